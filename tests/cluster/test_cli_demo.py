"""`pd-cluster demo` as a newcomer runs it: stories, where the time went, who did the work, and nothing left behind."""

import re

import pytest
from processes import running, until

pytestmark = pytest.mark.processes


def test_the_demo_tells_stories_on_a_ray_cluster_and_leaves_nothing() -> None:
    with running("demo", "--max-tokens", "24", "--prompt", "Once upon a time", "--prompt", "The cat") as command:
        code, out, err = command.finish()
        until(lambda: command.family() == [])
    assert code == 0, err
    assert "Traceback" not in err
    assert "1 | Once upon a time" in out
    assert "2 | The cat" in out
    for number in (1, 2):
        (row,) = re.findall(rf"^{number} .*prefill-0/0 .*$", out, re.MULTILINE)
        assert re.search(r"\d KiB .*decode-0/[01] +24 .*length", row), row
    ranks = dict(re.findall(r"^((?:prefill|decode)-0\.\d) .* (\d+) +\d+%$", out, re.MULTILINE))
    assert set(ranks) == {"prefill-0.0", "prefill-0.1", "decode-0.0", "decode-0.1"}
    assert all(int(load) > 0 for load in ranks.values()), "every rank's experts had work"
    assert re.search(r"decode-0\.0 .* 0-15 .*\n.*decode-0\.1 .* 16-31 ", out)
    assert "all processes ended" in out
