"""A request in flight: queued -> prefilling -> transferring -> decoding -> finished, or queued again, or aborted.

A `Flight` is driven by what workers say, by time and by its client, and acts through a `Port`; it knows no sockets and
no event loop. Each attempt goes by an id of its own on the wire, so that what a former attempt still says cannot be
mistaken for the present one. Tokens reach the client once and in order: an attempt continues after the tokens it was
given, and an index that repeats or leaves a gap is noticed.
"""

from collections.abc import Collection

from msgspec import structs

from pd_cluster import messages as m
from pd_cluster.engine.plan import TokenLogprobs
from pd_cluster.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineError,
    Overloaded,
    PdClusterError,
    PeerIncompatible,
    TransferFailed,
    Unavailable,
    WorkerLost,
    from_info,
)
from pd_cluster.ids import EngineEpoch, RequestId, WorkerId, new_transfer_id
from pd_cluster.request import NEXT, FinishReason, Phase, Request
from router.attempt import MAX_BACKOFF_S, MIN_BACKOFF_S, Attempt, Delta, Leg, Limits, Link, Port, Timings
from router.deaths import Deaths
from router.recovery import Remedy, remedy

OVERLOAD_DELAY_S = 0.1
"""Before a request that found a full queue tries again."""


class Flight:
    """One request from submission to its last token."""

    def __init__(
        self, request: Request, port: Port, limits: Limits, deadline_s: float, prefer: WorkerId | None = None
    ) -> None:
        self.request = request  # with all output tokens so far
        self.prefer = prefer  # a worker known to hold the prompt's prefix
        self.phase = Phase.QUEUED
        self.attempt: Attempt | None = None
        self.timings = Timings(num_prompt_tokens=request.num_prompt_tokens)
        self.submitted_s = port.now_s()
        self.deadline_s = deadline_s
        self.alarm_s: float | None = None  # when its pipeline will look at it
        self._port = port
        self._limits = limits
        self._token_ids = list(request.token_ids)
        self._num_attempts = 0
        self._num_engine_errors = 0
        self._deaths = Deaths()
        self._avoid: set[WorkerId] = set()
        self._dispatch_at_s: float | None = None
        self._outage_since_s: float | None = None
        self._backoff_s = MIN_BACKOFF_S
        self._first_token_s: float | None = None
        self._first_output = request.num_output_tokens

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def done(self) -> bool:
        return not NEXT[self.phase]

    @property
    def token_ids(self) -> list[int]:
        return self._token_ids

    @property
    def num_output_tokens(self) -> int:
        return len(self._token_ids) - self.request.num_prompt_tokens

    @property
    def wake_s(self) -> float:
        """When `on_time` wants to be called next."""
        times = [self.deadline_s, self._dispatch_at_s]
        if self.attempt is not None:
            times += [self.attempt.reserve_at_s, self.attempt.reserve_until_s, self.attempt.transfer_until_s]
        return min(time for time in times if time is not None)

    # ---- from the client

    def start(self) -> None:
        """Send the request off. Raises what the policy raises when nobody can take it."""
        self._dispatch()

    def cancel(self, error: PdClusterError) -> None:
        """Free both sides and end with `error`."""
        if not self.done:
            self._fail(error)

    def stop(self) -> None:
        """The client has all it wanted (a stop string): free both sides and finish."""
        if not self.done:
            self._release()
            self._finish([], None, FinishReason.STOP)

    # ---- from time

    def on_time(self, now_s: float) -> None:
        if self.done:
            return
        if now_s >= self.deadline_s:
            self._fail(DeadlineExceeded(f"the request was not done within its time ({self.phase})"))
        elif self._dispatch_at_s is not None:
            if now_s >= self._dispatch_at_s:
                self._redispatch()
        elif (attempt := self.attempt) is not None:
            if attempt.reserve_at_s is not None and now_s >= attempt.reserve_at_s:
                self._reserve(attempt)
            elif attempt.reserve_until_s is not None and now_s >= attempt.reserve_until_s:
                self._refused(attempt, DeadlineExceeded("the decode worker did not answer in time"))
            elif attempt.transfer_until_s is not None and now_s >= attempt.transfer_until_s:
                seconds = self._limits.transfer_deadline_s
                self._retry(TransferFailed(f"the KV did not arrive within {seconds:g} s"), avoid=attempt.decode)

    # ---- from workers; the caller has matched the wire id and the leg

    def on_message(self, leg: Leg, message: m.ToRouterMessage) -> None:
        """One message about this attempt; what does not fit its state is late or repeated, and dropped."""
        attempt = self.attempt
        if attempt is None or self.done:
            return
        from_prefill, from_decode = leg == attempt.prefill, leg == attempt.decode
        match message:
            case m.Started() if attempt.colocated and from_prefill:
                attempt.started = True
                self._note_start(message)
            case m.Started() if from_prefill and message.transfer_id == attempt.transfer_id:
                self._on_started(attempt, message)
            case m.Prefilled() if from_prefill and not from_decode and message.transfer_id == attempt.transfer_id:
                self._on_prefilled(attempt, message)
            case m.Granted() if from_decode and message.transfer_id == attempt.transfer_id:
                self._on_granted(attempt, message)
            case m.Pushed() if from_prefill and message.transfer_id == attempt.transfer_id:
                self.timings.transfer_s, self.timings.transfer_bytes = message.seconds, message.num_bytes
            case m.Adopted() if from_decode and message.transfer_id == attempt.transfer_id:
                self._adopt(attempt, message.num_bytes)
            case m.Stopped() if from_prefill and message.transfer_id == attempt.transfer_id and not attempt.settled:
                self._retry(TransferFailed("the source stopped writing"))
            case m.Preempted() if from_decode:
                self.timings.num_preemptions += 1
                self._resume(WorkerLost("preempted: the decode worker ran out of KV blocks, or leaves"))
            case m.Failed() if message.transfer_id in (None, attempt.transfer_id):
                if from_decode or (from_prefill and not (attempt.adopted and attempt.prefilled)):
                    self._on_failed(attempt, leg, from_info(message.error))
            case _:
                pass

    def on_tokens(self, leg: Leg, delta: m.TokenDelta) -> None:
        """Tokens of the present attempt."""
        attempt = self.attempt
        if attempt is None or leg != attempt.decode:
            return
        if attempt.flows:
            self._accept(delta)
            return
        if self.done:
            return
        if attempt.colocated and self.phase is Phase.QUEUED:
            self.timings.queued_s = self.timings.queued_s or self._port.now_s() - self.submitted_s
            attempt.started = True
            self._move(Phase.DECODING)
        if attempt.colocated:
            attempt.vacate_prefill(self._port)
            attempt.flows = True
            self._accept(delta)
            return
        self._adopt(attempt, None)  # tokens prove it, should the word be late
        if attempt.prefilled:
            attempt.flows = attempt.adopted
            self._accept(delta)
        else:
            attempt.pending.append(delta)

    def on_lost(self, leg: Leg, reason: str) -> None:
        """A worker's stream broke, or its engine is dead; what it was doing for us is void."""
        attempt = self.attempt
        if attempt is None or self.done:
            return
        error = WorkerLost(f"{leg.worker_id} was lost: {reason}")
        if attempt.computes_at(leg):
            self._deaths.lost(leg)
        if leg == attempt.decode:
            if attempt.colocated or attempt.adopted or (attempt.link is not None and attempt.link.push_sent):
                self._retry(error, leg, self._deaths.hold_s)
            else:
                self._refused(attempt, error)
        elif leg == attempt.prefill and not (attempt.prefilled and (attempt.adopted or attempt.all_pushed)):
            self._retry(error, leg, self._deaths.hold_s)

    def on_dead(self, epoch: EngineEpoch, first: Collection[WorkerId] | None) -> None:
        """An engine is dead, after its loss was told; `first` of its workers died by themselves. None: not known."""
        error = self._deaths.dead(epoch, first)
        if self.done:
            return
        if error is not None:
            self._fail(error)
        else:
            self._look_again()

    def on_welcome(self, epoch: EngineEpoch) -> None:
        """A worker is there, new or again."""
        self._deaths.alive(epoch)
        if not self.done:
            self._look_again()

    def _look_again(self) -> None:
        """What kept the request from a worker may be over."""
        if self._dispatch_at_s is not None and not self._deaths.hold_s:
            self._redispatch()

    # ---- an attempt

    def _dispatch(self) -> None:
        choice = self._port.choose_prefill(self, frozenset(self._avoid))
        worker = choice.worker
        wire_id = RequestId(f"{self.id}~{self._num_attempts}") if self._num_attempts else self.id
        self._num_attempts += 1
        self._dispatch_at_s = self._outage_since_s = None
        self._backoff_s = MIN_BACKOFF_S
        num_new_tokens = len(self._token_ids) - choice.num_cached_tokens
        leg = Leg(worker.id, worker.epoch)
        attempt = self.attempt = Attempt(
            wire_id=wire_id,
            transfer_id=new_transfer_id(),
            prefill=leg,
            first_index=self.num_output_tokens,
            num_tokens=len(self._token_ids),
            avoid_decode=set(self._avoid),
        )
        attempt.occupy_prefill(self._port, num_new_tokens)
        self.request = structs.replace(self.request, token_ids=list(self._token_ids))
        self._port.renamed(self, None, wire_id)
        request = structs.replace(self.request, id=wire_id)
        remaining_s = self.deadline_s - self._port.now_s()
        if worker.info.can_decode:
            attempt.decode = leg
            attempt.occupy_decode(self._port)
            self.timings.prefill_worker = self.timings.decode_worker = worker.id
            self._port.send(leg, m.Generate(request=request, deadline_s=remaining_s))
        else:
            self.timings.prefill_worker, self.timings.decode_worker = worker.id, None
            message = m.Prefill(request=request, transfer_id=attempt.transfer_id, deadline_s=remaining_s)
            self._port.send(leg, message)

    def _on_started(self, attempt: Attempt, message: m.Started) -> None:
        if self.phase is not Phase.QUEUED:
            return
        attempt.started = True
        self._move(Phase.PREFILLING)
        self._note_start(message)
        if attempt.first_index + 1 < self.request.sampling.max_tokens:  # else prefill draws the last token
            self._reserve(attempt)

    def _note_start(self, message: m.Started) -> None:
        if self._num_attempts == 1:
            self.timings.queued_s = self._port.now_s() - self.submitted_s
            self.timings.num_cached_tokens = message.num_cached_tokens

    def _reserve(self, attempt: Attempt) -> None:
        attempt.reserve_at_s = None
        now_s = self._port.now_s()
        try:
            choice = self._port.choose_decode(self, attempt.prefill, frozenset(attempt.avoid_decode))
        except Unavailable:
            self._reserve_later(attempt)
            return
        except PeerIncompatible as error:
            self._resume(error, avoid=attempt.prefill)
            return
        except PdClusterError as error:
            self._fail(error)
            return
        worker = choice.worker
        attempt.decode = Leg(worker.id, worker.epoch)
        attempt.occupy_decode(self._port)
        attempt.link = Link(
            transfer_id=attempt.transfer_id, source=attempt.prefill, target=attempt.decode, wire_id=attempt.wire_id
        )
        self._port.open_link(attempt.link)
        wait_s = max(0.0, min(self._limits.reserve_wait_s, self.deadline_s - now_s))
        attempt.reserve_until_s = now_s + wait_s + self._limits.slack_s
        self.timings.decode_worker = worker.id
        reserve = m.Reserve(
            request=structs.replace(self.request, id=attempt.wire_id),
            transfer_id=attempt.transfer_id,
            source=attempt.prefill.worker_id,
            source_epoch=attempt.prefill.epoch,
            deadline_s=wait_s,
        )
        self._port.send(attempt.decode, reserve)

    def _reserve_later(self, attempt: Attempt) -> None:
        attempt.reserve_at_s = self._port.now_s() + attempt.backoff_s
        attempt.backoff_s = min(2 * attempt.backoff_s, MAX_BACKOFF_S)

    def _refused(self, attempt: Attempt, error: PdClusterError) -> None:
        """A decode worker will not take the request, and nothing was pushed: prefill goes on, another one is asked."""
        if attempt.decode is not None:
            attempt.avoid_decode.add(attempt.decode.worker_id)
            attempt.vacate_decode(self._port)
        if attempt.link is not None:
            self._port.close_link(attempt.link)
        attempt.decode = attempt.link = attempt.reserve_until_s = None
        attempt.pending.clear()
        self._port.retried(self, error)
        if isinstance(error, PeerIncompatible | WorkerLost):
            self._reserve(attempt)  # the directory has changed: ask at once
        else:
            self._reserve_later(attempt)

    def _on_granted(self, attempt: Attempt, message: m.Granted) -> None:
        link = attempt.link
        if link is None or attempt.granted_s is not None:
            return
        now_s = self._port.now_s()
        attempt.granted_s = now_s
        attempt.reserve_until_s = None
        remaining_s = self.deadline_s - now_s
        if attempt.prefilled:
            attempt.transfer_until_s = now_s + self._limits.transfer_deadline_s + self._limits.slack_s
            remaining_s = min(remaining_s, self._limits.transfer_deadline_s)
        link.push_sent = True
        self._port.push(link, message, remaining_s)

    def _on_prefilled(self, attempt: Attempt, message: m.Prefilled) -> None:
        if attempt.prefilled:
            return
        if self.phase is Phase.QUEUED:
            self._move(Phase.PREFILLING)
        attempt.prefilled = True
        attempt.vacate_prefill(self._port)
        self.timings.prefill_s = message.prefill_s
        if message.finish is not None:
            self._release()
        logprobs = [message.logprobs] if message.logprobs is not None else None
        wire = m.TokenDelta(attempt.wire_id, attempt.first_index, [message.token_id], message.finish, logprobs)
        if message.finish is not None:
            self._accept(wire)
            return
        self._move(Phase.TRANSFERRING)
        if attempt.granted_s is not None:
            attempt.transfer_until_s = self._port.now_s() + self._limits.transfer_deadline_s + self._limits.slack_s
        self._accept(wire)
        if attempt.decode is None and attempt.reserve_at_s is None:
            self._reserve(attempt)
        if attempt.adopted and not self.done:
            self._decode(attempt)

    def _adopt(self, attempt: Attempt, num_bytes: int | None) -> None:
        if attempt.adopted or attempt.granted_s is None or attempt.link is None:
            return
        attempt.adopted = True
        attempt.transfer_until_s = None
        self._port.settle_link(attempt.link)
        if num_bytes is not None and not self.timings.transfer_bytes:
            self.timings.transfer_bytes = num_bytes
            self.timings.transfer_s = self._port.now_s() - attempt.granted_s
        if attempt.prefilled:
            self._decode(attempt)

    def _decode(self, attempt: Attempt) -> None:
        """Prefill's token is out and decode has the KV."""
        attempt.transfer_until_s = None
        self._move(Phase.DECODING)
        for delta in attempt.pending:
            if not self.done and self.attempt is attempt:
                self._accept(delta)
        attempt.pending.clear()

    def _accept(self, delta: m.TokenDelta) -> None:
        """Pass on what is new of `delta`."""
        expected = len(self._token_ids) - self.request.num_prompt_tokens
        repeated = expected - delta.first_index
        if not repeated and delta.finish is None and self._first_token_s is not None and delta.token_ids:
            self._token_ids += delta.token_ids
            self._port.deliver(self, Delta(delta.token_ids, delta.logprobs))
            return
        if repeated < 0:
            self._retry(EngineError(f"tokens {expected} to {delta.first_index - 1} are missing"))
            return
        token_ids = delta.token_ids[repeated:]
        if not token_ids and (repeated or delta.finish is None):
            return
        logprobs = delta.logprobs[repeated:] if delta.logprobs is not None else None
        now_s = self._port.now_s()
        if self._first_token_s is None and token_ids:
            self._first_token_s = now_s
            self.timings.ttft_s = now_s - self.submitted_s
        self._token_ids += token_ids
        if delta.finish in (FinishReason.ABORT, FinishReason.ERROR):
            if token_ids:
                self._port.deliver(self, Delta(token_ids, logprobs))
            self._retry(WorkerLost("the worker gave the request up"))
        elif delta.finish is None:
            self._port.deliver(self, Delta(token_ids, logprobs))
        else:
            self._finish(token_ids, logprobs, delta.finish)

    def _on_failed(self, attempt: Attempt, leg: Leg, error: PdClusterError) -> None:
        if isinstance(error, PeerIncompatible):
            if attempt.link is None:  # there is no pair to avoid: another attempt would be the same
                self._fail(error)
                return
            self._port.mark_incompatible(attempt.link.source, attempt.link.target, error.message)
        self._num_engine_errors += isinstance(error, EngineError)
        refused = leg == attempt.decode and attempt.granted_s is None and not attempt.colocated
        begun = self.num_output_tokens > self._first_output
        match remedy(error, refused=refused, begun=begun, num_engine_errors=self._num_engine_errors):
            case Remedy.ASK_ELSEWHERE:
                self._refused(attempt, error)
            case Remedy.RETRY:
                self._retry(error, leg)
            case Remedy.RETRY_LATER:
                self._retry(error, leg, OVERLOAD_DELAY_S)
            case Remedy.RESUME:
                self._resume(error)
            case Remedy.RESUME_LATER:
                self._resume(error, leg, OVERLOAD_DELAY_S)
            case Remedy.FAIL:
                self._fail(error)

    # ---- from one attempt to the next, or to the end

    def _retry(self, error: PdClusterError, avoid: Leg | None = None, delay_s: float = 0.0) -> None:
        """Something broke: once more, within limits."""
        self.timings.num_retries += 1
        if self.timings.num_retries > self._limits.max_retries:
            self._fail(error)
        else:
            self._resume(error, avoid, delay_s)

    def _resume(self, error: PdClusterError, avoid: Leg | None = None, delay_s: float = 0.0) -> None:
        """Continue from the tokens so far with a new attempt."""
        self._release()
        if avoid is not None:
            self._avoid.add(avoid.worker_id)
        self._move(Phase.QUEUED)
        self._port.retried(self, error)
        if delay_s:
            self._dispatch_at_s = self._port.now_s() + delay_s
        else:
            self._redispatch()

    def _redispatch(self) -> None:
        now_s = self._port.now_s()
        try:
            self._dispatch()
        except ContextTooLong as error:
            if self.num_output_tokens > 0:
                self._finish([], None, FinishReason.LENGTH)
            else:
                self._fail(error)
        except (Unavailable, Overloaded) as error:
            if self._outage_since_s is None:
                self._outage_since_s = now_s
            if now_s - self._outage_since_s >= self._limits.outage_patience_s:
                self._fail(error)
                return
            self._avoid.clear()  # whoever comes back is welcome
            self._dispatch_at_s = now_s + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        except PdClusterError as error:
            self._fail(error)

    def _release(self) -> None:
        """End the present attempt at its workers."""
        attempt, self._dispatch_at_s = self.attempt, None
        if attempt is None:
            return
        self._forget()
        if attempt.colocated or attempt.adopted:
            assert attempt.decode is not None
            self._port.send(attempt.decode, m.Abort(request_id=attempt.wire_id))
        else:
            abort = m.Abort(request_id=attempt.wire_id, transfer_id=attempt.transfer_id)
            self._port.send(attempt.prefill, abort)
            if attempt.link is not None:
                self._port.close_link(attempt.link)

    def _finish(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None, finish: FinishReason) -> None:
        now_s = self._port.now_s()
        self._forget()
        self.timings.e2e_s = now_s - self.submitted_s
        self.timings.num_output_tokens = self.num_output_tokens
        num_later = self.num_output_tokens - self._first_output - 1
        if self._first_token_s is not None and num_later > 0:
            self.timings.tpot_s = (now_s - self._first_token_s) / num_later
        if self.phase is Phase.QUEUED:  # stopped between two attempts
            self._move(Phase.PREFILLING)
        self._move(Phase.FINISHED)
        self._port.deliver(self, Delta(token_ids, logprobs, finish, self.timings))

    def _fail(self, error: PdClusterError) -> None:
        self._release()
        self.timings.e2e_s = self._port.now_s() - self.submitted_s
        self.timings.num_output_tokens = self.num_output_tokens
        self._move(Phase.ABORTED)
        self._port.fail(self, error)

    def _forget(self) -> None:
        """The workers have ended the attempt themselves."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            self._port.renamed(self, attempt.wire_id, None)
            attempt.vacate_prefill(self._port)
            attempt.vacate_decode(self._port)

    def _move(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], f"{self.id} cannot go from {self.phase} to {phase}"
        before, self.phase = self.phase, phase
        self._port.moved(self, before, phase)
