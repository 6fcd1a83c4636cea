"""What a streamed token costs from the engine's output to the client's socket: CPU time of the front end's process, and
of the event loops of ranks.

Opens streams of /v1/completions over plain sockets, so that the client costs little, and reads CPU times from /proc
before and after. Without an address it serves the bundled model, colocated, in processes of its own. Next to a peer,
loads alternate; of the peer its API server's process counts alone.
"""

import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from pd_cluster.bench.completions import streamed
from pd_cluster.bench.serve_process import ServeProcess, rank_pids

DEMO = ["--colocated", "--set", "decode.max_num_seqs=1024", "--dtype", "float32", "--max-model-len", "1024"]
"""`serve` of the bundled model, with room for many streams."""

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU time of a process and its threads so far, seconds."""
    return _cpu_s(Path(f"/proc/{pid}/stat"))


def event_loop_cpu_s(pid: int) -> float:
    """CPU time so far of a rank's first thread, which runs its event loop: it takes steps' outcomes to the routers."""
    return _cpu_s(Path(f"/proc/{pid}/task/{pid}/stat"))


def _cpu_s(stat: Path) -> float:
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


async def stream(url: str, model: str, prompt: list[int], num_tokens: int) -> int:
    """One streamed completion; the number of events with a choice. Raises Unavailable when the server refuses."""
    asked = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    num_events = 0
    async with streamed(url, asked) as reader:
        while data := await reader.read(1 << 16):
            num_events += data.count(b'"choices"')
    return num_events


async def load(url: str, model: str, num_streams: int, num_tokens: int) -> float:
    """Run `num_streams` at once to their end; the seconds it took."""
    started_s = time.monotonic()
    prompts = [[1, 400 + index % 40, 300 + index // 40] for index in range(num_streams)]
    await asyncio.gather(*(stream(url, model, prompt, num_tokens) for prompt in prompts))
    return time.monotonic() - started_s


class Process(NamedTuple):
    """A server to account: its front end's process, and the processes of engines that answer to it, if they count."""

    url: str
    pid: int
    model: str
    rank_pids: tuple[int, ...] = ()


def measure(process: Process, *, num_streams: int, num_tokens: int) -> dict[str, float]:
    """One load: CPU microseconds for each token, and tokens per second."""
    before_s, ranks_before_s = cpu_s(process.pid), sum(map(event_loop_cpu_s, process.rank_pids))
    wall_s = asyncio.run(load(process.url, process.model, num_streams, num_tokens))
    count = num_streams * num_tokens
    return {
        "cpu_us_per_token": (cpu_s(process.pid) - before_s) / count * 1e6,
        "worker_us_per_token": (sum(map(event_loop_cpu_s, process.rank_pids)) - ranks_before_s) / count * 1e6,
        "tok_s": count / wall_s,
    }


def run(
    ours: Process | None = None,
    peer: Process | None = None,
    *,
    streams: tuple[int, ...] = (32, 128, 512),
    num_tokens: int = 192,
    repeats: int = 3,
) -> dict[str, Any]:
    """Medians over `repeats` for each number of streams, in loads that alternate with the peer's; and what we spend,
    the workers' share included, as a share of what the peer's front end spends. Without `ours` one is started.
    """
    if ours is None:
        with ServeProcess(DEMO) as server:
            started = Process(server.url, server.pid, "demo", tuple(rank_pids(server.pid)))
            return run(started, peer, streams=streams, num_tokens=num_tokens, repeats=repeats)
    results: dict[str, Any] = {}
    for count in streams:
        measured: dict[Process, list[dict[str, float]]] = {one: [] for one in (ours, peer) if one is not None}
        for number in range(repeats + 1):
            for one, kept in measured.items():
                result = measure(one, num_streams=count, num_tokens=num_tokens)
                if number:  # the first warms up
                    kept.append(result)
        results[f"streams_{count}"] = summary(measured[ours], measured[peer] if peer is not None else None)
    return results


def summary(ours: list[dict[str, float]], peer: list[dict[str, float]] | None) -> dict[str, float]:
    result = {name: statistics.median(one[name] for one in ours) for name in ours[0]}
    if peer is not None:
        result["peer_us_per_token"] = statistics.median(one["cpu_us_per_token"] for one in peer)
        result["peer_tok_s"] = statistics.median(one["tok_s"] for one in peer)
        spent = result["cpu_us_per_token"] + result["worker_us_per_token"]
        result["ratio"] = spent / result["peer_us_per_token"]
    return result
