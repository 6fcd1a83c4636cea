"""Serves an ASGI app from the running event loop, by uvicorn with httptools; signals stay the process's own.

ASGI sends by a coroutine that checks and counts at every part of a body. An answer that is many small parts may write
them to its `Socket` instead, once it has begun the ASGI way.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pd_cluster.errors import PdClusterError

START_DEADLINE_S = 10.0
STOP_GRACE_S = 2.0


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Socket:
    """The client's socket, for parts of an answer that has begun and is chunked."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def writable(self) -> bool:
        """Whether the client is there and takes what it is sent: little of it waits in our memory."""
        return not (self._flow.write_paused or self._cycle.disconnected)

    def write(self, body: bytes) -> None:
        """A part that is neither empty nor the last."""
        self._write(b"%x\r\n%b\r\n" % (len(body), body))


def socket_of(send: Send) -> Socket | None:
    """The socket behind the `send` of an answer that has begun; None when it is not this server's own."""
    cycle = getattr(send, "__self__", None)
    return Socket(cycle) if isinstance(cycle, RequestResponseCycle) and cycle.chunked_encoding else None


class HttpServer:
    """One listener on a bound socket."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._listener = listener
        self.port: int = listener.getsockname()[1]
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(STOP_GRACE_S),
                backlog=2048,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="http")
        async with asyncio.timeout(START_DEADLINE_S):
            while not self._server.started:
                if self._task.done():
                    self._task.result()
                    raise PdClusterError("the HTTP server ended before it had started")
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """End open connections after a short grace."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None
