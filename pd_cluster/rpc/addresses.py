"""Addresses as people write them: `host:port`, an IPv6 host in brackets, or names that a resolver turns into them."""

import asyncio
import socket

from pd_cluster.errors import ConfigError, Unavailable


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, str]:
    """Host (without brackets) and what stands behind the last colon. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port:
        raise ConfigError(f"an address is HOST:PORT, got {address!r}")
    return host.strip("[]"), port


async def resolve(host: str) -> list[str]:
    """The IP addresses of `host`, sorted. Raises Unavailable when the name is not known (yet)."""
    return await asyncio.to_thread(resolve_now, host)


def resolve_now(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unavailable(f"cannot resolve {host}: {error.strerror or error}") from error
    return sorted({str(info[4][0]) for info in found})
