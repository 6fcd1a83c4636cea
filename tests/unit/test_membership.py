"""Routers follow the owner of the pools by long polls: nothing they miss stays unknown, and nothing is told twice."""

import asyncio
from collections.abc import Awaitable

import pytest

from pd_cluster.errors import Unavailable
from pd_cluster.ids import EngineEpoch, EngineId, WorkerId
from pd_cluster.launch.lifecycle import EngineDead, EngineFailed, EngineLost, EngineUp
from pd_cluster.launch.membership import Follower, Members, Membership, encode

DECODE = EngineId("decode-0")
E1, E2 = EngineEpoch("e1"), EngineEpoch("e2")
KILLER = frozenset({WorkerId("decode-0/1")})


class FakeRouter:
    """Notes what it is told, as the pipeline of itself too."""

    def __init__(self) -> None:
        self.said: list[tuple[str, object]] = []
        self.pipeline = self

    def add_worker(self, address: str) -> None:
        self.said.append(("add", address))

    def remove_worker(self, address: str) -> None:
        self.said.append(("remove", address))

    def engine_dead(self, epoch: EngineEpoch, first: frozenset[WorkerId]) -> None:
        self.said.append(("dead", (epoch, first)))

    def take(self) -> list[tuple[str, object]]:
        said, self.said = self.said, []
        return said


def follower(ask: object = None) -> tuple[Follower, FakeRouter]:
    router = FakeRouter()
    return Follower(router, ask, (Unavailable,)), router  # type: ignore[arg-type]


def die_and_come_back(members: Members) -> None:
    members.note(EngineLost(DECODE, E1, ["h:1", "h:2"], "killed"))
    members.note(EngineDead(DECODE, E1), KILLER)
    members.note(EngineUp(DECODE, E2, ["h:3", "h:4"]))


async def test_an_answer_comes_when_something_has_changed_or_the_time_is_over() -> None:
    members = Members()
    members.note(EngineUp(DECODE, E1, ["h:1"]))
    first = await members.after(None, 0)
    assert first.addresses == ["h:1"]
    assert await members.after(first.owner, first.version, timeout_s=0.01) == first
    waiting = asyncio.create_task(members.after(first.owner, first.version))
    await asyncio.sleep(0)
    members.note(EngineFailed(DECODE, "that concerns no router"))
    await asyncio.sleep(0)
    assert not waiting.done()
    members.note(EngineLost(DECODE, E1, ["h:1"], "killed"))
    assert (await waiting).addresses == []
    assert (await members.after(first.owner, first.version)).version == first.version + 1


async def test_versions_of_another_owner_mean_nothing() -> None:
    one, two = Members(), Members()
    for members in (one, two):
        members.note(EngineUp(DECODE, E1, ["h:1"]))
    known = one.current()
    answer = await asyncio.wait_for(two.after(known.owner, known.version), 1)
    assert answer.owner != known.owner


def test_a_router_hears_of_the_loss_the_death_and_the_new_life_in_this_order_and_once() -> None:
    members = Members()
    members.note(EngineUp(DECODE, E1, ["h:1", "h:2"]))
    following, router = follower()
    following.apply(members.current())
    assert router.take() == [("add", "h:1"), ("add", "h:2")]
    die_and_come_back(members)
    following.apply(members.current())
    assert router.take() == [
        ("remove", "h:1"),
        ("remove", "h:2"),
        ("dead", (E1, KILLER)),
        ("add", "h:3"),
        ("add", "h:4"),
    ]
    following.apply(members.current())
    assert router.take() == [("add", "h:3"), ("add", "h:4")], "known addresses are fine, deaths are not repeated"


def test_a_router_that_comes_late_hears_of_the_dead_too() -> None:
    """Blocks that they were writing to may be in quarantine."""
    members = Members()
    members.note(EngineUp(DECODE, E1, ["h:1", "h:2"]))
    die_and_come_back(members)
    following, router = follower()
    following.apply(members.current())
    assert router.take()[0] == ("dead", (E1, KILLER))


async def test_a_router_keeps_its_workers_while_the_owner_is_away_and_takes_those_of_a_new_one() -> None:
    answers: asyncio.Queue[Membership | Exception] = asyncio.Queue()
    asked: list[tuple[str | None, int]] = []

    async def answer(owner: str | None, version: int) -> bytes:
        asked.append((owner, version))
        given = await answers.get()
        if isinstance(given, Exception):
            raise given
        return encode(given)

    def ask(owner: str | None, version: int) -> Awaitable[bytes]:
        return answer(owner, version)

    following, router = follower(ask)
    running = asyncio.create_task(following.run())
    old, new = Members(), Members()
    old.note(EngineUp(DECODE, E1, ["h:1"]))
    new.note(EngineUp(DECODE, E2, ["h:3"]))
    answers.put_nowait(old.current())
    answers.put_nowait(Unavailable("the owner is dead"))
    answers.put_nowait(Unavailable("the owner is dead"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pd_cluster.launch.membership.RETRY_S", 0.01)
        await asyncio.sleep(0.1)
        assert router.take() == [("add", "h:1")]
        answers.put_nowait(new.current())
        await asyncio.sleep(0.05)
    assert router.take() == [("remove", "h:1"), ("add", "h:3")]
    assert asked[0] == (None, 0)
    assert asked[1:4] == [(old.current().owner, 1)] * 3
    running.cancel()


async def test_an_error_that_nobody_foresaw_ends_the_following() -> None:
    async def ask(owner: str | None, version: int) -> bytes:
        raise ValueError("a bug")

    following, _ = follower(ask)
    with pytest.raises(ValueError, match="a bug"):
        await following.run()


def test_a_dp_rank_that_lives_on_its_own_comes_and_goes_alone_even_at_the_same_address() -> None:
    members, (follow, router) = Members(), follower()
    for life, address, dp_rank in (("a0", "h:1", 0), ("a1", "h:2", 1)):
        members.note(EngineUp(DECODE, EngineEpoch(life), [address], dp_rank))
    follow.apply(members.current())
    router.take()
    members.note(EngineLost(DECODE, EngineEpoch("a1"), ["h:2"], "killed", False, 1))
    follow.apply(members.current())
    assert router.take() == [("remove", "h:2"), ("add", "h:1")]
    members.note(EngineDead(DECODE, EngineEpoch("a1")))
    members.note(EngineUp(DECODE, EngineEpoch("b1"), ["h:2"], 1))
    follow.apply(members.current())
    assert router.take() == [("dead", ("a1", frozenset())), ("add", "h:1"), ("add", "h:2")]
