"""Clients go away in every phase, a hundred times: both sides are free within a second and serve on.

What a write may still read or reach is kept until it has ended, however long that takes.
"""

import asyncio
import contextlib
import ctypes
import random
from collections import Counter

import httpx
import pytest
from harness import CHECKPOINTS, Hold, LocalCluster, config_of, push_unit_by_unit, request, until

from pd_cluster.ids import BlockId
from pd_cluster.request import Phase

MODEL = CHECKPOINTS / "deepseek_v3_yarn"
SMALL_STEPS = {"prefill__max_num_batched_tokens": 16, "kv__num_blocks": 48, "kv__prefix_cache": False}
FREE_WITHIN_S = 1.0


@pytest.fixture(autouse=True)
def many_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    push_unit_by_unit(monkeypatch)


def prompt_of(number: int, length: int = 100) -> list[int]:
    return [3 + (number * 17 + i * i + 5 * i) % 500 for i in range(length)]


async def cancelled_in(cluster: LocalCluster, name: str, phase: Phase, rng: random.Random) -> Phase | None:
    """Start a request, cancel its client once it has been in `phase` for a moment; the phase it was in by then."""
    prompt = prompt_of(rng.randrange(1000), rng.randrange(60, 100))
    client = asyncio.create_task(cluster.generate(request(prompt, name, max_tokens=28)))
    await asyncio.sleep(0)
    await cluster.in_phase(name, phase)
    if rng.random() < 0.5:
        await asyncio.sleep(rng.random() * 0.01)
    flight = cluster.router.pipeline._flights.get(name)  # type: ignore[call-overload]
    found = None if flight is None else flight.phase
    client.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await client
    assert name not in cluster.router.pipeline._flights
    return found


async def batch(cluster: LocalCluster, number: int, phases: list[Phase], rng: random.Random) -> Counter[Phase]:
    names = [f"c{number}-{index}" for index in range(len(phases))]
    found = await asyncio.gather(
        *(cancelled_in(cluster, name, phase, rng) for name, phase in zip(names, phases, strict=True))
    )
    return Counter(phase for phase in found if phase is not None)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_cancelled_requests_free_both_sides_within_a_second_whatever_they_were_doing(ranks: int) -> None:
    rng = random.Random(11)
    hold, found, waits = Hold(), Counter[Phase](), list[float]()
    bystander = prompt_of(7)
    shape = {"prefill__tensor_parallel": ranks, "decode__tensor_parallel": ranks}
    num_batches = 6 if ranks == 1 else 2
    async with LocalCluster(config_of(MODEL, **SMALL_STEPS, **shape), wrap=hold.wrap) as cluster:
        expected = (await cluster.greedy(bystander)).token_ids
        await cluster.until_free()
        for number in range(num_batches):
            hold.on = number % 2 == 1
            last = Phase.TRANSFERRING if hold.on else Phase.DECODING
            phases = rng.choices([Phase.QUEUED, Phase.PREFILLING, last], [2, 3, 5], k=10)
            staying = asyncio.create_task(cluster.greedy(bystander))
            found += await batch(cluster, number, phases, rng)
            hold.on = False
            staying_on = await staying
            assert staying_on.token_ids == expected
            waits.append(await cluster.until_free())
    print(f"TP {ranks}: cancelled {dict(found)}; free within {1000 * max(waits):.1f} ms")
    assert max(waits) < FREE_WITHIN_S
    assert len(found) == 4, found
    assert min(found.values()) >= num_batches, found


