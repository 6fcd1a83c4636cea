"""The scheduler of one worker: which tokens of which requests the next step computes, and in which blocks.

A request waits in line, runs (prefill in chunks, then one token a step) and ends; a prefill-only one is held after its
first token, until its KV was pushed. A request prefilled elsewhere enters by `reserve`, then `adopt`, and runs at once.

- Each step takes decodes first, then prefill chunks with what is left of `max_num_batched_tokens`, first come first
  served.
- With a `ttft_target_s`, requests that can still have their first token in time start before those that cannot; see
  `queue_order`. Without one, or while the speed of prefill is not known, first come, first served.
- A request starts when the blocks of all its tokens are there, so that prefill never runs out of them; only decode
  grows.
- When decode runs out, the newest request is preempted: `requeue` puts it back to the head of the line, to be computed
  again; `evict` drops it and reports it. Prefill-only requests are never preempted: a push may be reading their blocks.
- A small watermark of blocks stays free of starts and reservations, for the growth of what runs.
- A request that alone would outgrow the pool ends with LENGTH when it fills it, as at `max_model_len`.

`plan` may be called again before `complete`: while a step is in flight nothing is preempted, and what ends frees its
blocks when the last step that uses them completes. Pure and single-threaded; `plan` and `complete` cost O(batch),
whatever the context.
"""

from collections import Counter, OrderedDict, deque
from typing import Literal

from pd_cluster.engine.kv_memory import KvMemory
from pd_cluster.engine.outcome import (
    FailedRequest,
    PrefilledRequest,
    Progress,
    Reservation,
    StartedRequest,
    StepOutcome,
)
from pd_cluster.engine.plan import NewSequence, Sampled, StepPlan, StepResult, Work
from pd_cluster.engine.queue_order import MAX_LOOK, Waiting, next_to_start
from pd_cluster.engine.sequence import Sequence, State
from pd_cluster.errors import ContextTooLong, DuplicateRequest, EngineError, InvalidRequest
from pd_cluster.ids import BlockId, RequestId, UnitHash
from pd_cluster.kv.hashing import unit_hashes
from pd_cluster.messages import TokenDelta, WorkerLoad
from pd_cluster.request import Request


