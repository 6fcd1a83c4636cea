"""How a rank meets the others of its engine and reports to its supervisor: one face for the store and for tests.

Over the store, waiting calls run on threads with a connection of their own, so that nobody waits behind a peer that is
late.
"""

import asyncio
from typing import Protocol

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import DistError

from pd_cluster.clock import SystemClock
from pd_cluster.engine.step_sync import Meeting
from pd_cluster.errors import EngineError
from pd_cluster.launch.spec import RankReport, RankSpec
from pd_cluster.launch.store import RankStore, connect, write


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
        """Whether the supervisor gave a sign lately."""


class StoreRendezvous:
    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._address = (spec.store_host, spec.store_port)
        self._timeout_s = spec.config.launch.start_timeout_s
        self._own = RankStore(*self._address, spec.epoch, spec.rank)
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
        return self._own.lease_held(self._clock.now_s())

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

    def slot(self, key: str) -> "asyncio.Future[str]":
        return self.values.setdefault(key, asyncio.get_running_loop().create_future())


class LocalRendezvous:
    def __init__(self, board: Board) -> None:
        self._board = board

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
