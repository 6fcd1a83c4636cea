"""Ranks and routers killed with SIGKILL under running requests: streams go on to the right end, the cluster heals.

One prefill rank and two decode engines, all processes of their own; times are printed (`pytest -s`).
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from harness import Output
from living import LivingCluster, config_of, longest_gap
from other_router import OtherRouter

from pd_cluster.errors import PoisonRequest
from pd_cluster.request import Phase

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


def prompt_of(number: int, length: int = 320) -> list[int]:
    return [3 + (number * 17 + i * i + 5 * i) % 500 for i in range(length)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LivingCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pd_cluster.launch.lifecycle.BACKOFF_S", 0.1)
        async with LivingCluster(config_of("demo", decode__instances=2, launch__max_restarts=20)) as cluster:
            yield cluster


async def undisturbed(cluster: LivingCluster, num: int, max_tokens: int) -> list[Output]:
    return list(await asyncio.gather(*(cluster.greedy(prompt_of(i), max_tokens=max_tokens) for i in range(num))))


async def report(cluster: LivingCluster, what: str, killed_s: float, resumed_s: float) -> None:
    healed_s = await cluster.until_healthy()
    await cluster.until_accounted()
    print(f"\n{what}: next token after {resumed_s - killed_s:.2f} s, all workers after {healed_s - killed_s:.2f} s")


async def test_a_prefill_rank_killed_in_mid_prefill(cluster: LivingCluster) -> None:
    expected = await undisturbed(cluster, 3, 24)
    first_token_s: list[float] = []

    async def on_token(num_tokens: int) -> None:
        first_token_s.append(time.monotonic())

    running = [asyncio.create_task(cluster.greedy(prompt_of(i), on_token, f"p{i}", max_tokens=24)) for i in range(3)]
    await cluster.in_phase("p0", Phase.PREFILLING)
    killed_s = cluster.kill("prefill-0")
    outputs = await asyncio.gather(*running)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert outputs[0].timings.num_retries == 1
    assert min(first_token_s) > killed_s, "it was killed before any prefill was done"
    await report(cluster, "prefill rank killed in mid-prefill", killed_s, min(first_token_s))


async def test_a_prefill_rank_killed_in_mid_transfer(cluster: LivingCluster) -> None:
    """Its target stands still meanwhile, for a write ends only once its target has looked."""
    (expected,) = await undisturbed(cluster, 1, 24)
    times_s: list[float] = []

    async def on_token(num_tokens: int) -> None:
        times_s.append(time.monotonic())

    running = asyncio.create_task(cluster.greedy(prompt_of(0), on_token, "t", max_tokens=24))
    attempt = await cluster.in_mid_transfer("t")
    killed_s = cluster.kill("prefill-0")
    cluster.resume(attempt)
    output = await running
    assert output.token_ids == expected.token_ids
    assert output.timings.num_retries == 1
    await report(cluster, "prefill rank killed in mid-transfer", killed_s, times_s[1])


async def test_a_decode_rank_killed_in_mid_decode(cluster: LivingCluster) -> None:
    """Its requests go on at the other engine, long before it is back."""
    prompts, num_tokens = [prompt_of(index, 96) for index in range(4)], 320
    expected = await asyncio.gather(*(cluster.greedy(prompt, max_tokens=num_tokens) for prompt in prompts))
    times_s: list[float] = []

    async def on_token(_num_tokens: int) -> None:
        times_s.append(time.monotonic())

    first = asyncio.create_task(cluster.greedy(prompts[0], on_token, "d0", max_tokens=num_tokens))
    others = [asyncio.create_task(cluster.greedy(prompt, max_tokens=num_tokens)) for prompt in prompts[1:]]
    await cluster.in_mid_decode("d0")
    victim = cluster.decode_engine("d0")
    killed_s = cluster.kill(victim)
    outputs = await asyncio.gather(first, *others)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert outputs[0].timings.num_retries == 1
    assert outputs[0].timings.decode_worker != f"{victim}/0"
    await report(cluster, "decode rank killed in mid-decode", killed_s, killed_s + longest_gap(times_s))


async def test_a_router_killed_with_requests_in_every_phase(cluster: LivingCluster) -> None:
    """Its requests are freed on the workers, blocks of an open transfer too; another router's are none of its."""
    expected = await undisturbed(cluster, 2, 200)
    with OtherRouter(cluster.cluster.config, cluster.addresses) as other:
        for name in ("o0", "o1"):
            other.submit(name, prompt_of(5, 40), 1500)
            await other.until(name, 3)
        running = asyncio.create_task(undisturbed(cluster, 2, 200))
        for engine in ("decode-0", "decode-1"):
            cluster.signal(signal.SIGSTOP, engine)
        other.submit("o2", prompt_of(6, 160), 1500)
        await other.until("o2", 1)
        other.submit("o3", prompt_of(7, 1200), 1500)
        other.kill()
        for engine in ("decode-0", "decode-1"):
            cluster.signal(signal.SIGCONT, engine)
        killed_s = time.monotonic()
        while any(load.num_reserved_blocks or load.num_quarantined_blocks for load in cluster.loads()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [output.token_ids for output in await running] == [output.token_ids for output in expected]
    await cluster.until_accounted()
    print(f"\nrouter killed: all of its requests freed after {time.monotonic() - killed_s:.2f} s at the latest")


async def test_a_request_that_kills_two_workers_is_refused(cluster: LivingCluster) -> None:
    num_before = cluster.deaths("prefill-0")
    running = asyncio.create_task(cluster.greedy(prompt_of(9), request_id="poison"))
    for num_deaths in (1, 2):
        await cluster.in_phase("poison", Phase.PREFILLING)
        cluster.kill("prefill-0")
        while cluster.deaths("prefill-0") < num_before + num_deaths:  # noqa: ASYNC110 (of another process)
            await asyncio.sleep(0.001)
    with pytest.raises(PoisonRequest, match="prefill-0/0 and prefill-0/0 died while they computed it"):
        await running
    assert cluster.deaths("prefill-0") == num_before + 2
    await cluster.until_healthy()
    (output,) = await undisturbed(cluster, 1, 8)
    assert len(output.token_ids) == 8
    await cluster.until_accounted()
