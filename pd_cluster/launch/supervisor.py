"""The supervisor: starts every engine of a configuration, watches its ranks and replaces what dies.

It alone decides what runs. One task on the event loop looks at all ranks, feeds what it sees to each engine's
`EngineLife` and does what that decides, so nothing else changes state. Launcher calls may block, so they run on one
thread of the supervisor's own, which lives as long as the ranks; the ranks' lease is extended by a task of its own.
"""

import asyncio
import functools
import itertools
import signal
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from msgspec import Struct

from pd_cluster.clock import Clock, SystemClock
from pd_cluster.config import ClusterConfig
from pd_cluster.errors import PdClusterError
from pd_cluster.ids import EngineEpoch, EngineId, Rank, WorkerId, new_epoch, worker_id
from pd_cluster.launch.launcher import Launcher, RankHandle
from pd_cluster.launch.lifecycle import (
    Action,
    EngineDead,
    EngineEvent,
    EngineFailed,
    EngineLife,
    EngineLost,
    EngineUp,
    Kill,
    Start,
    State,
    Terminate,
    describe_exit,
)
from pd_cluster.launch.roles import EngineShape, engine_shape, engine_shapes, rank_specs
from pd_cluster.launch.spec import RankProgress, RankReport, RankSpec, Role
from pd_cluster.launch.store import StoreServer
from pd_cluster.log import get_log

log = get_log(__name__)

WATCH_S = 0.05
CALM_WATCH_S = 0.2
"""While every engine serves."""

BEAT_S = 1.0

T = TypeVar("T")
OnEvent = Callable[[EngineEvent], Awaitable[None]]
OnProgress = Callable[[EngineId, Rank, RankProgress], None]


class Engine:
    """An engine under supervision: its shape, its life, and the processes of that life."""

    def __init__(self, shape: EngineShape, config: ClusterConfig) -> None:
        self.shape = shape
        self.life = EngineLife(
            shape.engine_id,
            shape.num_ranks,
            max_restarts=config.launch.max_restarts,
            start_timeout_s=config.launch.start_timeout_s,
            new_epoch=new_epoch,
        )
        self.handles: dict[Rank, RankHandle] = {}  # of ranks not seen dead
        self.progress: dict[Rank, RankProgress] = {}
        self.killed = False
        self.retired = False

    @property
    def pids(self) -> dict[Rank, int]:
        return {rank: handle.pid for rank, handle in self.handles.items() if handle.pid is not None}

    def terminate(self) -> None:
        for handle in self.handles.values():
            handle.terminate()

    def kill(self) -> None:
        self.killed = True
        for handle in self.handles.values():
            handle.kill()


class Seen(Struct, frozen=True):
    """What one look at an engine's ranks found."""

    reports: list[RankReport]
    progress: dict[Rank, RankProgress]
    exits: dict[Rank, str | None]  # rank -> how it ended; None when the supervisor killed it


