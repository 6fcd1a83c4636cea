"""A prefill worker: takes prompts, computes their KV and next token, and pushes the KV to where the router says.

This is the lead's side: it answers routers, feeds the scheduler, and drives the pushes of all its TP ranks. A request
is over here when its KV was pushed, or when it failed and no rank writes any more; until then its blocks stay.
"""

from collections.abc import Callable

import msgspec
from msgspec import Struct

from pd_cluster import messages as m
from pd_cluster.clock import Clock
from pd_cluster.engine.loop import EngineLoop
from pd_cluster.engine.outcome import PrefilledRequest, StepOutcome
from pd_cluster.engine.owners import Outgoing
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.engine.step_sync import StepSync
from pd_cluster.engine.worker import Worker
from pd_cluster.errors import InvalidRequest, PdClusterError
from pd_cluster.ids import BlockId, Rank, RequestId, RouterId, TransferId
from pd_cluster.parallel.placement_status import PlacementStatus
from pd_cluster.request import Request
from pd_cluster.transfer.contract import CommitRecord
from prefill_worker.push_group import GroupFailed, GroupPushed, GroupStopped, PushGroup
from prefill_worker.push_outputs import RankNotice
from prefill_worker.push_rank import (
    Aborted,
    Closed,
    Committed,
    Opened,
    Ordered,
    Progressed,
    PushInput,
    PushRank,
    TargetDied,
    decode_notice,
    encode,
)


class _Job(Struct, kw_only=True, eq=False):
    """A request from its arrival to the end of its transfer."""

    request: Request
    transfer_id: TransferId
    group: PushGroup
    started_s: float | None = None
    kept: list[BlockId] = msgspec.field(default_factory=list)  # of an aborted request, while somebody reads them


