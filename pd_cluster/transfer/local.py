"""Several ranks in one process: a write is a memory copy between registered arenas, a record goes into a mailbox.

Writes happen in `poll`, in the order posted, so that a test decides when bytes land. Ranks may live in different
threads.
"""

import ctypes
from collections import deque
from collections.abc import Callable

from pd_cluster.errors import TransferFailed
from pd_cluster.ids import EngineEpoch, Rank, TransferId
from pd_cluster.kv.layout import KvLayout
from pd_cluster.transfer.contract import Arena, Event, RankEndpoint, Received, Record, Write, WriteDone, WriteFailed


class LocalFabric:
    """The ranks that can reach each other."""

    def __init__(self) -> None:
        self.ranks: dict[str, LocalBackend] = {}


class LocalBackend:
    """One rank on a fabric; see `contract.Backend`."""

    def __init__(self, fabric: LocalFabric, epoch: EngineEpoch, rank: Rank, layout: KvLayout, arena: Arena) -> None:
        assert arena.memory == "DRAM", arena
        self._fabric = fabric
        self._endpoint = RankEndpoint(
            rank=rank,
            agent_name=f"{epoch}/{rank}",
            agent_metadata=b"local",
            base_address=arena.base_address,
            num_bytes=arena.num_bytes,
            device_id=0,
            layout=layout,
        )
        self._peers: set[str] = set()
        self._posted: deque[Write] = deque()
        self._mailbox: deque[Record] = deque()
        self._events: list[Event] = []
        fabric.ranks[self._endpoint.agent_name] = self

    def endpoint(self) -> RankEndpoint:
        return self._endpoint

    def connect(self, peer: RankEndpoint) -> None:
        if peer.agent_name not in self._fabric.ranks:
            raise TransferFailed(f"cannot connect to {peer.agent_name}: not on this fabric")
        self._peers.add(peer.agent_name)

    def disconnect(self, agent_name: str) -> None:
        self._peers.discard(agent_name)
        self._drop(lambda write: write.peer == agent_name, f"disconnected from {agent_name}")

    def post(self, write: Write) -> None:
        self._posted.append(write)

    def poll(self) -> list[Event]:
        while self._posted:
            self._events.append(self._run(self._posted.popleft()))
        while self._mailbox:
            self._events.append(Received(self._mailbox.popleft()))
        events, self._events = self._events, []
        return events

    def cancel(self, transfer_id: TransferId) -> None:
        self._drop(lambda write: write.transfer_id == transfer_id, "cancelled")

    def close(self) -> None:
        self._fabric.ranks.pop(self._endpoint.agent_name, None)

    def _run(self, write: Write) -> Event:
        peer = self._fabric.ranks.get(write.peer) if write.peer in self._peers else None
        if peer is None:
            return WriteFailed(write.write_id, write.transfer_id, f"no connection to {write.peer}", quiet=True)
        target = peer.endpoint()
        for copy in write.copies:
            src_end, dst_end = copy.src_offset + copy.num_bytes, copy.dst_offset + copy.num_bytes
            if src_end > self._endpoint.num_bytes or dst_end > target.num_bytes:
                return WriteFailed(write.write_id, write.transfer_id, f"{copy} leaves the arena", quiet=True)
        for copy in write.copies:
            source_address = self._endpoint.base_address + copy.src_offset
            ctypes.memmove(target.base_address + copy.dst_offset, source_address, copy.num_bytes)
        peer._mailbox.append(write.record)
        num_bytes = sum(copy.num_bytes for copy in write.copies)
        return WriteDone(write.write_id, write.transfer_id, num_bytes, 0.0)

    def _drop(self, gone: Callable[[Write], bool], reason: str) -> None:
        for write in [write for write in self._posted if gone(write)]:
            self._posted.remove(write)
            self._events.append(WriteFailed(write.write_id, write.transfer_id, reason, quiet=True))