class Supervisor:
    """Keeps every engine of `config`, or only `shapes` of them. `on_event` is awaited for every change, in order;
    `on_progress` is called as weights load.
    """

    def __init__(
        self,
        config: ClusterConfig,
        launcher: Launcher,
        *,
        shapes: list[EngineShape] | None = None,
        store_port: int = 0,
        on_event: OnEvent | None = None,
        on_progress: OnProgress | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._on_event = on_event
        self._on_progress = on_progress
        self._clock = clock or SystemClock()
        self._store_port = store_port
        self.engines = {shape.engine_id: Engine(shape, config) for shape in shapes or engine_shapes(config)}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="launcher")
        self._store: StoreServer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None
        self._stopping = False
        self._closed = False

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def num_ranks(self) -> int:
        return sum(engine.shape.num_ranks for engine in self.engines.values())

    def workers_of(self, engine_id: EngineId, ranks: Iterable[Rank]) -> frozenset[WorkerId]:
        """The workers that those ranks of an engine belong to."""
        tensor_parallel = self.engines[engine_id].shape.tensor_parallel
        return frozenset(worker_id(engine_id, rank // tensor_parallel) for rank in ranks)

    async def start(self) -> None:
        """Start all engines and wait until they serve. Raises the error of the first that cannot; then call `stop`."""
        self._store = await self._on_thread(lambda: StoreServer(self._launcher.host, self._store_port))
        self._beating = asyncio.create_task(_beat(self._store), name="lease")
        self._watching = asyncio.create_task(self._watch(self._store), name="supervisor")
        await self._until(self._all_ready)

    async def stop(self) -> None:
        """End every rank and the launcher: nothing of them is left when this returns. May be called again."""
        if self._closed:
            return
        self._stopping = True
        try:
            if self._watching is not None and not self._watching.done():
                await self._until(lambda: self._all_in(State.STOPPED))
        finally:
            self._closed = True
            tasks = [task for task in (self._watching, self._beating) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._on_thread(self._launcher.close)
            if self._store is not None:
                self._store.close()
            self._thread.shutdown()

    async def wait_failed(self) -> None:
        """Wait until a role has no engine left that will serve, then raise the last one's error."""
        await self._until(self._raise_when_hopeless)

    # ---- pools that change their size

    def pool(self, role: Role) -> list[Engine]:
        """The engines of a role that shall run, the oldest first."""
        return [
            engine
            for engine in self.engines.values()
            if engine.shape.role == role and not engine.retired and engine.life.state is not State.FAILED
        ]

    def add(self, role: Role) -> EngineId:
        """Let one more engine of a role run, beginning at the next look. One that cannot start is given up."""
        shapes = (engine_shape(role, index, self._config) for index in itertools.count())
        shape = next(shape for shape in shapes if shape.engine_id not in self.engines)
        self.engines[shape.engine_id] = Engine(shape, self._config)
        return shape.engine_id

    async def retire(self, engine_id: EngineId) -> None:
        """End an engine for good; returns when all of its ranks are gone. What still runs there goes on elsewhere."""
        engine = self.engines[engine_id]
        engine.retired = True
        await self._until(lambda: self.engines.get(engine_id) is not engine)

    # ---- conditions

    def _all_in(self, state: State) -> bool:
        return all(engine.life.state is state for engine in self.engines.values())

    def _all_ready(self) -> bool:
        for engine in self.engines.values():
            if engine.life.state is State.FAILED:
                raise self._error(engine)
        return self._all_in(State.READY)

    def _raise_when_hopeless(self) -> bool:
        for role in {engine.shape.role for engine in self.engines.values()}:
            pool = [engine for engine in self.engines.values() if engine.shape.role == role]
            if all(engine.life.state is State.FAILED for engine in pool):
                raise self._error(pool[-1])
        return False

    @staticmethod
    def _error(engine: Engine) -> PdClusterError:
        assert engine.life.error is not None
        return engine.life.error

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`, asked after every look; raises when the watch itself broke."""
        assert self._watching is not None, "not started"
        while not condition():
            self._looked.clear()
            look = asyncio.ensure_future(self._looked.wait())
            try:
                await asyncio.wait([look, self._watching], return_when=asyncio.FIRST_COMPLETED)
            finally:
                look.cancel()
            if self._watching.done():
                self._watching.result()
                return

    # ---- the watch: everything below runs in one task

    async def _watch(self, store: StoreServer) -> None:
        while True:
            await self._start_due(store)
            for engine_id, engine in list(self.engines.items()):
                if engine.retired and engine.life.state is State.STOPPED:
                    del self.engines[engine_id]
            living = [engine for engine in self.engines.values() if engine.handles]
            for engine, seen in await self._on_thread(functools.partial(self._look_at_all, living, store)):
                await self._take(engine, seen)
            self._looked.set()
            await asyncio.sleep(CALM_WATCH_S if self._all_in(State.READY) and not self._stopping else WATCH_S)

    async def _start_due(self, store: StoreServer) -> None:
        """Let time pass for every engine, and start those whose time has come together."""
        due: list[tuple[Engine, list[RankSpec]]] = []
        for engine in list(self.engines.values()):
            now_s = self._clock.now_s()
            actions: list[Action] = []
            if self._stopping:
                actions = engine.life.stop(now_s)
            elif engine.retired:
                actions = engine.life.stop(now_s, "its pool shrinks")
            for action in actions + engine.life.tick(now_s):
                if isinstance(action, Start):
                    address = (store.host, store.port)
                    due.append((engine, rank_specs(engine.shape, action.epoch, self._config, address, self.num_ranks)))
                else:
                    await self._do(engine, action)
        if not due:
            return
        specs = [spec for _, engine_specs in due for spec in engine_specs]
        try:
            handles = await self._on_thread(functools.partial(self._launcher.start, specs))
        except PdClusterError as error:
            for engine, _ in due:
                await self._do_all(engine, engine.life.not_started(error, self._clock.now_s()))
            return
        by_name = {handle.spec.name: handle for handle in handles}
        for engine, engine_specs in due:
            engine.progress = {}
            engine.killed = False
            engine.handles = {spec.rank: by_name[spec.name] for spec in engine_specs}

    def _look_at_all(self, engines: list[Engine], store: StoreServer) -> list[tuple[Engine, Seen]]:
        return [(engine, self._look(engine, store)) for engine in engines]

    def _look(self, engine: Engine, store: StoreServer) -> Seen:
        """Blocking. Exits come first, so that whatever a dead rank reported is seen with its death."""
        epoch = engine.life.epoch
        assert epoch is not None
        exits: dict[Rank, str | None] = {}
        for rank, handle in engine.handles.items():
            if (code := handle.poll()) is not None:
                ours = engine.killed and code == -signal.SIGKILL
                exits[rank] = None if ours else describe_exit(handle.spec.name, code, handle.log_tail())
        missing = engine.life.missing if engine.life.state is State.STARTING else []
        reports = [report for rank in missing if (report := store.report(epoch, rank)) is not None]
        progress = {rank: done for rank in missing if (done := store.progress(epoch, rank)) is not None}
        return Seen(reports, progress, exits)

    async def _take(self, engine: Engine, seen: Seen) -> None:
        now_s = self._clock.now_s()
        for rank, progress in seen.progress.items():
            if self._on_progress is not None and engine.progress.get(rank) != progress:
                self._on_progress(engine.shape.engine_id, rank, progress)
            engine.progress[rank] = progress
        for report in sorted(seen.reports, key=lambda r: r.error is None):  # errors first: they are the cause
            await self._do_all(engine, engine.life.reported(report, now_s))
        for rank, reason in seen.exits.items():
            del engine.handles[rank]
            await self._do_all(engine, engine.life.exited(rank, reason, now_s))

    async def _do_all(self, engine: Engine, actions: list[Action]) -> None:
        for action in actions:
            await self._do(engine, action)

    async def _do(self, engine: Engine, action: Action) -> None:
        match action:
            case Start():
                raise AssertionError("starts come from tick alone")
            case Terminate():
                await self._on_thread(engine.terminate)
            case Kill():
                await self._on_thread(functools.partial(self._kill, engine, action.epoch))
            case EngineUp() | EngineLost() | EngineDead() | EngineFailed():
                _log(action)
                if self._on_event is not None:
                    await self._on_event(action)

    def _kill(self, engine: Engine, epoch: EngineEpoch) -> None:
        """Ranks out of the launcher's reach end by themselves: the store tells them, or their lease is over."""
        if self._store is not None:
            self._store.revoke(epoch)
        engine.kill()

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


async def _beat(store: StoreServer) -> None:
    while True:
        store.beat()  # to a server in this process: microseconds
        await asyncio.sleep(BEAT_S)


def _log(event: EngineEvent) -> None:
    match event:
        case EngineUp():
            log.info("engine_up", engine=event.engine_id, epoch=event.epoch, addresses=event.addresses)
        case EngineLost():
            tell = log.info if event.expected else log.warning
            tell("engine_lost", engine=event.engine_id, epoch=event.epoch, reason=event.reason.partition("\n")[0])
        case EngineDead():
            log.info("engine_dead", engine=event.engine_id, epoch=event.epoch)
        case EngineFailed():
            log.error("engine_failed", engine=event.engine_id, reason=event.reason.partition("\n")[0])
