"""Streams over an elastic group of processes, while members of it are lost; with `LivingCluster`."""

import asyncio
import os
import time
from typing import Any

from harness import ELASTIC, Output
from living import LivingCluster, config_of, describe, longest_gap

from pd_cluster.config import ClusterConfig
from pd_cluster.ids import RequestId
from pd_cluster.messages import WorkerLoad

MAX_WAIT_S = float(os.environ.get("PD_CLUSTER_MAX_WAIT_S", "10"))
"""That any stream may stand still, on whatever machine tests run; 2 s on a quiet one."""

WHY_NOT = None if "PD_CLUSTER_LOSSES" in os.environ else "takes minutes of several busy processes: make losses"
"""Losses of processes are for `make losses`; `make test` loses members within one process, and one rank under load."""

NUM_STREAMS = 8
NUM_TOKENS = 200
WITHIN_S = 60.0
"""For the next token of any stream: all of them hang when none comes for so long."""


def prompt_of(number: int, length: int = 32) -> list[int]:
    return [3 + (number * 17 + i * i + 5 * i) % 500 for i in range(length)]


def elastic(**values: Any) -> ClusterConfig:
    return config_of(values.pop("model", "demo"), launch__max_restarts=1000, **ELASTIC | values)


class Streams:
    """Requests under way, and when their tokens came."""

    def __init__(self, cluster: LivingCluster) -> None:
        self._cluster = cluster
        self._names: list[str] = []
        self._times_s: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        self._running = [asyncio.ensure_future(self._stream(cluster, number)) for number in range(NUM_STREAMS)]

    async def _stream(self, cluster: LivingCluster, number: int) -> Output:
        async def on_token(_num_tokens: int) -> None:
            self._times_s[number].append(time.monotonic())

        name = f"stream-{number}-{time.monotonic()}"
        self._names.append(name)
        return await cluster.greedy(prompt_of(number), on_token, name, max_tokens=NUM_TOKENS)

    async def begun(self) -> None:
        async with asyncio.timeout(60):
            while any(len(times) < 20 for times in self._times_s):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def ended(self) -> list[Output]:
        """Fails when streams hang, and says where; the ranks' logs are kept then."""
        running, looked_s = set(self._running), time.monotonic()
        while running:
            done, running = await asyncio.wait(running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            if any(task.exception() is not None for task in done):
                break
            latest_s = max([looked_s, *(times[-1] for times in self._times_s if times)])
            if running and time.monotonic() - latest_s > WITHIN_S:
                report = self._report()
                for task in running:
                    task.cancel()
                await asyncio.wait(running)
                raise AssertionError(f"{len(running)} streams got no token for {WITHIN_S:.0f} s\n{report}")
        return list(await asyncio.gather(*self._running))

    def _report(self) -> str:
        now_s = time.monotonic()
        lines = []
        for name, at_worker, times in zip(self._names, self.where(), self._times_s, strict=True):
            last = f", the last {now_s - times[-1]:.1f} s ago" if times else ""
            lines.append(f"{name}: {self._cluster.phase(name)} at {at_worker}, {len(times)} tokens{last}")
        for worker in self._cluster.pipeline.directory.workers:
            lines.append(f"{worker.id}: ready {worker.is_ready}, {describe(worker.load)}, {worker.load.placement}")
        return "\n".join([*lines, f"logs: {self._cluster.keep_logs()}"])

    def where(self) -> list[str | None]:
        """The worker that decodes each stream now."""
        flights = self._cluster.pipeline._flights
        found = [flights.get(RequestId(name)) for name in self._names]
        attempts = [None if flight is None else flight.attempt for flight in found]
        return [None if attempt is None or attempt.decode is None else attempt.decode.worker_id for attempt in attempts]

    def waits_s(
        self, worker_id: str, where: list[str | None], since_s: float, outputs: list[Output]
    ) -> tuple[list[float], list[float]]:
        """How long each stream stood still at most since that worker was lost: of streams that were elsewhere, and did
        not move, and of its own, each of which was resumed once.
        """
        stayed: list[float] = []
        moved: list[float] = []
        for at_worker, times, output in zip(where, self._times_s, outputs, strict=True):
            wait_s = longest_gap([since_s, *(at for at in times if at > since_s)])
            assert output.timings.num_retries == (at_worker == worker_id), (at_worker, output.timings)
            (moved if at_worker == worker_id else stayed).append(wait_s)
        return stayed, moved


async def until_joined(cluster: LivingCluster, dp_rank: int) -> None:
    """Wait until a new member was given experts: first it takes over what holds, then it is part of a change."""

    def has_joined(load: WorkerLoad) -> bool:
        placement = load.placement
        return placement is not None and placement.num_swaps > 1 and not placement.is_changing

    await cluster.settled(f"decode-0/{dp_rank}", has_joined, 60.0)


def ids_of(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]
