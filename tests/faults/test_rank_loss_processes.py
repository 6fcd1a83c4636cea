"""Members of an elastic group killed and stopped while they decode: processes, NIXL and a supervisor as in production.

The streams of the others never break and go on soon, those of the lost member go on elsewhere without a seam, every
block is accounted for, and the member is replaced and given experts. Times are printed (`pytest -s`); `make losses`
repeats them many times, at moments drawn by chance.
"""

import asyncio
import os
import random
import signal
import statistics
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from living import LivingCluster
from losing import MAX_WAIT_S, WHY_NOT, Streams, elastic, ids_of, until_joined

NUM_LOSSES = int(os.environ.get("PD_CLUSTER_LOSSES", "1"))
"""Of each kind; more for statistics."""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.timeout(120 + 60 * NUM_LOSSES),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LivingCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pd_cluster.launch.lifecycle.BACKOFF_S", 0.1)
        async with LivingCluster(elastic()) as cluster:
            yield cluster


async def lose(
    cluster: LivingCluster, number: signal.Signals, rng: random.Random, expected: list[list[int]]
) -> tuple[int, float]:
    """One loss under load: who was lost, and how long the streams of the others stood still, seconds."""
    streams = Streams(cluster)
    await streams.begun()
    await asyncio.sleep(rng.random() * 0.05)
    where = streams.where()
    # one of those with the fewest streams, so that there are others to look at
    counts = [where.count(f"decode-0/{dp_rank}") for dp_rank in range(4)]
    victim = rng.choice([dp_rank for dp_rank, count in enumerate(counts) if count == min(filter(None, counts))])
    lost_s = cluster.signal(number, "decode-0", victim)
    outputs = await streams.ended()
    stayed, moved = streams.waits_s(f"decode-0/{victim}", where, lost_s, outputs)
    longest_s = max(stayed, default=0.0)
    print(
        f"\n{number.name} of rank {victim}: {len(stayed)} streams stood still for {longest_s:.2f} s at most, "
        f"{len(moved)} went on elsewhere after {max(moved, default=0.0):.2f} s"
    )
    assert ids_of(outputs) == expected
    assert longest_s < MAX_WAIT_S
    return victim, longest_s


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_member_costs_the_others_a_moment_and_its_own_streams_no_token(
    cluster: LivingCluster, number: signal.Signals
) -> None:
    rng = random.Random(int(number))
    expected = ids_of(await Streams(cluster).ended())
    deaths = cluster.deaths("decode-0")
    waits_s = []
    for _ in range(NUM_LOSSES):
        victim, wait_s = await lose(cluster, number, rng, expected)
        waits_s.append(wait_s)
        await cluster.until_healthy()
        await until_joined(cluster, victim)
        await cluster.until_accounted()
    assert ids_of(await Streams(cluster).ended()) == expected, "the new member has its experts"
    assert cluster.deaths("decode-0") == deaths + NUM_LOSSES, "one member each time, and not the group"
    if NUM_LOSSES > 1:
        ordered = sorted(waits_s)
        print(f"\n{len(ordered)} times: median {statistics.median(ordered):.2f} s, worst {ordered[-1]:.2f} s")
