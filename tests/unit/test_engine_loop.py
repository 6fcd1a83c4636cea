"""The loop around a real scheduler and the toy engine."""

import asyncio
import random

import msgspec
import pytest
from harness import until

from pd_cluster.clock import SystemClock
from pd_cluster.engine.loop import EngineLoop, EngineThread
from pd_cluster.engine.outcome import StepOutcome
from pd_cluster.engine.plan import StepPlan, StepResult
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.engine.step_sync import Meeting, StepSync
from pd_cluster.engine.toy import ToyEngine, toy_tokens
from pd_cluster.ids import EngineEpoch, Rank, RequestId
from pd_cluster.messages import TokenDelta
from pd_cluster.request import Request, SamplingParams

NUM_BLOCKS = 6


class Recorder:
    """A role that only remembers."""

    def __init__(self) -> None:
        self.tokens: dict[RequestId, list[int]] = {}
        self.preempted: list[RequestId] = []
        self.ended: set[RequestId] = set()
        self.changed = asyncio.Event()

    def planned(self) -> None:
        pass

    def stepped(self, outcome: StepOutcome) -> None:
        for delta in outcome.tokens:
            self._take(delta)
        self.preempted += outcome.preempted
        self.ended.update(outcome.preempted)
        self.changed.set()

    def _take(self, delta: TokenDelta) -> None:
        self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        if delta.finish is not None:
            self.ended.add(delta.request_id)

    async def until_ended(self, num_requests: int) -> None:
        async with asyncio.timeout(10):
            while len(self.ended) < num_requests:
                self.changed.clear()
                await self.changed.wait()


class Lossy(ToyEngine):
    """Steps whose draw is below `loss` are void: they leave garbage in KV and nothing else, as the real engine's do."""

    def __init__(self, *, loss: float, seed: int) -> None:
        super().__init__(num_blocks=NUM_BLOCKS, block_size=16, role="both")
        self._rng = random.Random(seed)
        self._loss = loss
        self.num_void = 0
        self.steps: list[int] = []

    def launch(self, plan: StepPlan, step_tokens: list[int]) -> None:
        self.steps.append(plan.step)
        if self._rng.random() >= self._loss:
            super().launch(plan, step_tokens)
            return
        super().launch(msgspec.structs.replace(plan, work=[]), [0])
        super().collect()
        for work in plan.work:
            sequence = self._find(work.request_id)
            for position in range(sequence.num_computed, sequence.num_computed + work.num_tokens):
                self.arena.words[self.arena.index(sequence.block_ids, position)] = self._rng.randrange(1 << 32)
        self.num_void += 1
        self._results.append(StepResult(step=plan.step, sampled=[], void=True))


