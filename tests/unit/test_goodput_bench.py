"""The arithmetic of the goodput benchmark: arrivals, bounds, percentiles, and what counts as a token."""

import asyncio
import itertools
import json
import math
import random
import statistics

import pytest

from pd_cluster.bench.goodput import (
    Asked,
    Bounds,
    Served,
    compare,
    num_tokens,
    percentile,
    poisson,
    span,
    summary,
    table,
    window,
)
from pd_cluster.bench.servers import Server
from pd_cluster.errors import ConfigError

BOUNDS = Bounds(ttft_s=1.0, tpot_s=0.1, gap_s=0.3)


def served(times_s: list[float], *, num_output: int | None = None, error: str | None = None) -> Served:
    return Served(Asked(0.0, 500, len(times_s) if num_output is None else num_output), times_s, error)


def test_arrivals_are_poisson_and_the_same_for_the_same_seed() -> None:
    requests = poisson(4.0, 1000.0, random.Random(1), (400, 1200), (32, 96))
    assert requests == poisson(4.0, 1000.0, random.Random(1), (400, 1200), (32, 96))
    assert len(requests) == pytest.approx(4000, abs=4 * math.sqrt(4000))
    times = [asked.at_s for asked in requests]
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.stdev(waits) == pytest.approx(statistics.fmean(waits), rel=0.1)  # exponential
    assert times[-1] < 1000.0
    assert (min(r.num_input for r in requests), max(r.num_input for r in requests)) == (400, 1200)
    assert (min(r.num_output for r in requests), max(r.num_output for r in requests)) == (32, 96)


@pytest.mark.parametrize(
    ("one", "good"),
    [
        (served([1.0, 1.1, 1.2]), True),
        (served([1.01, 1.1, 1.2]), False),  # the first token came late
        (served([0.5, 0.79, 0.8, 0.81, 0.82]), True),  # one long gap, within its bound
        (served([0.5, 0.81, 0.82, 0.83, 0.84]), False),
        (served([0.5, 0.65, 0.8]), False),  # slow on average
        (served([0.5, 0.6], num_output=3), False),  # a token is missing
        (served([0.5, 0.6], error="it broke"), False),
        (served([], num_output=3), False),
        (served([0.9]), True),  # no gap at all
    ],
)
def test_a_request_is_good_when_it_keeps_every_bound(one: Served, good: bool) -> None:
    assert one.keeps(BOUNDS) is good


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50.0, 90.0, 99.0, 100.0]
    assert percentile([3.0, 1.0], 0.5) == 1.0
    assert percentile([3.0, 1.0], 0.51) == 3.0
    assert percentile([], 0.5) is None


def test_a_summary_counts_and_divides_by_the_window() -> None:
    result = summary(
        [served([0.2, 0.25, 0.35]), served([2.0, 2.1]), served([], error="refused"), served([0.4])], BOUNDS, 10.0
    )
    assert (result["requests"], result["failed"], result["good"], result["goodput"]) == (4, 1, 2, 0.2)
    assert result["ttft_p50_ms"] == pytest.approx(400)
    assert result["ttft_p99_ms"] == pytest.approx(2000)
    assert result["tpot_p50_ms"] == pytest.approx(75)  # of those with a second token
    assert result["itl_p50_ms"] == pytest.approx(100)  # of 50, 100, 100
    assert summary([], BOUNDS, 10.0)["itl_p99_ms"] is None


def test_ratios_are_of_the_first_to_the_other() -> None:
    assert compare({"itl_p99_ms": 50.0, "goodput": 1.0}, {"itl_p99_ms": 200.0, "goodput": 0.5}) == {
        "itl_p99_ms": 0.25,
        "goodput": 2.0,
    }
    assert compare({"itl_p99_ms": 50.0, "goodput": 1.0}, {"itl_p99_ms": None, "goodput": 0.0}) == {
        "itl_p99_ms": None,
        "goodput": None,
    }


def test_tokens_without_text_and_several_in_an_event_count() -> None:
    event = {"choices": [{"index": 0, "text": "", "token_ids": [7]}]}
    assert num_tokens(json.dumps(event).encode()) == 1
    assert num_tokens(b'{"choices": [{"text": "ab", "token_ids": [1, 2]}]}') == 2
    assert num_tokens(b'{"choices": [], "usage": {"total_tokens": 9}}') == 0
    assert num_tokens(b'{"choices": [{"text": "a", "token_ids": null}]}') == 0


def test_a_span_is_two_numbers_or_one() -> None:
    assert span("400-1200") == (400, 1200)
    assert span("64") == (64, 64)
    for wrong in ("", "a-b", "5-4", "0-3", "-3", "3-"):
        with pytest.raises(ConfigError, match="looks like 400-1200"):
            span(wrong)


def test_a_window_sends_requests_when_they_are_due_and_times_their_tokens() -> None:
    bodies: list[dict[str, object]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        bodies.append(body)
        if body["max_tokens"] == 13:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            for token_id in range(body["max_tokens"]):
                await asyncio.sleep(0.05)
                event = {"choices": [{"text": "", "token_ids": [token_id]}]}
                writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            writer.write(b"data: [DONE]\n\n")
        writer.close()

    async def measured() -> list[Served]:
        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with listener:
            url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            requests = [Asked(0.2, 5, 3), Asked(0.0, 6, 2), Asked(0.1, 7, 13)]
            return await window(Server(url, "m"), requests, random.Random(0))

    late, early, refused = asyncio.run(measured())
    assert [len(body["prompt"]) for body in bodies] == [6, 7, 5]  # type: ignore[arg-type]
    assert all(body["stream"] and body["ignore_eos"] and body["return_token_ids"] for body in bodies)
    assert (len(early.times_s), len(late.times_s)) == (2, 3)
    assert early.error is None
    assert all(0.04 < gap < 1.0 for gap in (*early.gaps_s, *late.gaps_s))
    assert 0.04 < late.times_s[0] < 1.0  # counted from when it was due, not from the start of the window
    assert refused.error is not None
    assert refused.error.endswith("answered 503 Service Unavailable")
    assert not refused.times_s


def test_the_table_shows_servers_and_ratios() -> None:
    first, other = (summary([served([0.2, 0.25])], BOUNDS, 1.0), summary([], BOUNDS, 1.0))
    text = table(
        {
            "rates": [
                {
                    "rate": 1.25,
                    "servers": [{"url": "http://a"} | first, {"url": "http://b"} | other],
                    "ratios": [{"to": "http://b"} | compare(first, other)],
                }
            ]
        }
    )
    assert "1.25 requests/s" in text
    assert "http://a" in text
    assert "p99 gap x-, goodput x-" in text
    assert max(map(len, text.splitlines())) <= 100
