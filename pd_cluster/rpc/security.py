"""Who may open a control stream: nothing is asked on loopback; beyond it TLS and either a token or client certificates.

`allow_insecure` is for networks that are closed by other means (a network policy, a service mesh).
"""

import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import grpc
from msgspec import Struct

from pd_cluster.config import SecuritySection, read_secret
from pd_cluster.errors import ConfigError

AUTHORIZATION = "authorization"


class Security(Struct, frozen=True, kw_only=True):
    """Paths to PEM files, and the token that routers show to workers.

    With `root_certificates` both sides must show a certificate that these roots signed.
    """

    certificate: str | None = None
    private_key: str | None = None
    root_certificates: str | None = None
    token: str | None = None
    allow_insecure: bool = False
    server_name: str | None = None  # what a worker's certificate is issued to, when not the address that is dialled

    @classmethod
    def from_config(cls, section: SecuritySection) -> Self:
        """Raises ConfigError when the token's file cannot be read."""
        return cls(
            certificate=section.certificate,
            private_key=section.private_key,
            root_certificates=section.root_certificates,
            token=read_secret(section.token_file),
            allow_insecure=section.allow_insecure,
            server_name=section.server_name,
        )

    @property
    def uses_tls(self) -> bool:
        return self.certificate is not None or self.root_certificates is not None

    def check_exposed(self, host: str) -> None:
        """Raise ConfigError when a port on `host` would be open to anyone on the network."""
        if is_loopback(host) or self.allow_insecure:
            return
        if not self.uses_tls or not (self.token or self.root_certificates):
            raise ConfigError(
                f"the control port on {host} leaves this machine: give it a certificate and a token, "
                "or say allow_insecure when the network itself is closed"
            )

    def server_credentials(self) -> grpc.ServerCredentials | None:
        if self.certificate is None or self.private_key is None:
            if self.uses_tls:
                raise ConfigError("a server with TLS needs both certificate and private_key")
            return None
        roots = _read(self.root_certificates)
        pair = (_read(self.private_key), _read(self.certificate))
        return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=roots is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        if not self.uses_tls:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.root_certificates),
            private_key=_read(self.private_key),
            certificate_chain=_read(self.certificate),
        )

    def channel_options(self) -> list[tuple[str, Any]]:
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    def metadata(self) -> list[tuple[str, str]]:
        return [(AUTHORIZATION, f"Bearer {self.token}")] if self.token else []

    def admits(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a caller's metadata carries the token; true when none is set."""
        if not self.token:
            return True
        shown = next((value for key, value in metadata if key == AUTHORIZATION), "")
        given = shown if isinstance(shown, bytes) else shown.encode()
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
