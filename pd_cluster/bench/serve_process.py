"""`pd-cluster serve` on a free port in a process of its own, for as long as something is measured."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from pd_cluster.errors import Unavailable

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0


class ServeProcess:
    """A context manager; inside, `url` is where it serves and `pid` its router's process."""

    def __init__(self, arguments: list[str]) -> None:
        self.url = ""
        self._arguments = arguments
        self._lines: deque[str] = deque(maxlen=50)

    def __enter__(self) -> "ServeProcess":
        """Returns when it serves. Raises Unavailable, with its last lines, when it does not."""
        command = [sys.executable, "-m", "pd_cluster.cli.main", "serve", "--http-port", "0", *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        served = threading.Event()
        threading.Thread(target=self._read, args=(served,), daemon=True).start()
        served.wait(START_TIMEOUT_S)
        if not self.url:
            self._process.kill()
            self._process.wait()
            raise Unavailable("the server did not start: " + "".join(list(self._lines)[-5:]))
        return self

    def _read(self, served: threading.Event) -> None:
        """To its end, so that it never waits for a reader."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if not self.url and (found := re.search(r"served at (http://[\w.:]+)", line)):
                self.url = found[1]
                served.set()
        served.set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for each in found:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


@contextlib.contextmanager
def paused(pids: Iterable[int]) -> Iterator[None]:
    """Stop these processes and their descendants for as long as something else is measured: idle servers may spin."""
    stopped = [each for pid in pids for each in family(pid)]
    try:
        for pid in stopped:
            _signal(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in stopped:
            _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def rank_pids(pid: int) -> list[int]:
    """The processes of the ranks that a `serve` started, by the process launcher."""
    return [each for each in family(pid) if b"pd_cluster.launch.rank" in Path(f"/proc/{each}/cmdline").read_bytes()]
