"""Goodput of HTTP servers of one model: the requests per second that keep their bounds, under the same load.

Requests arrive as a Poisson process from a seed, with lengths drawn from it too. Each server gets the same list in
windows that alternate, and is given time to finish what a window left, so that none runs while another is measured.
Prompts are random token ids, new ones in every window, so that no cache holds them; token ids come back with every
event, so that a token without text counts as well.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from pd_cluster.bench.completions import streamed
from pd_cluster.bench.serve_process import paused
from pd_cluster.bench.servers import Server, random_prompt
from pd_cluster.errors import ConfigError, Unavailable

SETTLE_S = 3.0
"""Before a window: for whatever the servers were doing to end."""

PATIENCE_S = 60.0
"""For what a window left: requests that take longer count as failed."""


class Bounds(Struct, frozen=True, kw_only=True):
    """What a request must keep to count."""

    ttft_s: float = 3.0
    tpot_s: float = 0.040  # mean time per output token after the first
    gap_s: float = 0.200  # between any two tokens


class Asked(Struct, frozen=True):
    """A request to come, seconds after the start of its window."""

    at_s: float
    num_input: int
    num_output: int


class Served(Struct):
    """What became of it: `times_s` of its tokens, seconds after it was due. `error`: why it did not end well."""

    asked: Asked
    times_s: list[float] = msgspec.field(default_factory=list)
    error: str | None = None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.times_s)]

    @property
    def tpot_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / max(len(self.times_s) - 1, 1)

    def keeps(self, bounds: Bounds) -> bool:
        """Whether all of its tokens came, and in time."""
        return (
            self.error is None
            and len(self.times_s) == self.asked.num_output
            and self.times_s[0] <= bounds.ttft_s
            and self.tpot_s <= bounds.tpot_s
            and max(self.gaps_s, default=0.0) <= bounds.gap_s
        )


def span(text: str) -> tuple[int, int]:
    """`400-1200`, or one number for both. Raises ConfigError."""
    first, dash, last = text.partition("-")
    if not dash:
        last = first
    if not (first.isdecimal() and last.isdecimal()) or not 0 < int(first) <= int(last):
        raise ConfigError(f"a number of tokens from and to looks like 400-1200, got {text!r}")
    return int(first), int(last)


def poisson(
    rate: float, window_s: float, rng: random.Random, inputs: tuple[int, int], outputs: tuple[int, int]
) -> list[Asked]:
    """Requests that arrive at `rate` per second for `window_s`; lengths are even between their bounds."""
    requests = []
    at_s = rng.expovariate(rate)
    while at_s < window_s:
        requests.append(Asked(at_s, rng.randint(*inputs), rng.randint(*outputs)))
        at_s += rng.expovariate(rate)
    return requests


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest of the values that at least `share` of them do not exceed; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def summary(served: Sequence[Served], bounds: Bounds, window_s: float) -> dict[str, Any]:
    """Counts, requests per second that kept the bounds, and percentiles in milliseconds."""
    ended = [one for one in served if one.times_s]
    measures = {
        "ttft": [one.times_s[0] for one in ended],
        "tpot": [one.tpot_s for one in ended if len(one.times_s) > 1],
        "itl": [gap for one in ended for gap in one.gaps_s],
    }
    result: dict[str, Any] = {
        "requests": len(served),
        "failed": sum(one.error is not None for one in served),
        "good": sum(one.keeps(bounds) for one in served),
        "goodput": sum(one.keeps(bounds) for one in served) / window_s,
    }
    for name, values in measures.items():
        for share in (0.5, 0.9, 0.99):
            value = percentile(values, share)
            result[f"{name}_p{share * 100:.0f}_ms"] = None if value is None else value * 1e3
    return result


async def send(server: Server, asked: Asked, prompt: list[int], start_s: float) -> Served:
    """Wait until the request is due, then follow its stream to the end."""
    served = Served(asked)
    due_s = start_s + asked.at_s
    await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await _follow(server, prompt, served, due_s)
    except (OSError, TimeoutError, Unavailable) as error:
        served.error = str(error) or type(error).__name__
    return served


async def _follow(server: Server, prompt: list[int], served: Served, due_s: float) -> None:
    asked = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": served.asked.num_output,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with streamed(server.url, asked) as reader:
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now_s = time.perf_counter() - due_s
                served.times_s += [now_s] * num_tokens(line[6:])


def num_tokens(event: bytes) -> int:
    """Of the first choice of a server-sent event."""
    choices = json.loads(event).get("choices") or [{}]
    return len(choices[0].get("token_ids") or ())


async def window(server: Server, requests: Iterable[Asked], rng: random.Random) -> list[Served]:
    """Send the requests when they are due and wait for all of them."""
    prompts = [(asked, random_prompt(asked.num_input, rng)) for asked in requests]
    start_s = time.perf_counter()
    return await asyncio.gather(*(send(server, asked, prompt, start_s) for asked, prompt in prompts))


def run(
    servers: Sequence[Server],
    *,
    rates: Sequence[float] = (1.0,),
    window_s: float = 60.0,
    rounds: int = 1,
    inputs: tuple[int, int] = (400, 1200),
    outputs: tuple[int, int] = (32, 96),
    bounds: Bounds | None = None,
    seed: int = 0,
    pids: Sequence[Sequence[int]] = (),
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """For each rate the summary of each server over all rounds, and the first server's p99 gap and goodput as
    ratios to the others'. `pids`: processes of each server, which are paused while another is measured. `say` gets a
    line after each window.
    """
    bounds = bounds or Bounds()
    results: dict[str, Any] = {"bounds": msgspec.to_builtins(bounds), "seed": seed, "window_s": window_s, "rates": []}
    for server in servers:  # code paths and pages
        with paused(_of_others(servers, server, pids)):
            asyncio.run(window(server, [Asked(0.0, inputs[0], outputs[0])] * 2, random.Random()))
    for rate in rates:
        rng = random.Random(f"{seed} {rate}")
        served: list[list[Served]] = [[] for _ in servers]
        for _ in range(rounds):
            requests = poisson(rate, window_s, rng, inputs, outputs)
            prompts = random.randrange(1 << 30)
            for server, kept in zip(servers, served, strict=True):
                with paused(_of_others(servers, server, pids)):
                    time.sleep(SETTLE_S)
                    one = asyncio.run(window(server, requests, random.Random(prompts)))
                say(f"{rate:g}/s at {server.url}: {json.dumps(summary(one, bounds, window_s))}")
                kept.extend(one)
        summaries = [summary(kept, bounds, window_s * rounds) for kept in served]
        results["rates"].append(
            {
                "rate": rate,
                "servers": [
                    {"url": server.url} | measured for server, measured in zip(servers, summaries, strict=True)
                ],
                "ratios": [
                    {"to": server.url} | compare(summaries[0], other)
                    for server, other in zip(servers[1:], summaries[1:], strict=True)
                ],
            }
        )
    return results


def _of_others(servers: Sequence[Server], server: Server, pids: Sequence[Sequence[int]]) -> list[int]:
    return [pid for other, own in zip(servers, pids, strict=False) if other is not server for pid in own]


def compare(first: dict[str, Any], other: dict[str, Any]) -> dict[str, float | None]:
    """How many times the other's the first one's p99 gap and goodput are; None where the other's is nothing."""
    return {
        name: first[name] / other[name] if first[name] is not None and other[name] else None
        for name in ("itl_p99_ms", "goodput")
    }


