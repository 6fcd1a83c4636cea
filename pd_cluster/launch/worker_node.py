"""One pod of a pool outside any supervisor of a whole cluster: it keeps its part of one engine and can be asked about.

The first node of an engine runs the engine's supervisor and its store; the others follow it by an agent. Either way
this process starts the ranks, looks at their workers through an `Observer`, answers probes, and drains before it ends.
"""

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Protocol, Self

from pd_cluster.config import ClusterConfig
from pd_cluster.errors import PdClusterError
from pd_cluster.ids import EngineEpoch, EngineId
from pd_cluster.launch.launcher import Launcher
from pd_cluster.launch.lifecycle import EngineEvent, EngineLost, EngineUp
from pd_cluster.launch.node_agent import NodeAgent
from pd_cluster.launch.nodes import NodesLauncher, Place
from pd_cluster.launch.observer import Observer
from pd_cluster.launch.probes import build_probes
from pd_cluster.launch.supervisor import Supervisor
from pd_cluster.log import get_log
from pd_cluster.rpc.security import Security
from router.app import listen
from router.http_server import HttpServer

log = get_log(__name__)

WATCH_S = 0.2


class Ranks(Protocol):
    """The ranks of this node, whoever decides about them."""

    @property
    def ready(self) -> bool:
        """Whether the whole engine serves."""

    @property
    def num_starts(self) -> int:
        """Lives of the engine since this process began."""

    @property
    def told_to_drain(self) -> bool:
        """Whether another node ends, and the engine with it."""

    @property
    def others_drained(self) -> bool:
        """Whether the other nodes' workers have finished what they had, after `tell_drain`."""

    async def start(self) -> None:
        """Begin; at an engine's first node, wait until it serves. Raises PdClusterError."""

    def tell_drain(self) -> None:
        """This node ends: the others shall finish what they have too."""

    def tell_drained(self, drained: bool) -> None:
        """Whether this node's own workers have finished what they had."""

    async def failed(self) -> None:
        """Wait until these ranks are beyond help, and raise why."""

    async def stop(self) -> None:
        """None of them is left when this returns."""


class HeadRanks:
    """Of an engine's first node."""

    def __init__(self, config: ClusterConfig, place: Place, local: Launcher, store_port: int) -> None:
        self._up: set[EngineEpoch] = set()
        self._num_starts = 0
        self._launcher = NodesLauncher(place, local, wait_s=config.launch.start_timeout_s)
        self._supervisor = Supervisor(
            config, self._launcher, shapes=[place.shape], store_port=store_port, on_event=self._on_event
        )

    @property
    def ready(self) -> bool:
        return bool(self._up)

    @property
    def num_starts(self) -> int:
        return self._num_starts

    @property
    def told_to_drain(self) -> bool:
        return self._launcher.told_to_drain

    async def _on_event(self, event: EngineEvent) -> None:
        if isinstance(event, EngineUp):
            self._num_starts += not self._up
            self._up.add(event.epoch)
            self._launcher.announce(ready=True)
        elif isinstance(event, EngineLost):
            self._up.discard(event.epoch)

    async def start(self) -> None:
        await self._supervisor.start()

    @property
    def others_drained(self) -> bool:
        return self._launcher.others_drained

    def tell_drain(self) -> None:
        self._launcher.announce(drain=True)

    def tell_drained(self, drained: bool) -> None:
        self._launcher.announce(drained=drained and self.others_drained)

    async def failed(self) -> None:
        await self._supervisor.wait_failed()

    async def stop(self) -> None:
        self._launcher.abandon()
        await self._supervisor.stop()


