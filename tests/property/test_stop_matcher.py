"""Stop strings against a reference that looks at one character at a time, for any way to cut the text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.text import StopMatcher


def reference(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end if include else end - max(len(stop) for stop in matching)], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
    include=st.booleans(),
)
def test_any_cut_of_the_text_gives_what_one_character_at_a_time_gives(pieces, stops, include):
    matcher = StopMatcher(stops, include)
    expected, stopped = reference("".join(pieces), stops, include)
    seen = ""
    for piece in pieces:
        seen += matcher.push(piece)
        assert expected.startswith(seen)  # nothing was leaked
    if not matcher.stopped:
        seen += matcher.flush()
    assert (seen, matcher.stopped) == (expected, stopped)
