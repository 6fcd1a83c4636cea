"""Workers without an engine behind real control servers, so that a router can be measured alone.

Each takes whole requests and adds one token to everything it runs at every step; steps have a fixed pace. They cost
little, run in the process that measures, and say what a worker says: a message a step, a heartbeat on its own timer.
"""

import asyncio
import contextlib
from typing import Self

from pd_cluster import messages as m
from pd_cluster.ids import EngineEpoch, EngineId, RequestId, RouterId, WorkerId
from pd_cluster.rpc.server import ControlServer

FIRST_TOKEN, NUM_TOKENS = 300, 128
"""Ids that are drawn in turn: plain words of the bundled model."""


class StubWorker:
    """Implements `ControlHandler`."""

    def __init__(self, index: int, model: str) -> None:
        engine = EngineId(f"colocated-{index}")
        info = m.WorkerInfo(
            worker_id=WorkerId(f"{engine}/0"),
            engine_id=engine,
            dp_rank=0,
            can_prefill=True,
            can_decode=True,
            model=model,
            tensor_parallel=1,
            data_parallel=1,
            num_blocks=1 << 20,
            block_size=64,
            block_bytes=1 << 16,
            max_model_len=1 << 20,
            vocab_size=512,
            max_num_seqs=1 << 16,
            max_num_batched_tokens=1 << 16,
        )
        self.server = ControlServer(self, info, EngineEpoch(f"{engine}-1"))
        self.num_running = 0
        self._running: dict[RouterId, dict[RequestId, int]] = {}

    def on_attach(self, router_id: RouterId) -> None:
        self._running[router_id] = {}

    def on_messages(self, router_id: RouterId, messages: list[m.ToWorkerMessage]) -> None:
        running = self._running[router_id]
        for message in messages:
            if isinstance(message, m.Generate):
                running[message.request.id] = message.request.num_output_tokens
            elif isinstance(message, m.Abort):
                running.pop(message.request_id, None)
        self.num_running = sum(map(len, self._running.values()))

    def on_detach(self, router_id: RouterId) -> None:
        self._running.pop(router_id, None)

    def load(self) -> m.WorkerLoad:
        return m.WorkerLoad(num_running=self.num_running, num_free_blocks=1 << 20, step_s=0.05, prefill_tok_s=1e5)

    def step(self) -> None:
        """One token for everything that runs."""
        for router_id, running in self._running.items():
            deltas = []
            for request_id, index in running.items():
                deltas.append(m.TokenDelta(request_id, index, [FIRST_TOKEN + index % NUM_TOKENS]))
                running[request_id] = index + 1
            if deltas:
                self.server.send(router_id, [m.Tokens(deltas=deltas)])


class StubWorkers:
    """`async with StubWorkers(8, step_s=0.1) as workers`: `workers.addresses` are theirs, `num_steps` grows."""

    def __init__(self, num_workers: int, *, step_s: float, model: str = "demo") -> None:
        self._workers = [StubWorker(index, model) for index in range(num_workers)]
        self._step_s = step_s
        self._stepping: asyncio.Task[None] | None = None
        self.addresses: list[str] = []
        self.num_steps = 0

    @property
    def num_running(self) -> int:
        return sum(worker.num_running for worker in self._workers)

    async def __aenter__(self) -> Self:
        self.addresses = [f"127.0.0.1:{await worker.server.start()}" for worker in self._workers]
        self._stepping = asyncio.create_task(self._step())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._stepping is not None
        self._stepping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._stepping
        await asyncio.gather(*(worker.server.stop(0) for worker in self._workers))

    async def _step(self) -> None:
        """Workers step one after the other, spread evenly over a step's time."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            for worker in self._workers:
                due_s += self._step_s / len(self._workers)
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                worker.step()
            self.num_steps += 1
            due_s = max(due_s, loop.time() - self._step_s)  # steps that were missed are not made up for
