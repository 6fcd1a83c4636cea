"""Log lines as people and collectors read them."""

import io
import json
import logging

import pytest

from pd_cluster.log import configure_logging, get_log


@pytest.fixture(autouse=True)
def restore_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_an_event_is_one_line_with_its_fields():
    out = io.StringIO()
    configure_logging(process="router", stream=out)
    get_log("t").info("kv_sent", request_id="r 1", num_bytes=3, seconds=0.123456789, missing=None)
    (line,) = out.getvalue().splitlines()
    assert line.endswith('info    t kv_sent process=router request_id="r 1" num_bytes=3 seconds=0.123457')


def test_json_lines_carry_the_same_and_the_traceback():
    out = io.StringIO()
    configure_logging(style="json", stream=out)
    try:
        raise ValueError("broken")
    except ValueError:
        get_log("t").exception("failed", rank=2)
    line = json.loads(out.getvalue())
    assert (line["event"], line["level"], line["rank"]) == ("failed", "error", 2)
    assert "ValueError: broken" in line["traceback"]


def test_a_level_silences_what_is_below():
    out = io.StringIO()
    configure_logging(level="warning", stream=out)
    get_log("t").info("quiet")
    get_log("t").warning("loud")
    assert "quiet" not in out.getvalue()
    assert "loud" in out.getvalue()
