"""Real processes: a decode group of four DP ranks shrinks to two and grows back under load, and no request fails.

Whoever is to leave gives its requests and its experts away first; those that come begin without any.
"""

import asyncio
import time

import pytest
from harness import Output
from living import LivingCluster, config_of
from losing import prompt_of
from processes import is_alive

from pd_cluster.errors import InvalidRequest
from pd_cluster.ids import EngineId
from pd_cluster.launch.group_life import GroupLife

pytestmark = [pytest.mark.processes]

NUM_PROMPTS = 2
OPTIONS = {"max_tokens": 24}


class Load:
    """Requests that follow each other, so many at a time."""

    def __init__(self, cluster: LivingCluster, concurrency: int) -> None:
        self.answers: list[tuple[int, Output]] = []
        self._cluster = cluster
        self._enough = asyncio.Event()
        self._asking = [asyncio.ensure_future(self._ask(index % NUM_PROMPTS)) for index in range(concurrency)]

    async def _ask(self, index: int) -> None:
        while not self._enough.is_set():
            self.answers.append((index, await self._cluster.greedy(prompt_of(index), **OPTIONS)))

    async def until_from(self, workers: set[str]) -> None:
        """Until every one of these workers has answered once more, and nobody else."""
        before = len(self.answers)
        async with asyncio.timeout(120):
            while {answer.timings.decode_worker for _, answer in self.answers[before:]} != workers:
                await asyncio.sleep(0.02)
                if any(asking.done() for asking in self._asking):
                    await self.end()

    async def end(self) -> None:
        self._enough.set()
        await asyncio.gather(*self._asking)


async def test_a_group_shrinks_and_grows_back_under_load_and_no_request_fails() -> None:
    config = config_of(
        "demo",
        decode__data_parallel=4,
        decode__dispatcher="nixl",
        decode__expert_slots_per_rank=16,  # 32 experts fit on two ranks
    )
    async with LivingCluster(config) as cluster:
        engine = cluster.cluster.supervisor.engines[EngineId("decode-0")]
        expected = [await cluster.greedy(prompt_of(index), **OPTIONS) for index in range(NUM_PROMPTS)]
        load = Load(cluster, 8)
        everybody = {f"decode-0/{dp_rank}" for dp_rank in range(4)}
        await load.until_from(everybody)
        before = dict(engine.pids)

        began_s = time.monotonic()
        assert await cluster.cluster.scale_ranks("decode", 2) == ("decode-0", 4)
        shrunk_s = time.monotonic() - began_s
        assert not any(is_alive(pid) for rank, pid in before.items() if rank >= 2)
        await load.until_from({"decode-0/0", "decode-0/1"})
        assert {rank: engine.pids[rank] for rank in engine.pids} == {rank: before[rank] for rank in before if rank < 2}

        began_s = time.monotonic()
        assert await cluster.cluster.scale_ranks("decode", 4) == ("decode-0", 2)
        grown_s = time.monotonic() - began_s
        await load.until_from(everybody)

        with pytest.raises(InvalidRequest, match=r"decode-0 keeps its 4 DP ranks: .*expert_slots_per_rank"):
            await cluster.cluster.scale_ranks("decode", 1)
        await load.until_from(everybody)
        assert {answer.timings.num_retries for _, answer in load.answers} == {0}

        assert isinstance(engine.life, GroupLife)
        generation, killed_s = engine.life.generation, cluster.kill("decode-0", rank=3)
        async with asyncio.timeout(20):
            while engine.life.generation == generation:  # noqa: ASYNC110 (of the supervisor, on this loop)
                await asyncio.sleep(0.001)
        off_s = time.monotonic() - killed_s
        await cluster.until_healthy()
        back_s = time.monotonic() - killed_s
        await load.until_from(everybody)
        await load.end()
        assert all(answer.token_ids == expected[index].token_ids for index, answer in load.answers)
        assert {answer.timings.num_retries for _, answer in load.answers} <= {0, 1}
        moved = sum(answer.timings.num_preemptions for _, answer in load.answers)
        assert cluster.deaths("decode-0") == 3
        print(
            f"\nfrom 4 DP ranks to 2 in {shrunk_s:.2f} s, back in {grown_s:.2f} s; {len(load.answers)} requests "
            f"meanwhile, {moved} of them moved, none failed"
        )
        print(f"a rank killed: off the roster after {1000 * off_s:.0f} ms, replaced after {back_s:.2f} s")