@pytest.mark.parametrize("nixl", [False, True])
async def test_blocks_under_a_write_are_kept_until_it_has_ended(nixl: bool) -> None:
    hold = Hold()
    async with LocalCluster(config_of(MODEL, kv__num_blocks=24), wrap=hold.wrap, nixl=nixl) as cluster:
        expected = (await cluster.greedy(prompt_of(1))).token_ids
        cluster.clear_prefix_caches("prefill")
        cluster.clear_prefix_caches("decode")
        hold.on = True
        clients = [asyncio.create_task(cluster.greedy(prompt_of(1 + number, 50))) for number in range(3)]
        await until(lambda: hold.num_kept >= 3)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await until(lambda: cluster.load("decode").num_quarantined_blocks == 12)
        await until(lambda: cluster.load("prefill").num_reserved_blocks == 12)
        jobs = cluster.leads("prefill")[0].part.worker._jobs.values()  # type: ignore[union-attr]
        kept = [block for job in jobs for block in job.kept]
        assert len(set(kept)) == 12
        before = {block: block_bytes(cluster, block) for block in kept}
        # churn through all other blocks of prefill: these requests end there
        for number in range(8):
            await cluster.all_greedy([prompt_of(100 + 4 * number + i, 45) for i in range(4)], max_tokens=1)
        assert {block: block_bytes(cluster, block) for block in kept} == before
        assert cluster.load("decode").num_quarantined_blocks == 12
        assert cluster.load("decode").oldest_stranded_s > 0
        assert not cluster.is_free()
        hold.on = False
        free_s = await cluster.until_free()
        print(f"{'nixl' if nixl else 'local'}: free {1000 * free_s:.1f} ms after the writes could go on")
        assert free_s < FREE_WITHIN_S
        assert (await cluster.greedy(prompt_of(1))).token_ids == expected


def block_bytes(cluster: LocalCluster, block: BlockId) -> bytes:
    engine = cluster.leads("prefill")[0].engine
    assert engine is not None
    size = engine.layout.block_bytes
    return ctypes.string_at(engine.arena.base_address + block * size, size)


async def test_clients_that_hang_up_on_http_free_both_sides_too() -> None:
    rng = random.Random(5)
    waits = []
    async with (
        LocalCluster(config_of(MODEL, **SMALL_STEPS), http=True) as cluster,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{cluster.router.http_port}", timeout=20) as http,
    ):

        async def hang_up(number: int, stream: bool) -> None:
            body = {"model": "deepseek_v3_yarn", "prompt": prompt_of(number), "max_tokens": 27, "stream": stream}
            body |= {"ignore_eos": True, "return_token_ids": True}
            if not stream:
                asking = asyncio.create_task(http.post("/v1/completions", json=body))
                await asyncio.sleep(rng.random() * 0.15)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                return
            async with http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                num_events = rng.randrange(1, 20)
                async for line in response.aiter_lines():
                    num_events -= line.startswith("data:")
                    if not num_events:
                        return

        for first in range(0, 40, 8):
            await asyncio.gather(*(hang_up(first + index, stream=index % 2 == 0) for index in range(8)))
            waits.append(await cluster.until_free())
        gone = {
            sample.labels["status"]: sample.value
            for family in cluster.router.metrics.http_requests.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }
        cancelled = cluster.router.metrics.requests.labels("cancelled")._value.get()
        answer = await http.post(
            "/v1/completions", json={"model": "deepseek_v3_yarn", "prompt": [5, 6, 7], "max_tokens": 3}
        )
        assert answer.json()["usage"]["completion_tokens"] == 3
    print(f"HTTP: {cancelled:.0f} of 40 cancelled, by status {gone}; free within {1000 * max(waits):.1f} ms")
    assert cancelled >= 30, "most clients went before their request had ended"
    assert max(waits) < FREE_WITHIN_S


async def test_a_request_cancelled_before_it_starts_never_reaches_decode() -> None:
    async with LocalCluster(config_of(MODEL, **SMALL_STEPS, prefill__max_num_seqs=1)) as cluster:
        running = asyncio.create_task(cluster.greedy(prompt_of(1)))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(cluster.greedy(prompt_of(number))) for number in range(2, 12)]
        await asyncio.sleep(0.02)
        for client in waiting:
            client.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert len((await running).token_ids) == 28
        assert await cluster.until_free() < FREE_WITHIN_S
        assert cluster.leads("decode")[0].part.worker.reservations.num_late == 0  # type: ignore[union-attr]
