"""A router: control streams to its workers, the pipeline of requests, the OpenAI and gRPC APIs, in one event loop.

Usable without any API too: `router.pipeline.submit(request)` is how the offline commands run. Loads no torch.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from pd_cluster.config import ClusterConfig
from pd_cluster.costs.roofline import Hardware
from pd_cluster.errors import ConfigError
from pd_cluster.ids import RouterId
from pd_cluster.log import get_log
from pd_cluster.metrics import RouterMetrics
from pd_cluster.model.source import LoadedModel
from pd_cluster.rpc.client import ControlClient
from pd_cluster.rpc.security import Security
from router.attempt import Limits
from router.directory import Directory
from router.grpc_api import ConnectionLimits, GrpcApi
from router.grpc_cluster import Pools
from router.http_server import HttpServer
from router.openai_api import build_app
from router.pipeline import Pipeline
from router.serving import Serving
from router.work import model_work
from router.worker_metrics import WorkerMetrics

log = get_log(__name__)


class Router:
    """`async with Router(config, model, addresses=[...])` or `await start()` and `await stop()`.

    `http`: serve the OpenAI API, and the gRPC API unless `router.grpc` is off. Workers may be added and removed at any
    time by the address of their control port.
    """

    def __init__(
        self,
        config: ClusterConfig,
        model: LoadedModel,
        *,
        http: bool = True,
        addresses: Iterable[str] = (),
        security: Security | None = None,
        hardware: Hardware | None = None,
        pools: Pools | None = None,
        grpc_limits: ConnectionLimits | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.id = RouterId(f"router-{secrets.token_hex(4)}")
        self.metrics = RouterMetrics()
        self.directory = Directory(hardware, model_work(model.config))
        limits = Limits(
            max_retries=config.router.max_retries,
            transfer_deadline_s=config.kv.transfer_deadline_s,
            outage_patience_s=config.router.outage_patience_s,
        )
        self.pipeline = Pipeline(
            self.directory,
            limits=limits,
            max_queue=config.router.max_queue,
            request_timeout_s=config.router.request_timeout_s,
            metrics=self.metrics,
        )
        self.metrics.collect_from(WorkerMetrics(self.directory))
        self._security = security or Security.from_config(config.security)
        self._addresses = list(addresses)
        self._clients: dict[str, ControlClient] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._http = http
        self._server: HttpServer | None = None
        self._pools = pools
        self._grpc_limits = grpc_limits
        self._grpc: GrpcApi | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen and begin to dial. Raises ConfigError when a port is taken."""
        if self._http:
            section = self.config.router
            serving = self.serving()
            self._server = HttpServer(build_app(serving), listen(section.host, section.http_port))
            await self._server.start()
            log.info("http_listening", host=section.host, port=self._server.port, model=serving.model_name)
            if section.grpc:
                self._grpc = GrpcApi(serving, section, self.id, pools=self._pools, limits=self._grpc_limits)
                await self._grpc.start()
        self.pipeline.start()
        for address in self._addresses:
            self.add_worker(address)

    def serving(self) -> Serving:
        """What the routes of an API need, also of one that something else than this router serves."""
        name = self.config.model.served_model_name or self.model.name
        return Serving(self.pipeline, self.model, name, self.metrics, api_key=self.config.router.client_key)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Take nothing new, let requests finish for `drain_s`, cancel the rest, hang up."""
        await self.pipeline.stop(drain_s)
        if self._grpc is not None:
            await self._grpc.stop()
        if self._server is not None:
            await self._server.stop()
        for address in list(self._clients):
            self.remove_worker(address)
        while self._stopping:
            await asyncio.wait(self._stopping)

    @property
    def http_port(self) -> int | None:
        """The bound port; None when HTTP is off or not started."""
        return self._server.port if self._server is not None else None

    @property
    def grpc_port(self) -> int | None:
        """The bound port; None when the gRPC API is off or not started."""
        return self._grpc.port if self._grpc is not None else None

    def add_worker(self, address: str) -> None:
        """Dial the worker at `host:port`, and again whenever it is lost. Known addresses are fine."""
        if address not in self._clients:
            client = ControlClient(address, self.id, self.pipeline, security=self._security)
            client.start()
            self._clients[address] = client

    def is_attached(self, address: str) -> bool:
        """Whether the worker at `host:port` answers."""
        client = self._clients.get(address)
        return client is not None and client.attached

    def remove_worker(self, address: str) -> None:
        """Hang up and forget the worker; its requests go on elsewhere. Unknown addresses are fine."""
        client = self._clients.pop(address, None)
        if client is None:
            return
        self.pipeline.forget(client, "it was removed")
        task = asyncio.create_task(client.stop(), name=f"hang-up-{address}")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    @property
    def num_ready(self) -> int:
        """Workers that are attached and take requests."""
        return sum(worker.is_ready for worker in self.directory.workers)

    async def until_ready(self, num_workers: int) -> None:
        """Wait until that many workers are ready; bound it by a timeout of your own."""
        while self.num_ready < num_workers:  # noqa: ASYNC110 (workers come and go; their number is the condition)
            await asyncio.sleep(0.01)


def listen(host: str, port: int) -> socket.socket:
    """A bound TCP socket; port 0 takes a free one. Raises ConfigError that says who may be in the way."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        with contextlib.suppress(OSError):
            listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with router.http_port"
        ) from error
    return listener
