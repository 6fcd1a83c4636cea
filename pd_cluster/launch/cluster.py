"""A whole cluster in one object: the router in this process, the engines behind it, and their supervisor between.

The supervisor tells the router which workers there are and which epochs are dead; the router learns the rest from the
workers themselves.
"""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

from pd_cluster.clock import SystemClock
from pd_cluster.config import ClusterConfig, EngineSection, LaunchSection
from pd_cluster.errors import InvalidRequest, PdClusterError, Unavailable
from pd_cluster.ids import EngineId
from pd_cluster.launch.autoscale import Autoscaler
from pd_cluster.launch.group_life import GroupLife
from pd_cluster.launch.launcher import Launcher, create_launcher
from pd_cluster.launch.lifecycle import EngineDead, EngineEvent, EngineLost, EngineUp, State
from pd_cluster.launch.roles import engine_shapes
from pd_cluster.launch.spec import Role
from pd_cluster.launch.supervisor import OnProgress, Supervisor
from pd_cluster.log import get_log
from pd_cluster.model.source import LoadedModel, open_model
from router.app import Router

log = get_log(__name__)

ATTACH_TIMEOUT_S = 30.0
MAX_INSTANCES = 1024
LOOK_S = 0.1
"""Between two looks at an engine that drains."""


async def _created(section: LaunchSection) -> Launcher:
    """A launcher that is not lost when the wait for it is cancelled: Ray cannot stop half-way through its start."""
    creating = asyncio.create_task(asyncio.to_thread(create_launcher, section))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        with contextlib.suppress(PdClusterError):
            launcher = await creating
            await asyncio.to_thread(launcher.close)
        raise


def note_failure(task: asyncio.Task[None]) -> None:
    """Of a task that nobody waits for: the cluster serves on without it."""
    try:
        task.result()
    except asyncio.CancelledError:
        pass
    except Exception:  # the edge of the task
        log.exception("task_failed", task=task.get_name())


