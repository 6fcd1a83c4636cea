"""Text out of token streams: stop strings, half characters, log probabilities that belong to the text shown."""

import pytest
import tokenizers

from pd_cluster.engine.plan import TokenLogprobs
from pd_cluster.model.tokenizer import SpecialTokens, Tokenizer, byte_alphabet
from router.text import StopMatcher, TextStream


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token for each byte, and id 256 as end of sequence."""
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, SpecialTokens(eos="<eos>"))


def logprobs(count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(i), 1, [], []) for i in range(count)]


def test_a_stop_string_over_several_tokens_leaks_no_part_of_itself(tokenizer):
    stream = TextStream(tokenizer, stops=["END"])
    shown = [stream.push([byte], None) for byte in b"one ENtwo END"]
    assert [piece.text for piece in shown[:7]] == ["o", "n", "e", " ", "", "", "ENt"]
    assert "".join(piece.text for piece in shown) == "one ENtwo "
    assert [piece.stopped for piece in shown] == [False] * 12 + [True]


def test_what_was_held_back_is_text_when_the_stream_ends(tokenizer):
    stream = TextStream(tokenizer, stops=["END"])
    assert stream.push(b"the EN", None).text == "the "
    assert stream.finish().text == "EN"


def test_the_stop_string_is_shown_when_asked_for(tokenizer):
    stream = TextStream(tokenizer, stops=["END"], include_stop=True)
    assert stream.push(b"a END b", None).text == "a END"


def test_nothing_follows_a_stop(tokenizer):
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == "a"
    assert matcher.push("c") == ""
    assert matcher.stopped


def test_a_character_is_shown_only_when_it_is_whole(tokenizer):
    stream = TextStream(tokenizer)
    assert [stream.push([byte], None).text for byte in "é€".encode()] == ["", "é", "", "", "€"]
    stream.push("€".encode()[:2], None)
    assert stream.finish().text == "\ufffd"


def test_a_stop_string_of_special_characters_is_found_across_bytes(tokenizer):
    stream = TextStream(tokenizer, stops=["€"])
    pieces = [stream.push([byte], None) for byte in "5 €".encode()]
    assert "".join(piece.text for piece in pieces) == "5 "
    assert pieces[-1].stopped


def test_stop_strings_do_not_count_before_min_tokens(tokenizer):
    stream = TextStream(tokenizer, stops=["a"], min_tokens=3)
    piece = stream.push(b"aaa", None)
    assert (piece.text, piece.stopped) == ("aaa", False)
    piece = stream.push(b"ba", None)
    assert (piece.text, piece.stopped) == ("b", True)


@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_log_probabilities_cover_the_text_shown_and_no_more(tokenizer, size):
    text = b"one ENtwo END of it"
    stream = TextStream(tokenizer, stops=["END"])
    tokens, shown, stopped = [], "", False
    for start in range(0, len(text), size):
        if stopped:
            break
        chunk = text[start : start + size]
        piece = stream.push(chunk, logprobs(len(chunk)))
        tokens += piece.tokens
        shown += piece.text
        stopped = piece.stopped
        assert len(shown) == len(tokens)  # here a token is a character: both are held back together
    assert shown == "one ENtwo "
    assert bytes(token.token_id for token in tokens) == shown.encode()
    assert [token.offset for token in tokens] == list(range(len(shown)))


def test_tokens_without_text_come_with_the_end(tokenizer):
    stream = TextStream(tokenizer)
    piece = stream.push([ord("a"), 256], logprobs(2))
    assert [token.token_id for token in piece.tokens] == [ord("a")]
    assert [token.token_id for token in stream.finish().tokens] == [256]


def test_special_tokens_are_shown_when_asked_for(tokenizer):
    assert TextStream(tokenizer).push([97, 256], None).text == "a"
    assert TextStream(tokenizer, skip_special_tokens=False).push([97, 256], None).text == "a<eos>"


def test_a_model_without_a_tokenizer_has_no_text():
    stream = TextStream(None)
    assert stream.push([1, 2], None).text == ""
    assert stream.finish().text == ""
