"""A NIXL agent as every part of a rank opens it: the UCX backend, no progress thread, defaults of UCX set beforehand.

An agent has no lock of its own: whoever opens one calls it from one thread at a time.

UCX lists the host's network devices, then opens them all. One that vanishes in between fails the agent, and so does one
that is not up yet; on a host where containers come and go that is a matter of time, so opening is tried again. Later it
connects ranks over any device that both have listed, and writes over one that vanishes never end: links to containers
are left out from the start.
"""

import logging
import os
import resource
import socket
import time
from pathlib import Path
from typing import Any

from pd_cluster.errors import TransferFailed

log = logging.getLogger(__name__)

RETRY_S = (0.1, 0.3, 1.0)
"""Pauses between tries to open an agent."""

IFF_UP = 1

AGENT_FILES = 32
"""More than an agent opens at first; each peer over TCP takes one more later."""


def prepare_environment(memory: str = "DRAM") -> None:
    """Defaults of UCX and NIXL, read when their libraries load; what the user has set stays."""
    has_rdma = any(Path("/sys/class/infiniband").glob("*"))
    if memory == "DRAM" and not has_rdma:
        os.environ.setdefault("UCX_TLS", "shm,self,tcp")
    if not has_rdma and (devices := lasting_devices()):
        os.environ.setdefault("UCX_NET_DEVICES", ",".join(devices))
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")


def lasting_devices(
    devices: Path = Path("/sys/class/net"),
    routes: Path = Path("/proc/net/route"),
    routes_6: Path = Path("/proc/net/ipv6_route"),
) -> list[str]:
    """Network devices that are there for as long as the host is, by name: all that are up but ends of links to
    containers, which look like a link to elsewhere of no type. A host without a default route keeps all of its devices,
    and says so by an empty list: it may be a container itself.
    """
    leading_out = {fields[0] for fields in _fields(routes)[1:] if fields[1] == "00000000"}
    leading_out |= {fields[9] for fields in _fields(routes_6) if set(fields[0]) == {"0"} and fields[1] == "00"}
    leading_out.discard("lo")  # where IPv6 sends what has no route
    if not leading_out:
        return []
    return sorted(path.name for path in devices.iterdir() if path.name in leading_out or _lasts(path))


def _fields(table: Path) -> list[list[str]]:
    try:
        return [line.split() for line in table.read_text().splitlines()]
    except OSError:
        return []


def _lasts(device: Path) -> bool:
    """Whether a device of `/sys/class/net` is up and no end of a pair; one that is gone meanwhile does not last."""
    try:
        index, link = (int((device / name).read_text()) for name in ("ifindex", "iflink"))
        is_up = int((device / "flags").read_text(), 16) & IFF_UP
        return bool(is_up) and (link in (0, index) or "DEVTYPE=" in (device / "uevent").read_text())
    except (OSError, ValueError):
        return False


class AgentErrors:
    """The exceptions of NIXL's calls, which share no base class of their own."""

    def __init__(self) -> None:
        from nixl import _bindings

        self.all: tuple[type[Exception], ...] = tuple(
            getattr(_bindings, name) for name in dir(_bindings) if name.startswith("nixl") and name.endswith("Error")
        )
        # the peer is gone, was never met, or is another one by now: no retry helps
        self.of_peer: tuple[type[Exception], ...] = (_bindings.nixlRemoteDisconnectError, _bindings.nixlNotFoundError)


def open_agent(name: str, memory: str = "DRAM") -> tuple[Any, AgentErrors]:
    """An agent that will register such memory, and what its calls raise. May sleep, see `RETRY_S`. Raises
    TransferFailed with the likely cause when there is none.
    """
    prepare_environment(memory)
    from nixl import nixl_agent, nixl_agent_config

    errors = AgentErrors()
    pauses_s = list(RETRY_S)
    while True:
        _want_files()
        try:
            return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"])), errors
        except errors.all as error:
            if not pauses_s:
                hint = f"UCX's log says why; network devices: {_network_devices()}, see UCX_NET_DEVICES"
                raise TransferFailed(f"NIXL cannot open an agent: {error} ({hint})") from error
            log.warning("nixl_agent_refused agent=%s error=%s next_try_s=%g", name, error, pauses_s[0])
        time.sleep(pauses_s.pop(0))


def _want_files() -> None:
    """Raise TransferFailed when hardly any more files may be opened: at some of its calls UCX would end the process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError:  # not even that directory
        num_open = limit
    if num_open + AGENT_FILES > limit:
        need = f"{num_open} of {limit} files are open, and an agent needs up to {AGENT_FILES}"
        raise TransferFailed(f"NIXL cannot open an agent: {need}: raise the limit (ulimit -n)")


def _network_devices() -> str:
    return ", ".join(device for _, device in socket.if_nameindex()) or "none"


def meet(agent: Any, errors: AgentErrors, name: str, metadata: bytes) -> None:
    """Connect to the peer of that name before the first transfer would; `part` ends it.

    Raises TransferFailed, and then nothing of the peer is left.
    """
    try:
        loaded = agent.add_remote_agent(metadata).decode()
    except errors.all as error:
        raise TransferFailed(f"cannot load the metadata of {name}: {error}") from error
    if loaded != name:
        part(agent, errors, loaded)
        raise TransferFailed(f"the metadata of {name} is {loaded}'s")
    try:
        agent.make_connection(name)
    except errors.all as error:
        part(agent, errors, name)
        raise TransferFailed(f"cannot connect to {name}: {error}") from error


def part(agent: Any, errors: AgentErrors, name: str) -> None:
    """Disconnect from a peer and forget its metadata."""
    try:
        agent.remove_remote_agent(name)
    except errors.all as error:
        log.warning("nixl_disconnect_failed peer=%s error=%s", name, error)
