"""What the handoff adds to the second token: a split engine next to a colocated one, for the same prompts in turn.

The first token comes from prefill in both. Before the second, a split cluster moves the prompt's KV to the decode
engine, which takes the request into its next step; a colocated engine just goes on. Both serve the same model on this
machine, one thread to a rank, with prefill and decode on a CPU each where there are two.
"""

import asyncio
import contextlib
import os
import random
import time
from typing import Any

from pd_cluster.bench.goodput import Asked, percentile, send
from pd_cluster.bench.serve_process import ServeProcess
from pd_cluster.bench.servers import Server, random_prompt
from pd_cluster.errors import Unavailable

NUM_OUTPUT = 4
NAME = "bench"


def arguments(model: str, num_tokens: int, cpus: list[int]) -> tuple[list[str], list[str]]:
    """Of `serve`: split, and colocated."""
    both = [model, "--served-model-name", NAME, "--max-model-len", str(num_tokens + 64), "--set", "router.grpc=false"]
    split, colocated = list(both), [*both, "--colocated"]
    if len(cpus) > 1:
        split += ["--set", f"prefill.cpus={cpus[0]}", "--set", f"decode.cpus={cpus[1]}"]
        colocated += ["--set", f"decode.cpus={cpus[0]}"]
    return split, colocated


async def times(server: Server, num_tokens: int) -> list[float]:
    """When each token of one answer came, seconds after the request was sent. Raises Unavailable."""
    prompt = random_prompt(num_tokens, random.Random())  # no cache holds it
    served = await send(server, Asked(0.0, num_tokens, NUM_OUTPUT), prompt, time.perf_counter())
    if served.error is not None or len(served.times_s) != NUM_OUTPUT:
        raise Unavailable(f"{server.url}: {served.error or f'{len(served.times_s)} of {NUM_OUTPUT} tokens came'}")
    return served.times_s


def run(model: str = "demo", *, num_tokens: int = 1500, rounds: int = 20) -> dict[str, Any]:
    """Milliseconds, medians over rounds after one to warm up, and the gap between tokens 1 and 2 also as p99."""
    split, colocated = arguments(model, num_tokens, sorted(os.sched_getaffinity(0)))
    with contextlib.ExitStack() as stack:
        servers = {
            name: Server(stack.enter_context(ServeProcess(each)).url, NAME)
            for name, each in (("split", split), ("colocated", colocated))
        }
        measured: dict[str, list[list[float]]] = {name: [] for name in servers}
        for number in range(rounds + 1):
            for name, server in servers.items():
                one = asyncio.run(times(server, num_tokens))
                if number:
                    measured[name].append(one)
    return {"num_tokens": num_tokens, "rounds": rounds} | summary(measured)


def summary(measured: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Of the times of tokens, in seconds, of `split` and `colocated` answers."""
    result: dict[str, Any] = {}
    for name, answers in measured.items():
        gaps = [one[1] - one[0] for one in answers]
        for label, values, share in (
            ("first_p50", [one[0] for one in answers], 0.5),
            ("second_p50", [one[1] for one in answers], 0.5),
            ("gap_p50", gaps, 0.5),
            ("gap_p99", gaps, 0.99),
        ):
            result[f"{name}_{label}_ms"] = (percentile(values, share) or 0.0) * 1e3
    result["second_ratio"] = result["split_second_p50_ms"] / result["colocated_second_p50_ms"]
    return result
