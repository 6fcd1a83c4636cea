"""Control streams break while requests run, and the workers live on: no token is lost, and no block.

Whatever was under way on the stream is gone in both directions, aborts and proofs included.
"""

import asyncio
import random

import pytest
from harness import CHECKPOINTS, Hold, LocalCluster, config_of, request, until

from pd_cluster.ids import WorkerId
from pd_cluster.launch.rank import RankServer
from pd_cluster.request import Phase

MODEL = CHECKPOINTS / "deepseek_v3_yarn"
SMALL = {"prefill__max_num_batched_tokens": 16, "kv__num_blocks": 48, "router__max_retries": 1000}
PREFILL, DECODE = WorkerId("prefill-0/0"), WorkerId("decode-0/0")


def prompt_of(number: int, length: int = 60) -> list[int]:
    return [3 + (number * 17 + i * i + 5 * i) % 500 for i in range(length)]


def break_stream(lead: RankServer) -> None:
    """Drop what waits to be sent, and the stream with it."""
    server = lead.part.server  # type: ignore[union-attr]
    for outbox in list(server._outboxes.values()):  # type: ignore[union-attr]
        outbox._messages.clear()
        outbox.close("broken by a test")


@pytest.mark.parametrize("victim", [PREFILL, DECODE])
@pytest.mark.parametrize("phase", [Phase.PREFILLING, Phase.TRANSFERRING, Phase.DECODING])
async def test_a_request_survives_a_broken_stream_in_any_phase(victim: WorkerId, phase: Phase) -> None:
    hold = Hold()
    async with LocalCluster(config_of(MODEL, **SMALL), wrap=hold.wrap) as cluster:
        expected = await cluster.greedy(prompt_of(1))
        cluster.clear_prefix_caches("prefill")
        cluster.clear_prefix_caches("decode")
        hold.on = phase is not Phase.DECODING
        running = asyncio.create_task(cluster.generate(request(prompt_of(1), "r")))
        await asyncio.sleep(0)
        assert await cluster.in_phase("r", phase)
        break_stream(cluster.lead(victim))
        await until(lambda: cluster.router.num_ready < 2)
        hold.on = False
        output = await running
        assert output.token_ids == expected.token_ids


async def test_a_cancel_that_a_broken_stream_swallows_frees_both_sides() -> None:
    hold = Hold()
    async with LocalCluster(config_of(MODEL, **SMALL), wrap=hold.wrap) as cluster:
        for victim in (PREFILL, DECODE):
            hold.on = True
            running = asyncio.create_task(cluster.generate(request(prompt_of(2), "r")))
            await asyncio.sleep(0)
            assert await cluster.in_phase("r", Phase.TRANSFERRING)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            break_stream(cluster.lead(victim))
            await until(lambda: cluster.router.num_ready < 2)
            hold.on = False
            await cluster.until_free()


async def test_many_requests_under_streams_that_keep_breaking_all_end_right() -> None:
    rng = random.Random(5)
    async with LocalCluster(config_of(MODEL, **SMALL, decode__data_parallel=2)) as cluster:
        prompts = [prompt_of(number, 20 + 3 * number) for number in range(10)]
        expected = await cluster.all_greedy(prompts, max_tokens=64)
        running = asyncio.create_task(cluster.all_greedy(prompts, max_tokens=64))
        num_breaks = 0
        while not running.done():
            await asyncio.sleep(rng.uniform(0.02, 0.15))
            break_stream(rng.choice(cluster.leads()))
            num_breaks += 1
        assert [output.token_ids for output in await running] == [output.token_ids for output in expected]
        assert num_breaks >= 3
        await asyncio.wait_for(cluster.router.until_ready(3), 10)
