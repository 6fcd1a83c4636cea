"""A fill: what a target rank has received of one transfer.

Every source rank that owes this rank bytes announces each of its writes by a SourceRecord. Records come in any order
and may repeat. The fill is done when all sources have covered all units and the commit is there; it fails when a
record contradicts what was reserved or its checksum does not match the memory. Apart from that it counts which
sources have stopped, after which nobody writes here any more.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum

from pd_cluster.errors import ChecksumMismatch, TransferError, TransferFailed
from pd_cluster.ids import EngineEpoch, TransferId
from pd_cluster.kv.layout import KvLayout
from pd_cluster.request import UNIT_TOKENS
from pd_cluster.transfer.contract import CommitRecord, Record, SourceRecord, StoppedRecord
from pd_cluster.transfer.plan import units_of


class FillState(StrEnum):
    FILLING = "filling"
    FILLED = "filled"
    FAILED = "failed"


class Intervals:
    """Disjoint, ascending [start, end) ranges of units."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        low = bisect_left(self._ends, start)  # the first range that touches or follows
        high = low
        while high < len(self._starts) and self._starts[high] <= end:
            start, end = min(start, self._starts[high]), max(end, self._ends[high])
            high += 1
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]

    def cover(self, start: int, end: int) -> bool:
        return start >= end or (self._starts == [start] and self._ends == [end])

    @property
    def num_units(self) -> int:
        return sum(self._ends) - sum(self._starts)


class Fill:
    """One transfer into one target rank: units of tokens [num_cached_tokens, num_tokens) of a sequence.

    `verify` says whether the memory holds what a record's checksum promises; None trusts the transport.
    """

    def __init__(
        self,
        transfer_id: TransferId,
        layout: KvLayout,
        num_tokens: int,
        num_cached_tokens: int,
        verify: Callable[[SourceRecord], bool] | None = None,
    ) -> None:
        assert num_cached_tokens % UNIT_TOKENS == 0, num_cached_tokens
        self.transfer_id = transfer_id
        self.state = FillState.FILLING
        self.commit: CommitRecord | None = None
        self.error: TransferError | None = None
        self.num_bytes = 0
        self.num_ignored = 0
        self._layout = layout
        self._verify = verify
        self._first_unit = num_cached_tokens // UNIT_TOKENS
        self._end_unit = max(units_of(num_tokens), self._first_unit)
        self._num_sources: int | None = None
        self._covered: dict[int, Intervals] = {}
        self._head_ids: dict[int, tuple[int, ...]] = {}
        self._seen: set[tuple[int, int, int]] = set()
        self._stopped: set[int] = set()

    @property
    def is_stopped(self) -> bool:
        """Every source said that it writes nothing more."""
        return self._num_sources is not None and len(self._stopped) == self._num_sources

    @property
    def num_missing_units(self) -> int:
        """Units that the sources heard of so far still owe; a hint for humans."""
        owed = self._end_unit - self._first_unit
        return sum(owed - covered.num_units for covered in self._covered.values())

    def add(self, record: Record) -> bool:
        """Take one record of this transfer; whether `state` or `is_stopped` changed."""
        before = self.state, self.is_stopped
        if isinstance(record, StoppedRecord):
            if self._num_sources in (None, record.num_sources):
                self._num_sources = record.num_sources
                self._stopped.add(record.source)
        elif self.state is not FillState.FILLING:
            self.num_ignored += 1
        else:
            self._take(record)
        return before != (self.state, self.is_stopped)

    def _take(self, record: SourceRecord) -> None:
        problem = self._contradiction(record)
        if problem:
            self._fail(TransferFailed(f"transfer {self.transfer_id}: source rank {record.source} {problem}"))
            return
        if record.commit is not None:
            self.commit = record.commit
        self._num_sources = record.num_sources
        self._head_ids[record.source] = record.head_ids
        covered = self._covered.setdefault(record.source, Intervals())
        key = (record.source, record.first_unit, record.num_units)
        if key not in self._seen:
            if record.checksum is not None and self._verify is not None and not self._verify(record):
                units = f"units {record.first_unit}-{record.first_unit + record.num_units}"
                source = f"source rank {record.source}"
                self._fail(ChecksumMismatch(f"transfer {self.transfer_id}: {units} from {source} are corrupt"))
                return
            self._seen.add(key)
            self.num_bytes += record.num_bytes
            covered.add(record.first_unit, record.first_unit + record.num_units)
        else:
            self.num_ignored += record.commit is None
        if self._is_complete():
            self.state = FillState.FILLED

    def _contradiction(self, record: SourceRecord) -> str | None:
        owed = self._end_unit - self._first_unit
        first, end = record.first_unit, record.first_unit + record.num_units
        if record.total_units != owed:
            return f"sends {record.total_units} units, reserved are {owed}"
        if record.num_units < 0 or first < self._first_unit or end > self._end_unit:
            return f"wrote units {first}-{end}, reserved are {self._first_unit}-{self._end_unit}"
        if not set(record.head_ids) <= set(self._layout.head_ids):
            return f"sends heads {record.head_ids}, this rank has {self._layout.head_ids}"
        if record.num_bytes != record.num_units * len(record.head_ids) * self._layout.head_bytes:
            return f"wrote {record.num_bytes} bytes for {record.num_units} units of {len(record.head_ids)} heads"
        if self._head_ids.get(record.source, record.head_ids) != record.head_ids:
            return f"changed its heads from {self._head_ids[record.source]} to {record.head_ids}"
        if self._num_sources not in (None, record.num_sources):
            return f"counts {record.num_sources} sources, another counted {self._num_sources}"
        return None

    def _is_complete(self) -> bool:
        if self.commit is None:
            return False
        if self._first_unit == self._end_unit:
            return True
        heads = sorted(head for heads in self._head_ids.values() for head in heads)
        return (
            len(self._covered) == self._num_sources
            and heads == sorted(self._layout.head_ids)
            and all(covered.cover(self._first_unit, self._end_unit) for covered in self._covered.values())
        )

    def _fail(self, error: TransferError) -> None:
        self.state = FillState.FAILED
        self.error = error


