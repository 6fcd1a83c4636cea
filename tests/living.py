"""A whole cluster of real processes, killed and stopped under running requests, and what must hold afterwards."""

import asyncio
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness import Output, request

from pd_cluster import env
from pd_cluster import messages as m
from pd_cluster.config import ClusterConfig, load_config
from pd_cluster.ids import BlockId, EngineId, Rank, RequestId, WorkerId
from pd_cluster.launch.cluster import Cluster
from pd_cluster.launch.lifecycle import EngineDead, EngineEvent
from pd_cluster.launch.process import ProcessLauncher
from pd_cluster.messages import WorkerLoad
from pd_cluster.request import Phase, Request
from router.attempt import Attempt, Link, Timings
from router.pipeline import Pipeline

STRANDED = (
    "num_waiting",
    "num_running",
    "num_reserved_blocks",
    "num_held_blocks",
    "num_quarantined_blocks",
    "num_pending_reservations",
    "num_pending_sends",
)


def config_of(model: str, **values: Any) -> ClusterConfig:
    """Exact, small, and slow enough at prefill to be caught at it; keys are dotted with __."""
    defaults = {
        "model.path": model,
        "model.dtype": "float32",
        "kv.block_size": 16,
        "kv.num_blocks": 128,
        "prefill.max_num_batched_tokens": 16,
        "router.http_port": 0,
        "router.grpc": False,
    }
    return load_config(values=defaults | {key.replace("__", "."): value for key, value in values.items()})


async def generate(
    pipeline: Pipeline,
    made: Request,
    on_token: Callable[[int], Awaitable[None]] | None = None,
    timeout_s: float | None = None,
) -> Output:
    """The whole answer; `on_token` is awaited with the number of tokens so far."""
    output = Output([], [], None, Timings())
    async for delta in pipeline.generate(made, timeout_s=timeout_s):
        output.token_ids += delta.token_ids
        output.logprobs += delta.logprobs or []
        if on_token is not None:
            await on_token(len(output.token_ids))
        if delta.finish is not None:
            assert delta.timings is not None
            output.finish, output.timings = delta.finish, delta.timings
    return output


