"""Commands of ours as a user runs them, and a look at what they leave behind.

Of the standard library alone, so that any test may import it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

MARK = "PD_CLUSTER_TEST_MARK"
ROOT = Path(__file__).parents[1]


class Command:
    """A running `pd-cluster ...` whose descendants can be told from all other processes."""

    def __init__(self, args: tuple[str, ...], errors: IO[bytes]) -> None:
        self.mark = uuid.uuid4().hex
        self._errors = Path(errors.name)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pd_cluster.cli.main", *args],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            start_new_session=True,
        )

    @property
    def stderr(self) -> str:
        """What it and its descendants wrote so far."""
        return self._errors.read_text()

    def family(self) -> list[int]:
        """Processes with the mark other than the command itself."""
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(path.name)
                if f"{MARK}={self.mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return [pid for pid in found if pid != self.process.pid]

    def ranks(self) -> list[int]:
        found = []
        for pid in self.family():
            with contextlib.suppress(OSError):  # it has just ended
                if b"pd_cluster.launch.rank" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def finish(self, timeout_s: float = 120.0) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, self.stderr

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextlib.contextmanager
def running(*args: str) -> Iterator[Command]:
    """Leaves nothing behind, even when a test fails; a test that passed finds nothing to clean."""
    with tempfile.NamedTemporaryFile(prefix="pd-cluster-test-") as errors:
        command = Command(args, errors)
        try:
            yield command
        finally:
            if command.process.poll() is None:
                command.process.kill()
            command.process.communicate()
            for pid in command.family():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.05)


def state(pid: int) -> str | None:
    """Of a process, as `ps` writes it; None when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def is_alive(pid: int) -> bool:
    """A zombie is dead; whoever inherited it has not looked yet."""
    return state(pid) not in (None, "Z")


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])
