"""What a stream's reader sleeps on: set by many, awaited by one, and patient without a timer for every wait.

A stream waits once for every token, and hardly ever for as long as it is willing to. So a timer that is running is left
as it is, and looks at the present deadline when it fires.
"""

import asyncio


class Wakeup:
    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None
        self._until_s: float | None = None  # how long the present wait is to last, on the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """There is something; it stays known until `clear`."""
        self._is_set = True
        self._end_wait()

    def clear(self) -> None:
        self._is_set = False

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Return when it is set, or after `timeout_s`; whether it is set. One waits at a time."""
        if self._is_set:
            return True
        assert self._waiter is None, "two wait for one wake-up"
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._until_s = None
        if timeout_s is not None:
            self._until_s = loop.time() + timeout_s
            if self._timer is not None and self._timer.when() > self._until_s:
                self.close()
            if self._timer is None:
                self._timer = loop.call_at(self._until_s, self._look, loop)
        try:
            await self._waiter
        finally:
            self._waiter = None
        return self._is_set

    def close(self) -> None:
        """Nobody waits any more: the timer goes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

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
