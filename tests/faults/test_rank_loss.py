"""An elastic group loses members, gets them back, shrinks and grows: real engines, exchange, placements and router, in
one process. What is true of a member's death here is its place in the step: its engine thread is stopped there.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness import ELASTIC, ElasticGroup, LocalCluster, Output, config_of, request, until
from living import longest_gap

from pd_cluster.config import ClusterConfig
from pd_cluster.ids import EngineId
from pd_cluster.parallel.one_sided import NixlDispatcher
from pd_cluster.parallel.wire import COMBINE, DISPATCH

GROUP = EngineId("decode-0")
PROMPTS = [[(7 * i + j) % 200 + 1 for j in range(20 + i)] for i in range(6)]
NUM_TOKENS = 40


def elastic(**values: Any) -> ClusterConfig:
    return config_of("demo", **ELASTIC | values)


class Streams:
    """Requests under way, when their tokens came, and what must become of them."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.times_s: list[list[float]] = [[] for _ in PROMPTS]
        self._cluster = cluster
        self._running = [asyncio.ensure_future(self._stream(index)) for index in range(len(PROMPTS))]

    async def _stream(self, index: int) -> Output:
        made = request(PROMPTS[index], f"s{index}-{time.monotonic()}", max_tokens=NUM_TOKENS)
        return await self._cluster.generate(made, lambda _count: self.times_s[index].append(time.monotonic()))

    async def begun(self, num_tokens: int = 4) -> None:
        await until(lambda: all(len(times) >= num_tokens for times in self.times_s), 30)

    async def ended(self) -> list[Output]:
        return await asyncio.gather(*self._running)

    def longest_wait_s(self, since_s: float) -> float:
        """How long any stream stood still at most since then."""
        return max(longest_gap([since_s, *(at for at in times if at > since_s)]) for times in self.times_s)


def stop_at(dispatcher: NixlDispatcher, place: str) -> tuple[threading.Event, Callable[[], None]]:
    """The rank's engine thread stops there in its next step: when it has, and how to let it go on."""
    reached, released = threading.Event(), threading.Event()

    def stop() -> None:
        reached.set()
        released.wait(60)

    dispatch, wait = dispatcher.dispatch, dispatcher.wait

    def stopping_dispatch(*args: Any) -> Any:
        if place == "before dispatch":
            stop()
        return dispatch(*args)

    def stopping_wait(phase: Any, *args: Any) -> None:
        if (place, phase) in (("between dispatch and combine", DISPATCH), ("in combine", COMBINE)):
            stop()
        wait(phase, *args)

    dispatcher.dispatch = stopping_dispatch  # type: ignore[method-assign]
    dispatcher.wait = stopping_wait  # type: ignore[method-assign]
    return reached, released.set


def dispatcher_of(group: ElasticGroup, dp_rank: int) -> NixlDispatcher:
    engine = group.ranks(dp_rank)[0].engine
    assert engine is not None
    assert isinstance(engine.dispatcher, NixlDispatcher)
    return engine.dispatcher


def check(outputs: list[Output], expected: list[Output]) -> None:
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


PLACES = ["before dispatch", "between dispatch and combine", "in combine"]


async def test_a_member_lost_anywhere_in_a_step_costs_no_stream_and_a_new_one_takes_its_place() -> None:
    async with LocalCluster(elastic()) as cluster:
        group = cluster.groups[GROUP]
        expected = await cluster.all_greedy(PROMPTS, max_tokens=NUM_TOKENS)
        for victim, place in enumerate(["idle", *PLACES]):  # the hub first
            streams = Streams(cluster) if place != "idle" else None
            release: Callable[[], None] = lambda: None  # noqa: E731
            if streams is not None:
                await streams.begun()
                reached, release = stop_at(dispatcher_of(group, victim), place)
                await until(reached.is_set)
            lost_s = time.monotonic()
            await group.lose(victim, release)
            if streams is not None:
                check(await streams.ended(), expected)
                print(f"\nlost {place}: streams stood still for {streams.longest_wait_s(lost_s):.3f} s at most")
            await group.join(victim)
            await group.placed()
            check(await cluster.all_greedy(PROMPTS, max_tokens=NUM_TOKENS), expected)


@pytest.mark.parametrize("redundant", [0, 32])
async def test_two_members_lost_together_leave_a_group_that_goes_on(redundant: int) -> None:
    slots = 20 if redundant else 16  # room for what is lost with both copies
    async with LocalCluster(
        elastic(decode__redundant_experts=redundant, decode__expert_slots_per_rank=slots)
    ) as cluster:
        group = cluster.groups[GROUP]
        expected = await cluster.all_greedy(PROMPTS, max_tokens=NUM_TOKENS)
        streams = Streams(cluster)
        await streams.begun()
        await asyncio.gather(group.lose(0), group.lose(3))
        check(await streams.ended(), expected)
        await group.placed()
        await group.join(3)
        await group.placed()
        check(await cluster.all_greedy(PROMPTS, max_tokens=NUM_TOKENS), expected)


async def test_a_member_of_two_tensor_parallel_ranks_is_lost_and_replaced_as_one() -> None:
    async with LocalCluster(elastic(decode__data_parallel=2, decode__tensor_parallel=2)) as cluster:
        group = cluster.groups[GROUP]
        expected = await cluster.all_greedy(PROMPTS, max_tokens=NUM_TOKENS)
        streams = Streams(cluster)
        await streams.begun()
        await group.lose(0)
        check(await streams.ended(), expected)
        await group.join(0)
        await group.placed()
        check(await cluster.all_greedy(PROMPTS, max_tokens=NUM_TOKENS), expected)


async def test_members_leave_and_come_back_under_load_and_what_does_not_fit_is_refused() -> None:
    async with LocalCluster(elastic()) as cluster:
        group = cluster.groups[GROUP]
        expected = await cluster.all_greedy(PROMPTS, max_tokens=NUM_TOKENS)
        streams = Streams(cluster)
        await streams.begun()
        assert await group.dismiss([2, 3]) is None
        check(await streams.ended(), expected)
        streams = Streams(cluster)
        await streams.begun()
        refused = await group.dismiss([1])
        assert refused is not None
        assert "expert_slots_per_rank" in refused
        await group.join(2)
        await group.join(3)
        check(await streams.ended(), expected)
        await group.placed()
        assert await group.dismiss([0]) is None, "the hub may leave too"
        check(await cluster.all_greedy(PROMPTS, max_tokens=NUM_TOKENS), expected)


async def test_a_loss_that_the_slots_of_the_others_cannot_make_good_ends_the_engine_by_name() -> None:
    async with LocalCluster(elastic(decode__data_parallel=2)) as cluster:
        group = cluster.groups[GROUP]
        await group.formed()
        (left,) = [lead for lead in group.leads if lead.spec.dp_rank == 1]
        running = cluster._running[left]
        group.drop(0)
        del left
        await until(lambda: group.board.ended is not None, 30)
        assert group.board.ended is not None
        assert "expert_slots_per_rank" in group.board.ended
        await until(running.done)
        cluster.give_up(cluster.ranks)
