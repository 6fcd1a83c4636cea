"""A whole cluster in one process and on one event loop: real ranks, engines, control streams and router.

Each rank has its own engine and transfer threads; only processes are missing. At the end everything must be free.
"""

import asyncio
import functools
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from msgspec import Struct

from decode_worker.service import DecodeWorker
from pd_cluster.config import ClusterConfig, load_config
from pd_cluster.engine.plan import TokenLogprobs
from pd_cluster.ids import EngineEpoch, EngineId, RequestId, TransferId, WorkerId, new_epoch
from pd_cluster.kv.layout import KvLayout
from pd_cluster.launch import parts
from pd_cluster.launch.meeting import Board, LocalRendezvous
from pd_cluster.launch.parts import BackendFactory, nixl_backend
from pd_cluster.launch.rank import RankServer
from pd_cluster.launch.roles import EngineShape, engine_shapes, rank_specs
from pd_cluster.launch.spec import RankSpec
from pd_cluster.messages import WorkerLoad
from pd_cluster.model.source import open_model
from pd_cluster.parallel.roster import Roster
from pd_cluster.request import FinishReason, Phase, Request, SamplingParams
from pd_cluster.transfer.contract import Arena, Backend, Event, RankEndpoint, Write
from pd_cluster.transfer.faulty import Faults, FaultyBackend
from pd_cluster.transfer.local import LocalBackend, LocalFabric
from prefill_worker.pushes import Pushes
from router.app import Router
from router.attempt import Timings

CHECKPOINTS = Path(__file__).parent / "checkpoints"
NEAR_TIE = 1e-3
ELASTIC = {
    "decode__data_parallel": 4,
    "decode__dispatcher": "nixl",
    "decode__expert_slots_per_rank": 16,
    "decode__rebalance": "off",
}
"""For the demo model: a decode group whose 32 experts have room on any two of its members."""

Wrap = Callable[[RankSpec, Backend], Backend]


def local_backends() -> BackendFactory:
    fabric = LocalFabric()

    def make(spec: RankSpec, layout: KvLayout, arena: Arena) -> Backend:
        return LocalBackend(fabric, spec.worker_epoch, spec.rank, layout, arena)

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


def assert_same(output: Output, expected: Output) -> None:
    """Equal tokens, up to the first place where `expected` had a near-tie (it needs `logprobs` of 2 to know)."""
    assert len(output.token_ids) == len(expected.token_ids)
    for step, (ours, theirs) in enumerate(zip(output.token_ids, expected.token_ids, strict=True)):
        if ours != theirs:
            first, second = expected.logprobs[step].top_logprobs[:2]
            assert first - second < NEAR_TIE, (step, ours, theirs, first, second)
            return


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> float:
    """Look until `condition` holds; the seconds it took."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, "waited in vain"
        await asyncio.sleep(0.001)
    return time.monotonic() - started_s


def push_unit_by_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make prefill ranks write every 16 tokens as they are computed, so that short prompts take many writes."""
    monkeypatch.setattr(parts, "Pushes", functools.partial(Pushes, min_write_units=1))


class HoldingBackend:
    """Posts nothing while its hold is on, and forgets nothing: as with RDMA, what was posted cannot be recalled."""

    def __init__(self, inner: Backend, hold: "Hold") -> None:
        self._inner = inner
        self._hold = hold
        self._kept: list[Write] = []

    def endpoint(self) -> RankEndpoint:
        return self._inner.endpoint()

    def connect(self, peer: RankEndpoint) -> None:
        self._inner.connect(peer)

    def disconnect(self, agent_name: str) -> None:
        self._inner.disconnect(agent_name)

    def post(self, write: Write) -> None:
        if self._hold.on:
            self._kept.append(write)
            self._hold.num_kept += 1
        else:
            self._inner.post(write)

    def poll(self) -> list[Event]:
        if self._kept and not self._hold.on:
            kept, self._kept = self._kept, []
            for write in kept:
                self._inner.post(write)
        return self._inner.poll()

    def cancel(self, transfer_id: TransferId) -> None:
        self._inner.cancel(transfer_id)

    def close(self) -> None:
        self._inner.close()


class Hold:
    """A switch over the writes of all ranks: `LocalCluster(config, wrap=hold.wrap)`, then `hold.on = True`."""

    def __init__(self) -> None:
        self.on = False
        self.num_kept = 0

    def wrap(self, spec: RankSpec, inner: Backend) -> Backend:
        return HoldingBackend(inner, self)


