"""Serves an ASGI app from the running event loop, by uvicorn with httptools; signals stay the process's own."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from pd_cluster.errors import PdClusterError

START_DEADLINE_S = 10.0
STOP_GRACE_S = 2.0


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
