"""The loop around a real scheduler and the toy engine."""

import asyncio

from pd_cluster.clock import SystemClock
from pd_cluster.engine.loop import EngineLoop, EngineThread
from pd_cluster.engine.outcome import StepOutcome
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


class Setup:
    def __init__(self, preempt: str) -> None:
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
        self.thread = EngineThread(ToyEngine(num_blocks=NUM_BLOCKS, block_size=16, role="both"))
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