class Cluster:
    """`async with Cluster(config) as cluster`: everything serves inside, and every process is gone after.

    `http`: also serve the OpenAI API. Entering raises ConfigError, ModelError or Unavailable that say what to do.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        model: LoadedModel | None = None,
        http: bool = False,
        on_progress: OnProgress | None = None,
        on_event: Callable[[EngineEvent], None] | None = None,
    ) -> None:
        self.config = config
        self.model = model or open_model(config.model.path, config.model.load)
        self.router = Router(config, self.model, http=http, pools=self)
        self._on_progress = on_progress
        self._on_event = on_event
        self._exits = contextlib.AsyncExitStack()
        self._supervisor: Supervisor | None = None
        self._leaving: dict[EngineId, asyncio.Task[None]] = {}
        self._autoscaling: asyncio.Task[None] | None = None

    @property
    def supervisor(self) -> Supervisor:
        assert self._supervisor is not None, "not started"
        return self._supervisor

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.aclose()

    async def scale(self, role: str, instances: int) -> int:
        """Let that many engines of a role run; how many were meant to before.

        New ones take requests when they are up. Those that go, the newest first, take nothing new and end when they
        have finished what they have. Raises InvalidRequest.
        """
        known = sorted({shape.role for shape in engine_shapes(self.config)})
        if role not in known:
            raise InvalidRequest(f"this cluster has no {role} engines: it has {' and '.join(known)}", param="role")
        if not 1 <= instances <= MAX_INSTANCES:
            raise InvalidRequest(
                f"a pool has between 1 and {MAX_INSTANCES} engines, got {instances}", param="instances"
            )
        kind: Role = next(shape.role for shape in engine_shapes(self.config) if shape.role == role)
        pool = [engine for engine in self.supervisor.pool(kind) if engine.shape.engine_id not in self._leaving]
        for _ in range(instances - len(pool)):
            self.supervisor.add(kind)
        ready = [engine for engine in pool if engine.life.state is State.READY]
        staying_first = ready + [engine for engine in pool if engine.life.state is not State.READY]
        for engine in staying_first[instances:]:
            engine_id = engine.shape.engine_id
            self._leaving[engine_id] = asyncio.create_task(self._dismiss(engine_id), name=f"dismiss-{engine_id}")
        return len(pool)

    async def scale_ranks(self, role: str, ranks: int, engine_id: str | None = None) -> tuple[str, int]:
        """Let that many ranks of an elastic engine compute; its id, and how many were meant to before.

        Returns when they do. DP ranks that go give their requests and experts away first, the highest ones; those that
        come begin with none. `engine_id` may be left out when the role has one engine. Raises InvalidRequest, or
        Unavailable when the engine ends meanwhile.
        """
        pool = {
            engine.shape.engine_id: engine
            for engine in self.supervisor.engines.values()
            if engine.shape.role == role and engine.shape.engine_id not in self._leaving
        }
        names = " and ".join(pool) or "none"
        if engine_id is None and len(pool) != 1:
            raise InvalidRequest(f"say which {role} engine: there are {names}", param="engine_id")
        name = next(iter(pool)) if engine_id is None else EngineId(engine_id)
        if name not in pool:
            raise InvalidRequest(f"there is no {role} engine {name[:200]}: there are {names}", param="engine_id")
        shape, life = pool[name].shape, pool[name].life
        if not isinstance(life, GroupLife):
            raise InvalidRequest(
                f"{name} lives and dies as a whole: for ranks that come and go, start it with data_parallel above 1 "
                'and dispatcher = "nixl"',
                param="ranks",
            )
        if ranks % shape.tensor_parallel:
            raise InvalidRequest(
                f"{name} has DP ranks of {shape.tensor_parallel} ranks each (tensor_parallel): {ranks} is no multiple",
                param="ranks",
            )
        if not shape.tensor_parallel <= ranks <= shape.num_ranks:
            raise InvalidRequest(
                f"{name} was started for {shape.num_ranks} ranks: it can have {shape.tensor_parallel} to "
                f"{shape.num_ranks}, not {ranks}",
                param="ranks",
            )
        before = life.num_wanted * shape.tensor_parallel
        await self.supervisor.resize(name, ranks // shape.tensor_parallel)
        return name, before

    async def _dismiss(self, engine_id: EngineId) -> None:
        """Drain an engine and end it; after the longest time that a request may take, with what is left."""
        pipeline = self.router.pipeline
        try:
            for worker in pipeline.directory.workers:
                if worker.info.engine_id == engine_id:
                    pipeline.drain(worker.id)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.router.request_timeout_s):
                    while pipeline.is_busy(engine_id):  # noqa: ASYNC110 (its load comes with heartbeats)
                        await asyncio.sleep(LOOK_S)
            await self.supervisor.retire(engine_id)
        finally:
            del self._leaving[engine_id]

    def _section(self, role: str) -> EngineSection:
        return self.config.prefill if role == "prefill" else self.config.decode

    async def _stop_leaving(self) -> None:
        tasks = list(self._leaving.values())
        if self._autoscaling is not None:
            tasks.append(self._autoscaling)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self) -> None:
        self._exits.push_async_callback(self._stop_supervisor)
        self._exits.push_async_callback(self._stop_leaving)
        self._exits.push_async_callback(self.router.stop)  # first, so that no request takes the end for a failure
        await self.router.start()
        launcher = await _created(self.config.launch)
        self._supervisor = Supervisor(self.config, launcher, on_event=self._tell_router, on_progress=self._on_progress)
        await self._supervisor.start()
        autoscaler = Autoscaler(
            self._supervisor,
            self.router.directory,
            lambda role: self._section(role).autoscale,
            SystemClock(),
            change_timeout_s=self.config.launch.start_timeout_s + self.config.launch.shrink_timeout_s,
        )
        self._autoscaling = asyncio.create_task(autoscaler.run(), name="autoscale")
        self._autoscaling.add_done_callback(note_failure)
        num_workers = sum(engine.shape.data_parallel for engine in self._supervisor.engines.values())
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                await self.router.until_ready(num_workers)
        except TimeoutError as error:
            raise Unavailable(
                f"the router reached {self.router.num_ready} of {num_workers} workers in {ATTACH_TIMEOUT_S:g} s"
            ) from error

    async def _stop_supervisor(self) -> None:
        if self._supervisor is not None:
            await self._supervisor.stop()

    async def _tell_router(self, event: EngineEvent) -> None:
        match event:
            case EngineUp():
                for address in event.addresses:
                    self.router.add_worker(address)
            case EngineLost():
                for address in event.addresses:
                    self.router.remove_worker(address)
            case EngineDead():
                self.router.pipeline.engine_dead(event.epoch, self.supervisor.workers_of(event.engine_id, event.first))
            case _:
                pass
        if self._on_event is not None:
            self._on_event(event)