class LivingCluster:
    """`async with LivingCluster(config) as cluster`: ranks are processes; at the end every block is accounted for."""

    def __init__(self, config: ClusterConfig) -> None:
        self.cluster = Cluster(config, on_event=self._on_event)
        self.events: list[EngineEvent] = []
        self.grants: list[list[BlockId]] = []
        self._held: set[str] = set()
        self._num_requests = 0

    async def __aenter__(self) -> Self:
        await self.cluster.__aenter__()
        self._push, self.pipeline.push = self.pipeline.push, self._on_push  # type: ignore[method-assign]
        return self

    def _on_push(self, link: Link, granted: m.Granted, deadline_s: float) -> None:
        self.grants.append(granted.block_ids)
        if granted.request_id in self._held:
            self.signal(signal.SIGSTOP, link.target.worker_id.partition("/")[0])
        self._push(link, granted, deadline_s)

    async def in_mid_transfer(self, request_id: str) -> Attempt:
        """Call it right after the request was made. Its decode rank stands still before the source has written
        anything, and all of the prompt's KV is on its way when this returns; `resume` lets the rank go on.
        """
        self._held.add(request_id)
        await self.in_phase(request_id, Phase.TRANSFERRING)
        self._held.discard(request_id)
        await asyncio.sleep(0.2)  # for the last writes to be posted
        attempt = self.pipeline._flights[RequestId(request_id)].attempt
        assert attempt is not None
        return attempt

    def resume(self, attempt: Attempt) -> None:
        assert attempt.decode is not None
        self.signal(signal.SIGCONT, attempt.decode.worker_id.partition("/")[0])

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.until_accounted()
        finally:
            await self.cluster.__aexit__(kind, error, trace)

    def _on_event(self, event: EngineEvent) -> None:
        self.events.append(event)

    @property
    def pipeline(self) -> Pipeline:
        return self.cluster.router.pipeline

    @property
    def num_workers(self) -> int:
        return sum(engine.shape.data_parallel for engine in self.cluster.supervisor.engines.values())

    @property
    def addresses(self) -> list[str]:
        """Of the control ports of all workers."""
        return [address for engine in self.cluster.supervisor.engines.values() for address in engine.life.addresses]

    def loads(self) -> list[WorkerLoad]:
        """As the workers last told them."""
        return [worker.load for worker in self.pipeline.directory.workers]

    def pid(self, engine: str, rank: int = 0) -> int:
        return self.cluster.supervisor.engines[EngineId(engine)].pids[Rank(rank)]

    def signal(self, number: signal.Signals, engine: str, rank: int = 0) -> float:
        """Send a signal to a rank; the time."""
        os.kill(self.pid(engine, rank), number)
        return time.monotonic()

    def kill(self, engine: str, rank: int = 0) -> float:
        return self.signal(signal.SIGKILL, engine, rank)

    def keep_logs(self) -> Path:
        """A folder with the ranks' logs as they are now, which outlives the cluster."""
        launcher = self.cluster.supervisor._launcher
        assert isinstance(launcher, ProcessLauncher)
        if env.log_dir() is not None:
            return launcher.logs
        kept = Path(tempfile.mkdtemp(prefix="pd-cluster-logs-"))
        return shutil.copytree(launcher.logs, kept, dirs_exist_ok=True)

    # ---- requests

    async def greedy(
        self,
        token_ids: Sequence[int],
        on_token: Callable[[int], Awaitable[None]] | None = None,
        request_id: str | None = None,
        **sampling: Any,
    ) -> Output:
        """Every request has a salt of its own, so that none finds its prefix cached."""
        self._num_requests += 1
        made = request(token_ids, request_id or f"r{self._num_requests}", salt=f"s{self._num_requests}", **sampling)
        return await generate(self.pipeline, made, on_token)

    def phase(self, request_id: str) -> Phase | None:
        flight = self.pipeline._flights.get(RequestId(request_id))
        return None if flight is None else flight.phase

    async def in_phase(self, request_id: str, phase: Phase, timeout_s: float = 30.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        await asyncio.sleep(0)  # a task made just now has not begun
        while (now := self.phase(request_id)) is not phase:
            assert now is not None, f"{request_id} ended before it was {phase}"
            assert time.monotonic() < deadline_s, f"{request_id} is {now}, wanted {phase}"
            await asyncio.sleep(0)

    async def in_mid_decode(self, request_id: str, num_tokens: int = 4, timeout_s: float = 30.0) -> None:
        """Wait until it has so many tokens; it must be going to have many more, for they may come in bursts."""
        await self.in_phase(request_id, Phase.DECODING, timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while True:
            flight = self.pipeline._flights.get(RequestId(request_id))
            assert flight is not None, f"{request_id} ended before anybody saw it decode"
            if flight.num_output_tokens >= num_tokens:
                return
            assert time.monotonic() < deadline_s, f"{request_id} has {flight.num_output_tokens} tokens"
            await asyncio.sleep(0)

    def decode_engine(self, request_id: str) -> str:
        """The engine that decodes the request, or will."""
        attempt = self.pipeline._flights[RequestId(request_id)].attempt
        assert attempt is not None
        assert attempt.decode is not None
        return attempt.decode.worker_id.partition("/")[0]

    # ---- what must hold afterwards

    async def until_healthy(self, timeout_s: float = 120.0) -> float:
        """Wait until every worker is there; the time when that was."""
        async with asyncio.timeout(timeout_s):
            await self.cluster.router.until_ready(self.num_workers)
        return time.monotonic()

    async def settled(self, worker_id: str, condition: Callable[[WorkerLoad], bool], timeout_s: float = 60.0) -> None:
        """Wait until a worker's load is so."""
        async with asyncio.timeout(timeout_s):
            while True:
                worker = self.pipeline.directory.get(WorkerId(worker_id))
                if worker is not None and condition(worker.load):
                    return
                await asyncio.sleep(0.01)

    async def until_accounted(self, timeout_s: float = 60.0) -> None:
        """Wait until fresh words of all workers say that nothing is held, reserved, quarantined or running."""
        await self.until_healthy()
        old = {worker.id: worker.load for worker in self.pipeline.directory.workers}
        deadline_s = time.monotonic() + timeout_s
        while True:
            loads = {worker.id: worker.load for worker in self.pipeline.directory.workers}
            left = {
                worker.id: describe(worker.load)
                for worker in self.pipeline.directory.workers
                if not is_free(worker.load, worker.info.num_blocks)
            }
            if self.pipeline.idle() and not left and all(loads[id_] is not old.get(id_) for id_ in loads):
                return
            assert time.monotonic() < deadline_s, f"pipeline idle: {self.pipeline.idle()}; left: {left}"
            await asyncio.sleep(0.02)

    def deaths(self, engine: str) -> int:
        return sum(isinstance(event, EngineDead) and event.engine_id == engine for event in self.events)


def longest_gap(times_s: list[float]) -> float:
    """How long a stream stood still at most; 0 when it had ended."""
    return max((after - before for before, after in itertools.pairwise(times_s)), default=0.0)


def is_free(load: WorkerLoad, num_blocks: int) -> bool:
    return load.num_free_blocks == num_blocks and not any(getattr(load, name) for name in STRANDED)


def describe(load: WorkerLoad) -> dict[str, int]:
    return {name: getattr(load, name) for name in (*STRANDED, "num_free_blocks")}
