"""A process of this host, named so that another process which gets the same id later is not taken for it."""

import os
import signal
from pathlib import Path
from typing import Self

from msgspec import Struct


class ProcessIdentity(Struct, frozen=True):
    pid: int
    started: int | None  # clock ticks between boot and start; None where /proc is missing

    @classmethod
    def own(cls) -> Self:
        return cls(os.getpid(), _stat(os.getpid())[1])

    def lives(self) -> bool:
        """Whether it can still run an instruction; a zombie cannot."""
        if self.started is None:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            return True
        state, started = _stat(self.pid)
        return started == self.started and state not in ("Z", "X")

    def kill(self) -> None:
        if self.lives():
            os.kill(self.pid, signal.SIGKILL)


def _stat(pid: int) -> tuple[str, int | None]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", None
    return fields[0], int(fields[19])
