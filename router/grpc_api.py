"""The gRPC API on a port of its own: Inference, Cluster, health and reflection in the router's event loop.

Pings are answered as often as proxies and clients like to send them; connections end in turn after a while, so that
load moves to new routers, but never before their calls had time to finish.
"""

from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from msgspec import Struct

from pd_cluster.config import RouterSection
from pd_cluster.errors import ConfigError
from pd_cluster.ids import RouterId
from pd_cluster.log import get_log
from pd_cluster.pb.v1 import cluster_pb2_grpc, inference_pb2_grpc
from pd_cluster.rpc.addresses import join_address
from pd_cluster.rpc.security import Security
from router.grpc_cluster import Cluster, Pools
from router.grpc_edge import ApiKeys, WellFormed
from router.grpc_health import Health
from router.grpc_inference import Inference
from router.serving import Serving

log = get_log(__name__)

MAX_MESSAGE_BYTES = 64 << 20
SERVICES = ("pd_cluster.v1.Inference", "pd_cluster.v1.Cluster", "grpc.health.v1.Health", reflection.SERVICE_NAME)


class ConnectionLimits(Struct, frozen=True, kw_only=True):
    """Seconds."""

    min_ping_interval_s: float = 5.0  # clients that ping more often while idle are cut off
    keepalive_s: float = 30.0  # a client behind a cut network is noticed, and its requests freed
    keepalive_timeout_s: float = 10.0
    max_age_s: float = 3600.0
    max_age_grace_s: float = 600.0

    def options(self) -> list[tuple[str, Any]]:
        def ms(seconds: float) -> int:
            return round(1000 * seconds)

        return [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.http2.min_ping_interval_without_data_ms", ms(self.min_ping_interval_s)),
            ("grpc.keepalive_time_ms", ms(self.keepalive_s)),
            ("grpc.keepalive_timeout_ms", ms(self.keepalive_timeout_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_connection_age_ms", ms(self.max_age_s)),
            ("grpc.max_connection_age_grace_ms", ms(self.max_age_grace_s)),
            ("grpc.so_reuseport", 0),  # a port taken by another process is an error, not a shared queue
        ]


class GrpcApi:
    """`await start()`, `await stop()`; `port` is the bound one."""

    def __init__(
        self,
        serving: Serving,
        section: RouterSection,
        router_id: RouterId,
        *,
        pools: Pools | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self.port: int | None = None
        self._section = section
        client_key, operator_key = section.client_key, section.operator_key
        keys = [] if client_key is None else [client_key]  # without one, inference is open to all
        if keys and operator_key is not None:
            keys.append(operator_key)
        interceptors = [ApiKeys(keys), WellFormed()]
        self._server = aio.server(interceptors=interceptors, options=(limits or ConnectionLimits()).options())
        inference_pb2_grpc.add_InferenceServicer_to_server(Inference(serving), self._server)
        cluster = Cluster(serving, router_id, admin_key=operator_key, pools=pools)
        cluster_pb2_grpc.add_ClusterServicer_to_server(cluster, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(Health(serving.pipeline), self._server)
        reflection.enable_server_reflection(SERVICES, self._server)

    async def start(self) -> None:
        """Listen. Raises ConfigError when the port is taken or a certificate cannot be read."""
        section = self._section
        wanted = section.wanted_grpc_port
        address = join_address(section.host, wanted)
        tls = section.grpc_tls
        security = Security()
        if tls is not None:
            security = Security(
                certificate=tls.certificate, private_key=tls.private_key, root_certificates=tls.client_roots
            )
        credentials = security.server_credentials()
        try:
            if credentials is not None:
                bound = self._server.add_secure_port(address, credentials)
            else:
                bound = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}; choose another with router.grpc_port") from error
        if not bound:
            raise ConfigError(f"cannot listen on {address}: choose another port with router.grpc_port")
        await self._server.start()
        self.port = int(bound)
        log.info("grpc_listening", host=section.host, port=self.port, tls=tls is not None)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, and end the rest after `grace_s`."""
        await self._server.stop(grace_s)
