"""The supervisor: starts every engine of a configuration, watches its ranks and replaces what dies.

It alone decides what runs. One task on the event loop looks at all ranks, feeds what it sees to each engine's life (see
`lifecycle`, and `group_life` for elastic engines) and does what that decides, so nothing else changes state. Launcher
calls may block: one thread of the supervisor's own looks at ranks and ends them, another one starts them, so that a
start that takes long keeps nobody from noticing a death. Both live as long as the ranks; the ranks' lease is extended
by a task of its own.
"""

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from msgspec import Struct

from pd_cluster.clock import Clock, SystemClock
from pd_cluster.config import ClusterConfig
from pd_cluster.errors import InvalidRequest, PdClusterError, Unavailable
from pd_cluster.ids import EngineId, Rank, WorkerId, worker_id
from pd_cluster.launch.group_life import GroupLife, Issue, KillMembers, Mismatch, StartMembers, TerminateMembers
from pd_cluster.launch.group_member import MISMATCH_S
from pd_cluster.launch.launcher import Launcher, RankHandle
from pd_cluster.launch.lifecycle import (
    EngineDead,
    EngineEvent,
    EngineFailed,
    EngineLost,
    EngineUp,
    Kill,
    Start,
    State,
    Terminate,
)
from pd_cluster.launch.roles import EngineShape, engine_shape, engine_shapes
from pd_cluster.launch.spec import RankProgress, RankSpec, Role
from pd_cluster.launch.store import StoreServer
from pd_cluster.launch.supervised import AnyAction, Engine, Seen
from pd_cluster.log import get_log
from pd_cluster.parallel.roster import Roster

log = get_log(__name__)

WATCH_S = 0.05
ELASTIC_WATCH_S = 0.1
"""While every engine serves and one of them is elastic: its other DP ranks wait for the word that one is dead."""

CALM_WATCH_S = 0.2
"""While every engine serves."""

BEAT_S = 1.0

T = TypeVar("T")
OnEvent = Callable[[EngineEvent], Awaitable[None]]
OnProgress = Callable[[EngineId, Rank, RankProgress], None]
Begin = Start | StartMembers


