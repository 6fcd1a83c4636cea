"""Two HTTP servers of one model, side by side: decode and prefill speeds in alternating rounds.

Both speak /v1/completions and take token ids as prompts, so that tokenizers play no part. Decode counts tokens while
all streams are decoding; prefill is the time to the first token of a prompt that no cache holds. Rounds alternate, so
that a busy machine is busy for both, and medians are compared.
"""

import asyncio
import random
import statistics
import time
from typing import Any, NamedTuple

from pd_cluster.bench.completions import streamed

SHORT_PROMPT = 16
FIRST_ID, LAST_ID = 1000, 30_000
"""Prompts are of these ids: ordinary tokens of every vocabulary that this is used with."""
EVENT = b'"choices"'


class Server(NamedTuple):
    url: str
    model: str


async def token_times(server: Server, prompt: list[int], num_tokens: int) -> list[float]:
    """When the request was begun, and when each token came, seconds. Raises Unavailable when the server refuses."""
    asked = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    times = [time.perf_counter()]
    async with streamed(server.url, asked) as reader:
        while line := await reader.readline():
            if EVENT in line:
                times.append(time.perf_counter())
    return times


def random_prompt(num_tokens: int, rng: random.Random) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(num_tokens)]


async def decode_tok_s(server: Server, batch: int, num_tokens: int, rng: random.Random) -> float:
    """Tokens per second of all streams, from the last one's first token to the first one's last."""
    prompts = [random_prompt(SHORT_PROMPT, rng) for _ in range(batch)]
    streams = await asyncio.gather(*(token_times(server, prompt, num_tokens) for prompt in prompts))
    started, ended = max(times[1] for times in streams), min(times[-1] for times in streams)
    return sum(started < at <= ended for times in streams for at in times[1:]) / (ended - started)


async def prefill_tok_s(server: Server, num_tokens: int, rng: random.Random) -> float:
    times = await token_times(server, random_prompt(num_tokens, rng), 1)
    return num_tokens / (times[1] - times[0])


def run(
    servers: list[Server],
    *,
    rounds: int = 5,
    batches: tuple[int, ...] = (1, 32),
    decode_tokens: int = 64,
    prefill_tokens: int = 1500,
) -> dict[str, Any]:
    """Tokens per second of each server, and how many times the others' the first one's are."""
    rng = random.Random()  # prompts of an earlier run may be cached

    async def measure(server: Server) -> dict[str, float]:
        speeds = {f"decode_{batch}": await decode_tok_s(server, batch, decode_tokens, rng) for batch in batches}
        return speeds | {f"prefill_{prefill_tokens}": await prefill_tok_s(server, prefill_tokens, rng)}

    measured: list[list[dict[str, float]]] = [[] for _ in servers]
    for number in range(rounds + 1):
        for server, kept in zip(servers, measured, strict=True):
            speeds = asyncio.run(measure(server))
            if number:  # the first warms up
                kept.append(speeds)
    result: dict[str, Any] = {}
    for name in measured[0][0]:
        medians = [statistics.median(speeds[name] for speeds in kept) for kept in measured]
        for server, median in zip(servers, medians, strict=True):
            result[f"{name}_tok_s {server.url}"] = median
        for server, median in zip(servers[1:], medians[1:], strict=True):
            result[f"{name}_ratio to {server.url}"] = medians[0] / median
    return result
