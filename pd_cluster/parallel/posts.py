"""Writes of messages into peers' buffers through NIXL, and the progress that these need.

A write ends by itself over shared memory and RDMA. Over TCP it needs both sides to poll: the waiting side does while it
waits, and a thread polls between steps, often while a write is unfinished. NIXL's agent is called under one lock.
"""

import contextlib
import logging
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from pd_cluster.errors import ConfigError, TransferFailed
from pd_cluster.ids import Rank
from pd_cluster.nixl_agent import meet, open_agent, part
from pd_cluster.parallel.wire import Buffers, Phase, Shape

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.1
BUSY_POLL_S = 1e-3
PIECES = 16
"""TCP sends a piece of a large write each time it is polled."""

QUIESCE_S = 1.0
"""How long a new generation waits for writes of the old one before it cuts their connection."""


class Endpoint(Struct, frozen=True, kw_only=True):
    """How to write to one rank's buffer. Ranks whose `shape` differs cannot exchange anything."""

    rank: Rank
    life: int
    agent_name: str
    agent_metadata: bytes
    address: int
    host: str
    shape: Shape


class Posts:
    """Any thread may call anything."""

    def __init__(self, buffers: Buffers, name: str) -> None:
        self._buffers = buffers
        self._agent, self._errors = open_agent(f"{name}/{buffers.rank}/{buffers.life:x}")
        try:
            registered = [(buffers.address, len(buffers.bytes), 0, "")]
            self._registered = self._agent.register_memory(registered, "DRAM")
            metadata = self._agent.get_agent_metadata()
        except self._errors.all as error:
            raise TransferFailed(f"NIXL cannot register {len(buffers.bytes)} bytes: {error}") from error
        self.endpoint = Endpoint(
            rank=Rank(buffers.rank),
            life=buffers.life,
            agent_name=f"{name}/{buffers.rank}/{buffers.life:x}",
            agent_metadata=metadata,
            address=buffers.address,
            host=_host(),
            shape=buffers.shape,
        )
        self.peers: dict[int, Endpoint] = {}
        self.broken: set[int] = set()
        """Peers whose connection failed: nothing is written to them until they are connected again."""
        self._handles: dict[tuple[int, Phase, int], dict[int, Any]] = {}  # by size, for each region
        self._pending: dict[tuple[int, Phase, int], Any] = {}
        self._unreleased: list[Any] = []
        self._lock = threading.Lock()
        self._closing = False
        self._woken = threading.Event()
        self._sleeps_long = False
        self._is_waiting = False
        self._left_s = 0.0
        self._poller = threading.Thread(target=self._poll_when_idle, name=f"dispatch-{buffers.rank}", daemon=True)
        self._poller.start()

    def connect(self, peer: Endpoint) -> None:
        """Raises ConfigError when the peer is sized otherwise, TransferFailed when it cannot be reached."""
        mine = self._buffers.shape
        if peer.shape != mine:
            differing = [
                field for field in mine.__struct_fields__ if getattr(mine, field) != getattr(peer.shape, field)
            ]
            text = ", ".join(f"{f} {getattr(peer.shape, f)} there and {getattr(mine, f)} here" for f in differing)
            raise ConfigError(f"rank {peer.rank} cannot exchange tokens with rank {self._buffers.rank}: {text}")
        with self._lock:
            if self.peers.get(peer.rank) == peer and peer.rank not in self.broken:
                return
            self._forget(peer.rank)
            meet(self._agent, self._errors, peer.agent_name, peer.agent_metadata)
            self.peers[peer.rank] = peer
            self._buffers.lives[peer.rank] = peer.life

    def reconnect(self, rank: int) -> None:
        """Try a broken connection again; it stays broken when that fails."""
        peer = self.peers[rank]
        try:
            self.connect(peer)
        except TransferFailed as error:
            self.peers[rank] = peer
            self.broken.add(rank)
            log.warning("dispatch_reconnect_failed rank=%s error=%s", rank, error)

    def forget(self, rank: int) -> None:
        with self._lock:
            self._forget(rank)

    def _forget(self, rank: int) -> None:
        peer = self.peers.pop(rank, None)
        self.broken.discard(rank)
        self._buffers.lives[rank] = 0
        for key in [key for key in self._handles if key[0] == rank]:
            for handle in self._handles.pop(key).values():
                self._release(handle)
            self._pending.pop(key, None)
        if peer is not None:
            part(self._agent, self._errors, peer.agent_name)

    def post(self, rank: int, parity: int, phase: Phase, num_bytes: int) -> None:
        """Write what the send region for `rank` holds. Whatever goes wrong marks the peer as broken."""
        with self._lock:
            peer = self.peers.get(rank)
            if peer is None or rank in self.broken:
                return
            key = rank, phase, parity
            size = min(_coarse(num_bytes), self._buffers.room[phase])
            handles = self._handles.setdefault(key, {})
            try:
                if size not in handles:
                    handles[size] = self._prepare(peer, parity, phase, size)
                state = self._agent.transfer(handles[size])
            except self._errors.all as error:
                self._break(rank, str(error))
                return
            if state == "PROC":
                self._pending[key] = handles[size]
            elif state != "DONE":
                self._break(rank, f"NIXL says {state}")

    def _prepare(self, peer: Endpoint, parity: int, phase: Phase, size: int) -> Any:
        buffers = self._buffers
        source = buffers.address + buffers.send_offset(parity, phase, peer.rank)
        target = peer.address + buffers.receive_offset(parity, phase, buffers.rank)
        return self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(np.array([[source, size, 0]], np.uint64), "DRAM"),
            self._agent.get_xfer_descs(np.array([[target, size, 0]], np.uint64), "DRAM"),
            peer.agent_name,
        )

    def progress(self) -> None:
        """Let NIXL work, and see which writes have ended."""
        with self._lock:
            try:
                self._agent.get_new_notifs()
            except self._errors.all as error:
                # a broken connection surfaces here and at the writes that it carried, which say whose it was
                log.debug("dispatch_poll_failed rank=%s error=%s", self._buffers.rank, error)
            for key, handle in list(self._pending.items()):
                try:
                    state = self._agent.check_xfer_state(handle)
                except self._errors.all as error:
                    self._break(key[0], str(error))
                    continue
                if state == "DONE":
                    self._pending.pop(key, None)
                elif state != "PROC":
                    self._break(key[0], f"NIXL says {state}")
            unreleased, self._unreleased = self._unreleased, []
            for handle in unreleased:
                self._release(handle)

    def is_busy(self, rank: int, parity: int, phase: Phase) -> bool:
        """Whether NIXL may still read that send region."""
        return (rank, phase, parity) in self._pending

    def give_up(self, rank: int, reason: str) -> None:
        """Whatever is written to that peer counts as failed."""
        with self._lock:
            self._break(rank, reason)

    def quiesce(self, timeout_s: float = QUIESCE_S) -> None:
        """Wait until no write is under way; connections whose writes do not end are cut."""
        give_up_s = time.monotonic() + timeout_s
        while self._pending and time.monotonic() < give_up_s:
            self.progress()
            os.sched_yield()
        for rank in {key[0] for key in list(self._pending)}:
            self.broken.add(rank)
            self.reconnect(rank)

    def is_near(self, rank: int) -> bool:
        """Whether writes of that peer land here without this rank's polling."""
        transports = os.environ.get("UCX_TLS", "all").split(",")
        shared = any(name in ("all", "shm", "sm", "cma", "posix", "sysv") for name in transports)
        return shared and self.peers[rank].host == self.endpoint.host

    def close(self) -> None:
        """No peer may write here any more, or the process ends."""
        self._closing = True
        self._woken.set()
        self._poller.join(5.0)
        with self._lock:
            for rank in list(self.peers):
                self._forget(rank)
            try:
                self._agent.deregister_memory(self._registered)
            except self._errors.all as error:
                log.warning("dispatch_deregister_failed rank=%s error=%s", self._buffers.rank, error)
            del self._agent

    def _break(self, rank: int, reason: str) -> None:
        log.warning("dispatch_write_failed rank=%s peer=%s reason=%s", self._buffers.rank, rank, reason)
        self.broken.add(rank)
        for key in [key for key in self._handles if key[0] == rank]:
            for handle in self._handles.pop(key).values():
                self._release(handle)
            self._pending.pop(key, None)

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except self._errors.all:
            self._unreleased.append(handle)

    def enter(self) -> None:
        """An exchange begins: who waits for it also polls."""
        self._is_waiting = True

    def leave(self) -> None:
        """Whoever waited polls no longer: the thread sees to it that writes under way get to their ends."""
        self._is_waiting = False
        self._left_s = time.monotonic()
        if self._pending and self._sleeps_long:
            self._woken.set()

    def _poll_when_idle(self) -> None:
        while not self._closing:
            # a peer that does not poll lets writes wait for it: look less and less often
            pause_s = max(BUSY_POLL_S, (time.monotonic() - self._left_s) / 20)
            if self._pending and pause_s < IDLE_POLL_S:
                time.sleep(pause_s)
            else:
                self._sleeps_long = True
                self._woken.wait(IDLE_POLL_S)
                self._sleeps_long = False
                self._woken.clear()
            for _ in range(PIECES if self._pending else 1):
                if not self._is_waiting:
                    self.progress()


def decode_endpoint(payload: bytes) -> Endpoint:
    """Raises ConfigError for what is not one."""
    try:
        return msgspec.msgpack.decode(payload, type=Endpoint)
    except msgspec.DecodeError as error:
        raise ConfigError(f"not a dispatcher's endpoint: {error}") from error


def _coarse(num_bytes: int) -> int:
    """At most an eighth more, so that few sizes occur: each keeps a prepared transfer."""
    step = max(64, 1 << num_bytes.bit_length() >> 4)
    return -(-num_bytes // step) * step


def _host() -> str:
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()}/{boot}"
