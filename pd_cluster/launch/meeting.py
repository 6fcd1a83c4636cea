"""How a rank meets the others of its engine and reports to its supervisor: one face for the store and for tests.

Over the store, waiting calls run on threads with a connection of their own, so that nobody waits behind a peer that is
late, nor behind a store that does not answer.
"""

import asyncio
import threading
from typing import Protocol

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import DistError

from pd_cluster.clock import SystemClock
from pd_cluster.engine.step_sync import Meeting
from pd_cluster.errors import EngineError
from pd_cluster.ids import EngineEpoch, Rank
from pd_cluster.launch.spec import Beat, RankReport, RankSpec, Release
from pd_cluster.launch.store import TIMEOUT_S, RankStore, connect, write
from pd_cluster.parallel.groups import FIRST_RANK
from pd_cluster.parallel.roster import Roster

ROSTER_WAIT_S = 1e6
"""A roster comes when something happens; a supervisor that is gone breaks the connection, or the lease."""

NO_LIFE = EngineEpoch("")


class Rendezvous(Protocol):
    def meeting(self) -> Meeting:
        """Publish and look up strings among the ranks of this life of the engine."""

    def groups_store(self) -> Store:
        """What process groups are built on; calls may block."""

    def report(self, report: RankReport) -> None:
        """Tell the supervisor how the start ended."""

    def progress(self, stage: str, done: int, total: int) -> None:
        """Tell the supervisor how far the start is; called from any thread."""

    def lease_held(self) -> bool:
        """Whether the supervisor gave a sign lately. Blocks while the store does not answer."""

    # ---- of elastic engines

    def roster_after(self, generation: int) -> Roster:
        """Wait for the roster that follows `generation`; the first of an engine follows -1. Blocks for as long as that
        takes, on a thread of the caller's. Raises EngineError when nobody can issue it any more.
        """

    def beat(self, beat: Beat) -> None:
        """Tell the supervisor that this rank lives; called from a thread of its own. Raises Unavailable."""

    def released(self, generation: int, refused: str | None) -> None:
        """Of the DP ranks that leave with that roster nothing is needed any more; or the group refuses to let them go,
        and why.
        """

    def end_engine(self, reason: str) -> None:
        """No rank of this engine can go on, and why. Blocks until the store has it. Raises Unavailable."""


class StoreRendezvous:
    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._address = (spec.store_host, spec.store_port)
        self._timeout_s = spec.config.launch.start_timeout_s
        self._own = self._connection(TIMEOUT_S)
        self._lease = self._connection(TIMEOUT_S)
        self._beats: RankStore | None = None
        self._rosters: RankStore | None = None
        self._clock = SystemClock()

    def meeting(self) -> Meeting:
        return Meeting(publish=self._publish, lookup=self._lookup)

    def groups_store(self) -> Store:
        return connect(*self._address, self._timeout_s)

    def report(self, report: RankReport) -> None:
        self._own.report(report)

    def progress(self, stage: str, done: int, total: int) -> None:
        self._own.progress(stage, done, total)

    def lease_held(self) -> bool:
        return self._lease.lease_held(self._clock.now_s())

    def roster_after(self, generation: int) -> Roster:
        if self._rosters is None:  # a connection of its own, which waits as long as its supervisor lives
            self._rosters = self._connection(ROSTER_WAIT_S)
        try:
            return self._rosters.roster(generation + 1)
        except DistError as error:
            raise EngineError(f"no roster will follow {generation}: {error}") from error

    def beat(self, beat: Beat) -> None:
        if self._beats is None:
            self._beats = self._connection(TIMEOUT_S)
        self._beats.beat(beat)

    def released(self, generation: int, refused: str | None) -> None:
        self._own.release(Release(generation, refused))

    def end_engine(self, reason: str) -> None:
        self._connection(TIMEOUT_S).end(reason)

    def _connection(self, wait_s: float) -> RankStore:
        spec = self._spec
        return RankStore(*self._address, spec.epoch, spec.rank, spec.worker_epoch, wait_s)

    def _key(self, key: str) -> str:
        return f"{self._spec.epoch}/meet/{key}"

    async def _publish(self, key: str, value: str) -> None:
        await asyncio.to_thread(self._write, self._key(key), value.encode())

    def _write(self, key: str, value: bytes) -> None:
        write(connect(*self._address, self._timeout_s), key, value)

    async def _lookup(self, key: str) -> str:
        return await asyncio.to_thread(self._read, self._key(key))

    def _read(self, key: str) -> str:
        try:
            return bytes(connect(*self._address, self._timeout_s).get(key)).decode()
        except DistError as error:
            raise EngineError(f"rank {self._spec.rank} waited in vain for {key}: {error}") from error


class Board:
    """What the ranks of one engine share when all of them live in this process, on one event loop."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.reports: dict[int, RankReport] = {}
        self.values: dict[str, asyncio.Future[str]] = {}
        self.beats: dict[tuple[EngineEpoch, Rank], Beat] = {}
        self.releases: dict[int, str | None] = {}
        self.ended: str | None = None
        self._rosters: list[Roster] = []
        self._issued = threading.Condition()
        self._closed = False

    def issue(self, roster: Roster) -> None:
        """Let a generation begin; what the supervisor does by the store."""
        with self._issued:
            assert roster.generation == len(self._rosters)
            self._rosters.append(roster)
            self._issued.notify_all()

    def roster(self, generation: int) -> Roster:
        """Wait for a generation to be issued. Raises EngineError once the board is closed."""
        with self._issued:
            self._issued.wait_for(lambda: generation < len(self._rosters) or self._closed)
            if generation >= len(self._rosters):
                raise EngineError(f"no roster {generation} will be issued")
            return self._rosters[generation]

    def close(self) -> None:
        """End every wait for a roster."""
        with self._issued:
            self._closed = True
            self._issued.notify_all()

    def slot(self, key: str) -> "asyncio.Future[str]":
        return self.values.setdefault(key, asyncio.get_running_loop().create_future())


class LocalRendezvous:
    """`life` and `rank` are of the rank that beats; they say nothing in an engine that is not elastic."""

    def __init__(self, board: Board, life: EngineEpoch = NO_LIFE, rank: Rank = FIRST_RANK) -> None:
        self._board = board
        self._life = life
        self._rank = rank

    def meeting(self) -> Meeting:
        async def publish(key: str, value: str) -> None:
            self._board.slot(key).set_result(value)

        async def lookup(key: str) -> str:
            return await asyncio.shield(self._board.slot(key))

        return Meeting(publish=publish, lookup=lookup)

    def groups_store(self) -> Store:
        return self._board.store

    def report(self, report: RankReport) -> None:
        self._board.reports[report.rank] = report

    def progress(self, stage: str, done: int, total: int) -> None:
        pass

    def lease_held(self) -> bool:
        return True

    def roster_after(self, generation: int) -> Roster:
        return self._board.roster(generation + 1)

    def beat(self, beat: Beat) -> None:
        self._board.beats[self._life, self._rank] = beat

    def released(self, generation: int, refused: str | None) -> None:
        self._board.releases[generation] = refused

    def end_engine(self, reason: str) -> None:
        self._board.ended = self._board.ended or reason
