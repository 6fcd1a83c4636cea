"""A decode worker: reserves blocks, adopts what prefill workers write into them, and generates.

This is the lead's side. It also runs whole requests (`Generate`) when it is colocated, or when a router prefers to
prefill a prompt here.
"""

from collections.abc import Callable, Sequence

import msgspec

from decode_worker.fill_rank import (
    Close,
    FillInput,
    FillNotice,
    FillRank,
    Open,
    RankFailed,
    RankFilled,
    decode_notice,
    encode,
)
from decode_worker.reservations import Filled, Freed, Grant, Notice, Refused, Reservations, ReservationState
from pd_cluster import messages as m
from pd_cluster.clock import Clock
from pd_cluster.engine.loop import EngineLoop
from pd_cluster.engine.outcome import StepOutcome
from pd_cluster.engine.owners import Outgoing
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.engine.step_sync import StepSync
from pd_cluster.engine.worker import Worker
from pd_cluster.errors import DuplicateRequest, InvalidRequest, PdClusterError, Unavailable, from_info
from pd_cluster.ids import BlockId, Rank, RequestId, RouterId, TransferId, WorkerId
from pd_cluster.parallel.placement_status import PlacementStatus
from pd_cluster.request import Request
from pd_cluster.transfer.contract import CommitRecord

QUARANTINE_LOOK_S = 1.0

MAX_QUARANTINE_TOLD = 256
"""In one message; the rest are told when these are free."""


