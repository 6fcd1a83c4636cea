"""How long a client tries, and how long it waits between two tries."""

import random

from pd_cluster.clock import Clock

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


class Patience:
    """Of one call. A first round goes through all `num_routers` without waiting.

    A call that was never accepted gives up after one round (gRPC itself repeats each try of it); one that was accepted
    goes on until nothing has come for `resume_timeout_s` since it broke.
    """

    def __init__(self, clock: Clock, *, timeout_s: float, resume_timeout_s: float, num_routers: int) -> None:
        self._clock = clock
        self._deadline_s = clock.now_s() + timeout_s
        self._resume_timeout_s = resume_timeout_s
        self._num_routers = num_routers
        self._num_failures = 0  # since something came
        self._broke_s = 0.0

    def remaining_s(self) -> float:
        return self._deadline_s - self._clock.now_s()

    def progress(self) -> None:
        """Something came."""
        self._num_failures = 0

    def next_delay_s(self, *, begun: bool) -> float | None:
        """A try failed: seconds until the next, None to give up."""
        self._num_failures += 1
        if not begun:
            return 0.0 if self._num_failures < self._num_routers else None
        if self._num_failures == 1:
            self._broke_s = self._clock.now_s()
        elif self._clock.now_s() - self._broke_s >= self._resume_timeout_s:
            return None
        num_rounds, place = divmod(self._num_failures, self._num_routers)
        if place:
            return 0.0
        return min(MIN_BACKOFF_S * 2.0 ** min(num_rounds - 1, 10), MAX_BACKOFF_S) * random.uniform(0.8, 1.2)
