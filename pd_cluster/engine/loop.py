"""The loop that drives an engine: plan, agree, run on the engine thread, apply, tell the role.

All state belongs to the event loop; the engine thread only runs steps. While a step runs, the previous one's outcome is
sent out, so that messages cost no step time. The loop sleeps when there is nothing to do. What a void step was to
compute is run again under the next step's number, before anything else is planned; so is what waited for a Go when its
generation ended.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from pd_cluster.clock import Clock
from pd_cluster.engine.generations import Formed
from pd_cluster.engine.outcome import StepOutcome
from pd_cluster.engine.plan import Engine, StepPlan, StepResult
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.engine.step_sync import GenerationOver, Go, Run, StepSync
from pd_cluster.parallel.transition import Decision

AVERAGE_DECAY = 0.9

T = TypeVar("T")


class Role(Protocol):
    """What a prefill or a decode worker does around its steps."""

    def planned(self) -> None:
        """A plan was made: requests may have started."""

    def stepped(self, outcome: StepOutcome) -> None:
        """A step's outcome, in order; the next step may be running."""


class Epochs(Protocol):
    """This rank's part in placement epochs; called on the event loop."""

    def launching(self, step: int, decision: Decision | None) -> Callable[[], None] | None:
        """`step` is about to be launched, and its Go carried `decision`. What the engine thread is to do before."""

    def ended(self, step: int) -> None:
        """The results of `step` are in."""


class OneEpoch:
    """The placement never changes."""

    def launching(self, step: int, decision: Decision | None) -> Callable[[], None] | None:
        return None

    def ended(self, step: int) -> None:
        pass