class Fills:
    """All open fills of one target rank, by transfer.

    A record may overtake the news of its reservation on a follower rank: those of unknown transfers are kept, the
    newest `max_early` of them, and replayed when the fill opens. Records of another epoch or of a closed transfer
    change nothing.
    """

    def __init__(self, epoch: EngineEpoch, max_early: int = 4096) -> None:
        self.num_ignored = 0
        self._epoch = epoch
        self._open: dict[TransferId, Fill] = {}
        self._early: OrderedDict[int, Record] = OrderedDict()
        self._num_early = 0
        self._max_early = max_early

    def __len__(self) -> int:
        return len(self._open)

    def open(self, fill: Fill) -> bool:
        """Begin to count; whether records that came before already changed the fill's state."""
        assert fill.transfer_id not in self._open, fill.transfer_id
        self._open[fill.transfer_id] = fill
        early = [key for key, record in self._early.items() if record.transfer_id == fill.transfer_id]
        changes = [fill.add(self._early.pop(key)) for key in early]
        return any(changes)

    def add(self, record: Record) -> Fill | None:
        """Take a record; the fill whose state it changed."""
        if record.epoch != self._epoch:
            self.num_ignored += 1
            return None
        fill = self._open.get(record.transfer_id)
        if fill is not None:
            return fill if fill.add(record) else None
        self._early[self._num_early] = record
        self._num_early += 1
        if len(self._early) > self._max_early:
            self._early.popitem(last=False)
            self.num_ignored += 1
        return None

    def get(self, transfer_id: TransferId) -> Fill | None:
        return self._open.get(transfer_id)

    def close(self, transfer_id: TransferId) -> None:
        """Forget a transfer; unknown ones are fine."""
        self._open.pop(transfer_id, None)
