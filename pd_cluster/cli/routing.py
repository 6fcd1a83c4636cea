"""What `pd-cluster router` runs: a router, the discovery of its workers, and the door for the preStop hook."""

import contextlib
import gc
from collections.abc import Sequence
from pathlib import Path

from pd_cluster.config import ClusterConfig
from pd_cluster.launch.prestop import PrestopDoor, default_socket
from pd_cluster.log import get_log
from pd_cluster.model.source import open_model
from router.app import Router
from router.discovery import Discovery, Source

log = get_log(__name__)


async def run_router(config: ClusterConfig, sources: Sequence[Source], drain_s: float, socket: Path | None) -> None:
    """Serve until cancelled, then let requests finish for at most `drain_s`. Raises ConfigError or ModelError."""
    router = Router(config, open_model(config.model.path, config.model.load))

    async def drain(timeout_s: float) -> bool:
        """Take nothing new and wait for what runs; whether nothing was left to cancel."""
        log.info("router_drains", num_requests=router.pipeline.num_in_flight)
        return await router.pipeline.finish(timeout_s)

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(router.stop, drain_s)
        await router.start()
        await stack.enter_async_context(PrestopDoor(socket or default_socket(), drain))
        gc.collect()
        gc.freeze()  # a loaded router stays as it is: no pause between tokens to look through it again
        await Discovery(router, sources).run()
