"""Time as a parameter: the system's clock in production, a fake one in tests and in the simulator."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything, and only in this process."""


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()


class FakeClock:
    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now_s += seconds