class MemberRanks:
    """Of any other node: its agent runs on a thread that lives as long as the ranks."""

    def __init__(self, place: Place, local: Launcher, head: str, store_port: int) -> None:
        self._agent = NodeAgent(place, local, head, store_port)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._thread = threading.Thread(target=self._run, args=[asyncio.get_running_loop()], name="node-agent")

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        error: BaseException | None = None
        try:
            self._agent.run()
        except Exception as raised:  # the thread's edge: whoever waits for `failed` gets it
            error = raised
        loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    @property
    def ready(self) -> bool:
        return self._agent.ready

    @property
    def num_starts(self) -> int:
        return self._agent.num_starts

    @property
    def told_to_drain(self) -> bool:
        return self._agent.draining

    async def start(self) -> None:
        self._thread.start()

    @property
    def others_drained(self) -> bool:
        return self._agent.all_drained

    def tell_drain(self) -> None:
        self._agent.told_to_drain.set()

    def tell_drained(self, drained: bool) -> None:
        if drained:
            self._agent.drained.set()
        else:
            self._agent.drained.clear()

    async def failed(self) -> None:
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        self._agent.stop.set()
        if self._thread.is_alive():
            await asyncio.wait([self._ended])


class WorkerNode:
    """`async with WorkerNode(...) as node: await node.run()`; cancel `run` and leave to drain it and to end it."""

    def __init__(
        self,
        config: ClusterConfig,
        place: Place,
        local: Launcher,
        *,
        head: str = "",
        store_port: int,
        http_host: str,
        http_port: int,
        drain_s: float,
    ) -> None:
        self.place = place
        self.started = False
        self._drain_s = drain_s
        self._ending = False  # of this pod's own accord
        self._told = False  # another pod of the engine ends
        self._observer = Observer(place.lead_addresses, Security.from_config(config.security))
        self._ranks: Ranks = (
            HeadRanks(config, place, local, store_port)
            if place.node == 0
            else MemberRanks(place, local, head, store_port)
        )
        self._server = HttpServer(build_probes(self, self._observer.directory), listen(http_host, http_port))
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._exits.push_async_callback(self._ranks.stop)
        self._exits.push_async_callback(self._observer.stop)
        self._exits.push_async_callback(self._server.stop)
        try:
            await self._server.start()
            self._observer.start()
        except BaseException:
            await self._exits.aclose()
            raise
        log.info("node_listens", engine=self.engine_id, node=self.place.node, http_port=self._server.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, PdClusterError) and not self._ending:
            await self.drain(self._drain_s)
        await self._exits.aclose()

    async def run(self) -> None:
        """Until cancelled. Raises the error of an engine that is given up."""
        watching = asyncio.create_task(self._watch(), name="node-watch")
        try:
            await self._ranks.start()
            await self._ranks.failed()
        finally:
            watching.cancel()

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and finish what all workers of the engine have; whether they did within `timeout_s`."""
        self._ending = True
        log.info("node_drains", engine=self.engine_id, node=self.place.node)
        self._ranks.tell_drain()
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        drained = await self._observer.drain(timeout_s)
        while drained and self._ranks.ready and not self._ranks.others_drained:
            self._ranks.tell_drained(True)
            await asyncio.sleep(WATCH_S)
            drained = asyncio.get_running_loop().time() < deadline_s
        self._ranks.tell_drained(drained)
        log.info("node_drained" if drained else "node_still_busy", engine=self.engine_id, node=self.place.node)
        return drained

    async def _watch(self) -> None:
        draining: asyncio.Task[bool] | None = None
        while True:
            self.started = self.started or self.trouble is None
            told = self._ranks.told_to_drain
            if told and not self._told and not self._ending:
                self._ranks.tell_drain()
                draining = asyncio.create_task(self._observer.drain(self._drain_s), name="drain-with-others")
            elif draining is not None and draining.done():
                self._ranks.tell_drained(told and draining.result())
                if not told:
                    draining = None
                    self._observer.draining = False
            self._told = told
            await asyncio.sleep(WATCH_S)

    # ---- what probes and metrics ask

    @property
    def engine_id(self) -> EngineId:
        return self.place.shape.engine_id

    @property
    def draining(self) -> bool:
        return self._ending or self._told

    @property
    def num_starts(self) -> int:
        return self._ranks.num_starts

    @property
    def trouble(self) -> str | None:
        if self.draining:
            return "it drains"
        if not self._ranks.ready:
            return f"{self.engine_id} does not serve"
        if not self._observer.attached:
            return "a worker of this pod does not answer"
        return None