class EngineThread:
    """The one thread that calls the engine. A loop hands it a step and hears of its end once a step, so an executor's
    two futures, locks and callbacks for each would be felt.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._orders: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="engine", daemon=True).start()

    def run(
        self, plan: StepPlan, step_tokens: list[int], before: Callable[[], None] | None = None
    ) -> "asyncio.Future[StepResult]":
        """Begin a step, after `before`; the future raises EngineError when it fails."""
        return self.call(lambda: self._step(plan, step_tokens, before))

    def _step(self, plan: StepPlan, step_tokens: list[int], before: Callable[[], None] | None) -> StepResult:
        if before is not None:
            before()
        self._engine.launch(plan, step_tokens)
        return self._engine.collect()

    def call(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Run `function` between steps; not at all if the future is cancelled before its turn."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._orders.put((future, function))
        return future

    def close(self) -> None:
        """On the event loop: what has not begun is cancelled, what runs is not waited for."""
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                if order is not None:
                    order[0].cancel()
        self._orders.put(None)

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            future, function = order
            if future.cancelled():
                continue
            result, failure = None, None
            try:
                result = function()
            except BaseException as error:  # for whoever awaits it
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody does
                future.get_loop().call_soon_threadsafe(_settle, future, result, failure)
            del order, future, function, result, failure  # a step's values go before the next comes


class EngineLoop:
    """A lead's loop. `run` ends by raising EngineError (a step failed or a rank is lost) or by cancellation."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        thread: EngineThread,
        sync: StepSync,
        role: Role,
        clock: Clock,
        epochs: Epochs | None = None,
    ) -> None:
        self.num_steps = 0
        self.num_void_steps = 0
        self.step_s = 0.0
        """Moving average of the duration of steps with work, seconds."""
        self._scheduler = scheduler
        self._thread = thread
        self._sync = sync
        self._role = role
        self._clock = clock
        self._epochs: Epochs = epochs or OneEpoch()
        self._work = asyncio.Event()
        self._held: StepPlan | None = None  # planned and not computed: the last Go came too early, or its step was void
        self._outcome: StepOutcome | None = None  # applied, not told yet

    def wake(self) -> None:
        """There may be work: a request came, or blocks did."""
        self._work.set()

    async def run(self) -> None:
        step = await self._sync.form(0)
        while True:
            try:
                plan, go = await self._agree(step)
            except GenerationOver:
                self._tell()
                step = await self._sync.form(step)
                continue
            self._sync.run_followers(plan, go.step_tokens, go.decision)
            before = self._epochs.launching(step, go.decision)
            started_s = self._clock.now_s()
            running = self._thread.run(plan, go.step_tokens, before)
            self._tell()
            result = await running
            self._epochs.ended(step)
            self.num_steps += 1
            step += 1
            if result.void:
                self.num_void_steps += 1
                self._held = plan.again() if plan.work else self._held
            elif plan.work:
                self._measure(plan, self._clock.now_s() - started_s)
                self._outcome = self._scheduler.complete(result)

    def _measure(self, plan: StepPlan, step_s: float) -> None:
        self.step_s = _average(self.step_s, step_s)
        num_tokens = plan.num_tokens
        if num_tokens > len(plan.work):
            speed = num_tokens / max(step_s, 1e-9)
            self._scheduler.prefill_tok_s = _average(self._scheduler.prefill_tok_s, speed)

    async def _agree(self, step: int) -> tuple[StepPlan, Go]:
        """Vote until the hub says go; return what to run. Raises GenerationOver when it will not say so any more."""
        plan = msgspec.structs.replace(self._held, step=step) if self._held else self._plan(step)
        self._held = plan if plan.work else None
        num_tokens = plan.num_tokens
        self._sync.vote(step, num_tokens)
        if not self._sync.has_go():
            self._tell()
        while not num_tokens and not self._sync.has_go():
            await self._go_or_work()
            if not self._sync.has_go():
                plan = self._plan(step)
                num_tokens = plan.num_tokens
                if num_tokens:
                    self._held = plan
                    self._sync.vote(step, num_tokens)
        go = await self._sync.go()
        assert go.step == step, (go.step, step)
        if go.step_tokens[self._sync.lead_index] != num_tokens:
            return StepPlan(step=step), go  # our raise crossed this Go, or no step may have work now: it stays held
        self._held = None
        return plan, go

    def _plan(self, step: int) -> StepPlan:
        """What this worker would do now; a plan without work needs no step."""
        self._work.clear()
        now_s = self._clock.now_s()
        if not self._scheduler.has_work(now_s):
            return StepPlan(step=step)
        plan = self._scheduler.plan(step, now_s)
        self._role.planned()
        preempted = [] if plan.work else self._scheduler.take_preempted()
        if preempted:  # no step will tell
            self._role.stepped(StepOutcome(preempted=preempted))
        return plan

    async def _go_or_work(self) -> None:
        go = asyncio.ensure_future(self._sync.wait_go())
        work = asyncio.ensure_future(self._work.wait())
        try:
            await asyncio.wait({go, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            go.cancel()
            work.cancel()

    def _tell(self) -> None:
        if self._outcome is not None:
            outcome, self._outcome = self._outcome, None
            self._role.stepped(outcome)


def _settle(future: "asyncio.Future[Any]", result: object, failure: BaseException | None) -> None:
    if future.done():  # cancelled: nobody wants to know
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(result)


def _average(average: float, value: float) -> float:
    return AVERAGE_DECAY * average + (1 - AVERAGE_DECAY) * value if average else value


async def follow(
    thread: EngineThread, sync: StepSync, on_tell: Callable[[bytes], None], epochs: Epochs | None = None
) -> None:
    """A follower's loop: run the lead's plans and hand on what it tells, in order. Raises EngineError."""
    epochs = epochs or OneEpoch()
    async for order in sync.orders():
        if isinstance(order, Run):
            step = order.plan.step
            await thread.run(order.plan, order.step_tokens, epochs.launching(step, order.decision))
            epochs.ended(step)
        elif isinstance(order, Formed):
            await sync.begin(order)
        else:
            on_tell(order.payload)
