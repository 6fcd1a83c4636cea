"""Where a router finds workers when no supervisor tells it: a fixed list, or names that DNS turns into addresses.

A name is looked up again every few seconds. A worker whose address is gone from DNS is forgotten once its stream is
over too: a pod that drains leaves DNS first and finishes its requests after.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from pd_cluster.errors import ConfigError, Unavailable
from pd_cluster.log import get_log
from pd_cluster.rpc.addresses import join_address, resolve, split_address
from pd_cluster.rpc.security import Security

log = get_log(__name__)

INTERVAL_S = 2.0
MAX_PORTS = 1000


class Source(Protocol):
    async def addresses(self) -> set[str]:
        """Control addresses, `host:port`. Raises Unavailable when they cannot be told now."""


class StaticSource:
    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = {join_address(host, _port(port)) for host, port in map(split_address, addresses)}

    @property
    def hosts(self) -> list[str]:
        return sorted({split_address(address)[0] for address in self._addresses})

    async def addresses(self) -> set[str]:
        return self._addresses


class DnsSource:
    """Every address of `host`, at each of `ports`: pods with several workers listen on as many ports."""

    def __init__(self, host: str, ports: range) -> None:
        self._host = host
        self._ports = ports

    @property
    def hosts(self) -> list[str]:
        return [self._host]

    async def addresses(self) -> set[str]:
        return {join_address(address, port) for address in await resolve(self._host) for port in self._ports}


def parse_source(text: str) -> StaticSource | DnsSource:
    """`dns:HOST:PORT`, `dns:HOST:FIRST-LAST`, or `static:HOST:PORT,HOST:PORT`. Raises ConfigError."""
    kind, colon, rest = text.partition(":")
    if not colon or kind not in ("dns", "static"):
        raise ConfigError(f"discovery is dns:HOST:PORT, dns:HOST:FIRST-LAST or static:HOST:PORT,..., got {text!r}")
    if kind == "static":
        return StaticSource([part for part in rest.split(",") if part])
    host, port = split_address(rest)
    first, _, last = port.partition("-")
    ports = range(_port(first), _port(last or first) + 1)
    if not 1 <= len(ports) <= MAX_PORTS:
        raise ConfigError(f"the ports {port} of {host} are no range of 1 to {MAX_PORTS}")
    return DnsSource(host, ports)


def check_exposed(sources: Sequence[StaticSource | DnsSource], security: Security) -> None:
    """Raise ConfigError when control streams to one of them would leave this machine in the clear."""
    for source in sources:
        for host in source.hosts:
            security.check_exposed(host)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"a port is a number from 1 to 65535, got {text!r}")
    return int(text)


class Pool(Protocol):
    """What discovery does with a `Router`."""

    def add_worker(self, address: str) -> None: ...

    def remove_worker(self, address: str) -> None: ...

    def is_attached(self, address: str) -> bool: ...


class Discovery:
    """Keeps a router's workers equal to what its sources say."""

    def __init__(self, pool: Pool, sources: Sequence[Source], *, interval_s: float = INTERVAL_S) -> None:
        self._pool = pool
        self._sources = sources
        self._interval_s = interval_s
        self._found: list[set[str]] = [set() for _ in sources]  # the latest answer of each source
        self._known: set[str] = set()
        self._reasons: list[str | None] = [None for _ in sources]

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """Ask every source once. What a source said last holds while it cannot be asked."""
        for index, source in enumerate(self._sources):
            reason = None
            try:
                self._found[index] = await source.addresses()
            except Unavailable as error:
                reason = error.message
            if reason is not None and reason != self._reasons[index]:
                log.warning("discovery_failed", reason=reason)
            self._reasons[index] = reason
        wanted = set().union(*self._found)
        for address in sorted(wanted - self._known):
            log.info("worker_found", address=address)
            self._pool.add_worker(address)
            self._known.add(address)
        for address in sorted(self._known - wanted):
            if not self._pool.is_attached(address):
                log.info("worker_gone", address=address)
                self._pool.remove_worker(address)
                self._known.remove(address)
