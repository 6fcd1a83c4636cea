"""One rank's fills at work: records from the transfer thread are counted, what they add up to goes to the lead.

Followers open and close fills as the lead tells them (`FillInput`); records that come before are kept by `Fills`. While
any is open, writes may arrive, and the transfer thread is told to expect them.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec import Struct

from pd_cluster.errors import ErrorInfo
from pd_cluster.ids import BlockId, EngineEpoch, TransferId
from pd_cluster.kv.layout import KvLayout
from pd_cluster.transfer.contract import CommitRecord, Event, Received, SourceRecord
from pd_cluster.transfer.fill import Fill, Fills, FillState


class Open(Struct, frozen=True, tag="open"):
    """Blocks were granted: units of tokens [num_cached_tokens, num_tokens) will come."""

    transfer_id: TransferId
    num_tokens: int
    num_cached_tokens: int
    block_ids: list[BlockId]


class Close(Struct, frozen=True, tag="close"):
    """The transfer is adopted or freed."""

    transfer_id: TransferId


FillInput = Open | Close


class RankFilled(Struct, frozen=True, tag="filled"):
    """Everything this rank was to get is here."""

    transfer_id: TransferId
    num_bytes: int
    commit: CommitRecord


class RankFailed(Struct, frozen=True, tag="failed"):
    """What came is wrong."""

    transfer_id: TransferId
    error: ErrorInfo


class RankStopped(Struct, frozen=True, tag="stopped"):
    """All sources of this rank said that they write nothing more."""

    transfer_id: TransferId


FillNotice = RankFilled | RankFailed | RankStopped
encode = msgspec.msgpack.Encoder().encode
decode_input = msgspec.msgpack.Decoder(FillInput).decode
decode_notice = msgspec.msgpack.Decoder(FillNotice).decode

Verify = Callable[[SourceRecord, list[BlockId]], bool]
"""Whether the units a record names, in these blocks, hold what its checksum promises."""


class Expecting(Protocol):
    """The transfer thread, as a fill uses it."""

    is_expecting: bool


class FillRank:
    """`on_notice` is called on the event loop for each change of a fill."""

    def __init__(
        self,
        epoch: EngineEpoch,
        layout: KvLayout,
        transfers: Expecting,
        on_notice: Callable[[FillNotice], None],
        verify: Verify | None,
    ) -> None:
        self.fills = Fills(epoch)
        self._layout = layout
        self._transfers = transfers
        self._on_notice = on_notice
        self._verify = verify

    def apply(self, change: FillInput) -> None:
        if isinstance(change, Close):
            self.fills.close(change.transfer_id)
            self._transfers.is_expecting = len(self.fills) > 0
            return
        verify = self._verify
        fill = Fill(
            change.transfer_id,
            self._layout,
            change.num_tokens,
            change.num_cached_tokens,
            None if verify is None else lambda record: verify(record, change.block_ids),
        )
        self._transfers.is_expecting = True
        if self.fills.open(fill):
            self._note(fill)

    def on_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Received):
                fill = self.fills.add(event.record)
                if fill is not None:
                    self._note(fill)

    def _note(self, fill: Fill) -> None:
        if fill.state is FillState.FILLED:
            assert fill.commit is not None
            self._on_notice(RankFilled(fill.transfer_id, fill.num_bytes, fill.commit))
        elif fill.state is FillState.FAILED:
            assert fill.error is not None
            self._on_notice(RankFailed(fill.transfer_id, fill.error.info()))
        if fill.is_stopped:
            self._on_notice(RankStopped(fill.transfer_id))