COLUMNS = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "itl_p50_ms", "itl_p99_ms")


def table(results: dict[str, Any]) -> str:
    """For people, 100 columns: a line for each rate and server, then the ratios."""
    lines = [
        f"{'':28}{'requests':>9}{'goodput':>8}{'TTFT ms':>15}{'TPOT ms':>15}{'gap ms':>15}",
        f"{'':28}{'':>9}{'/s':>8}" + f"{'p50':>8}{'p99':>7}" * 3,
    ]
    for at in results["rates"]:
        lines.append(f"{at['rate']:g} requests/s")
        for one in at["servers"]:
            cells = [_cell(one[name], width) for name, width in zip(COLUMNS, (8, 7) * 3, strict=True)]
            failed = f" {one['failed']} failed" if one["failed"] else ""
            lines.append(f"  {one['url'][:26]:26}{one['requests']:9}{one['goodput']:8.2f}" + "".join(cells) + failed)
        for ratio in at["ratios"]:
            gap, goodput = _cell(ratio["itl_p99_ms"], 0, 3), _cell(ratio["goodput"], 0, 2)
            lines.append(f"  to {ratio['to']}: p99 gap x{gap}, goodput x{goodput}")
    return "\n".join(lines) + "\n"


def _cell(value: float | None, width: int, digits: int = 0) -> str:
    return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"
