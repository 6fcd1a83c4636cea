"""The scheduler under random requests, handoffs, aborts and steps: right tokens, no leak, no write into foreign blocks.

Steps run late: the toy engine writes KV only when a step completes, so blocks given away too early would show.
"""

from collections import deque
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pd_cluster.engine.outcome import Reservation, StepOutcome
from pd_cluster.engine.plan import StepPlan
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.engine.toy import PREFILL, ToyEngine, toy_tokens
from pd_cluster.errors import ContextTooLong
from pd_cluster.ids import BlockId, RequestId, UnitHash
from pd_cluster.request import FinishReason, Request, SamplingParams

MAX_DEPTH = 3
SENTINEL = 0xDEAD

prompts = st.builds(
    lambda units, tail: [token for token in units for _ in range(16)][: len(units) * 16 - tail] or [0],
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
    st.sampled_from([0, 0, 1, 8, 15]),
)
max_tokens = st.integers(1, 40)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from([16, 32]),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 7, 16, 40, 200]),
        prefix_cache=st.booleans(),
        preempt=st.sampled_from(["requeue", "evict"]),
        max_held_blocks=st.sampled_from([None, 0, 3]),
        ttft_target_s=st.sampled_from([None, 5.0, 50.0]),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        prefix_cache: bool,
        preempt: Literal["requeue", "evict"],
        max_held_blocks: int | None,
        ttft_target_s: float | None,
    ) -> None:
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=120,
            eos_token_ids=frozenset({11}),
            prefix_cache=prefix_cache,
            max_held_blocks=max_held_blocks,
            preempt=preempt,
            ttft_target_s=ttft_target_s,
        )
        self.scheduler.prefill_tok_s = 4.0  # a second is a step here
        self.engine = ToyEngine(num_blocks=num_blocks, block_size=block_size)
        self.num_blocks, self.budget, self.max_num_seqs = num_blocks, budget, max_num_seqs
        self.max_len = min(120, num_blocks * block_size)
        self.step = 0
        self.requests: dict[RequestId, Request] = {}  # as first sent
        self.live: set[RequestId] = set()
        self.output: dict[RequestId, list[int]] = {}
        self.evicted: list[RequestId] = []
        self.started: dict[RequestId, list[BlockId]] = {}
        self.held: dict[RequestId, list[BlockId]] = {}
        self.reserved: dict[RequestId, Reservation] = {}
        self.kept: list[list[BlockId]] = []  # of aborted requests
        self.plans: deque[StepPlan] = deque()
        self.known: set[UnitHash] = set()

    # ---- requests

    def new_request(self, prompt: list[int], limit: int) -> Request:
        request = Request(
            id=RequestId(f"r{len(self.requests)}"),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=limit),
        )
        self.requests[request.id] = request
        return request

    def resumed(self, request_id: RequestId) -> Request:
        first = self.requests[request_id]
        return Request(
            id=request_id,
            token_ids=first.token_ids + self.output.get(request_id, []),
            num_prompt_tokens=first.num_prompt_tokens,
            sampling=first.sampling,
        )

    @rule(prompt=prompts, limit=max_tokens, prefill_only=st.booleans())
    def add(self, prompt: list[int], limit: int, prefill_only: bool) -> None:
        request = self.new_request(prompt, limit)
        try:
            self.scheduler.add(request, prefill_only=prefill_only, now_s=float(self.step))
        except ContextTooLong:
            assert len(prompt) + 1 > self.max_len
        else:
            assert len(prompt) + 1 <= self.max_len
            self.live.add(request.id)

    @rule(prompt=prompts, limit=st.integers(2, 40))
    def reserve(self, prompt: list[int], limit: int) -> None:
        request = self.new_request(prompt, limit)
        try:
            reservation = self.scheduler.reserve(request, float(self.step))
        except ContextTooLong:
            assert len(prompt) + 1 > self.max_len
            return
        if reservation is None:
            return
        assert reservation.num_cached_tokens <= len(prompt)
        assert len(reservation.block_ids) == self.engine.layout.num_blocks_for(len(prompt))
        self.reserved[request.id] = reservation
        self.write(reservation, range(reservation.num_cached_tokens, len(prompt)), None)

    def write(self, reservation: Reservation, positions: range, prompt: list[int] | None) -> None:
        """As a transfer does: the prompt's KV, or sentinels."""
        words = self.engine.arena.words
        for position in positions:
            index = self.engine.arena.index(reservation.block_ids, position)
            words[index] = prompt[position] + 1 if prompt else SENTINEL
            words[index + 16] = PREFILL if prompt else SENTINEL

    def check_untouched(self, request: Request, reservation: Reservation) -> None:
        words = self.engine.arena.words
        for position in range(reservation.num_cached_tokens, len(request.token_ids)):
            index = self.engine.arena.index(reservation.block_ids, position)
            assert (words[index], words[index + 16]) == (SENTINEL, SENTINEL), "a step wrote into reserved blocks"

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), adopt=st.booleans())
    def settle(self, data: st.DataObject, adopt: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.reserved)))
        self.settle_one(request_id, adopt)

    def settle_one(self, request_id: RequestId, adopt: bool) -> None:
        request, reservation = self.requests[request_id], self.reserved.pop(request_id)
        self.check_untouched(request, reservation)
        if not adopt:
            self.scheduler.cancel(reservation.block_ids)
            return
        prompt = request.token_ids
        self.write(reservation, range(reservation.num_cached_tokens, len(prompt)), prompt)
        first = toy_tokens(prompt, 1)
        if first == [11]:
            self.scheduler.cancel(reservation.block_ids)
            return
        self.output[request_id] = first
        self.live.add(request_id)
        self.scheduler.adopt(self.resumed(request_id), reservation.block_ids, float(self.step))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def abort(self, data: st.DataObject, keep: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        if keep:
            self.kept.append(self.scheduler.abort_keeping_blocks(request_id))
        else:
            assert self.scheduler.abort(request_id) == (request_id not in self.evicted)
        assert not self.scheduler.abort(request_id)
        self.live.remove(request_id)
        self.held.pop(request_id, None)
        if request_id in self.evicted:
            self.evicted.remove(request_id)

    @precondition(lambda self: self.kept)
    @rule()
    def give_kept_back(self) -> None:
        self.scheduler.cancel(self.kept.pop())

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        request_id, block_ids = self.held.popitem()
        prompt = self.requests[request_id].token_ids
        keys = [self.engine.arena.words[self.engine.arena.index(block_ids, p)] for p in range(len(prompt))]
        assert keys == [token + 1 for token in prompt], "held blocks were overwritten"
        self.scheduler.release(request_id)
        assert not self.scheduler.abort(request_id)
        self.live.remove(request_id)

    @precondition(lambda self: self.evicted)
    @rule()
    def resume(self) -> None:
        request_id = self.evicted.pop(0)
        try:
            self.scheduler.add(self.resumed(request_id), prefill_only=False, now_s=float(self.step))
        except ContextTooLong:
            assert len(self.resumed(request_id).token_ids) >= self.max_len
            self.live.remove(request_id)

    # ---- steps

    @precondition(lambda self: len(self.plans) < MAX_DEPTH)
    @rule()
    def launch(self) -> None:
        might_work = self.scheduler.has_work(float(self.step))
        plan = self.scheduler.plan(self.step, float(self.step))
        self.step += 1
        assert plan.num_tokens <= self.budget
        assert len(plan.work) <= self.max_num_seqs
        assert len({work.request_id for work in plan.work}) == len(plan.work)
        assert might_work or not plan.work
        self.evicted += self.scheduler.take_preempted()
        for started in self.scheduler.take_started():
            self.started[started.request_id] = self.scheduler.block_ids(started.request_id)
        if plan.work:
            self.plans.append(plan)
        else:
            assert plan == StepPlan(step=plan.step)

    @precondition(lambda self: self.plans)
    @rule()
    def complete(self) -> None:
        plan = self.plans.popleft()
        self.engine.launch(plan, [plan.num_tokens])
        assert self.engine.num_sequences <= self.max_num_seqs
        self.apply(self.scheduler.complete(self.engine.collect()))

    @rule(num_steps=st.integers(1, 12))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if len(self.plans) < MAX_DEPTH:
                self.launch()
            if self.plans:
                self.complete()

    def apply(self, outcome: StepOutcome) -> None:
        assert not outcome.preempted
        assert not outcome.failed
        for delta in outcome.tokens:
            assert delta.request_id in self.live
            output = self.output.setdefault(delta.request_id, [])
            assert delta.first_index == len(output)
            output += delta.token_ids
            self.check_output(delta.request_id, delta.finish)
            if delta.finish is not None:
                self.live.remove(delta.request_id)
        for done in outcome.prefilled:
            assert done.request_id in self.live
            self.output[done.request_id] = [done.token_id]
            self.check_output(done.request_id, done.finish)
            if done.finish is None:
                self.held[done.request_id] = self.scheduler.block_ids(done.request_id)
                assert self.held[done.request_id] == self.started[done.request_id], "moved under a push"
            else:
                self.live.remove(done.request_id)

    def check_output(self, request_id: RequestId, finish: FinishReason | None) -> None:
        request, output = self.requests[request_id], self.output[request_id]
        assert output == toy_tokens(request.token_ids, len(output))
        assert 11 not in output[:-1]
        num_tokens = request.num_prompt_tokens + len(output)
        if output[-1] == 11:
            assert finish is FinishReason.STOP
        elif len(output) == request.sampling.max_tokens or num_tokens >= self.max_len:
            assert finish is FinishReason.LENGTH
        else:
            assert finish is None

    @precondition(lambda self: self.step % 8 == 7)
    @rule()
    def clear_prefix_cache(self) -> None:
        self.scheduler.clear_prefix_cache()

    @rule()
    def follow_cache(self) -> None:
        stored, removed = self.scheduler.take_cache_events()
        assert set(removed) <= self.known
        self.known = self.known - set(removed) | set(stored)
        assert self.known == set(self.scheduler.cached_units())

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.scheduler.check()
        load = self.scheduler.load()
        assert load.num_waiting + load.num_running + len(self.held) + len(self.evicted) == len(self.live)

    def teardown(self) -> None:
        for request_id in list(self.reserved):
            self.settle_one(request_id, adopt=True)
        while self.kept:
            self.give_kept_back()
        for _ in range(20_000):
            while self.held:
                self.release()
            while self.evicted:
                self.resume()
            if not self.plans and not self.scheduler.has_work(float(self.step)):
                break
            if len(self.plans) < 1 + self.step % MAX_DEPTH:
                before = len(self.plans)
                self.launch()
                if len(self.plans) == before and self.plans:
                    self.complete()
            else:
                self.complete()
        assert not self.live, f"never finished: {self.live}"
        self.every_block_is_accounted_for()
        self.scheduler.clear_prefix_cache()
        assert self.scheduler.load().num_free_blocks == self.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
