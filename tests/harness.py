"""A whole cluster in one process and on one event loop: real ranks, engines, control streams and router.

Each rank has its own engine and transfer threads; only processes are missing. At the end everything must be free.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from pd_cluster.config import ClusterConfig, load_config
from pd_cluster.engine.plan import TokenLogprobs
from pd_cluster.ids import RequestId, WorkerId, new_epoch
from pd_cluster.kv.layout import KvLayout
from pd_cluster.launch.meeting import Board, LocalRendezvous
from pd_cluster.launch.parts import BackendFactory, nixl_backend
from pd_cluster.launch.rank import RankServer
from pd_cluster.launch.roles import engine_shapes, rank_specs
from pd_cluster.launch.spec import RankSpec
from pd_cluster.model.source import open_model
from pd_cluster.request import FinishReason, Request, SamplingParams
from pd_cluster.transfer.contract import Arena, Backend
from pd_cluster.transfer.local import LocalBackend, LocalFabric
from router.app import Router
from router.attempt import Timings

CHECKPOINTS = Path(__file__).parent / "checkpoints"


def local_backends() -> BackendFactory:
    fabric = LocalFabric()

    def make(spec: RankSpec, layout: KvLayout, arena: Arena) -> Backend:
        return LocalBackend(fabric, spec.epoch, spec.rank, layout, arena)

    return make


def config_of(model: str | Path, **values: Any) -> ClusterConfig:
    """Small and exact by default; keys are dotted with __, as in `decode__data_parallel=2`."""
    defaults = {
        "model.path": str(model),
        "model.dtype": "float32",
        "kv.block_size": 16,
        "kv.num_blocks": 64,
        "router.http_port": 0,
    }
    return load_config(values=defaults | {key.replace("__", "."): value for key, value in values.items()})


class Output(Struct):
    """What one request brought."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: FinishReason | None
    timings: Timings


def request(token_ids: Sequence[int], request_id: str = "r", salt: str = "", **sampling: Any) -> Request:
    """Greedy for 32 tokens without a stop unless told otherwise."""
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True, "logprobs": 0}
    return Request(
        id=RequestId(request_id),
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(**(params | sampling)),
        cache_salt=salt,
    )


class LocalCluster:
    """`async with LocalCluster(config) as cluster`. `wrap` may put something around each rank's backend."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        nixl: bool = False,
        http: bool = False,
        wrap: Callable[[RankSpec, Backend], Backend] | None = None,
    ) -> None:
        self.config = config
        self.model = open_model(config.model.path, config.model.load)
        self.router = Router(config, self.model, http=http)
        make = nixl_backend if nixl else local_backends()

        def backend(spec: RankSpec, layout: KvLayout, arena: Arena) -> Backend:
            inner = make(spec, layout, arena)
            return wrap(spec, inner) if wrap else inner

        self._backend = backend
        self.ranks: list[RankServer] = []
        self._running: list[asyncio.Task[None]] = []
        self._num_requests = 0

    async def __aenter__(self) -> Self:
        await self.router.start()
        for shape in engine_shapes(self.config):
            board = Board()
            specs = rank_specs(shape, new_epoch(), self.config, ("", 0), 1)
            self.ranks += [
                RankServer(spec, LocalRendezvous(board), model=self.model, backend_factory=self._backend)
                for spec in specs
            ]
        await asyncio.gather(*(rank.start() for rank in self.ranks))
        self._running = [asyncio.create_task(rank.run()) for rank in self.ranks]
        leads = [rank for rank in self.ranks if rank.spec.is_lead]
        for lead in leads:
            report = lead._rendezvous._board.reports[lead.spec.rank]  # type: ignore[attr-defined]
            self.router.add_worker(report.control_address)
        await asyncio.wait_for(self.router.until_ready(len(leads)), 30)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.until_free()
                self.check_nothing_leaked()
        finally:
            await self.router.stop()
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await asyncio.gather(*(rank.stop() for rank in self.ranks))

    # ---- requests

    async def generate(self, made: Request, on_token: Callable[[int], None] | None = None) -> Output:
        output = Output([], [], None, Timings())
        async for delta in self.router.pipeline.generate(made):
            output.token_ids += delta.token_ids
            output.logprobs += delta.logprobs or []
            if on_token is not None:
                on_token(len(output.token_ids))
            if delta.finish is not None:
                assert delta.timings is not None
                output.finish, output.timings = delta.finish, delta.timings
        return output

    async def greedy(self, token_ids: Sequence[int], **sampling: Any) -> Output:
        self._num_requests += 1
        return await self.generate(request(token_ids, f"r{self._num_requests}", **sampling))

    async def all_greedy(self, prompts: Iterable[Sequence[int]], **sampling: Any) -> list[Output]:
        return list(await asyncio.gather(*(self.greedy(prompt, **sampling) for prompt in prompts)))

    # ---- what must hold at the end

    def leads(self, role: str | None = None) -> list[RankServer]:
        return [rank for rank in self.ranks if rank.spec.is_lead and role in (None, rank.spec.role)]

    def lead(self, worker_id: WorkerId) -> RankServer:
        return next(rank for rank in self.leads() if rank.spec.worker_id == worker_id)

    def is_free(self) -> bool:
        """No request, reservation, transfer or quarantine is left on either side."""
        return self.router.pipeline.idle() and all(
            lead.part is not None and lead.part.worker is not None and lead.part.worker.idle for lead in self.leads()
        )

    async def until_free(self, timeout_s: float = 10.0) -> float:
        """Wait until nothing is left; the seconds it took. Fails after `timeout_s`, saying who still holds what."""
        started_s = time.monotonic()
        while not self.is_free():
            if time.monotonic() - started_s > timeout_s:
                held = {lead.spec.worker_id: lead.part.worker.load() for lead in self.leads()}  # type: ignore[union-attr]
                raise AssertionError(f"pipeline idle: {self.router.pipeline.idle()}; {held}")
            await asyncio.sleep(0.005)
        return time.monotonic() - started_s

    def check_nothing_leaked(self) -> None:
        for lead in self.leads():
            assert lead.part is not None
            assert lead.part.scheduler is not None
            scheduler = lead.part.scheduler
            scheduler.check()
            scheduler.clear_prefix_cache()
            scheduler.take_cache_events()
            assert lead.engine is not None
            assert scheduler.load().num_free_blocks == lead.engine.num_blocks, lead.spec.worker_id

    def clear_prefix_caches(self, role: str) -> None:
        for lead in self.leads(role):
            assert lead.part is not None
            assert lead.part.scheduler is not None
            lead.part.scheduler.clear_prefix_cache()
