"""What a stream's reader sleeps on: it wakes when set, and after its patience, with one timer for many waits."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from router.turn import Turn
from router.wakeup import Wakeup


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the timers that were made."""

    num_timers = 0

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        self.num_timers += 1
        return super().call_at(when, callback, *args, **kwargs)


def run(body: Callable[[CountingLoop], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=CountingLoop) as runner:

        async def main() -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, CountingLoop)
            async with asyncio.timeout(20):
                await body(loop)

        runner.run(main())


def test_what_was_set_before_the_wait_counts_until_cleared() -> None:
    async def body(loop: CountingLoop) -> None:
        wakeup = Wakeup()
        wakeup.set()
        assert await wakeup.wait()
        assert await wakeup.wait(5.0)
        wakeup.clear()
        assert not await wakeup.wait(0.01)

    run(body)


def test_a_wait_ends_when_it_is_set() -> None:
    async def body(loop: CountingLoop) -> None:
        wakeup = Wakeup()
        loop.call_later(0.02, wakeup.set)
        assert await wakeup.wait()

    run(body)


def test_many_waits_share_one_timer_and_the_last_is_still_patient_enough() -> None:
    async def body(loop: CountingLoop) -> None:
        wakeup = Wakeup()
        before = loop.num_timers
        for _ in range(100):
            wakeup.clear()
            loop.call_soon(wakeup.set)
            assert await wakeup.wait(0.2)
            await asyncio.sleep(0)
        assert loop.num_timers == before + 1
        await asyncio.sleep(0.1)
        wakeup.clear()
        started_s = loop.time()
        assert not await wakeup.wait(0.2)
        assert loop.time() - started_s == pytest.approx(0.2, abs=0.15)
        assert loop.time() - started_s > 0.19
        wakeup.close()

    run(body)


def test_a_shorter_patience_than_the_running_timers_is_kept() -> None:
    async def body(loop: CountingLoop) -> None:
        wakeup = Wakeup()
        loop.call_soon(wakeup.set)
        assert await wakeup.wait(15.0)
        wakeup.clear()
        started_s = loop.time()
        assert not await wakeup.wait(0.02)
        assert loop.time() - started_s < 5.0
        wakeup.close()

    run(body)


def test_a_cancelled_wait_leaves_room_for_another() -> None:
    async def body(loop: CountingLoop) -> None:
        wakeup = Wakeup()
        waiting = asyncio.create_task(wakeup.wait(10.0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        loop.call_soon(wakeup.set)
        assert await wakeup.wait()
        wakeup.close()

    run(body)


def test_what_is_dealt_with_at_once_wakes_nobody_and_several_times_in_a_turn_are_one() -> None:
    async def body(loop: CountingLoop) -> None:
        turn = Turn()
        wakeups, dealt = [Wakeup(turn) for _ in range(3)], []

        def deal(index: int) -> bool:
            dealt.append(index)
            return True

        waits = [asyncio.create_task(wakeup.wait(30.0, partial(deal, index))) for index, wakeup in enumerate(wakeups)]
        await asyncio.sleep(0)
        for wakeup in (wakeups[2], wakeups[0], wakeups[2], wakeups[1], wakeups[0]):
            wakeup.set()
        assert dealt == []  # whoever sets is done first
        await asyncio.sleep(0)
        assert dealt == [2, 0, 1]
        await asyncio.sleep(0.01)
        assert not any(wait.done() for wait in waits)
        for wakeup, wait in zip(wakeups, waits, strict=True):
            wait.cancel()
            with pytest.raises(asyncio.CancelledError):
                await wait
            wakeup.set()  # nobody waits: it stays known
        await asyncio.sleep(0)
        assert dealt == [2, 0, 1]
        for wakeup in wakeups:
            assert await wakeup.wait(0.0, partial(deal, 9))
            wakeup.close()

    run(body)


def test_what_cannot_be_dealt_with_at_once_wakes_its_reader_and_so_does_an_error() -> None:
    async def body(loop: CountingLoop) -> None:
        def fail() -> bool:
            raise ValueError("of this stream")

        wakeup = Wakeup()
        loop.call_soon(wakeup.set)
        assert await wakeup.wait(30.0, lambda: False)
        wakeup.clear()
        loop.call_soon(wakeup.set)
        with pytest.raises(ValueError, match="of this stream"):
            await wakeup.wait(30.0, fail)
        wakeup.close()

    run(body)


def test_patience_begins_anew_with_what_was_dealt_with() -> None:
    async def body(loop: CountingLoop) -> None:
        wakeup, at_s = Wakeup(), []

        def deal() -> bool:
            at_s.append(loop.time())
            return True

        for delay_s in (0.05, 0.15, 0.25):
            loop.call_later(delay_s, wakeup.set)
        assert not await wakeup.wait(0.2, deal)
        assert len(at_s) == 3
        assert loop.time() - at_s[-1] > 0.19
        wakeup.close()

    run(body)