class Scheduler:
    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        prefix_cache: bool,
        max_held_blocks: int | None = None,
        preempt: Literal["requeue", "evict"] = "requeue",
        ttft_target_s: float | None = None,
    ) -> None:
        """`max_held_blocks`: while prefilled requests hold more, no prefill-only request starts, nor what waits behind
        it.
        """
        assert max_num_seqs > 0
        assert max_num_batched_tokens > 0
        self._memory = KvMemory(num_blocks=num_blocks, block_size=block_size)
        self._max_len = min(max_model_len, num_blocks * block_size)
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._eos_token_ids = eos_token_ids
        self._prefix_cache = prefix_cache
        self._max_held_blocks = max_held_blocks
        self._preempt_policy = preempt
        self._ttft_target_s = ttft_target_s
        self.prefill_tok_s = 0.0
        """Moving average over steps that prefill, kept by whoever runs them; 0 before the first."""
        self._num_starts = 0
        self._sequences: dict[RequestId, Sequence] = {}  # all that have not ended
        self._waiting: OrderedDict[RequestId, Sequence] = OrderedDict()
        self._running: OrderedDict[RequestId, Sequence] = OrderedDict()  # oldest start first
        self._ending: dict[Sequence, None] = {}  # ended, but a step in flight uses their blocks
        self._num_held_blocks = 0
        self._reserve_hashes: tuple[Request, list[UnitHash]] | None = (
            None  # of the request last refused, which will ask again
        )
        self._steps: deque[tuple[int, list[tuple[Sequence, Work]]]] = deque()  # in flight
        self._drops: list[RequestId] = []  # the engine still knows them
        self._started: list[StartedRequest] = []
        self._preempted: list[RequestId] = []

    # ---- requests come and go

    def add(self, request: Request, *, prefill_only: bool, now_s: float) -> None:
        """Put a request, fresh or resumed, in line.

        Raises DuplicateRequest, InvalidRequest when nothing is left to generate, ContextTooLong when it can never fit.
        """
        self._validate(request)
        if request.num_output_tokens >= request.sampling.max_tokens:
            raise InvalidRequest(
                f"max_tokens is {request.sampling.max_tokens} and {request.num_output_tokens} tokens are there already",
                param="max_tokens",
            )
        seq = Sequence(request, prefill_only=prefill_only, now_s=now_s)
        if self._prefix_cache:
            seq.chain.extend(seq.token_ids)
        self._sequences[seq.request_id] = self._waiting[seq.request_id] = seq

    def reserve(self, request: Request, now_s: float) -> Reservation | None:
        """Keep blocks for all of `request.token_ids`, sharing the cached ones; None when there are too few now.

        Ends by `adopt` or `cancel`. Raises as `add` does.
        """
        self._validate(request)
        hashes: list[UnitHash] = []
        if self._prefix_cache:
            if self._reserve_hashes is not None and self._reserve_hashes[0] is request:
                hashes = self._reserve_hashes[1]
            else:
                hashes = unit_hashes(request.token_ids, request.cache_salt)
        shared = self._memory.cache.lookup(hashes)
        block_ids = self._memory.reserve(shared, self._memory.num_blocks_for(len(request.token_ids)))
        if block_ids is None:
            self._reserve_hashes = (request, hashes)
            return None
        self._reserve_hashes = None
        return Reservation(block_ids, len(shared) * self._memory.block_size)

    def cancel(self, block_ids: list[BlockId]) -> None:
        """Give reserved blocks back, all of a reservation or some. What was written into them is not cached."""
        self._memory.unreserve(block_ids)
        self._memory.free(block_ids)

    def adopt(self, request: Request, block_ids: list[BlockId], now_s: float) -> None:
        """Run a request whose KV, but the last token's, now lies in reserved blocks. It takes part from the next plan
        on.

        Raises DuplicateRequest; the blocks stay reserved then.
        """
        if request.id in self._sequences:
            raise DuplicateRequest(f"request {request.id} is here already")
        num_computed = len(request.token_ids) - 1
        assert len(block_ids) * self._memory.block_size >= num_computed, (len(block_ids), num_computed)
        self._memory.unreserve(block_ids)
        seq = Sequence(request, prefill_only=False, now_s=now_s)
        seq.block_ids = list(block_ids)
        seq.num_scheduled = seq.num_computed = seq.num_prefill_tokens = num_computed
        seq.started = True
        seq.move(State.RUNNING)
        self._sequences[seq.request_id] = self._running[seq.request_id] = seq
        self._publish(seq)

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request in any state; False when it is not here. Blocks that a step in flight uses are freed when it
        completes.
        """
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        self._end(seq)
        return True

    def evict(self) -> list[RequestId]:
        """Forget all requests, as `abort` does each of them; which those were, to be resumed elsewhere."""
        request_ids = list(self._sequences)
        for request_id in request_ids:
            self.abort(request_id)
        return request_ids

    def abort_keeping_blocks(self, request_id: RequestId) -> list[BlockId]:
        """Forget a request whose blocks somebody still reads: they count as reserved until `cancel`."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return []
        block_ids = seq.block_ids.copy()
        self._memory.keep(block_ids)
        self._end(seq)
        return block_ids

    def release(self, request_id: RequestId) -> None:
        """A held request was pushed, or will not be: its blocks become prefix cache. Nothing happens when it is not
        held here.
        """
        seq = self._sequences.get(request_id)
        if seq is not None and seq.state is State.HELD:
            self._end(seq)

    def block_ids(self, request_id: RequestId) -> list[BlockId]:
        """The blocks of a running or held request, in order: where a push reads from."""
        return self._sequences[request_id].block_ids.copy()

    # ---- steps

    def has_work(self, now_s: float) -> bool:
        """Whether a plan made now would have work, provided no step is in flight."""
        if self._running:
            return True
        self._order(now_s)
        return self._admit() is not None

    def plan(self, step: int, now_s: float) -> StepPlan:
        """The next step; empty when there is nothing to do. Each plan with work must be run and completed, in order;
        one without changes nothing that a later plan does not repeat, and may be dropped.
        """
        assert not self._steps or step > self._steps[-1][0], step
        works: list[tuple[Sequence, Work]] = []
        add: list[NewSequence] = []
        grow: dict[RequestId, list[BlockId]] = {}
        budget = self._max_num_batched_tokens
        num_in_engine = sum([seq.in_engine for seq in self._running.values()])
        num_sequences = len(self._running)

        def schedule(seq: Sequence, num_tokens: int) -> None:
            nonlocal budget, num_in_engine
            if not seq.in_engine:
                grow.pop(seq.request_id, None)
                add.append(seq.to_engine())
                num_in_engine += 1
            sample = num_tokens == seq.num_unscheduled
            works.append((seq, Work(seq.request_id, num_tokens, sample)))
            seq.num_scheduled += num_tokens
            seq.num_in_flight += 1
            seq.num_pending_samples += sample
            budget -= num_tokens

        prefills: list[Sequence] = []
        for seq in list(self._running.values()):
            if seq.state is not State.RUNNING or not seq.may_continue(self._max_len):
                continue  # preempted by an older one, or waiting for its last token
            if not seq.in_engine and num_in_engine >= self._max_num_seqs:
                continue
            if seq.num_unscheduled > 1:
                prefills.append(seq)
            elif budget and self._grow(seq, grow):
                schedule(seq, 1)
        for seq in prefills:
            if budget and seq.state is State.RUNNING:
                schedule(seq, min(budget, seq.num_unscheduled))
        preempted = len(self._running) < num_sequences
        while budget and self._waiting and not preempted:
            self._order(now_s)
            started = self._start(now_s)
            if started is None:
                break
            seq = started
            schedule(seq, min(budget, seq.num_unscheduled))
        if not works:
            return StepPlan(step=step)  # drops wait for a plan that is sure to run
        self._steps.append((step, works))
        drop, self._drops = self._drops, []
        return StepPlan(step=step, drop=drop, add=add, grow=grow, work=[work for _, work in works])

    def take_started(self) -> list[StartedRequest]:
        """Requests that started since the last call; a start after a preemption is not reported again."""
        started, self._started = self._started, []
        return started

    def take_preempted(self) -> list[RequestId]:
        """Requests that plans since the last call evicted (preempt="evict"), to be resumed from their tokens."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def complete(self, result: StepResult) -> StepOutcome:
        """Apply the oldest planned step that had work; a step that ran later than planned may have a later number.

        Raises EngineError when `result` lacks a token that was to be drawn.
        """
        outcome = StepOutcome(started=self.take_started(), preempted=self.take_preempted())
        if not self._steps:
            return outcome  # an idle rank's step
        step, works = self._steps.popleft()
        assert step <= result.step, f"step {step} is next to complete, not {result.step}"
        sampled = {s.request_id: s for s in result.sampled}
        block_size = self._memory.block_size
        for seq, work in works:
            seq.num_in_flight -= 1
            seq.num_pending_samples -= work.sample
            if seq.state is State.ENDED:
                if not seq.num_in_flight:
                    del self._ending[seq]
                    self._memory.free(seq.block_ids)
                continue
            seq.num_computed += work.num_tokens
            if seq.num_computed >= (seq.num_published_blocks + 1) * block_size:
                self._publish(seq)
            if seq.prefill_only:
                outcome.progress.append(Progress(seq.request_id, seq.num_computed))
            if work.sample:
                drawn = sampled.get(seq.request_id)
                if drawn is None:
                    raise EngineError(f"step {step} drew no token for request {seq.request_id}")
                self._apply(seq, drawn, outcome)
        return outcome

    # ---- what others want to know

    def load(self) -> WorkerLoad:
        """The scheduler's part of a load report."""
        return WorkerLoad(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_waiting_tokens=sum(len(seq.token_ids) for seq in self._waiting.values())
            + sum(max(0, seq.num_prefill_tokens - seq.num_computed) for seq in self._running.values()),
            num_context_tokens=sum(seq.num_computed for seq in self._running.values()),
            num_free_blocks=self._memory.num_free,
            num_reserved_blocks=self._memory.num_reserved,
            num_held_blocks=self._num_held_blocks,
            prefill_tok_s=self.prefill_tok_s,
        )

    def take_cache_events(self) -> tuple[list[UnitHash], list[UnitHash]]:
        """Units stored and removed, net, since the last call."""
        return self._memory.cache.take_events()

    def cached_units(self) -> list[UnitHash]:
        """All units of the prefix cache, for a router that arrives late."""
        return self._memory.cache.units()

    def clear_prefix_cache(self) -> None:
        self._memory.cache.clear()

    def check(self) -> None:
        """Assert that every block is free, idle or referenced by exactly those who hold it, and that sequences are
        consistent.
        """
        num_holders: Counter[BlockId] = Counter()
        num_held_blocks = 0
        for seq in (*self._sequences.values(), *self._ending):
            num_holders.update(seq.block_ids)
            assert seq.num_computed <= seq.num_scheduled, seq.request_id
            assert seq.num_unscheduled >= 0 or seq.state is State.ENDED, seq.request_id
            assert seq.num_scheduled <= len(seq.block_ids) * self._memory.block_size, seq.request_id
            num_held_blocks += len(seq.block_ids) if seq.state is State.HELD else 0
            assert seq.state is not State.WAITING or not seq.block_ids, seq.request_id
        assert num_held_blocks == self._num_held_blocks
        by_state = {state: {s.request_id for s in self._sequences.values() if s.state is state} for state in State}
        assert by_state[State.WAITING] == self._waiting.keys()
        assert by_state[State.RUNNING] == self._running.keys()
        assert not by_state[State.ENDED]
        assert all(seq.state is State.ENDED and seq.num_in_flight for seq in self._ending)
        assert sum(seq.in_engine for seq in self._running.values()) <= self._max_num_seqs
        self._memory.check(num_holders)

    # ---- within

    def _validate(self, request: Request) -> None:
        if request.id in self._sequences:
            raise DuplicateRequest(f"request {request.id} is here already")
        num_tokens = len(request.token_ids)
        if not num_tokens:
            raise InvalidRequest("the prompt is empty: send at least one token", param="prompt")
        if num_tokens + 1 > self._max_len:
            raise ContextTooLong(
                f"the request has {num_tokens} tokens and this worker takes at most {self._max_len - 1} "
                f"({self._memory.num_blocks} KV blocks of {self._memory.block_size} tokens)",
                param="prompt",
            )

    def _order(self, now_s: float) -> None:
        """Put who starts next at the head of the line."""
        if self._ttft_target_s is None or not self.prefill_tok_s or len(self._waiting) < 2:
            return
        if next(iter(self._waiting.values())).started:  # preempted: it goes on first
            return
        line = [seq for seq, _ in zip(self._waiting.values(), range(MAX_LOOK), strict=False)]
        rate = self.prefill_tok_s
        head = next_to_start(
            [Waiting(now_s - seq.added_s, len(seq.token_ids) / rate) for seq in line],
            target_s=self._ttft_target_s,
            busy_s=sum(max(0, seq.num_prefill_tokens - seq.num_computed) for seq in self._running.values()) / rate,
            num_starts=self._num_starts,
        )
        self._waiting.move_to_end(line[head].request_id, last=False)

    def _admit(self) -> tuple[Sequence, list[BlockId]] | None:
        """The head of the line with the cached blocks it would share, when it may start now."""
        seq = next(iter(self._waiting.values()), None)
        if seq is None or len(self._running) >= self._max_num_seqs:
            return None
        if seq.prefill_only and self._max_held_blocks is not None and self._num_held_blocks > self._max_held_blocks:
            return None
        # at least the last token is computed: its logits choose the next
        shared = self._memory.cache.lookup(seq.chain.hashes, (len(seq.token_ids) - 1) // self._memory.block_size)
        fits = self._memory.fits(shared, self._memory.num_blocks_for(len(seq.token_ids)))
        return (seq, shared) if fits else None

    def _start(self, now_s: float) -> Sequence | None:
        admitted = self._admit()
        if admitted is None:
            return None
        seq, shared = admitted
        block_ids = self._memory.take(shared, self._memory.num_blocks_for(len(seq.token_ids)))
        assert block_ids is not None
        seq.block_ids = block_ids
        seq.num_published_blocks = len(shared)
        seq.num_cached_tokens = seq.num_scheduled = seq.num_computed = len(shared) * self._memory.block_size
        del self._waiting[seq.request_id]
        self._num_starts += 1
        seq.move(State.RUNNING)
        self._running[seq.request_id] = seq
        if not seq.started:
            seq.started = True
            self._started.append(StartedRequest(seq.request_id, seq.num_cached_tokens, now_s - seq.added_s))
        return seq

    def _grow(self, seq: Sequence, grow: dict[RequestId, list[BlockId]]) -> bool:
        """Make room for one more token, preempting newer requests; False when the sequence cannot run in this step."""
        if seq.num_scheduled < len(seq.block_ids) * self._memory.block_size:
            return True
        while (block_ids := self._memory.grow()) is None:
            if self._steps:
                return False  # blocks of a step in flight are not free to give
            victim = next(s for s in reversed(self._running.values()) if not s.prefill_only)
            self._preempt(victim)
            if victim is seq:
                return False
        seq.block_ids += block_ids
        grow[seq.request_id] = block_ids
        return True

    def _preempt(self, seq: Sequence) -> None:
        if self._preempt_policy == "evict":
            self._preempted.append(seq.request_id)
            self._end(seq)
            return
        del self._running[seq.request_id]
        if seq.in_engine:
            self._drops.append(seq.request_id)
        self._memory.free(seq.block_ids)
        seq.requeue()
        if self._prefix_cache:
            seq.chain.extend(seq.token_ids)
        self._waiting[seq.request_id] = seq
        self._waiting.move_to_end(seq.request_id, last=False)

    def _publish(self, seq: Sequence) -> None:
        """Offer blocks that have become full of computed KV to the prefix cache."""
        num_full = seq.num_computed // self._memory.block_size
        if self._prefix_cache and num_full > seq.num_published_blocks:
            seq.chain.extend(seq.token_ids, seq.num_computed)
            self._memory.publish(seq.block_ids, seq.chain.hashes, seq.num_published_blocks, num_full)
            seq.num_published_blocks = num_full

    def _apply(self, seq: Sequence, sampled: Sampled, outcome: StepOutcome) -> None:
        if sampled.token_id is None:
            error = EngineError("the model's output for this request is not a number")
            outcome.failed.append(FailedRequest(seq.request_id, error.info()))
            self._end(seq)
            return
        first_index = seq.num_output_tokens
        finish = seq.append(sampled.token_id, self._eos_token_ids, self._max_len)
        if seq.prefill_only:
            outcome.prefilled.append(
                PrefilledRequest(seq.request_id, sampled.token_id, sampled.logprobs, finish, seq.num_cached_tokens)
            )
        else:
            logprobs = None if sampled.logprobs is None else [sampled.logprobs]
            outcome.tokens.append(TokenDelta(seq.request_id, first_index, [sampled.token_id], finish, logprobs))
        if finish is not None:
            self._end(seq)
        elif seq.prefill_only:
            seq.move(State.HELD)
            del self._running[seq.request_id]
            self._drops.append(seq.request_id)
            seq.in_engine = False
            self._num_held_blocks += len(seq.block_ids)

    def _end(self, seq: Sequence) -> None:
        if seq.state is State.HELD:
            self._num_held_blocks -= len(seq.block_ids)
        if seq.in_engine:
            self._drops.append(seq.request_id)
        self._waiting.pop(seq.request_id, None)
        self._running.pop(seq.request_id, None)
        del self._sequences[seq.request_id]
        seq.move(State.ENDED)
        if seq.num_in_flight:
            self._ending[seq] = None
        else:
            self._memory.free(seq.block_ids)
