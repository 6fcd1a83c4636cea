"""One rank's pushes at work: inputs go into the machine, what it asks for goes to the transfer thread.

The lead drives its own rank and tells its followers the same inputs (`PushInput`), which they apply after the steps
that came before; every rank's notices come together at the lead.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec import Struct

from pd_cluster.ids import BlockId, EngineEpoch, TransferId
from pd_cluster.messages import Push
from pd_cluster.transfer.contract import CommitRecord, Event, RankEndpoint, Received, Write
from prefill_worker.push_outputs import Cancel, Connect, Disconnect, Output, Post, RankNotice
from prefill_worker.pushes import Pushes


class Transfers(Protocol):
    """The transfer thread as a push uses it; nothing here blocks."""

    def connect(self, peer: RankEndpoint) -> None: ...

    def disconnect(self, agent_name: str) -> None: ...

    def post(self, write: Write) -> None: ...

    def cancel(self, transfer_id: TransferId) -> None: ...


class Opened(Struct, frozen=True, tag="opened"):
    """Prefill of a request was asked for."""

    transfer_id: TransferId
    num_tokens: int
    deadline_s: float


class Ordered(Struct, frozen=True, tag="ordered"):
    """The router named the target."""

    push: Push


class Progressed(Struct, frozen=True, tag="progressed"):
    """KV of the first `num_computed` tokens lies in `block_ids`."""

    transfer_id: TransferId
    num_computed: int
    block_ids: list[BlockId]


class Committed(Struct, frozen=True, tag="committed"):
    """Prefill is done and its token drawn."""

    transfer_id: TransferId
    commit: CommitRecord
    block_ids: list[BlockId]


class Aborted(Struct, frozen=True, tag="aborted"):
    transfer_id: TransferId


class Closed(Struct, frozen=True, tag="closed"):
    """All ranks have pushed."""

    transfer_id: TransferId


class TargetDied(Struct, frozen=True, tag="target_died"):
    epoch: EngineEpoch


PushInput = Opened | Ordered | Progressed | Committed | Aborted | Closed | TargetDied
encode = msgspec.msgpack.Encoder().encode
decode_input = msgspec.msgpack.Decoder(PushInput).decode
decode_notice = msgspec.msgpack.Decoder(RankNotice).decode


class PushRank:
    """`on_notice` is called for each notice of this rank, on the event loop."""

    def __init__(self, pushes: Pushes, transfers: Transfers, on_notice: Callable[[RankNotice], None]) -> None:
        self.pushes = pushes
        self._transfers = transfers
        self._on_notice = on_notice

    def apply(self, change: PushInput) -> None:
        match change:
            case Opened():
                self.pushes.open(change.transfer_id, change.num_tokens, change.deadline_s)
            case Ordered():
                self._do(self.pushes.push(change.push))
            case Progressed():
                self._do(self.pushes.progress(change.transfer_id, change.num_computed, change.block_ids))
            case Committed():
                self._do(self.pushes.prefilled(change.transfer_id, change.commit, change.block_ids))
            case Aborted():
                self._do(self.pushes.abort(change.transfer_id))
            case Closed():
                self.pushes.close(change.transfer_id)
            case TargetDied():
                self._do(self.pushes.target_dead(change.epoch))

    def on_events(self, events: list[Event]) -> None:
        for event in events:
            if not isinstance(event, Received):  # nobody writes to a source
                self._do(self.pushes.event(event))

    def tick(self) -> bool:
        """Look at deadlines; whether any push is left that has one."""
        self._do(self.pushes.tick())
        return len(self.pushes) > 0

    def _do(self, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Connect():
                    self._transfers.connect(output.peer)
                case Disconnect():
                    self._transfers.disconnect(output.agent_name)
                case Post():
                    self._transfers.post(output.write)
                case Cancel():
                    self._transfers.cancel(output.transfer_id)
                case _:
                    self._on_notice(output)
