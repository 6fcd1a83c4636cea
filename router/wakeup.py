"""What a stream's reader sleeps on: set by many, awaited by one, and patient without a timer for every wait.

A stream waits once for every token, and hardly ever for as long as it is willing to. So a timer that is running is left
as it is, and looks at the present deadline when it fires. And a reader that can mostly do its work at once need not
wake for it: it leaves what to do, which is done in the turn of the loop in which something came.
"""

import asyncio
from collections.abc import Callable

from router.turn import Turn


class Wakeup:
    """`turn`: shared by those that are often set together."""

    def __init__(self, turn: Turn | None = None) -> None:
        self._turn = turn or Turn()
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None
        self._at_once: Callable[[], bool] | None = None  # of the present wait
        self._is_due = False  # in this turn of the loop
        self._timeout_s: float | None = None
        self._until_s: float | None = None  # how long the present wait is to last, on the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """There is something; it stays known until `clear`, or until it was dealt with at once."""
        self._is_set = True
        if self._at_once is None:
            self._end_wait()
        elif not self._is_due:
            self._is_due = True
            self._turn.add(self._deal)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self, timeout_s: float | None = None, at_once: Callable[[], bool] | None = None) -> bool:
        """Return when it is set, or after `timeout_s`; whether it is set. One waits at a time.

        `at_once` deals with what has come and says whether all is done: then the wait goes on, for `timeout_s` from
        there. What it raises is raised here.
        """
        if self._is_set:
            return True
        assert self._waiter is None, "two wait for one wake-up"
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._at_once = at_once
        self._timeout_s, self._until_s = timeout_s, None
        if timeout_s is not None:
            self._until_s = loop.time() + timeout_s
            if self._timer is not None and self._timer.when() > self._until_s:
                self.close()
            if self._timer is None:
                self._timer = loop.call_at(self._until_s, self._look, loop)
        try:
            await self._waiter
        finally:
            self._waiter = self._at_once = None
        return self._is_set

    def close(self) -> None:
        """Nobody waits any more: the timer goes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _deal(self) -> None:
        self._is_due = False
        waiter, at_once = self._waiter, self._at_once
        if waiter is None or at_once is None or waiter.done():
            return  # whoever waited is awake, and finds it set
        self._is_set = False
        try:
            is_done = at_once()
        except Exception as error:  # its owner is who waits
            if not waiter.done():
                waiter.set_exception(error)
            return
        if not is_done:
            self._is_set = True
            self._end_wait()
        elif self._timeout_s is not None:
            self._until_s = waiter.get_loop().time() + self._timeout_s

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None or self._until_s is None:
            return  # the next wait that has a deadline brings a new one
        if loop.time() >= self._until_s:
            self._end_wait()
        else:
            self._timer = loop.call_at(self._until_s, self._look, loop)

    def _end_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
