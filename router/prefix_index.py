"""Which worker has which prefix cached: unit hash -> workers, fed by their CacheEvents.

A hash maps to a bit mask of workers: one walk over a prompt's hashes finds every worker's longest cached prefix.
A worker never counts for more units than its KV memory can hold; beyond that its oldest entries are forgotten.
"""

from collections.abc import Sequence

from pd_cluster.ids import UnitHash, WorkerId
from pd_cluster.messages import CacheEvents
from pd_cluster.request import UNIT_TOKENS


class PrefixIndex:
    """Advisory: a stale entry costs a recomputation, never a wrong token."""

    def __init__(self) -> None:
        self._holders: dict[UnitHash, int] = {}
        self._units: dict[WorkerId, dict[UnitHash, None]] = {}  # in the order they were stored
        self._max_units: dict[WorkerId, int] = {}
        self._bits: dict[WorkerId, int] = {}
        self._workers: dict[int, WorkerId] = {}

    @property
    def num_hashes(self) -> int:
        return len(self._holders)

    def add_worker(self, worker: WorkerId, max_units: int) -> None:
        """Begin with nothing cached at `worker`, whose memory holds at most `max_units` units."""
        self.remove_worker(worker)
        position = 0
        while 1 << position in self._workers:
            position += 1
        self._bits[worker] = 1 << position
        self._workers[1 << position] = worker
        self._units[worker] = {}
        self._max_units[worker] = max_units

    def remove_worker(self, worker: WorkerId) -> None:
        """Forget a worker; unknown ones are fine."""
        if worker not in self._bits:
            return
        self._clear(worker)
        del self._workers[self._bits.pop(worker)], self._units[worker], self._max_units[worker]

    def apply(self, worker: WorkerId, events: CacheEvents) -> None:
        """Follow a worker's cache; events of an unknown worker are dropped."""
        if worker not in self._bits:
            return
        if events.cleared:
            self._clear(worker)
        units = self._units[worker]
        for unit in events.removed:
            if unit in units:
                del units[unit]
                self._drop(unit, self._bits[worker])
        bit = self._bits[worker]
        for unit in events.stored:
            if unit not in units:
                units[unit] = None
                self._holders[unit] = self._holders.get(unit, 0) | bit
        while len(units) > self._max_units[worker]:
            oldest = next(iter(units))
            del units[oldest]
            self._drop(oldest, bit)

    def match(self, hashes: Sequence[UnitHash]) -> dict[WorkerId, int]:
        """Tokens that each worker has cached of the prompt with these unit hashes; workers with none are absent."""
        matched: dict[WorkerId, int] = {}
        mask = -1
        num_units = 0
        for unit in hashes:
            remaining = self._holders.get(unit, 0) & mask
            if remaining != mask and num_units:
                self._record(matched, mask & ~remaining, num_units)
            mask = remaining
            if not mask:
                return matched
            num_units += 1
        if num_units:
            self._record(matched, mask, num_units)
        return matched

    def num_matched_tokens(self, hashes: Sequence[UnitHash], worker: WorkerId) -> int:
        return self.match(hashes).get(worker, 0)

    def _record(self, matched: dict[WorkerId, int], mask: int, num_units: int) -> None:
        while mask:
            bit = mask & -mask
            matched[self._workers[bit]] = num_units * UNIT_TOKENS
            mask ^= bit

    def _clear(self, worker: WorkerId) -> None:
        for unit in self._units[worker]:
            self._drop(unit, self._bits[worker])
        self._units[worker].clear()

    def _drop(self, unit: UnitHash, bit: int) -> None:
        left = self._holders[unit] & ~bit
        if left:
            self._holders[unit] = left
        else:
            del self._holders[unit]