class Setup:
    def __init__(self, preempt: str, engine: ToyEngine | None = None) -> None:
        self.scheduler = Scheduler(
            num_blocks=NUM_BLOCKS,
            block_size=16,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=256,
            eos_token_ids=frozenset(),
            prefix_cache=False,
            preempt=preempt,  # type: ignore[arg-type]
        )
        self.role = Recorder()
        self.sync = StepSync(epoch=EngineEpoch("e"), rank=Rank(0), data_parallel=1, tensor_parallel=1, shared=False)
        self.thread = EngineThread(engine or ToyEngine(num_blocks=NUM_BLOCKS, block_size=16, role="both"))
        self.loop = EngineLoop(
            scheduler=self.scheduler, thread=self.thread, sync=self.sync, role=self.role, clock=SystemClock()
        )

    async def __aenter__(self) -> "Setup":
        async def nobody(*_: str) -> str:
            raise AssertionError("one rank meets nobody")

        await self.sync.start(Meeting(publish=nobody, lookup=nobody), "127.0.0.1", 1.0)  # type: ignore[arg-type]
        self.running = asyncio.create_task(self.loop.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.thread.close()
        await self.sync.close()

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        request = Request(
            id=RequestId(name),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        )
        self.scheduler.add(request, prefill_only=False, now_s=0.0)
        self.loop.wake()


async def test_requests_that_come_while_others_run_get_their_own_tokens() -> None:
    async with Setup("requeue") as setup:
        prompts = [[i + 1, 2 * i + 1, 3] for i in range(4)]
        for index, prompt in enumerate(prompts):
            setup.add(f"r{index}", prompt, 5)
            await asyncio.sleep(0.002)
        await setup.role.until_ended(4)
        for index, prompt in enumerate(prompts):
            assert setup.role.tokens[RequestId(f"r{index}")] == toy_tokens(prompt, 5)
        setup.scheduler.check()


async def test_the_scheduler_knows_how_fast_prompts_are_computed() -> None:
    async with Setup("requeue") as setup:
        assert setup.scheduler.load().prefill_tok_s == 0.0
        setup.add("prompt", list(range(1, 50)), 1)
        await setup.role.until_ended(1)
        measured = setup.scheduler.load().prefill_tok_s
        assert measured > 0.0
        setup.add("token", [1], 2)
        await setup.role.until_ended(2)
        assert setup.scheduler.load().prefill_tok_s == measured, "steps of single tokens say nothing of it"


async def test_a_preemption_that_leaves_nothing_to_run_is_told_and_the_loop_goes_on() -> None:
    async with Setup("evict") as setup:
        # two requests fill the pool; as both grow the newer one is put off the worker
        setup.add("old", list(range(1, 25)), 40)
        setup.add("new", list(range(2, 26)), 40)
        await setup.role.until_ended(2)
        assert setup.role.preempted == [RequestId("new")]
        assert setup.role.tokens[RequestId("old")] == toy_tokens(list(range(1, 25)), 40)
        held = setup.scheduler.reserve(
            Request(
                id=RequestId("held"),
                token_ids=list(range(1, 50)),
                num_prompt_tokens=49,
                sampling=SamplingParams(temperature=0.0),
            ),
            0.0,
        )
        assert held is not None
        setup.add("alone", list(range(1, 17)), 40)  # grows until the reservation is in its way
        await setup.role.until_ended(3)
        assert setup.role.preempted == [RequestId("new"), RequestId("alone")]
        setup.scheduler.cancel(held.block_ids)
        setup.add("last", [1, 2, 3], 4)
        await setup.role.until_ended(4)
        assert setup.role.tokens[RequestId("last")] == toy_tokens([1, 2, 3], 4)
        setup.scheduler.check()


@pytest.mark.parametrize("preempt", ["requeue", "evict"])
async def test_void_steps_are_run_again_and_change_nothing_but_their_number(preempt: str) -> None:
    engine = Lossy(loss=0.5, seed=1)
    async with Setup(preempt, engine) as setup:
        prompts = [list(range(i + 1, 20 + 3 * i)) for i in range(3)]
        for index, prompt in enumerate(prompts):
            setup.add(f"r{index}", prompt, 30)
        setup.add("gone", list(range(1, 30)), 30)
        await until(lambda: engine.num_void > 2)
        setup.scheduler.abort(RequestId("gone"))
        await setup.role.until_ended(3)
        for index, prompt in enumerate(prompts):
            request_id = RequestId(f"r{index}")
            expected = toy_tokens(prompt, 30)
            if request_id in setup.role.preempted:
                assert setup.role.tokens.get(request_id, []) == expected[: len(setup.role.tokens.get(request_id, []))]
            else:
                assert setup.role.tokens[request_id] == expected
        assert (preempt == "evict") == bool(setup.role.preempted), "blocks ran out while steps were void"
        assert engine.num_void == setup.loop.num_void_steps > 20
        assert engine.steps == list(range(len(engine.steps)))
        setup.add("last", [1, 2, 3], 4)
        await setup.role.until_ended(4)
        setup.scheduler.check()
        assert setup.scheduler.load().num_free_blocks == NUM_BLOCKS
        assert engine.num_sequences <= 1, "the last one's drop waits for a step"


async def test_a_request_aborted_while_its_step_is_void_frees_its_blocks() -> None:
    engine = Lossy(loss=1.0, seed=1)
    async with Setup("evict", engine) as setup:
        setup.add("gone", list(range(1, 30)), 5)
        await until(lambda: engine.num_void > 2)
        setup.scheduler.abort(RequestId("gone"))
        engine._loss = 0.0
        setup.add("next", list(range(1, 30)), 5)
        await setup.role.until_ended(1)
        assert setup.role.tokens == {RequestId("next"): toy_tokens(list(range(1, 30)), 5)}
        setup.scheduler.check()
        assert setup.scheduler.load().num_free_blocks == NUM_BLOCKS
