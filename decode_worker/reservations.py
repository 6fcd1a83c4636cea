"""Reservations: blocks kept for a request whose KV a prefill worker writes, from the wait in line to adoption.

    WAITING --blocks--> GRANTED --all ranks filled--> FILLED --adopt--> ADOPTED
       |                   |                            |
       | abort,            | abort, lease over,         | abort, lease over: all writes have landed
       | deadline          | failed fill                v
       v                   v                          FREED
     FREED           QUARANTINED --every source stopped or is done, or its engine is dead--> FREED

From the grant on a writer may exist that nobody here can stop, so blocks go back only on proof: the source says it
has stopped (by the router, or by a record to every rank), every process of its engine is dead, or the fill is
complete. Cached blocks in front of a reservation are shared and never written; they go back at once. Requests wait in
line first come, first served.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

from msgspec import Struct, field

from pd_cluster.clock import Clock
from pd_cluster.errors import DeadlineExceeded, ErrorInfo, Overloaded, PdClusterError, TransferFailed, WorkerLost
from pd_cluster.ids import BlockId, EngineEpoch, RequestId, TransferId
from pd_cluster.request import Request


class ReservationState(StrEnum):
    WAITING = "waiting"
    GRANTED = "granted"
    FILLED = "filled"
    ADOPTED = "adopted"
    QUARANTINED = "quarantined"
    FREED = "freed"


S = ReservationState

NEXT: dict[ReservationState, frozenset[ReservationState]] = {
    S.WAITING: frozenset({S.GRANTED, S.FREED}),
    S.GRANTED: frozenset({S.FILLED, S.QUARANTINED, S.FREED}),
    S.FILLED: frozenset({S.ADOPTED, S.FREED}),
    S.ADOPTED: frozenset(),
    S.QUARANTINED: frozenset({S.FREED}),
    S.FREED: frozenset(),
}


class Grant(Struct, frozen=True):
    """Blocks are kept: open fills on all ranks, then tell the router."""

    transfer_id: TransferId
    request: Request
    block_ids: list[BlockId]
    num_cached_tokens: int
    lease_s: float


class Filled(Struct, frozen=True):
    """All KV is here on every rank: adopt it at the next step."""

    transfer_id: TransferId


class Refused(Struct, frozen=True):
    """The reservation ended without adoption; its blocks are freed, or in quarantine until Freed."""

    transfer_id: TransferId
    request_id: RequestId
    error: ErrorInfo


class Freed(Struct, frozen=True):
    """Nothing of the transfer is left: close its fills on all ranks."""

    transfer_id: TransferId


Notice = Grant | Filled | Refused | Freed


class Reservation(Struct, kw_only=True):
    transfer_id: TransferId
    request: Request
    source_epoch: EngineEpoch
    expires_s: float  # in line: the deadline; then: the lease
    since_s: float  # when the blocks were granted
    state: ReservationState = S.WAITING
    block_ids: list[BlockId] = field(default_factory=list)
    num_cached_tokens: int = 0
    filled_ranks: set[int] = field(default_factory=set)
    stopped_ranks: set[int] = field(default_factory=set)

    def go(self, state: ReservationState) -> None:
        assert state in NEXT[self.state], (self.transfer_id, self.state, state)
        self.state = state


class ReservationLoad(Struct, frozen=True):
    """Blocks by state; `oldest_s`: since the oldest of them was granted."""

    num_reserved_blocks: int
    num_quarantined_blocks: int
    num_pending: int
    oldest_s: float


class Reservations:
    """All reservations of one worker, kept by its lead. Methods return notices in order.

    `take(request)` gives (blocks for all of its tokens, how many of them are cached), None when there are not enough
    now, or raises a PdClusterError when there never will be; `give_back(blocks)` takes them again. `block_size` in
    tokens; cached tokens come in whole blocks.
    """

    def __init__(
        self,
        num_ranks: int,
        block_size: int,
        lease_s: float,
        take: Callable[[Request], tuple[list[BlockId], int] | None],
        give_back: Callable[[Sequence[BlockId]], None],
        clock: Clock,
    ) -> None:
        self.num_late = 0  # fills of transfers that were over
        self._num_ranks = num_ranks
        self._block_size = block_size
        self._lease_s = lease_s
        self._take = take
        self._give_back = give_back
        self._clock = clock
        self._all: dict[TransferId, Reservation] = {}
        self._line: dict[TransferId, Reservation] = {}  # those of `_all` that wait, in order of arrival
        self._dead: set[EngineEpoch] = set()

    def __len__(self) -> int:
        return len(self._all)

    def get(self, transfer_id: TransferId) -> Reservation | None:
        """A reservation that is neither adopted nor freed."""
        return self._all.get(transfer_id)

    @property
    def quarantined(self) -> list[Reservation]:
        """Those whose blocks wait for a proof."""
        return [reservation for reservation in self._all.values() if reservation.state is S.QUARANTINED]

    def load(self) -> ReservationLoad:
        held = [r for r in self._all.values() if r.state is not S.WAITING]
        quarantined = sum(len(r.block_ids) for r in held if r.state is S.QUARANTINED)
        reserved = sum(len(r.block_ids) for r in held) - quarantined
        oldest_s = max((self._clock.now_s() - r.since_s for r in held), default=0.0)
        return ReservationLoad(reserved, quarantined, len(self._line), oldest_s)

    # ---- inputs

    def reserve(
        self, transfer_id: TransferId, request: Request, source_epoch: EngineEpoch, deadline_s: float
    ) -> list[Notice]:
        """Get in line; granted at once when it is empty and there are blocks. A repeat changes nothing."""
        if transfer_id in self._all:
            return []
        now_s = self._clock.now_s()
        reservation = Reservation(
            transfer_id=transfer_id,
            request=request,
            source_epoch=source_epoch,
            expires_s=now_s + deadline_s,
            since_s=now_s,
        )
        self._all[transfer_id] = self._line[transfer_id] = reservation
        if source_epoch in self._dead:
            return self._end(reservation, WorkerLost(f"transfer {transfer_id}: its prefill engine is dead"))
        return self.grant()

    def grant(self) -> list[Notice]:
        """Give blocks to those in front of the line; call it when blocks have come free."""
        notices: list[Notice] = []
        while self._line:
            reservation = next(iter(self._line.values()))
            try:
                taken = self._take(reservation.request)
            except PdClusterError as error:  # it can never have them
                notices += self._finish(reservation, error)
                continue
            if taken is None:
                break
            reservation.block_ids, reservation.num_cached_tokens = taken
            assert reservation.num_cached_tokens % self._block_size == 0, reservation.num_cached_tokens
            del self._line[reservation.transfer_id]
            reservation.go(S.GRANTED)
            reservation.since_s = self._clock.now_s()
            reservation.expires_s = reservation.since_s + self._lease_s
            notices.append(
                Grant(
                    reservation.transfer_id,
                    reservation.request,
                    reservation.block_ids,
                    reservation.num_cached_tokens,
                    self._lease_s,
                )
            )
        return notices

    def rank_filled(self, transfer_id: TransferId, tp_rank: int) -> list[Notice]:
        """A TP rank of this worker has received everything: nothing more comes for it."""
        reservation = self._in(transfer_id, S.GRANTED, S.QUARANTINED)
        self.num_late += reservation is None or reservation.state is S.QUARANTINED
        if reservation is None:
            return []
        reservation.filled_ranks.add(tp_rank)
        if reservation.state is S.QUARANTINED or len(reservation.filled_ranks) < self._num_ranks:
            return self._end_if_quiet(reservation)
        reservation.go(S.FILLED)
        return [Filled(transfer_id)]

    def rank_failed(self, transfer_id: TransferId, error: PdClusterError) -> list[Notice]:
        """What a TP rank received is wrong."""
        reservation = self._granted(transfer_id)
        return [] if reservation is None else self._end(reservation, error)

    def rank_stopped(self, transfer_id: TransferId, tp_rank: int) -> list[Notice]:
        """All sources of a TP rank of this worker said that they write nothing more."""
        reservation = self._in(transfer_id, S.GRANTED, S.QUARANTINED)
        if reservation is None:
            return []
        reservation.stopped_ranks.add(tp_rank)
        return self._end_if_quiet(reservation)

    def source_stopped(self, transfer_id: TransferId) -> list[Notice]:
        """Nothing more will be written for this transfer."""
        reservation = self._in(transfer_id, S.WAITING, S.GRANTED, S.QUARANTINED)
        if reservation is None:
            return []
        error = TransferFailed(f"transfer {transfer_id}: the prefill worker stopped")
        return self._end(reservation, error, proof=True)

    def engine_dead(self, epoch: EngineEpoch) -> list[Notice]:
        """Every process of a prefill engine died: nothing of it writes any more."""
        self._dead.add(epoch)
        orphans = [r for r in self._all.values() if r.source_epoch == epoch and r.state is not S.FILLED]
        self._leave_line(orphans)
        notices: list[Notice] = []
        for reservation in orphans:
            error = WorkerLost(f"transfer {reservation.transfer_id}: its prefill engine died")
            notices += self._end(reservation, error, proof=True)
        return notices

    def extend(self, transfer_ids: Sequence[TransferId], lease_s: float) -> None:
        """The router still follows these transfers; those in line keep their deadline."""
        for transfer_id in transfer_ids:
            reservation = self._all.get(transfer_id)
            if reservation is not None and reservation.state in (S.GRANTED, S.FILLED):
                reservation.expires_s = max(reservation.expires_s, self._clock.now_s() + lease_s)

    def abort(self, transfer_id: TransferId) -> list[Notice]:
        """Nobody wants the transfer any more. Unknown ones are fine."""
        reservation = self._in(transfer_id, S.WAITING, S.GRANTED, S.FILLED)
        return [] if reservation is None else self._end(reservation, None)

    def adopt(self, transfer_id: TransferId) -> Reservation | None:
        """Hand a filled reservation's blocks to its sequence; None when it is no longer filled."""
        reservation = self._in(transfer_id, S.FILLED)
        if reservation is not None:
            reservation.go(S.ADOPTED)
            del self._all[transfer_id]
        return reservation

    def tick(self) -> list[Notice]:
        """Look at every deadline and lease; call it a few times a second."""
        now_s = self._clock.now_s()
        over = [r for r in self._all.values() if now_s >= r.expires_s and r.state is not S.QUARANTINED]
        self._leave_line(over)
        notices: list[Notice] = []
        for reservation in over:
            name = f"transfer {reservation.transfer_id}"
            if reservation.state is S.WAITING:
                notices += self._end(reservation, Overloaded(f"{name}: no KV blocks came free in time"))
            else:
                notices += self._end(reservation, DeadlineExceeded(f"{name}: the lease of its blocks ran out"))
        return notices

    # ---- transitions

    def _in(self, transfer_id: TransferId, *states: ReservationState) -> Reservation | None:
        reservation = self._all.get(transfer_id)
        return reservation if reservation is not None and reservation.state in states else None

    def _end_if_quiet(self, reservation: Reservation) -> list[Notice]:
        """Nobody writes to a rank that is filled, nor to one whose sources have stopped."""
        quiet = reservation.filled_ranks | reservation.stopped_ranks
        return self.source_stopped(reservation.transfer_id) if len(quiet) == self._num_ranks else []

    def _granted(self, transfer_id: TransferId) -> Reservation | None:
        reservation = self._in(transfer_id, S.GRANTED)
        self.num_late += reservation is None
        return reservation

    def _leave_line(self, reservations: Sequence[Reservation]) -> None:
        """Before any of them ends, so that none takes the place of another in the same breath."""
        for reservation in reservations:
            self._line.pop(reservation.transfer_id, None)

    def _end(self, reservation: Reservation, error: PdClusterError | None, proof: bool = False) -> list[Notice]:
        """End what nobody will adopt, as far as possible now, and let the next in line have what it had."""
        return self._finish(reservation, error, proof) + self.grant()

    def _finish(self, reservation: Reservation, error: PdClusterError | None, proof: bool = False) -> list[Notice]:
        """Give back what nobody may still write to; with `proof` that is everything."""
        notices: list[Notice] = []
        if error is not None and reservation.state is not S.QUARANTINED:
            notices.append(Refused(reservation.transfer_id, reservation.request.id, error.info()))
        self._leave_line([reservation])
        num_shared = reservation.num_cached_tokens // self._block_size
        shared, writable = reservation.block_ids[:num_shared], reservation.block_ids[num_shared:]
        if reservation.state is S.GRANTED and writable and not proof:
            reservation.go(S.QUARANTINED)
            reservation.block_ids, reservation.num_cached_tokens = writable, 0
            self._give_back(shared)
            return notices
        reservation.go(S.FREED)
        del self._all[reservation.transfer_id]
        self._give_back(reservation.block_ids)
        return [*notices, Freed(reservation.transfer_id)]