class Faulty:
    """Faults around the backend of every rank, each with a seed of its own drawn from one."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self.backends: list[FaultyBackend] = []
        self._on, self._off = faults, Faults()
        self._seed = seed
        self.start()

    def wrap(self, spec: RankSpec, inner: Backend) -> Backend:
        backend = FaultyBackend(inner, self._now, self._seed * 1000 + len(self.backends))
        self.backends.append(backend)
        return backend

    def start(self) -> None:
        self._set(self._on)

    def stop(self) -> None:
        """No new faults; what was dropped stays dropped."""
        self._set(self._off)

    def _set(self, faults: Faults) -> None:
        self._now = faults
        for backend in self.backends:
            backend._faults = faults

    @property
    def num_injected(self) -> dict[str, int]:
        """By name of the fault, over all ranks."""
        counts: dict[str, int] = {}
        for name, num in itertools.chain.from_iterable(b.num_injected.items() for b in self.backends):
            counts[name] = counts.get(name, 0) + num
        return counts


class ElasticGroup:
    """What a supervisor does for an elastic engine, when a test tells it to."""

    def __init__(self, cluster: "LocalCluster", shape: EngineShape, lives: dict[int, EngineEpoch]) -> None:
        self.epoch = new_epoch()
        self.board = Board()
        self.generation = -1
        self._cluster = cluster
        self._shape = shape
        self._lives: dict[int, EngineEpoch | None] = dict(lives)
        self.issue()

    def issue(self, leaving: Iterable[int] = ()) -> int:
        """The next roster; its generation."""
        self.generation += 1
        lives = tuple(self._lives.values())
        self.board.issue(
            Roster(
                generation=self.generation,
                tensor_parallel=self._shape.tensor_parallel,
                lives=lives,
                leaving=frozenset(leaving),
            )
        )
        return self.generation

    def ranks(self, dp_rank: int) -> list[RankServer]:
        return [rank for rank in self._cluster.ranks if rank.spec.worker_epoch == self._lives[dp_rank]]

    @property
    def leads(self) -> list[RankServer]:
        return [self.ranks(dp_rank)[0] for dp_rank, life in self._lives.items() if life is not None]

    def drop(self, dp_rank: int) -> list[RankServer]:
        """Take a member off the roster, and tell nobody else; its ranks, which still run."""
        ranks = self.ranks(dp_rank)
        self._lives[dp_rank] = None
        self._cluster.give_up(ranks)
        self.issue()
        return ranks

    async def lose(self, dp_rank: int, release: Callable[[], None] = lambda: None) -> None:
        """End a member as if it had died: the others hear of it first. `release` lets its engine thread go on, if a
        test has stopped it somewhere.
        """
        ranks = self.drop(dp_rank)
        await self.formed()
        release()
        await self._cluster.bury_members(ranks)

    async def dismiss(self, dp_ranks: list[int], timeout_s: float = 30.0) -> str | None:
        """Let members leave; why the group refused, or None when they are gone."""
        generation = self.issue(dp_ranks)
        await until(lambda: generation in self.board.releases, timeout_s)
        refused = self.board.releases[generation]
        if refused is not None:
            self.issue()
            return refused
        ranks = [rank for dp_rank in dp_ranks for rank in self.ranks(dp_rank)]
        self._lives |= dict.fromkeys(dp_ranks)
        running = [self._cluster._running[rank] for rank in ranks]
        self._cluster.give_up(ranks)
        self.issue()
        await asyncio.wait_for(asyncio.gather(*running), timeout_s)  # they end by themselves, and in peace
        await self._cluster.bury_members(ranks)
        return None

    async def join(self, dp_rank: int) -> None:
        """A new life of that DP rank: it starts, reports, and is on the next roster."""
        assert self._lives[dp_rank] is None
        life = new_epoch()
        specs = rank_specs(self._shape, self.epoch, self._cluster.config, ("", 0), 1, {dp_rank: life})
        self.board.reports = {
            rank: report
            for rank, report in self.board.reports.items()
            if rank // self._shape.tensor_parallel != dp_rank
        }
        await self._cluster._start_ranks(specs, self.board)
        self._lives[dp_rank] = life
        self.issue()

    async def formed(self, timeout_s: float = 30.0) -> None:
        """Wait until all members compute together, and know of the latest roster."""

        def is_formed() -> bool:
            for lead in self.leads:
                generations = lead._sync.generations  # type: ignore[attr-defined]
                if generations.is_over or generations.roster.generation != self.generation:
                    return False
            return True

        await until(is_formed, timeout_s)

    async def placed(self, timeout_s: float = 30.0) -> None:
        """Wait until, besides, every member has experts."""
        await self.formed(timeout_s)
        size = self._shape.tensor_parallel

        def is_placed() -> bool:
            slots = [lead.engine.expert_slots() for lead in self.leads if lead.engine is not None]
            live = [lead.spec.rank + tp_rank for lead in self.leads for tp_rank in range(size)]
            return all(counts == slots[0] and all(counts[rank] for rank in live) for counts in slots)

        await until(is_placed, timeout_s)


class LocalCluster:
    """`async with LocalCluster(config) as cluster`. `wrap` may put something around each rank's backend."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        nixl: bool = False,
        http: bool = False,
        wrap: Wrap | None = None,
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
        self._stopped: list[RankServer] = []  # kept, so that a late write still finds their memory
        self._running: dict[RankServer, asyncio.Task[None]] = {}
        self._num_requests = 0
        self.groups: dict[EngineId, ElasticGroup] = {}

    async def __aenter__(self) -> Self:
        await self.router.start()
        await asyncio.gather(*(self._start_engine(shape) for shape in engine_shapes(self.config)))
        await asyncio.wait_for(self.router.until_ready(len(self.leads())), 60)
        return self

    async def _start_engine(self, shape: EngineShape) -> None:
        if not shape.elastic:
            await self._start_ranks(rank_specs(shape, new_epoch(), self.config, ("", 0), 1), Board())
            return
        lives = {dp_rank: new_epoch() for dp_rank in range(shape.data_parallel)}
        group = self.groups[shape.engine_id] = ElasticGroup(self, shape, lives)
        await self._start_ranks(rank_specs(shape, group.epoch, self.config, ("", 0), 1, lives), group.board)

    async def _start_ranks(self, specs: Sequence[RankSpec], board: Board) -> None:
        ranks = [
            RankServer(
                spec,
                LocalRendezvous(board, spec.worker_epoch, spec.rank),
                model=self.model,
                backend_factory=self._backend,
            )
            for spec in specs
        ]
        await asyncio.gather(*(rank.start() for rank in ranks))
        self.ranks += ranks
        self._running |= {rank: asyncio.create_task(rank.run()) for rank in ranks}
        for rank in ranks:
            if rank.spec.is_lead:
                self.router.add_worker(address_of(rank))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.until_free()
                self.check_nothing_leaked()
        finally:
            await self.router.stop()
            await self._stop(self.ranks)
            for group in self.groups.values():
                group.board.close()

    async def _stop(self, ranks: list[RankServer]) -> None:
        tasks = [self._running.pop(rank) for rank in ranks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(rank.stop() for rank in ranks))

    # ---- engines come and go

    def engine(self, engine_id: str) -> list[RankServer]:
        """Its running ranks, of every life that still runs."""
        return [rank for rank in self.ranks if rank.spec.engine_id == engine_id]

    async def kill(self, ranks: list[RankServer]) -> None:
        """End an engine's ranks as if they had died: their streams break, and nobody has said that they are dead.

        Only for engines of one rank: the others of a larger one would wait for it in a collective.
        """
        assert all(rank.spec.num_ranks == 1 for rank in ranks)
        self.ranks = [rank for rank in self.ranks if rank not in ranks]
        self._stopped += ranks
        await self._stop(ranks)

    def give_up(self, ranks: list[RankServer]) -> None:
        """They count no more."""
        self.ranks = [rank for rank in self.ranks if rank not in ranks]
        self._stopped += ranks

    async def bury_members(self, ranks: list[RankServer]) -> None:
        """End ranks of an elastic engine that were given up, and say that their life is over."""
        address, life = address_of(ranks[0]), ranks[0].spec.worker_epoch
        await self._stop(ranks)
        self.router.remove_worker(address)
        self.router.pipeline.engine_dead(life)

    def bury(self, ranks: list[RankServer]) -> None:
        """What the supervisor says once it has seen every process of an engine dead."""
        for rank in ranks:
            if rank.spec.is_lead:
                self.router.remove_worker(address_of(rank))
        self.router.pipeline.engine_dead(ranks[0].spec.epoch)

    async def start_engine(self, engine_id: str) -> None:
        """A new life of an engine."""
        shape = next(shape for shape in engine_shapes(self.config) if shape.engine_id == EngineId(engine_id))
        await self._start_engine(shape)
        leads = [rank for rank in self.ranks if rank.spec.is_lead]
        epochs = {lead.spec.worker_id: lead.spec.epoch for lead in leads}  # of the newest life
        directory = self.router.directory
        await until(lambda: {worker.id: worker.epoch for worker in directory.workers if worker.is_ready} == epochs, 30)

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

    async def in_phase(self, request_id: str, phase: Phase, timeout_s: float = 30.0) -> bool:
        """Wait until a request is in `phase`; False when it ended before."""
        pipeline = self.router.pipeline
        deadline_s = time.monotonic() + timeout_s
        while (flight := pipeline._flights.get(RequestId(request_id))) is not None:
            if flight.phase is phase:
                return True
            assert time.monotonic() < deadline_s, f"{request_id} is {flight.phase}, wanted {phase}"
            await asyncio.sleep(0)
        return False

    async def all_greedy(self, prompts: Iterable[Sequence[int]], **sampling: Any) -> list[Output]:
        return list(await asyncio.gather(*(self.greedy(prompt, **sampling) for prompt in prompts)))

    async def served(self, outputs: Iterable[Awaitable[Output]], quiet_s: float = 60.0) -> list[Output]:
        """All outputs, however long they take, as long as some token comes every `quiet_s`; fails when none does, and
        says where the requests stand.
        """
        tasks = [asyncio.ensure_future(output) for output in outputs]
        before, since_s = -1, time.monotonic()
        while not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=1.0)
            num_tokens = sum(flight.num_output_tokens for flight in self.router.pipeline.flights)
            progress = num_tokens + 1_000_000 * sum(task.done() for task in tasks)
            if progress != before:
                before, since_s = progress, time.monotonic()
            if any(task.done() and task.exception() for task in tasks) or time.monotonic() - since_s > quiet_s:
                where = self.where()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                errors = [task.exception() for task in tasks if not task.cancelled() and task.exception()]
                raise AssertionError(f"{errors or f'no token for {quiet_s:g} s'}\n{where}")
        return [task.result() for task in tasks]

    def where(self) -> str:
        """Where the requests in flight stand, by the router, and what each worker says."""
        now_s = self.router.pipeline.now_s()
        lines = []
        for flight in self.router.pipeline.flights:
            attempt = flight.attempt
            due_s = f"due in {flight.wake_s - now_s:.1f} s"
            if attempt is None:
                lines.append(f"{flight.id}: {flight.phase}, {flight.num_output_tokens} tokens, {due_s}")
                continue
            flags = [name for name in ("started", "prefilled", "adopted") if getattr(attempt, name)]
            flags += ["granted"] if attempt.granted_s is not None else []
            place = f"{attempt.prefill.worker_id} to {attempt.decode and attempt.decode.worker_id}"
            lines.append(
                f"{flight.id}: {flight.phase}, {flight.num_output_tokens} tokens, {attempt.wire_id} from {place}, "
                f"{' '.join(flags)}, {flight.timings.num_retries} retries, {due_s}"
            )
        for lead in self.leads():
            assert lead.part is not None
            assert lead.part.worker is not None
            assert lead.part.scheduler is not None
            scheduler, running = lead.part.scheduler, self._running[lead]
            lines.append(f"{lead.spec.worker_id}: {lead.part.worker.load()}")
            lines.append(
                f"  waiting {list(scheduler._waiting)}, running {list(scheduler._running)}, "
                f"{len(scheduler._steps)} steps under way, {len(scheduler._ending)} ending"
            )
            if isinstance(lead.part.worker, DecodeWorker):
                for reservation in lead.part.worker.reservations._all.values():
                    lines.append(f"  {reservation.request.id} {reservation.state}, filled {reservation.filled_ranks}")
            if running.done():
                lines.append(f"  it has ended: {'cancelled' if running.cancelled() else repr(running.exception())}")
        return "\n".join(lines)

    # ---- what must hold at the end

    def leads(self, role: str | None = None) -> list[RankServer]:
        leads = [rank for rank in self.ranks if rank.spec.is_lead and role in (None, rank.spec.role)]
        return sorted(leads, key=lambda lead: lead.spec.worker_id)

    def lead(self, worker_id: WorkerId) -> RankServer:
        return next(rank for rank in self.leads() if rank.spec.worker_id == worker_id)

    @property
    def addresses(self) -> list[str]:
        """Of all workers' control ports."""
        return [address_of(lead) for lead in self.leads()]

    def load(self, role: str) -> WorkerLoad:
        """Of the first worker of that role, as it would report it now."""
        worker = self.leads(role)[0].part.worker  # type: ignore[union-attr]
        assert worker is not None
        return worker.load()

    def unit_bytes(self, role: str = "decode") -> int:
        """KV bytes of 16 tokens over all ranks of a worker."""
        endpoint = self.leads(role)[0].part.server._info.endpoint  # type: ignore[union-attr]
        return sum(rank.layout.unit_bytes for rank in endpoint.ranks)  # type: ignore[union-attr]

    def is_free(self) -> bool:
        """No request, reservation, transfer or quarantine is left on either side, and every block is free."""
        return self.router.pipeline.idle() and all(_is_free(lead) for lead in self.leads())

    async def until_free(self, timeout_s: float = 30.0) -> float:
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


def _is_free(lead: RankServer) -> bool:
    part, engine = lead.part, lead.engine
    assert part is not None
    assert part.worker is not None
    assert part.scheduler is not None
    assert engine is not None
    return part.worker.idle and part.scheduler.load().num_free_blocks == engine.num_blocks


def address_of(lead: RankServer) -> str:
    report = lead._rendezvous._board.reports[lead.spec.rank]  # type: ignore[attr-defined]
    return str(report.control_address)
