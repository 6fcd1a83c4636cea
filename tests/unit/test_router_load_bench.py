"""Streams of the router's measurement: one that cannot begin or has ended is said, and not counted as cheap."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable

import pytest

from pd_cluster.bench.router_load import RouterProcess, cpu_ms_per_step
from pd_cluster.bench.stub_workers import StubWorkers
from pd_cluster.errors import Unavailable

TOKEN = b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [1]}\n\n'


class Answering(RouterProcess):
    """Stands for a router: this very process."""

    @property
    def pid(self) -> int:
        return os.getpid()


def answered(*answers: bytes, then: Callable[[RouterProcess], Awaitable[None]], ends: asyncio.Event) -> None:
    """Run `then` against a server that gives the streams these answers, in turn, and ends them when told to."""

    async def run() -> None:
        left = list(answers)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(left.pop(0))
            await writer.drain()
            await ends.wait()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        router = Answering([])
        router.port = server.sockets[0].getsockname()[1]
        async with server:
            try:
                await then(router)
            finally:
                ends.set()
                await asyncio.gather(*router._streams, return_exceptions=True)

    asyncio.run(run())


def test_a_window_in_which_a_stream_ended_measures_nothing() -> None:
    ends = asyncio.Event()

    async def then(router: RouterProcess) -> None:
        await router.add_streams(2)
        workers = StubWorkers(1, step_s=0.01)
        assert await cpu_ms_per_step(router, workers, 0.02) >= 0
        ends.set()
        with pytest.raises(Unavailable, match="a stream is gone: the router ended it"):
            await cpu_ms_per_step(router, workers, 0.2)

    answered(TOKEN, TOKEN, then=then, ends=ends)


def test_a_stream_that_is_refused_says_so_at_once() -> None:
    async def then(router: RouterProcess) -> None:
        with pytest.raises(Unavailable, match="answered 503 Full"):
            await router.add_streams(2)

    ends = asyncio.Event()
    ends.set()
    answered(b"HTTP/1.1 503 Full\r\n\r\n", TOKEN, then=then, ends=ends)


def test_streams_to_a_router_that_is_gone_are_not_waited_for() -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        router = Answering([])
        router.port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        started_s = time.monotonic()
        with pytest.raises(Unavailable, match="cannot be reached"):
            await router.add_streams(3)
        assert time.monotonic() - started_s < 30
        await asyncio.gather(*router._streams, return_exceptions=True)

    asyncio.run(run())
