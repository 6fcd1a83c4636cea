"""The one thread that calls the engine: calls run in their order, and whoever awaits them hears how they ended."""

import asyncio
import threading

import pytest

from pd_cluster.engine.loop import EngineThread
from pd_cluster.engine.plan import StepPlan, StepResult
from pd_cluster.errors import EngineError


class Engine:
    """Notes what it is told, and on which thread."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def launch(self, plan: StepPlan, step_tokens: list[int]) -> None:
        self.told += [threading.current_thread().name, plan.step, step_tokens]

    def collect(self) -> StepResult:
        return StepResult(step=1, sampled=[])


async def test_a_step_runs_after_what_comes_before_it_and_returns_its_result() -> None:
    engine = Engine()
    thread = EngineThread(engine)
    result = await thread.run(StepPlan(step=1), [3], lambda: engine.told.append("before"))
    assert result == StepResult(step=1, sampled=[])
    assert engine.told == ["before", "engine", 1, [3]]
    thread.close()


async def test_an_error_reaches_whoever_awaits_and_the_thread_goes_on() -> None:
    def fail() -> None:
        raise EngineError("broken")

    thread = EngineThread(Engine())
    failing, later = thread.call(fail), thread.call(lambda: 5)
    with pytest.raises(EngineError, match="broken"):
        await failing
    assert await later == 5
    thread.close()


async def test_what_is_cancelled_before_its_turn_never_runs_and_what_runs_is_left_to_end() -> None:
    thread, told, hold, begun = EngineThread(Engine()), [], threading.Event(), threading.Event()

    def held() -> None:
        begun.set()
        hold.wait(20)
        told.append("held")

    running, cancelled, last = thread.call(held), thread.call(lambda: told.append("cancelled")), thread.call(lambda: 1)
    await asyncio.to_thread(begun.wait, 20)
    cancelled.cancel()
    running.cancel()
    hold.set()
    assert await last == 1
    assert told == ["held"]
    thread.close()


async def test_closing_cancels_what_has_not_begun_and_ends_the_thread() -> None:
    thread, hold, begun, names = EngineThread(Engine()), threading.Event(), threading.Event(), []

    def held() -> threading.Thread:
        begun.set()
        hold.wait(20)
        return threading.current_thread()

    running, waiting = thread.call(held), thread.call(lambda: names.append("waiting"))
    await asyncio.to_thread(begun.wait, 20)
    thread.close()
    assert waiting.cancelled()
    hold.set()
    engine_thread = await running
    await asyncio.to_thread(engine_thread.join, 20)
    assert not engine_thread.is_alive()
    assert not names
