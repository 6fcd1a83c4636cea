"""What is left to do in this turn of the event loop: one callback for all, however many streams a step has fed.

A worker's message brings a token to each of many streams. Their readers run after all of it has been taken in, one
after the other, so that no reader sees half a step and none costs a task of its own.
"""

import asyncio
from collections.abc import Callable


class Turn:
    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def add(self, run: Callable[[], None]) -> None:
        """Call `run`, which must not raise, once this callback or task has given the loop back."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(run)

    def _run(self) -> None:
        due, self._due = self._due, []
        for run in due:
            run()
