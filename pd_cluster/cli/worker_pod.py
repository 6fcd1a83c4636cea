"""What `pd-cluster worker` runs: a worker node, the echo of its ranks' logs, and the door for the preStop hook."""

import asyncio
import contextlib
from pathlib import Path

from pd_cluster.config import ClusterConfig
from pd_cluster.errors import ConfigError
from pd_cluster.launch.log_echo import LogEcho
from pd_cluster.launch.nodes import Place
from pd_cluster.launch.prestop import PrestopDoor, default_socket
from pd_cluster.launch.process import ProcessLauncher
from pd_cluster.launch.roles import engine_shape
from pd_cluster.launch.spec import Role
from pd_cluster.launch.worker_node import WorkerNode
from pd_cluster.rpc.security import Security, is_loopback


async def run_pod(
    config: ClusterConfig,
    role: Role,
    engine: int,
    node: int,
    *,
    num_nodes: int,
    host: str,
    control_port: int,
    head: str,
    store_port: int,
    http_port: int,
    drain_s: float,
    socket: Path | None,
) -> None:
    """Serve until cancelled, then drain. Raises PdClusterError when the engine is given up."""
    place = Place.of(engine_shape(role, engine, config), node, num_nodes, host, control_port)
    if node and not head:
        raise ConfigError("a pod that is not its engine's first needs --head: the host of that one")
    security = Security.from_config(config.security)
    security.check_exposed(host)  # now, not when the ranks have loaded
    if num_nodes > 1 and not (is_loopback(host) or security.allow_insecure):
        raise ConfigError(
            f"the {num_nodes} pods of an engine meet at ports without TLS: "
            "say security.allow_insecure where the network between them is closed"
        )
    launcher = ProcessLauncher()
    echo = LogEcho(launcher.logs)
    worker = WorkerNode(
        config,
        place,
        launcher,
        head=head,
        store_port=store_port,
        http_host=host,
        http_port=http_port,
        drain_s=drain_s,
    )
    async with contextlib.AsyncExitStack() as stack:
        echoing = asyncio.create_task(echo.run(), name="log-echo")
        stack.callback(echo.copy)
        stack.callback(echoing.cancel)
        await stack.enter_async_context(worker)
        await stack.enter_async_context(PrestopDoor(socket or default_socket(), worker.drain))
        await worker.run()
