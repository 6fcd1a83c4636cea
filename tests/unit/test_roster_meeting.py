"""What ranks of an elastic engine and their supervisor say to each other, over the store and within one process."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from harness import config_of

from pd_cluster.clock import SystemClock
from pd_cluster.errors import EngineError
from pd_cluster.ids import EngineEpoch, EngineId, Rank
from pd_cluster.launch.meeting import Board, LocalRendezvous, StoreRendezvous
from pd_cluster.launch.rank import RankServer
from pd_cluster.launch.spec import Beat, RankReport, RankSpec, Release
from pd_cluster.launch.store import StoreServer
from pd_cluster.parallel.roster import Roster

EPOCH = EngineEpoch("e")
LIVES = EngineEpoch("a"), EngineEpoch("b")
ROSTERS = [
    Roster(generation=0, tensor_parallel=1, lives=LIVES),
    Roster(generation=1, tensor_parallel=1, lives=LIVES, leaving=frozenset({1})),
    Roster(generation=2, tensor_parallel=1, lives=(LIVES[0], None)),
]


def spec(server: StoreServer, dp_rank: int, life: EngineEpoch) -> RankSpec:
    return RankSpec(
        role="decode",
        engine_id=EngineId("decode-0"),
        epoch=EPOCH,
        life=life,
        rank=Rank(dp_rank),
        data_parallel=2,
        tensor_parallel=1,
        config=config_of("demo"),
        store_host=server.host,
        store_port=server.port,
    )


def until(condition: Callable[[], bool]) -> None:
    """Writes are not answered: the server has them soon."""
    deadline_s = SystemClock().now_s() + 10
    while not condition():
        assert SystemClock().now_s() < deadline_s


def waiting(wait: Callable[[], Roster]) -> tuple[threading.Thread, list[Roster]]:
    got: list[Roster] = []
    thread = threading.Thread(target=lambda: got.append(wait()))
    thread.start()
    return thread, got


def test_a_rank_waits_for_the_next_roster_and_gets_each_in_turn() -> None:
    server = StoreServer()
    try:
        rank = StoreRendezvous(spec(server, 0, LIVES[0]))
        thread, got = waiting(lambda: rank.roster_after(-1))
        server.issue(EPOCH, ROSTERS[0])
        server.issue(EPOCH, ROSTERS[1])
        thread.join(10)
        assert got == [ROSTERS[0]]
        assert rank.roster_after(0) == ROSTERS[1]
        thread, got = waiting(lambda: rank.roster_after(1))
        rank.beat(Beat(1, []))  # nobody waits behind the one who waits for a roster
        server.issue(EPOCH, ROSTERS[2])
        thread.join(10)
        assert got == [ROSTERS[2]]
    finally:
        server.close()


def test_what_a_member_says_belongs_to_its_life_and_what_the_group_says_to_the_engine() -> None:
    server = StoreServer()
    try:
        old, new = (StoreRendezvous(spec(server, 1, life)) for life in (LIVES[1], EngineEpoch("c")))
        old.report(RankReport(rank=Rank(1), pid=1))
        old.beat(Beat(7, [Rank(0)]))
        new.beat(Beat(1, []))
        new.released(1, None)
        old.end_engine("out of slots")
        new.end_engine("a later reason")
        assert server.end(EPOCH) == "out of slots"
        assert old.lease_held()
        assert new.lease_held()
        until(lambda: server.report(LIVES[1], Rank(1)) is not None and server.release(EPOCH, 1) is not None)
        until(lambda: server.beat_of(EngineEpoch("c"), Rank(1)) is not None)
        until(lambda: server.beat_of(LIVES[1], Rank(1)) is not None)
        assert server.report(LIVES[1], Rank(1)) == RankReport(rank=Rank(1), pid=1)
        assert server.report(EngineEpoch("c"), Rank(1)) is None
        assert server.beat_of(LIVES[1], Rank(1)) == Beat(7, [Rank(0)])
        assert server.beat_of(EngineEpoch("c"), Rank(1)) == Beat(1)
        assert server.release(EPOCH, 1) == Release(1)
        assert server.release(EPOCH, 0) is None
        server.revoke(LIVES[1])
        assert not old.lease_held()
        assert new.lease_held()
        server.revoke(EPOCH)
        assert not new.lease_held()
    finally:
        server.close()


def test_the_lease_is_looked_at_and_an_end_is_told_behind_nobody() -> None:
    server = StoreServer()
    try:
        server.beat()
        rank = StoreRendezvous(spec(server, 0, LIVES[0]))
        stuck = threading.Thread(target=lambda: rank._own.roster(0))  # has the connection until there is one
        stuck.start()
        over = threading.Event()

        def end() -> None:
            assert rank.lease_held()
            rank.end_engine("out of slots")
            over.set()

        threading.Thread(target=end).start()
        told = over.wait(5)
        server.issue(EPOCH, ROSTERS[0])
        stuck.join(10)
        assert told
        assert server.end(EPOCH) == "out of slots"
    finally:
        server.close()


async def test_an_engine_that_ends_while_its_store_does_not_answer_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pd_cluster.launch.rank.END_S", 0.2)
    answered = threading.Event()

    class Silent(LocalRendezvous):
        def end_engine(self, reason: str) -> None:
            answered.wait(10)

    server = StoreServer()
    try:
        rank = RankServer(spec(server, 0, LIVES[0]), Silent(Board()))
        started_s = SystemClock().now_s()
        rank._end_engine(EngineError("out of slots"))
        assert SystemClock().now_s() - started_s < 0.1, "its event loop goes on"
        with pytest.raises(EngineError, match="out of slots"):
            await asyncio.wait_for(rank._ended, 5)
    finally:
        answered.set()
        server.close()


def test_a_supervisor_that_is_gone_ends_the_wait_for_a_roster() -> None:
    server = StoreServer()
    rank = StoreRendezvous(spec(server, 0, LIVES[0]))
    server.issue(EPOCH, ROSTERS[0])
    rank.roster_after(-1)
    server.close()
    with pytest.raises(EngineError, match="no roster will follow 0"):
        rank.roster_after(0)


async def test_ranks_of_one_process_meet_on_a_board() -> None:
    board = Board()
    rank = LocalRendezvous(board, LIVES[1], Rank(1))
    first = asyncio.create_task(asyncio.to_thread(rank.roster_after, -1))
    board.issue(ROSTERS[0])
    assert await first == ROSTERS[0]
    rank.beat(Beat(3, [Rank(0)]))
    rank.released(1, "no slot is free")
    assert board.beats == {(LIVES[1], Rank(1)): Beat(3, [Rank(0)])}
    assert board.releases == {1: "no slot is free"}
    late = asyncio.create_task(asyncio.to_thread(rank.roster_after, 0))
    board.close()
    with pytest.raises(EngineError):
        await late
