"""One rank of a larger engine killed with SIGKILL: the engine ends and starts anew as a whole, its requests go on.

A prefill instance of two tensor-parallel ranks, and a decode group of two DP ranks that share their experts.
"""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from living import LivingCluster, config_of, longest_gap

from pd_cluster.request import Phase

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


NUM_TOKENS = 320
"""More than come between two looks at the stream."""


def prompt_of(number: int, length: int = 200) -> list[int]:
    return [3 + (number * 17 + i * i + 5 * i) % 500 for i in range(length)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LivingCluster]:
    config = config_of("demo", prefill__tensor_parallel=2, decode__data_parallel=2)
    async with LivingCluster(config) as cluster:
        yield cluster


async def test_a_rank_that_speaks_to_no_router_killed_in_mid_prefill(cluster: LivingCluster) -> None:
    expected = await cluster.greedy(prompt_of(0), max_tokens=16)
    running = asyncio.create_task(cluster.greedy(prompt_of(0), request_id="p", max_tokens=16))
    await cluster.in_phase("p", Phase.PREFILLING)
    lead = cluster.pid("prefill-0")
    killed_s = cluster.kill("prefill-0", rank=1)
    output = await running
    assert output.token_ids == expected.token_ids
    healed_s = await cluster.until_healthy()
    await cluster.until_accounted()
    assert cluster.pid("prefill-0") != lead, "an engine is replaced as a whole"
    print(f"\na tensor-parallel follower killed in mid-prefill: all workers after {healed_s - killed_s:.2f} s")


async def test_the_other_rank_of_a_decode_group_killed_in_mid_decode(cluster: LivingCluster) -> None:
    """Its experts are gone, so the rank that has the request cannot go on either."""
    expected = await cluster.greedy(prompt_of(1, 48), max_tokens=NUM_TOKENS)
    times_s: list[float] = []

    async def on_token(_num_tokens: int) -> None:
        times_s.append(time.monotonic())

    running = asyncio.create_task(cluster.greedy(prompt_of(1, 48), on_token, "d", max_tokens=NUM_TOKENS))
    await cluster.in_mid_decode("d")
    attempt = cluster.pipeline.flights[0].attempt
    assert attempt is not None
    assert attempt.decode is not None
    own = int(attempt.decode.worker_id.partition("/")[2])
    killed_s = cluster.kill("decode-0", rank=1 - own)
    output = await running
    assert output.token_ids == expected.token_ids
    assert output.timings.num_retries == 1
    healed_s = await cluster.until_healthy()
    await cluster.until_accounted()
    stood_s = longest_gap(times_s)
    print(
        f"\na rank of a group killed: the stream stood {stood_s:.2f} s, all workers after {healed_s - killed_s:.2f} s"
    )
