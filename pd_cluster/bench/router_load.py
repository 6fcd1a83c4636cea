"""A router process under a steady load: streams of tokens from workers without engines, and its CPU time meanwhile.

The router is `pd-cluster router` in a process of its own; workers and clients are in this one and do not count.
"""

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Self

from pd_cluster.bench.completions import streamed
from pd_cluster.bench.stub_workers import StubWorkers
from pd_cluster.errors import Unavailable

START_TIMEOUT_S = 60.0
STOP_S = 10.0
MAX_TOKENS = 1_000_000
"""Streams are ended by their clients."""


def cpu_ns(pid: int) -> int:
    """CPU time of a process and its living threads so far, from the scheduler's own clock."""
    total = 0
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            total += int((path / "schedstat").read_text().split()[0])
    return total


class RouterProcess:
    """`async with RouterProcess(addresses) as router` once HTTP listens; `port` is where. Raises Unavailable."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "pd_cluster.cli.main", "router", "--http-port", "0"]
        self._command += ["--discover", f"static:{','.join(addresses)}", "--drain-timeout", "0"]
        self._command += ["--set", "router.grpc=false", "--set", "router.max_queue=100000"]
        self._num_workers = len(addresses)
        self._streams: list[asyncio.Task[None]] = []
        self._draining: asyncio.Task[None] | None = None
        self.port = 0
        self.num_tokens = 0

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._until_ready()
        except BaseException as error:
            await self._stop()
            if isinstance(error, TimeoutError):
                raise Unavailable(f"the router was not ready within {START_TIMEOUT_S:g} s") from None
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = self._streams if self._draining is None else [*self._streams, self._draining]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def add_streams(self, count: int) -> None:
        """Open that many more streams; returns when each has had a token. Raises Unavailable when one cannot."""
        first = [asyncio.get_running_loop().create_future() for _ in range(count)]
        base = len(self._streams)
        self._streams += [asyncio.create_task(self._stream(base + index, future)) for index, future in enumerate(first)]
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.gather(*first)
        except TimeoutError:
            raise Unavailable(f"a stream had no token within {START_TIMEOUT_S:g} s") from None

    def check(self) -> None:
        """Raises Unavailable when a stream is gone: what was measured would be the cost of fewer."""
        for task in self._streams:
            if task.done():
                raise Unavailable(f"a stream is gone: {task.exception()}")

    async def _until_ready(self) -> None:
        assert self._process.stderr is not None
        num_attached = 0
        lines: list[str] = []
        while not self.port or num_attached < self._num_workers:
            line = (await self._process.stderr.readline()).decode(errors="replace")
            if not line:
                raise Unavailable("the router did not start: " + "".join(lines[-5:]).strip())
            lines.append(line)
            if found := re.search(r"http_listening .*port=(\d+)", line):
                self.port = int(found[1])
            num_attached += "worker_attached" in line
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        assert self._process.stderr is not None
        while await self._process.stderr.read(1 << 16):
            pass

    async def _stream(self, index: int, first: "asyncio.Future[None]") -> None:
        asked = {
            "model": "demo",
            "prompt": [1, 300 + index % 100, 301 + index // 100],
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
        }
        try:
            async with streamed(f"http://127.0.0.1:{self.port}", asked) as reader:
                while data := await reader.read(1 << 16):
                    num_events = data.count(b'"choices"')
                    self.num_tokens += num_events
                    if num_events and not first.done():
                        first.set_result(None)
            raise Unavailable("the router ended it")
        except (OSError, Unavailable) as error:
            if not first.done():
                first.set_exception(error)
            raise

    async def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def routed(num_workers: int, step_s: float) -> AsyncIterator[tuple[RouterProcess, StubWorkers]]:
    async with StubWorkers(num_workers, step_s=step_s) as workers, RouterProcess(workers.addresses) as router:
        yield router, workers


async def cpu_ms_per_step(router: RouterProcess, workers: StubWorkers, window_s: float) -> float:
    """CPU time of the router while every stream gets one token, over a window of steps. Raises Unavailable when one
    ends.
    """
    await asyncio.sleep(min(0.5, window_s / 2))  # until the streams' beginnings are over
    before, steps = cpu_ns(router.pid), workers.num_steps
    await asyncio.sleep(window_s)
    spent_ns, num_steps = cpu_ns(router.pid) - before, workers.num_steps - steps
    router.check()
    return spent_ns / 1e6 / max(num_steps, 1)
