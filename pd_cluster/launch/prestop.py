"""The door by which a container's preStop hook asks its process to drain: a Unix socket that only this user can open.

The hook sends one line, `drain SECONDS`, and waits for the answer: `drained`, or `busy` when the time was too short.
Nothing of this can be reached over the network.
"""

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from pd_cluster.errors import ConfigError, Unavailable

ANSWER_SLACK_S = 5.0
MAX_LINE_BYTES = 100
MAX_PATH_BYTES = 99
"""Of the 107 that a Unix socket's path may have; the rest is for the number of a process."""
READ_TIMEOUT_S = 5.0

Drain = Callable[[float], Awaitable[bool]]


def default_socket() -> Path:
    """One for each pid namespace and user: a container has one such process."""
    return Path(tempfile.gettempdir()) / f"pd-cluster-{os.getuid()}.sock"


class PrestopDoor:
    """`async with PrestopDoor(path, drain)`: serves while inside. `drain(timeout_s)` says whether all was finished.

    Whoever opens a door at the same path later takes it over.
    """

    def __init__(self, path: Path, drain: Drain) -> None:
        self._path = path
        self._drain = drain
        self._server: asyncio.Server | None = None
        self._inode: int | None = None

    async def __aenter__(self) -> Self:
        if len(os.fsencode(self._path)) > MAX_PATH_BYTES:
            raise ConfigError(f"the path of this socket may have {MAX_PATH_BYTES} bytes, got {self._path}")
        opened = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, opened, limit=MAX_LINE_BYTES)
            self._inode = opened.stat().st_ino
            opened.replace(self._path)  # at once, whoever else does the same
        except OSError as error:
            raise ConfigError(f"cannot open {self._path}: {error.strerror}; choose another with --socket") from error
        finally:
            os.umask(before)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                line = await reader.readline()
            word, _, seconds = line.decode("ascii", "replace").strip().partition(" ")
            if word != "drain" or not seconds.replace(".", "", 1).isdecimal():
                writer.write(b"unknown\n")
            else:
                writer.write(b"drained\n" if await self._drain(float(seconds)) else b"busy\n")
            await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):
            pass  # the hook is gone, or is not one
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def ask_to_drain(path: Path, timeout_s: float) -> bool:
    """The hook's side; blocks. Raises Unavailable when nobody answers."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s + ANSWER_SLACK_S)
            connection.connect(str(path))
            connection.sendall(f"drain {timeout_s:.3f}\n".encode())
            answer = connection.makefile("rb").readline(MAX_LINE_BYTES).strip()
    except OSError as error:
        raise Unavailable(f"no process of ours answers at {path}: {error}") from error
    if answer not in (b"drained", b"busy"):
        raise Unavailable(f"the process at {path} did not finish its answer")
    return answer == b"drained"