class PrefillWorker(Worker):
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        sync: StepSync,
        clock: Clock,
        vocab_size: int,
        max_model_len: int,
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
        self._jobs: dict[TransferId, _Job] = {}
        self._transfer_of: dict[RequestId, TransferId] = {}  # of requests the scheduler knows
        sync.on_tell = self._on_tell

    def attach(self, loop: EngineLoop, outgoing: Outgoing, push_rank: PushRank) -> None:
        self._attach(loop, outgoing)
        self._push_rank = push_rank

    @property
    def idle(self) -> bool:
        """Nothing is queued, running, held or on its way."""
        return not self._jobs and not self._owners

    # ---- from routers

    def on_messages(self, router_id: RouterId, messages: list[m.ToWorkerMessage]) -> None:
        for message in messages:
            match message:
                case m.Prefill():
                    self._prefill(router_id, message)
                case m.Push():
                    self._tell_ranks(Ordered(message))
                case m.Abort():
                    if message.transfer_id in (None, self._transfer_of.get(message.request_id)):
                        self._abort(message.request_id)
                    self._answer_abort(router_id, message)
                case m.EngineDead():
                    self._tell_ranks(TargetDied(message.dead))
                case m.Drain():
                    self._drain()
                case m.Generate():
                    self._owners.refuse(
                        router_id, message.request.id, None, InvalidRequest("this worker only prefills")
                    )
                case m.Reserve():
                    error = InvalidRequest("this worker does not decode")
                    self._owners.refuse(router_id, message.request.id, message.transfer_id, error)
                case _:
                    pass  # leases and proofs concern targets
        self._loop.wake()

    def load(self) -> m.WorkerLoad:
        pushes = self._push_rank.pushes.load()
        return msgspec.structs.replace(
            super().load(), num_pending_sends=pushes.num_pending, oldest_stranded_s=pushes.oldest_s
        )

    def _prefill(self, router_id: RouterId, message: m.Prefill) -> None:
        request, transfer_id = message.request, message.transfer_id
        try:
            self._check(request)
            self._scheduler.add(request, prefill_only=True, now_s=self._clock.now_s())
        except PdClusterError as error:
            self._owners.refuse(router_id, request.id, transfer_id, error)
            return
        self._owners.add(request.id, router_id)
        self._jobs[transfer_id] = _Job(
            request=request, transfer_id=transfer_id, group=PushGroup(self._sync.num_followers + 1)
        )
        self._transfer_of[request.id] = transfer_id
        self._tell_ranks(Opened(transfer_id, len(request.token_ids), message.deadline_s))

    def _abort(self, request_id: RequestId) -> None:
        transfer_id = self._transfer_of.get(request_id)
        if transfer_id is not None:
            self._stop(self._jobs[transfer_id])

    def _answer_abort(self, router_id: RouterId, message: m.Abort) -> None:
        """Of a transfer that still stops, the router hears when it has; of any other, that it is quiet."""
        if message.transfer_id is not None and message.transfer_id not in self._jobs:
            stopped = m.Stopped(request_id=message.request_id, transfer_id=message.transfer_id)
            self._outgoing.send(router_id, [stopped])

    def _stop(self, job: _Job) -> None:
        """End a request early. Its blocks stay until every rank has stopped; then the router hears Stopped."""
        if self._transfer_of.pop(job.request.id, None) is None:
            return
        job.kept = self._scheduler.abort_keeping_blocks(job.request.id)
        self._tell_ranks(Aborted(job.transfer_id))

    # ---- from the engine

    def planned(self) -> None:
        for started in self._scheduler.take_started():
            transfer_id = self._transfer_of[started.request_id]
            self._jobs[transfer_id].started_s = self._clock.now_s()
            self._tell_started(started, transfer_id)

    def stepped(self, outcome: StepOutcome) -> None:
        done = {prefilled.request_id for prefilled in outcome.prefilled}
        for progress in outcome.progress:
            transfer_id = self._transfer_of.get(progress.request_id)
            if transfer_id is not None and progress.request_id not in done:
                block_ids = self._scheduler.block_ids(progress.request_id)
                self._tell_ranks(Progressed(transfer_id, progress.num_computed, block_ids))
        for prefilled in outcome.prefilled:
            if prefilled.request_id in self._transfer_of:
                self._prefilled(prefilled)
        for failed in outcome.failed:
            transfer_id = self._transfer_of.get(failed.request_id)
            if transfer_id is not None:
                self._owners.tell(
                    failed.request_id,
                    m.Failed(request_id=failed.request_id, transfer_id=transfer_id, error=failed.error),
                )
                self._stop(self._jobs[transfer_id])
        self._tell_cache_events()

    def _prefilled(self, prefilled: PrefilledRequest) -> None:
        job = self._jobs[self._transfer_of[prefilled.request_id]]
        request = job.request
        assert job.started_s is not None
        self._owners.tell(
            request.id,
            m.Prefilled(
                request_id=request.id,
                transfer_id=job.transfer_id,
                token_id=prefilled.token_id,
                logprobs=prefilled.logprobs,
                finish=prefilled.finish,
                prefill_s=self._clock.now_s() - job.started_s,
                num_cached_tokens=prefilled.num_cached_tokens,
            ),
        )
        if prefilled.finish is not None:
            self._stop(job)
            return
        commit = CommitRecord(
            token_id=prefilled.token_id,
            logprob=None if prefilled.logprobs is None else prefilled.logprobs.chosen,
            num_prompt_tokens=request.num_prompt_tokens,
            num_tokens=len(request.token_ids),
            num_cached_tokens=prefilled.num_cached_tokens,
            seed=request.sampling.seed,
            position=len(request.token_ids) + 1,
        )
        self._tell_ranks(Committed(job.transfer_id, commit, self._scheduler.block_ids(request.id)))

    # ---- from the ranks' pushes

    def _tell_ranks(self, change: PushInput) -> None:
        self._sync.tell_followers(encode(change))
        self._push_rank.apply(change)

    def _on_tell(self, rank: Rank, payload: bytes) -> None:
        self.on_notice(rank % (self._sync.num_followers + 1), decode_notice(payload))

    def on_notice(self, tp_rank: int, notice: RankNotice) -> None:
        """What a rank says about a push; this lead's own rank is 0."""
        job = self._jobs.get(notice.transfer_id)
        if job is None:
            return
        request_id = job.request.id
        match job.group.report(tp_rank, notice):
            case GroupPushed(num_bytes=num_bytes, seconds=seconds):
                self._owners.tell(
                    request_id,
                    m.Pushed(request_id=request_id, transfer_id=job.transfer_id, num_bytes=num_bytes, seconds=seconds),
                )
                self._tell_ranks(Closed(job.transfer_id))
                self._scheduler.release(request_id)
                self._end(job)
            case GroupFailed(error=error):
                self._owners.tell(request_id, m.Failed(request_id=request_id, transfer_id=job.transfer_id, error=error))
                self._stop(job)
            case GroupStopped():
                self._owners.tell(request_id, m.Stopped(request_id=request_id, transfer_id=job.transfer_id))
                self._scheduler.cancel(job.kept)
                self._end(job)

    def _end(self, job: _Job) -> None:
        del self._jobs[job.transfer_id]
        self._transfer_of.pop(job.request.id, None)
        self._owners.remove(job.request.id)
        self._loop.wake()
        self._note_drained()
