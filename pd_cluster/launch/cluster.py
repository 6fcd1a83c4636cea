"""A whole cluster in one object: the router in this process, the engines behind it, and their supervisor between.

The supervisor tells the router which workers there are and which epochs are dead; the router learns the rest from the
workers themselves.
"""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

from pd_cluster.config import ClusterConfig, LaunchSection
from pd_cluster.errors import PdClusterError, Unavailable
from pd_cluster.launch.launcher import Launcher, create_launcher
from pd_cluster.launch.lifecycle import EngineDead, EngineEvent, EngineLost, EngineUp
from pd_cluster.launch.supervisor import OnProgress, Supervisor
from pd_cluster.model.source import LoadedModel, open_model
from router.app import Router

ATTACH_TIMEOUT_S = 30.0


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
        self.router = Router(config, self.model, http=http)
        self._on_progress = on_progress
        self._on_event = on_event
        self._exits = contextlib.AsyncExitStack()
        self._supervisor: Supervisor | None = None

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

    async def _start(self) -> None:
        self._exits.push_async_callback(self._stop_supervisor)
        self._exits.push_async_callback(self.router.stop)  # first, so that no request takes the end for a failure
        await self.router.start()
        launcher = await _created(self.config.launch)
        self._supervisor = Supervisor(self.config, launcher, on_event=self._tell_router, on_progress=self._on_progress)
        await self._supervisor.start()
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
