"""What a transfer backend does: write ranges of its own memory into a peer's, and deliver small records.

Three implementations: `nixl` (production), `local` (threads of one process), `faulty` (drops, delays, reorders,
corrupts and fails by seed, around another). A backend is driven by one thread that posts and polls; nothing else
touches it.
"""

from typing import Literal, Protocol

from msgspec import Struct

from pd_cluster.ids import EngineEpoch, EngineId, Rank, TransferId
from pd_cluster.kv.layout import KvFingerprint, KvLayout

Memory = Literal["DRAM", "VRAM"]


class Arena(Struct, frozen=True, kw_only=True):
    """The memory of one rank that holds its KV; it outlives the backend that registers it."""

    base_address: int
    num_bytes: int
    memory: Memory = "DRAM"
    device_id: int = 0


class RankEndpoint(Struct, frozen=True, kw_only=True):
    """How to reach one rank's arena. `agent_metadata` is opaque and decoded only when fingerprints match."""

    rank: Rank
    agent_name: str
    agent_metadata: bytes
    base_address: int
    num_bytes: int
    device_id: int
    layout: KvLayout
    memory: Memory = "DRAM"


class WorkerEndpoint(Struct, frozen=True, kw_only=True):
    """A worker (one DP rank of an engine) as the target of writes: one endpoint for each of its TP ranks, in order."""

    engine_id: EngineId
    epoch: EngineEpoch
    dp_rank: int
    fingerprint: KvFingerprint
    ranks: list[RankEndpoint]


class CopyRange(Struct, frozen=True, array_like=True):
    """One contiguous copy: byte offsets into the source's and the target's arena."""

    src_offset: int
    dst_offset: int
    num_bytes: int


class SourceRecord(Struct, frozen=True, kw_only=True, tag="source"):
    """Notification of one completed write, ordered behind it: which units of which transfer now lie in the target.

    A target rank is filled when every source that owes it bytes has covered all units of the transfer and `commit` is
    there, which comes with the last write of the rank's first source.
    """

    transfer_id: TransferId
    epoch: EngineEpoch  # the target's; a record for another life is dropped
    source: int  # TP rank within the source worker
    num_sources: int  # how many source ranks write to this target rank
    head_ids: tuple[int, ...]  # global ids of the heads this source writes here, the same in all its records
    first_unit: int  # counted from the sequence's first token
    num_units: int
    total_units: int  # units this source owes this target in this transfer
    num_bytes: int
    checksum: int | None = None  # with verification: over the bytes by unit, then head as in `head_ids`
    commit: "CommitRecord | None" = None


class CommitRecord(Struct, frozen=True, kw_only=True):
    """What decode needs to go on: the first token and how it was drawn."""

    token_id: int
    logprob: float | None
    num_prompt_tokens: int
    num_tokens: int  # tokens whose KV the transfer carries, cached ones included
    num_cached_tokens: int  # of them, how many prefill found in its prefix cache
    seed: int
    position: int  # of the token sampled next


class StoppedRecord(Struct, frozen=True, kw_only=True, tag="stopped"):
    """The source writes nothing more for this transfer: the target may reuse its blocks once all sources said so."""

    transfer_id: TransferId
    epoch: EngineEpoch
    source: int
    num_sources: int


Record = SourceRecord | StoppedRecord


class Write(Struct, frozen=True, kw_only=True):
    """A write of several ranges to one peer rank, and the record that follows it; without `copies` only the record."""

    write_id: int
    transfer_id: TransferId
    peer: str  # agent name
    copies: list[CopyRange]
    record: Record


class WriteDone(Struct, frozen=True):
    """The write and its record are with the peer; a record alone is with the transport, which delivers it reliably."""

    write_id: int
    transfer_id: TransferId
    num_bytes: int
    seconds: float


class WriteFailed(Struct, frozen=True):
    """The write will not complete. `quiet`: no byte of it can land any more; else what its connection carried may."""

    write_id: int
    transfer_id: TransferId
    reason: str
    quiet: bool


class Received(Struct, frozen=True):
    """A record arrived from a peer's agent."""

    record: Record


Event = WriteDone | WriteFailed | Received


class Backend(Protocol):
    def endpoint(self) -> RankEndpoint:
        """How peers reach this rank's arena; the arena is registered before."""

    def connect(self, peer: RankEndpoint) -> None:
        """Make `peer` a possible target; idempotent. Raises TransferFailed."""

    def disconnect(self, agent_name: str) -> None:
        """Forget a peer; writes in flight to it fail."""

    def post(self, write: Write) -> None:
        """Start a write; its outcome comes from `poll`. Never raises for a peer's fault: that is a WriteFailed."""

    def poll(self) -> list[Event]:
        """What happened since the last call; does not block."""

    def cancel(self, transfer_id: TransferId) -> None:
        """Stop this transfer's writes as far as possible. Each ends by an event once no byte of it can land any more;

        one to a peer that neither answers nor dies stays open until `disconnect`.
        """

    def close(self) -> None:
        """Release everything."""
