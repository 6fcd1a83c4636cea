import asyncio

import pytest

from pd_cluster.engine.plan import StepPlan
from pd_cluster.engine.step_sync import Go, Meeting, Run, StepSync, Tell, Vote, Votes
from pd_cluster.errors import EngineError
from pd_cluster.ids import EngineEpoch, Rank
from pd_cluster.parallel.transition import Abandon, Commit, Decision


def board() -> Meeting:
    """A meeting place in memory."""
    values: dict[str, asyncio.Future[str]] = {}

    def slot(key: str) -> asyncio.Future[str]:
        return values.setdefault(key, asyncio.get_running_loop().create_future())

    async def publish(key: str, value: str) -> None:
        slot(key).set_result(value)

    async def lookup(key: str) -> str:
        return await slot(key)

    return Meeting(publish=publish, lookup=lookup)


async def engine(data_parallel: int, tensor_parallel: int, shared: bool = True) -> list[StepSync]:
    meeting = board()
    ranks = [
        StepSync(
            epoch=EngineEpoch("e"),
            rank=Rank(r),
            data_parallel=data_parallel,
            tensor_parallel=tensor_parallel,
            shared=shared,
        )
        for r in range(data_parallel * tensor_parallel)
    ]
    await asyncio.gather(*(r.start(meeting, "127.0.0.1", 5.0) for r in ranks))
    return ranks


async def close(ranks: list[StepSync]) -> None:
    await asyncio.gather(*(r.close() for r in ranks))


def test_hub_says_go_only_when_all_voted_and_one_has_tokens() -> None:
    votes = Votes(2)
    assert votes.cast(Vote(0, 0, 0)) is None
    assert votes.cast(Vote(1, 0, 0)) is None
    assert votes.cast(Vote(1, 0, 3)) == Go(0, [0, 3])
    assert votes.cast(Vote(0, 0, 5)) is None, "a raise that crossed the go is voted again for the next step"
    assert votes.cast(Vote(0, 1, 5)) is None
    assert votes.cast(Vote(1, 1, 0)) == Go(1, [5, 0])


class Deciding:
    """What a hub decides next, once, and whether steps may have work."""

    def __init__(self) -> None:
        self.next: Decision | None = None
        self.may_run = True

    def decide(self, step: int) -> Decision | None:
        decision, self.next = self.next, None
        return Commit(decision.epoch, step) if isinstance(decision, Commit) else decision


def test_a_decision_travels_on_the_next_go_or_begins_a_step_without_work() -> None:
    deciding = Deciding()
    votes = Votes(2, deciding.decide, lambda: deciding.may_run)
    votes.cast(Vote(0, 0, 5))
    deciding.next = Commit(3, -1)
    assert votes.go() is None, "one lead has not voted: nothing is decided for this step yet"
    assert votes.cast(Vote(1, 0, 0)) == Go(0, [5, 0], Commit(3, 0))
    for dp_rank in range(2):
        assert votes.cast(Vote(dp_rank, 1, 0)) is None
    deciding.next = Abandon(4, "slow")
    assert votes.go() == Go(1, [0, 0], Abandon(4, "slow"))
    assert votes.go() is None


def test_no_step_has_work_while_experts_are_missing() -> None:
    deciding = Deciding()
    votes = Votes(1, deciding.decide, lambda: deciding.may_run)
    deciding.may_run = False
    assert votes.cast(Vote(0, 0, 7)) is None
    deciding.next = Commit(1, -1)
    assert votes.go() == Go(0, [0], Commit(1, 0)), "the commit of a placement that still lacks experts"
    assert votes.cast(Vote(0, 1, 7)) is None
    deciding.may_run = True
    assert votes.go() == Go(1, [7])


async def test_notes_reach_every_rank_and_the_hub_and_decisions_reach_followers() -> None:
    ranks = await engine(2, 2)
    ordered: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
    reported: asyncio.Queue[bytes] = asyncio.Queue()
    for index, rank in enumerate(ranks):
        rank.on_order = lambda payload, index=index: ordered.put_nowait((index, payload))  # type: ignore[misc]
    ranks[0].on_report = reported.put_nowait
    async with asyncio.timeout(5):
        ranks[0].order(b"prepare")
        assert {await ordered.get() for _ in range(2)} == {(0, b"prepare"), (2, b"prepare")}
        for lead, follower in ((ranks[0], ranks[1]), (ranks[2], ranks[3])):
            lead.run_followers(StepPlan(step=0), [0, 0], Commit(1, 0))
            assert await anext(follower.orders()) == Run(StepPlan(step=0), [0, 0], Commit(1, 0))
        assert {ordered.get_nowait() for _ in range(2)} == {(1, b"prepare"), (3, b"prepare")}, "before the step"
        for index, rank in enumerate(ranks):
            rank.report(b"ready%d" % index)
        assert {await reported.get() for _ in ranks} == {b"ready0", b"ready1", b"ready2", b"ready3"}
    await close(ranks)


async def test_two_leads_step_together_and_followers_get_the_plan() -> None:
    ranks = await engine(2, 2)
    leads = [ranks[0], ranks[2]]
    leads[1].vote(0, 0)
    leads[0].vote(0, 7)
    assert [await lead.go() for lead in leads] == [Go(0, [7, 0])] * 2
    plan = StepPlan(step=0)
    leads[0].run_followers(plan, [7, 0])
    leads[0].tell_followers(b"after the plan")
    orders = ranks[1].orders()
    assert await anext(orders) == Run(plan, [7, 0])
    assert await anext(orders) == Tell(b"after the plan")
    told: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
    leads[1].on_tell = lambda rank, payload: told.set_result((rank, payload))
    ranks[3].tell_lead(b"filled")
    assert await told == (3, b"filled")
    await close(ranks)


async def test_an_idle_lead_is_woken_by_anothers_work() -> None:
    ranks = await engine(3, 1)
    for rank in ranks:
        rank.vote(0, 0)
    await asyncio.sleep(0)
    assert not any(rank.has_go() for rank in ranks)
    ranks[2].vote(0, 4)
    assert [await rank.go() for rank in ranks] == [Go(0, [0, 0, 4])] * 3
    await close(ranks)


async def test_replicas_without_shared_experts_never_wait_for_each_other() -> None:
    ranks = await engine(2, 1, shared=False)
    ranks[1].vote(0, 5)
    assert await ranks[1].go() == Go(0, [5])
    assert not ranks[0].has_go()
    await close(ranks)


async def test_a_lost_rank_ends_every_wait() -> None:
    ranks = await engine(2, 2)
    await ranks[2].close()
    with pytest.raises(EngineError):
        await ranks[0].go()
    with pytest.raises(EngineError):
        async for _ in ranks[3].orders():
            pass
    await close([ranks[0], ranks[1], ranks[3]])


async def test_strangers_are_hung_up_on_and_the_engine_still_meets() -> None:
    meeting = board()
    hub, other = (
        StepSync(epoch=EngineEpoch("e"), rank=Rank(r), data_parallel=2, tensor_parallel=1, shared=True)
        for r in range(2)
    )
    starting = asyncio.ensure_future(hub.start(meeting, "127.0.0.1", 5.0))
    host, _, port = (await meeting.lookup("sync/0")).rpartition(":")
    for garbage in (b"\x80\x04\x95pickle", b"\xff" * 100, (3).to_bytes(4, "big") + b"abc"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        assert await reader.read() == b""
        writer.close()
    await other.start(meeting, "127.0.0.1", 5.0)
    await starting
    await close([hub, other])