class Starting(Struct, frozen=True, kw_only=True):
    """Engines whose ranks start together, on the launcher's thread."""

    due: list[tuple[Engine, Begin]]
    specs: list[list[RankSpec]]  # of each
    handles: asyncio.Future[list[RankHandle]]


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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="watch")
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="launcher")
        self._starting: list[Starting] = []
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
            await asyncio.get_running_loop().run_in_executor(self._starter, self._launcher.close)
            if self._store is not None:
                self._store.close()
            self._thread.shutdown()
            self._starter.shutdown()

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

    async def resize(self, engine_id: EngineId, num_members: int) -> None:
        """Let so many DP ranks of an elastic engine serve; returns when they do, which may take as long as a start.

        Raises InvalidRequest, with the engine as it was, when the others cannot do without those that were to go, which
        it says before anything moves when experts cannot fit. Raises Unavailable when the engine has ended for good.
        """
        engine = self.engines[engine_id]
        assert isinstance(engine.life, GroupLife)
        life = engine.life
        if (reason := life.does_not_fit(num_members)) is not None:
            raise InvalidRequest(f"{engine_id} keeps its {life.num_wanted} DP ranks: {reason}", param="ranks")
        life.resize(num_members)

        def ended() -> bool:
            return engine.retired or life.state in (State.FAILED, State.STOPPED)

        def settled() -> bool:
            return life.num_wanted != num_members or (life.state is State.READY and life.settled)

        await self._until(lambda: ended() or settled())
        if ended():
            why = f": {life.error.message}" if life.error is not None else ""
            raise Unavailable(f"{engine_id} has ended and cannot change its DP ranks{why}")
        if life.refusal is not None:
            raise InvalidRequest(f"{engine_id} keeps its {life.num_wanted} DP ranks: {life.refusal}", param="ranks")
        if life.num_wanted != num_members:
            raise InvalidRequest(f"{engine_id} was told meanwhile to have {life.num_wanted} DP ranks", param="ranks")

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
            await self._let_time_pass(store)
            await self._take_started(store)
            for engine_id, engine in list(self.engines.items()):
                if engine.retired and engine.life.state is State.STOPPED:
                    del self.engines[engine_id]
            living = [engine for engine in self.engines.values() if engine.handles]
            for engine, seen in await self._on_thread(functools.partial(self._look_at_all, living, store)):
                self._tell_progress(engine, seen)
                await self._do_all(engine, engine.take(seen, self._clock.now_s()), store)
            self._looked.set()
            await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        if self._stopping or not self._all_in(State.READY):
            return WATCH_S
        return ELASTIC_WATCH_S if any(engine.shape.elastic for engine in self.engines.values()) else CALM_WATCH_S

    async def _let_time_pass(self, store: StoreServer) -> None:
        """For every engine; those whose time has come start together."""
        due: list[tuple[Engine, Begin]] = []
        for engine in list(self.engines.values()):
            now_s = self._clock.now_s()
            actions: list[AnyAction] = []
            if self._stopping:
                actions += engine.life.stop(now_s)
            elif engine.retired:
                actions += engine.life.stop(now_s, "its pool shrinks")
            actions += engine.life.tick(now_s)
            due += [(engine, action) for action in actions if isinstance(action, Start | StartMembers)]
            await self._do_all(
                engine, [action for action in actions if not isinstance(action, Start | StartMembers)], store
            )
        if due:
            self._starting.append(self._start(due, store))

    def _start(self, due: list[tuple[Engine, Begin]], store: StoreServer) -> "Starting":
        address = (store.host, store.port)
        specs = [engine.specs(start, address, self.num_ranks) for engine, start in due]
        for engine_specs in specs:
            store.expect_beats({spec.rank: spec.worker_epoch for spec in engine_specs if spec.is_elastic})
        wanted = [spec for engine_specs in specs for spec in engine_specs]
        handles = asyncio.get_running_loop().run_in_executor(self._starter, self._launcher.start, wanted)
        return Starting(due=due, specs=specs, handles=handles)

    async def _take_started(self, store: StoreServer) -> None:
        """Ranks whose start has ended are looked at from now on; those that were given up meanwhile are told so."""
        ended = [starting for starting in self._starting if starting.handles.done()]
        self._starting = [starting for starting in self._starting if not starting.handles.done()]
        for starting in ended:
            try:
                by_name = {handle.spec.name: handle for handle in starting.handles.result()}
            except PdClusterError as error:
                for engine, start in starting.due:
                    await self._do_all(engine, engine.not_started(start, error, self._clock.now_s()), store)
                continue
            for (engine, _), specs in zip(starting.due, starting.specs, strict=True):
                engine.started([by_name[spec.name] for spec in specs])
                await self._on_thread(engine.catch_up)

    def _tell_progress(self, engine: Engine, seen: Seen) -> None:
        for rank, progress in seen.progress.items():
            if self._on_progress is not None and engine.progress.get(rank) != progress:
                self._on_progress(engine.shape.engine_id, rank, progress)

    async def _do_all(self, engine: Engine, actions: list[AnyAction], store: StoreServer) -> None:
        for action in actions:
            match action:
                case Start() | StartMembers():
                    raise AssertionError("starts come from tick alone")
                case Issue():
                    store.issue(action.epoch, action.roster)  # to a server in this process: microseconds
                    if action.roster.generation:
                        _log_roster(engine.shape.engine_id, action.roster)
                case Terminate() | Kill() | TerminateMembers() | KillMembers():
                    await self._on_thread(functools.partial(engine.end, action, store))
                case Mismatch():
                    name = worker_id(action.engine_id, action.dp_rank)
                    log.error("dp_rank_refused", worker=name, reason=action.reason, retry_s=MISMATCH_S)
                case EngineUp() | EngineLost() | EngineDead() | EngineFailed():
                    _log(action)
                    if self._on_event is not None:
                        await self._on_event(action)

    def _look_at_all(self, engines: list[Engine], store: StoreServer) -> list[tuple[Engine, Seen]]:
        return [(engine, engine.look(store, self._clock.now_s())) for engine in engines]

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


async def _beat(store: StoreServer) -> None:
    while True:
        store.beat()  # to a server in this process: microseconds
        await asyncio.sleep(BEAT_S)


def _log_roster(engine_id: EngineId, roster: Roster) -> None:
    members, leaving = roster.members, sorted(roster.leaving)
    log.info("roster", engine=engine_id, generation=roster.generation, members=members, leaving=leaving)


def _name(event: EngineUp | EngineLost) -> str:
    return event.engine_id if event.dp_rank is None else worker_id(event.engine_id, event.dp_rank)


def _log(event: EngineEvent) -> None:
    match event:
        case EngineUp():
            log.info("engine_up", engine=_name(event), epoch=event.epoch, addresses=event.addresses)
        case EngineLost():
            tell = log.info if event.expected else log.warning
            tell("engine_lost", engine=_name(event), epoch=event.epoch, reason=event.reason.partition("\n")[0])
        case EngineDead():
            log.info("engine_dead", engine=event.engine_id, epoch=event.epoch)
        case EngineFailed():
            log.error("engine_failed", engine=event.engine_id, reason=event.reason.partition("\n")[0])
