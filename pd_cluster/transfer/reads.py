"""Reads of what peers have registered: pieces of a peer's memory into buffers of this rank.

A read lands in a small buffer and is copied on from there, never in memory that anyone else may use meanwhile: what was
posted cannot be recalled, and a read given up at its deadline may still land later. Its buffer is given out again only
when the read has ended. One thread drives a reader; peers must poll theirs while they are read from, because not every
transport moves bytes without them.
"""

import logging
from typing import Any, Protocol

import msgspec
import torch
from msgspec import Struct

from pd_cluster.errors import TransferFailed
from pd_cluster.ids import Rank
from pd_cluster.nixl_agent import meet, open_agent, part
from pd_cluster.transfer.contract import Arena, Memory

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
NUM_BUFFERS = 8


class ReadEnded(Struct, frozen=True):
    """`error` is None when the bytes are in the buffer."""

    read_id: int
    error: str | None


class Reader(Protocol):
    def endpoint(self) -> bytes:
        """What peers need for `connect`."""

    def connect(self, rank: Rank, endpoint: bytes) -> None:
        """Make a peer's memory readable; another endpoint than before replaces it. Raises TransferFailed."""

    def forget(self, rank: Rank) -> None:
        """The peer is gone: reads from it end in errors, if they end."""

    def post(self, rank: Rank, offset: int, buffer: torch.Tensor) -> int:
        """Begin to read `len(buffer)` bytes at `offset` of the peer's memory; the read's id. Raises TransferFailed."""

    def poll(self) -> list[ReadEnded]:
        """Make progress, also for peers that read here."""

    def close(self) -> None: ...


class _Endpoint(Struct, frozen=True, array_like=True):
    agent_name: str
    agent_metadata: bytes
    base_address: int
    num_bytes: int
    memory: Memory
    device_id: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Endpoint).decode


class NixlReader:
    """An agent of its own, under a `name` that no other has. `arena` is open to peers; `buffers`, uint8 in host memory,
    are what is read into.
    """

    def __init__(self, name: str, arena: Arena, buffers: torch.Tensor) -> None:
        self._agent, self._errors = open_agent(name, arena.memory)
        self._buffers = buffers
        try:
            own = [(arena.base_address, arena.num_bytes, arena.device_id, "")]
            self._registered = [
                self._agent.register_memory(own, arena.memory),
                self._agent.register_memory([(buffers.data_ptr(), buffers.numel(), 0, "")], "DRAM"),
            ]
            metadata = self._agent.get_agent_metadata()
        except self._errors.all as error:
            raise TransferFailed(f"NIXL cannot register {arena.num_bytes} bytes of {arena.memory}: {error}") from error
        self._endpoint = _Endpoint(name, metadata, arena.base_address, arena.num_bytes, arena.memory, arena.device_id)
        self._peers: dict[Rank, _Endpoint] = {}
        self._posted: dict[int, tuple[Rank, Any]] = {}
        self._unreleased: list[Any] = []
        self._next_id = 0

    def endpoint(self) -> bytes:
        return _encode(self._endpoint)

    def connect(self, rank: Rank, endpoint: bytes) -> None:
        peer = _decode(endpoint)
        if self._peers.get(rank) == peer:
            return
        self.forget(rank)
        meet(self._agent, self._errors, peer.agent_name, peer.agent_metadata)
        self._peers[rank] = peer

    def forget(self, rank: Rank) -> None:
        peer = self._peers.pop(rank, None)
        if peer is not None:
            part(self._agent, self._errors, peer.agent_name)

    def post(self, rank: Rank, offset: int, buffer: torch.Tensor) -> int:
        peer = self._peers.get(rank)
        if peer is None:
            raise TransferFailed(f"rank {rank} is not connected")
        if offset + len(buffer) > peer.num_bytes:
            raise TransferFailed(f"rank {rank} has {peer.num_bytes} bytes, not {offset + len(buffer)}")
        local = [(buffer.data_ptr(), len(buffer), 0)]
        remote = [(peer.base_address + offset, len(buffer), peer.device_id)]
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, "DRAM"),
                self._agent.get_xfer_descs(remote, peer.memory),
                peer.agent_name,
            )
        except self._errors.all as error:
            raise TransferFailed(f"NIXL refused to read from rank {rank}: {error}") from error
        try:
            self._agent.transfer(handle)
        except self._errors.all as error:
            self._let_go(handle)
            raise TransferFailed(f"NIXL refused to read from rank {rank}: {error}") from error
        self._next_id += 1
        self._posted[self._next_id] = (rank, handle)
        return self._next_id

    def poll(self) -> list[ReadEnded]:
        try:
            self._agent.get_new_notifs()  # nobody sends any: this drives the transport
        except self._errors.all as error:
            # a broken connection surfaces here and at the reads that it carried, which say whose it was
            log.debug("nixl_poll_failed error=%s", error)
        self._unreleased = [handle for handle in self._unreleased if not self._release(handle)]
        ended = []
        for read_id, (rank, handle) in list(self._posted.items()):
            try:
                state = self._agent.check_xfer_state(handle)
                problem = "NIXL reports an error" if state == "ERR" else None
            except self._errors.all as error:
                state, problem = "ERR", str(error)
            if state == "DONE":
                del self._posted[read_id]
                self._let_go(handle)
                ended.append(ReadEnded(read_id, None))
            elif state == "ERR" and self._release(handle):  # refused while its bytes may still come
                del self._posted[read_id]
                ended.append(ReadEnded(read_id, f"reading from rank {rank} failed: {problem}"))
        return ended

    def _let_go(self, handle: Any) -> None:
        """Now, or at a later poll when NIXL refuses because it is active."""
        if not self._release(handle):
            self._unreleased.append(handle)

    def _release(self, handle: Any) -> bool:
        """Whether NIXL let it go."""
        try:
            handle.release()
        except self._errors.all:
            return False
        return True

    def close(self) -> None:
        for rank in list(self._peers):
            self.forget(rank)
        for registered in self._registered:
            try:
                self._agent.deregister_memory(registered)
            except self._errors.all as error:
                log.warning("nixl_deregister_failed error=%s", error)
        del self._agent


class LocalFabric:
    """What `LocalReader`s of one process read: each rank's memory, as long as it is there."""

    def __init__(self) -> None:
        self.memory: dict[Rank, torch.Tensor] = {}


class LocalReader:
    """Ranks of one process: a read is a copy."""

    def __init__(self, fabric: LocalFabric, rank: Rank, memory: torch.Tensor) -> None:
        """`memory`: uint8 in host memory."""
        fabric.memory[rank] = memory.view(-1)
        self._fabric = fabric
        self._rank = rank
        self._ended: list[ReadEnded] = []
        self._next_id = 0

    def endpoint(self) -> bytes:
        return b""

    def connect(self, rank: Rank, endpoint: bytes) -> None:
        if rank not in self._fabric.memory:
            raise TransferFailed(f"rank {rank} is gone")

    def forget(self, rank: Rank) -> None:
        pass

    def post(self, rank: Rank, offset: int, buffer: torch.Tensor) -> int:
        self.connect(rank, b"")
        buffer.copy_(self._fabric.memory[rank][offset : offset + len(buffer)])
        self._next_id += 1
        self._ended.append(ReadEnded(self._next_id, None))
        return self._next_id

    def poll(self) -> list[ReadEnded]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self._fabric.memory.pop(self._rank, None)
