"""A cluster as a Ray Serve application: routers are replicas behind Serve's proxies, the pools are actors.

    proxy --> Router (replicas) ==control streams==> ranks (actors in placement groups)
                  | long polls                          ^ starts, watches, replaces
                Pools (one replica) --------------------+

`Pools` owns the ranks: they start before any router is ready, and end with it, when no request is left or when it has
died. Serve starts it again after its death, and routers follow it to its new ranks; requests in flight go on there. A
router that ends takes no new requests and has `drain_s` for those it has.
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from pd_cluster.config import ClusterConfig
from pd_cluster.errors import ConfigError, PdClusterError, Unavailable
from pd_cluster.launch.lifecycle import EngineDead, EngineEvent
from pd_cluster.launch.membership import Follower, Members, encode
from pd_cluster.launch.observer import Observer
from pd_cluster.launch.ray import RayLauncher
from pd_cluster.launch.serve_options import ServeOptions
from pd_cluster.launch.supervisor import Supervisor
from pd_cluster.log import configure_logging, get_log
from pd_cluster.messages import WorkerLoad
from pd_cluster.model.source import open_model
from pd_cluster.rpc.security import Security
from router.app import Router
from router.openai_api import build_app

log = get_log(__name__)

POOLS_CPUS = 0.1
IDLE_FOR_S = 1.0
IDLE_LOOK_S = 0.1
STOP_S = 30.0
"""What ranks may take to end, and Serve to notice."""

MAX_STARTS = 3
AWAY = (RayError, RayServeException)


def application(config: ClusterConfig, options: ServeOptions) -> serve.Application:
    """The application graph: routers in front, the pools behind them."""
    encoded = msgspec.json.encode(config)
    router_cpus = options.num_cpus * options.num_at_start
    pools = serve.deployment(
        Pools,
        name="pools",
        num_replicas=1,
        ray_actor_options={"num_cpus": POOLS_CPUS},
        max_ongoing_requests=10_000,  # every router has one long poll open
        max_constructor_retry_count=MAX_STARTS,
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=options.drain_s + STOP_S,
        logging_config={"enable_access_log": False},  # of long polls
    ).bind(encoded, router_cpus, options.drain_s)
    scaling: dict[str, Any] = {}
    if options.num_replicas is not None:
        scaling["num_replicas"] = options.num_replicas
    if options.autoscaling is not None:
        scaling["autoscaling_config"] = options.autoscaling
    routers = serve.deployment(
        RouterReplica,
        name="router",
        ray_actor_options={"num_cpus": options.num_cpus},
        max_ongoing_requests=options.max_ongoing_requests or config.router.max_queue,
        max_queued_requests=options.max_queued_requests,
        max_constructor_retry_count=MAX_STARTS,
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=options.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        **scaling,
    )
    return routers.bind(encoded, pools)


def _decode(config: bytes) -> ClusterConfig:
    return msgspec.json.decode(config, type=ClusterConfig)


class Pools:
    """Starts every engine and keeps them running. `router_cpus` of the Ray cluster are left to the routers."""

    async def __init__(self, config: bytes, router_cpus: float, drain_s: float) -> None:  # type: ignore[misc]
        configure_logging(process="pools")
        self._config = _decode(config)
        self._drain_s = drain_s
        launcher = await asyncio.to_thread(RayLauncher, spare_cpus=router_cpus)
        self._members = Members(launcher.loopback_node)
        self._supervisor = Supervisor(self._config, launcher, on_event=self._on_event)
        try:
            await self._supervisor.start()
        except BaseException:
            await self._supervisor.stop()
            raise
        self._failing = asyncio.create_task(self._supervisor.wait_failed(), name="hopeless-pool")

    async def _on_event(self, event: EngineEvent) -> None:
        first = self._supervisor.workers_of(event.engine_id, event.first) if isinstance(event, EngineDead) else ()
        self._members.note(event, frozenset(first))

    async def membership(self, owner: str | None, version: int) -> bytes:
        """A long poll: see `Members.after`."""
        return encode(await self._members.after(owner, version))

    async def check_health(self) -> None:
        """Raise when a pool is beyond help, so that Serve starts all of them anew."""
        if self._failing.done():
            self._failing.result()
            raise Unavailable("the supervisor has ended")

    async def __del__(self) -> None:
        """Serve routes no new requests any more; those under way have their time."""
        if not hasattr(self, "_failing"):
            return  # it never started, and has cleaned up
        self._failing.cancel()
        await self._until_idle()
        await self._supervisor.stop()

    async def _until_idle(self) -> None:
        observer = Observer(self._members.addresses, Security.from_config(self._config.security))
        observer.start()
        idle_s = 0.0
        try:
            async with asyncio.timeout(self._drain_s):
                while idle_s < IDLE_FOR_S:
                    await asyncio.sleep(IDLE_LOOK_S)
                    idle = all(is_idle(worker.load) for worker in observer.directory.workers)
                    idle_s = idle_s + IDLE_LOOK_S if idle else 0.0
        except TimeoutError:
            log.warning("pools_end_with_requests", drain_s=self._drain_s)
        finally:
            await observer.stop()


def is_idle(load: WorkerLoad) -> bool:
    """Whether no request is queued, running or on its way there."""
    return not (load.num_waiting or load.num_running or load.num_held_blocks or load.num_reserved_blocks)


@serve.ingress()
class RouterReplica:
    """One router. Serve's proxies hand it HTTP requests; it speaks to the ranks as any other router does."""

    async def __init__(self, config: bytes, pools: DeploymentHandle) -> None:  # type: ignore[misc]
        configure_logging(process="router")
        self._pools = pools
        cluster = _decode(config)
        model = await asyncio.to_thread(open_model, cluster.model.path, cluster.model.load)
        self._router = Router(cluster, model, http=False)
        await self._router.start()
        self._follower = Follower(self._router, self._ask, AWAY)
        self._following = asyncio.create_task(self._follower.run(), name="follow-pools")
        try:
            await self._until_ready(cluster.launch.start_timeout_s)
        except BaseException:
            await self._stop()
            raise

    def __serve_build_asgi_app__(self) -> Starlette:
        return build_app(self._router.serving())

    def _ask(self, owner: str | None, version: int) -> Awaitable[bytes]:
        return self._pools.membership.remote(owner, version)  # type: ignore[no-any-return]

    async def _until_ready(self, timeout_s: float) -> None:
        """Take no requests before there is somebody to serve them. Raises Unavailable or ConfigError."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._router.pipeline.ready:
                    await self.check_health()
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise Unavailable(f"no pair of prefill and decode workers was ready after {timeout_s:g} s") from error

    async def check_health(self) -> None:
        """Raise when this router must be replaced. That its workers are away is no reason."""
        if self._following.done():
            self._following.result()
        known = self._follower.known
        if known is not None and known.node_id not in (None, ray.get_runtime_context().get_node_id()):
            raise ConfigError(
                "the pools were started when the Ray cluster had one node, and listen on its loopback; this router is "
                "on another node: deploy the application again"
            )

    async def __del__(self) -> None:
        if hasattr(self, "_following"):
            await self._stop()

    async def _stop(self) -> None:
        self._following.cancel()
        with contextlib.suppress(asyncio.CancelledError, PdClusterError):
            await self._following
        await self._router.stop()
