"""What holds when a generation forms, from what its members say of themselves."""

import asyncio

import msgspec
import numpy as np

from pd_cluster.clock import FakeClock
from pd_cluster.engine.epoch_hub import EpochHub
from pd_cluster.engine.epoch_messages import EpochStats, Loads, Prepare, Standing, decode_order, decode_stage, encode
from pd_cluster.engine.planning import Planner
from pd_cluster.ids import Rank
from pd_cluster.parallel.load_window import TriggerPolicy
from pd_cluster.parallel.placement import Placement, spread
from pd_cluster.parallel.planner import Answer, Question, Stage
from pd_cluster.parallel.stages import missing

NUM_EXPERTS, NUM_RANKS, SLOTS = 4, 3, 4


class Made:
    def __init__(
        self, placement: Placement, *, policy: TriggerPolicy | None = None, planner: Planner | None = None
    ) -> None:
        self.clock = FakeClock()
        self.orders: asyncio.Queue[Prepare] = asyncio.Queue()
        self.failures: asyncio.Queue[Exception] = asyncio.Queue()
        self.hub = EpochHub(
            Stage(placement, [{}]),
            tensor_parallel=1,
            expert_bytes=1,
            clock=self.clock,
            order=lambda payload: self.orders.put_nowait(decode_order(payload)),
            nudge=lambda: None,
            stats=EpochStats(),
            on_failure=self.failures.put_nowait,
            policy=policy,
            planner=planner,
        )


def placed(redundant: int, epoch: int) -> Placement:
    return msgspec.structs.replace(spread(NUM_EXPERTS, NUM_RANKS, 1, redundant, SLOTS), epoch=epoch)


def standing(placement: Placement, *, is_empty: bool = False) -> bytes:
    return encode(Standing(Stage(placement, [{}]), is_empty, attempt=0))


async def test_the_latest_commit_that_anyone_has_seen_holds() -> None:
    made = Made(placed(8, 2))
    settled = made.hub.form({0: standing(placed(8, 2)), 1: standing(placed(8, 3)), 2: standing(placed(8, 2))})
    assert decode_stage(settled).placement == placed(8, 3)
    assert made.hub.may_run()
    made.hub.close()


async def test_an_empty_member_says_nothing_of_what_holds_and_its_copies_are_left_out() -> None:
    made = Made(placed(8, 2))
    made.hub.form({0: standing(placed(8, 2)), 1: standing(placed(8, 3)), 2: standing(placed(8, 9), is_empty=True)})
    held = made.hub.placement
    assert held.epoch == 4, "epoch 3, less the copies that are not there"
    assert held.rank_slots(0, Rank(0)) == placed(8, 3).rank_slots(0, Rank(0))
    assert set(held.rank_slots(0, Rank(2))) == {None}
    assert made.hub.may_run()
    made.hub.close()


async def test_experts_that_only_an_empty_member_should_have_are_brought_back_before_any_work() -> None:
    made = Made(placed(0, 2))
    settled = made.hub.form(
        {0: standing(placed(0, 3)), 1: standing(placed(0, 2)), 2: standing(placed(0, 9), is_empty=True)}
    )
    assert decode_stage(settled).placement == placed(0, 3), "no later one is known to all who hold experts"
    assert not made.hub.may_run()
    async with asyncio.timeout(10):
        prepare = await made.orders.get()
    assert prepare.hurry
    assert prepare.holders == [Rank(0), Rank(1)]
    assert prepare.stage.placement.epoch == 4
    assert not missing(prepare.stage.placement, frozenset(prepare.holders))
    assert made.failures.empty()
    made.hub.close()


async def test_where_no_member_has_experts_the_engine_ends_by_name() -> None:
    made = Made(placed(0, 0))
    made.hub.form({rank: standing(placed(0, 0), is_empty=True) for rank in range(2)})
    assert not made.hub.may_run()
    async with asyncio.timeout(10):
        error = await made.failures.get()
    assert "cannot be brought back: no member has any of them" in str(error)
    assert made.orders.empty()
    made.hub.close()


class Unwilling(Planner):
    """Sees uneven ranks, and no change that is worth it."""

    async def ask(self, question: Question) -> Answer:
        return Answer(ratio=2.0) if question.kind == "look" else Answer(reason="it gains too little")


async def test_a_change_that_is_refused_counts_as_given_up_when_its_reason_is_told() -> None:
    made = Made(placed(8, 0), policy=TriggerPolicy(sustain_s=0.0), planner=Unwilling())
    made.clock.advance(60.0)
    made.hub.on_report(encode(Loads(Rank(0), "life", np.ones((1, NUM_EXPERTS), np.int64).tobytes())))
    async with asyncio.timeout(10):
        while not made.hub.is_idle:  # noqa: ASYNC110 (its plan is a task of its own)
            await asyncio.sleep(0)
    assert (made.hub.stats.num_abandoned, made.hub.stats.last_reason) == (1, "it gains too little")
    assert made.orders.empty()
    made.hub.close()
