"""Where the routers are and how they are reached: addresses, TLS, keys, and the options of their channels."""

import json
import random
from collections.abc import Sequence
from typing import Any

import grpc
from msgspec import Struct

from pd_cluster.errors import ConfigError
from pd_cluster.rpc.addresses import split_address
from pd_cluster.rpc.security import AUTHORIZATION, Security, is_loopback

DEFAULT_ADDRESS = "127.0.0.1:8001"
MAX_MESSAGE_BYTES = 64 << 20

SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],  # over the addresses of one name
    "methodConfig": [
        {
            "name": [{"service": "pd_cluster.v1.Inference"}, {"service": "pd_cluster.v1.Cluster"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}
"""gRPC's own retries: only of calls that were not accepted, and only where the router was not there or not ready."""


class Tls(Struct, frozen=True, kw_only=True):
    """Paths of PEM files. Without `roots` those of the system are trusted. `certificate` and `private_key` are shown to
    routers that ask for them. `server_name` is what their certificate is issued to when it is not the address."""

    roots: str | None = None
    certificate: str | None = None
    private_key: str | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError for a file that cannot be read."""
        if (self.certificate is None) != (self.private_key is None):
            raise ConfigError("certificate and private_key belong together: give both or neither")
        files = Security(
            certificate=self.certificate, private_key=self.private_key, root_certificates=self.roots
        ).channel_credentials()
        return files if files is not None else grpc.ssl_channel_credentials()


class Connection(Struct, frozen=True, kw_only=True):
    """How a client reaches its routers."""

    addresses: tuple[str, ...]
    api_key: str | None = None
    tls: Tls | None = None
    timeout_s: float = 600.0
    resume_timeout_s: float = 60.0
    keepalive_s: float = 10.0

    @property
    def metadata(self) -> list[tuple[str, str]]:
        return [(AUTHORIZATION, f"Bearer {self.api_key}")] if self.api_key else []

    @property
    def options(self) -> list[tuple[str, Any]]:
        """Of a channel."""
        options: list[tuple[str, Any]] = [
            ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", round(1000 * self.keepalive_s)),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),  # a long prefill sends nothing
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options


def connection(
    addresses: str | Sequence[str],
    *,
    api_key: str | None,
    tls: Tls | None,
    allow_insecure: bool,
    timeout_s: float,
    resume_timeout_s: float,
    keepalive_s: float,
) -> Connection:
    """`addresses`: HOST:PORT each, as a list or with commas between. Raises ConfigError."""
    listed = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    listed = [address.strip() for address in listed if address.strip()]
    if not listed:
        raise ConfigError("give the address of a router, such as 127.0.0.1:8001")
    for address in listed:
        host, _ = split_address(address.removeprefix("dns:///"))
        if api_key and tls is None and not (allow_insecure or is_loopback(host)):
            raise ConfigError(
                f"the API key for {address} would travel in the clear: give tls=Tls(...), or allow_insecure=True where "
                "the network itself is closed"
            )
    return Connection(
        addresses=tuple(listed),
        api_key=api_key,
        tls=tls,
        timeout_s=timeout_s,
        resume_timeout_s=resume_timeout_s,
        keepalive_s=keepalive_s,
    )


class Turn:
    """Which of several routers is asked: one of them by chance, the same as long as it answers, then the next."""

    def __init__(self, num_routers: int) -> None:
        self.num_routers = num_routers
        self.index = random.randrange(num_routers)

    def failed(self, index: int) -> None:
        """The router at `index` did not answer; whoever else saw that has maybe moved on already."""
        if self.index == index:
            self.index = (index + 1) % self.num_routers