class DecodeWorker(Worker):
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        sync: StepSync,
        clock: Clock,
        vocab_size: int,
        max_model_len: int,
        block_size: int,
        lease_s: float,
        expert_load: Callable[[], list[list[int]]],
        placement: Callable[[], PlacementStatus | None] = lambda: None,
    ) -> None:
        super().__init__(
            scheduler=scheduler,
            sync=sync,
            clock=clock,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            expert_load=expert_load,
            placement=placement,
        )
        self.reservations = Reservations(
            sync.num_followers + 1, block_size, lease_s, self._take_blocks, self._give_blocks_back, clock
        )
        self._transfer_of: dict[RequestId, TransferId] = {}  # reserved, not adopted
        self._arrived: dict[TransferId, list[RankFilled]] = {}
        self._source_of: dict[TransferId, WorkerId] = {}
        self._known_quarantined: set[TransferId] = set()  # at the last look
        self._next_look_s = 0.0
        sync.on_tell = self._on_tell

    def attach(self, loop: EngineLoop, outgoing: Outgoing, fill_rank: FillRank) -> None:
        self._attach(loop, outgoing)
        self._fill_rank = fill_rank

    @property
    def idle(self) -> bool:
        """Nothing is reserved, quarantined, queued or running."""
        return not len(self.reservations) and not self._owners

    # ---- from the group that this worker is a member of

    def leave(self) -> None:
        """Others are to do without this worker: it takes nothing new, and what it has goes on elsewhere."""
        super().leave()
        for request_id, transfer_id in reversed(list(self._transfer_of.items())):  # an abort lets the next one in
            reservation = self.reservations.get(transfer_id)
            if reservation is None or reservation.state is not ReservationState.GRANTED:  # its prefill goes on
                error = Unavailable("this worker leaves its group: ask another").info()
                self._owners.tell(request_id, m.Failed(request_id=request_id, transfer_id=transfer_id, error=error))
            else:
                self._owners.tell(request_id, m.Preempted(request_id=request_id))
            self._abort(request_id)
        self._evict()

    def _evict(self) -> None:
        evicted = self._scheduler.evict()
        for request_id in evicted:
            self._owners.tell(request_id, m.Preempted(request_id=request_id))
            self._forget(request_id)
        if evicted:
            self._do(self.reservations.grant())

    # ---- from routers

    def on_messages(self, router_id: RouterId, messages: list[m.ToWorkerMessage]) -> None:
        for message in messages:
            match message:
                case m.Reserve():
                    self._reserve(router_id, message)
                case m.Generate():
                    self._generate(router_id, message.request)
                case m.Abort():
                    self._abort(message.request_id)
                case m.ExtendLease():
                    self.reservations.extend(message.transfer_ids, message.lease_s)
                case m.SourceStopped():
                    self._do(self.reservations.source_stopped(message.transfer_id))
                case m.EngineDead():
                    self._do(self.reservations.engine_dead(message.dead))
                case m.Drain():
                    self._drain()
                case m.Prefill():
                    error = InvalidRequest("this worker prefills only what it also decodes")
                    self._owners.refuse(router_id, message.request.id, message.transfer_id, error)
                case _:
                    pass
        self._loop.wake()

    def load(self) -> m.WorkerLoad:
        reservations = self.reservations.load()
        return msgspec.structs.replace(
            super().load(),
            num_reserved_blocks=reservations.num_reserved_blocks,
            num_quarantined_blocks=reservations.num_quarantined_blocks,
            num_pending_reservations=reservations.num_pending,
            oldest_stranded_s=reservations.oldest_s,
        )

    def _check(self, request: Request) -> None:
        super()._check(request)
        if request.id in self._owners:
            raise DuplicateRequest(f"request {request.id} is here already")

    def _generate(self, router_id: RouterId, request: Request) -> None:
        try:
            self._check(request)
            self._scheduler.add(request, prefill_only=False, now_s=self._clock.now_s())
        except PdClusterError as error:
            self._owners.refuse(router_id, request.id, None, error)
            return
        self._owners.add(request.id, router_id)

    def _reserve(self, router_id: RouterId, message: m.Reserve) -> None:
        request, transfer_id = message.request, message.transfer_id
        try:
            self._check(request)
            if self.reservations.get(transfer_id) is not None:
                raise DuplicateRequest(f"transfer {transfer_id} is here already")
        except PdClusterError as error:
            self._owners.refuse(router_id, request.id, transfer_id, error)
            return
        self._owners.add(request.id, router_id)
        self._transfer_of[request.id] = transfer_id
        self._source_of[transfer_id] = message.source
        self._do(self.reservations.reserve(transfer_id, request, message.source_epoch, message.deadline_s))

    def _abort(self, request_id: RequestId) -> None:
        transfer_id = self._transfer_of.get(request_id)
        if transfer_id is not None:
            self._forget(request_id)
            self._do(self.reservations.abort(transfer_id))
        elif self._scheduler.abort(request_id):
            self._forget(request_id)
            self._do(self.reservations.grant())

    def _forget(self, request_id: RequestId) -> None:
        self._owners.remove(request_id)
        self._transfer_of.pop(request_id, None)
        self._note_drained()

    # ---- reservations

    def _take_blocks(self, request: Request) -> tuple[list[BlockId], int] | None:
        reservation = self._scheduler.reserve(request, self._clock.now_s())
        return None if reservation is None else (reservation.block_ids, reservation.num_cached_tokens)

    def _give_blocks_back(self, block_ids: Sequence[BlockId]) -> None:
        self._scheduler.cancel(list(block_ids))

    def tick(self) -> bool:
        """Look at leases, deadlines and the quarantine; a few times a second. Whether there are any."""
        self._do(self.reservations.tick())
        if self._clock.now_s() >= self._next_look_s:
            self._next_look_s = self._clock.now_s() + QUARANTINE_LOOK_S
            self._tell_quarantine()
        return len(self.reservations) > 0

    def _tell_quarantine(self) -> None:
        """Tell all routers what was in quarantine already at the last look."""
        quarantined = self.reservations.quarantined
        lasting = [
            m.Quarantine(r.transfer_id, r.request.id, self._source_of[r.transfer_id], r.source_epoch)
            for r in quarantined
            if r.transfer_id in self._known_quarantined
        ]
        self._known_quarantined = {r.transfer_id for r in quarantined}
        if lasting:
            self._outgoing.broadcast([m.Quarantined(transfers=lasting[:MAX_QUARANTINE_TOLD])])

    def _do(self, notices: list[Notice], known: TransferId | None = None) -> None:
        """Act on notices. Of the failure of `known` the router hears from the prefill worker."""
        for notice in notices:
            match notice:
                case Grant():
                    self._granted(notice)
                case Filled():
                    self._adopt(notice.transfer_id)
                case Refused():
                    if notice.transfer_id != known:
                        error, transfer_id = notice.error, notice.transfer_id
                        failed = m.Failed(request_id=notice.request_id, transfer_id=transfer_id, error=error)
                        self._owners.tell(notice.request_id, failed)
                    self._forget(notice.request_id)
                case Freed():
                    self._close(notice.transfer_id)
                    self._note_drained()
        if notices:
            self._loop.wake()

    def _granted(self, grant: Grant) -> None:
        self._owners.tell(
            grant.request.id,
            m.Granted(
                request_id=grant.request.id,
                transfer_id=grant.transfer_id,
                block_ids=grant.block_ids,
                num_cached_tokens=grant.num_cached_tokens,
                lease_s=grant.lease_s,
            ),
        )
        self._arrived[grant.transfer_id] = []
        self._tell_ranks(
            Open(grant.transfer_id, len(grant.request.token_ids), grant.num_cached_tokens, grant.block_ids)
        )

    def _adopt(self, transfer_id: TransferId) -> None:
        """All KV is here: the request runs from the next plan on."""
        reservation = self.reservations.adopt(transfer_id)
        if reservation is None:
            return
        arrived = self._arrived[transfer_id]
        commit: CommitRecord = arrived[0].commit
        self._close(transfer_id)
        request = reservation.request
        resumed = msgspec.structs.replace(request, token_ids=[*request.token_ids, commit.token_id])
        self._transfer_of.pop(request.id, None)
        try:
            self._scheduler.adopt(resumed, reservation.block_ids, self._clock.now_s())
        except PdClusterError as error:
            self._scheduler.cancel(reservation.block_ids)
            self._owners.tell(request.id, m.Failed(request_id=request.id, transfer_id=transfer_id, error=error.info()))
            self._forget(request.id)
            return
        num_bytes = sum(filled.num_bytes for filled in arrived)
        self._owners.tell(request.id, m.Adopted(request_id=request.id, transfer_id=transfer_id, num_bytes=num_bytes))

    def _close(self, transfer_id: TransferId) -> None:
        self._source_of.pop(transfer_id, None)
        if self._arrived.pop(transfer_id, None) is not None:
            self._tell_ranks(Close(transfer_id))

    # ---- from the ranks' fills

    def _tell_ranks(self, change: FillInput) -> None:
        self._sync.tell_followers(encode(change))
        self._fill_rank.apply(change)

    def _on_tell(self, rank: Rank, payload: bytes) -> None:
        self.on_notice(rank % (self._sync.num_followers + 1), decode_notice(payload))

    def on_notice(self, tp_rank: int, notice: FillNotice) -> None:
        """What a rank says about a fill; this lead's own rank is 0."""
        match notice:
            case RankFilled():
                arrived = self._arrived.get(notice.transfer_id)
                if arrived is not None:
                    arrived.append(notice)
                    self._do(self.reservations.rank_filled(notice.transfer_id, tp_rank))
            case RankFailed():
                self._do(self.reservations.rank_failed(notice.transfer_id, from_info(notice.error)))
            case _:
                # its record may overtake its word: that it has finished the request, or why it failed
                self._do(self.reservations.rank_stopped(notice.transfer_id, tp_rank), known=notice.transfer_id)

    # ---- from the engine

    def planned(self) -> None:
        for started in self._scheduler.take_started():
            self._tell_started(started, TransferId(""))

    def stepped(self, outcome: StepOutcome) -> None:
        self._owners.tell_tokens(outcome.tokens)
        for delta in outcome.tokens:
            if delta.finish is not None:
                self._forget(delta.request_id)
        for request_id in outcome.preempted:
            self._owners.tell(request_id, m.Preempted(request_id=request_id))
            self._forget(request_id)
        for failed in outcome.failed:
            self._owners.tell(
                failed.request_id, m.Failed(request_id=failed.request_id, transfer_id=None, error=failed.error)
            )
            self._forget(failed.request_id)
        self._tell_cache_events()
        self._do(self.reservations.grant())
