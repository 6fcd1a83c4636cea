"""A NIXL agent as every part of a rank opens it: the UCX backend, no progress thread, defaults of UCX set beforehand.

An agent has no lock of its own: whoever opens one calls it from one thread at a time.

UCX lists the host's network devices, then opens them all. One that vanishes in between fails the agent, and so does one
that is not up yet; on a host where containers come and go that is a matter of time, so opening is tried again.
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

AGENT_FILES = 32
"""More than an agent opens at first; each peer over TCP takes one more later."""


def prepare_environment(memory: str = "DRAM") -> None:
    """Defaults of UCX and NIXL, read when their libraries load; what the user has set stays."""
    has_rdma = any(Path("/sys/class/infiniband").glob("*"))
    if memory == "DRAM" and not has_rdma:
        os.environ.setdefault("UCX_TLS", "shm,self,tcp")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")


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
