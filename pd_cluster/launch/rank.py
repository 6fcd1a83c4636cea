"""What a rank process does: load its part of the model, meet the others of its engine, serve until told to stop.

    load model -> groups -> engine -> step sync -> transfer thread -> role (lead) -> control server (lead) -> report

A rank ends by itself when a step fails, its transfer thread breaks, its supervisor has given no sign for a lease, or a
rank is lost that it cannot go on without: any of its engine, but in an elastic one only those of its own DP rank (see
`member`). The supervisor replaces what ends together.
"""

import asyncio
import base64
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
import torch

from pd_cluster import log as logs
from pd_cluster.clock import SystemClock
from pd_cluster.config import EngineSection
from pd_cluster.cpus import bind
from pd_cluster.devices import CPU_MAX_KV_BYTES, CPU_MEMORY_FRACTION, GPU_MEMORY_FRACTION, device_name, narrow_to_one
from pd_cluster.engine.elastic_sync import ElasticSync
from pd_cluster.engine.loop import EngineThread, follow
from pd_cluster.engine.step_sync import StepSync
from pd_cluster.engine.torch_engine import TorchEngine, build_engine
from pd_cluster.errors import ConfigError, EngineError, PdClusterError, Unavailable
from pd_cluster.ids import Rank
from pd_cluster.launch.child import read_spec
from pd_cluster.launch.meeting import Rendezvous, StoreRendezvous
from pd_cluster.launch.member import Member
from pd_cluster.launch.parts import BackendFactory, Part, follower_part, lead_part, nixl_backend
from pd_cluster.launch.placements import Placements
from pd_cluster.launch.spec import LEASE_S, RankReport, RankSpec
from pd_cluster.launch.spec import LoadedModel as Loaded
from pd_cluster.model.source import LoadedModel, open_model
from pd_cluster.parallel.groups import Groups
from pd_cluster.parallel.one_sided import NixlDispatcher
from pd_cluster.parallel.placement import slots_to_lose_one
from pd_cluster.rpc.addresses import join_address
from pd_cluster.transfer.contract import Backend, Event, RankEndpoint
from pd_cluster.transfer.thread import TransferThread

log = logs.get_log(__name__)

TICK_S = 0.1
CALM_TICK_S = 0.5
"""While no deadline is near."""

LEASE_CHECK_S = 1.0
END_S = 5.0
"""For the word that its engine cannot go on; without it the supervisor sees this rank alone end."""

MEET_TIMEOUT_S = 300.0


def cpu(_: RankSpec) -> torch.device:
    return torch.device("cpu")


def own_device(spec: RankSpec) -> torch.device:
    """The GPU of this process, made current, or the CPU. Raises ConfigError."""
    num_seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(device_name(spec.section.device, num_seen, "prefill" if spec.role == "prefill" else "decode"))
    _use_device(device)
    return device


def _use_device(device: torch.device) -> None:
    """Make `device` the one that this thread, and libraries that it calls, work on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class RankServer:
    """One rank from start to stop, on the running event loop. Several may share a process."""

    def __init__(
        self,
        spec: RankSpec,
        rendezvous: Rendezvous,
        *,
        model: LoadedModel | None = None,
        backend_factory: BackendFactory = nixl_backend,
        choose_device: Callable[[RankSpec], torch.device] = cpu,
    ) -> None:
        self.spec = spec
        self.part: Part | None = None
        self.engine: TorchEngine | None = None
        self.placements: Placements | None = None
        self._rendezvous = rendezvous
        self._model = model
        self._backend_factory = backend_factory
        self._choose_device = choose_device
        self._clock = SystemClock()
        self._joins = False
        self._loaded: Loaded | None = None
        self._ending: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._exits = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Serve and report. Raises PdClusterError, reported too, when that cannot be; then call `stop`."""
        started_s = time.monotonic()
        spec = self.spec
        try:
            port = await self._start()
        except PdClusterError as error:
            self._rendezvous.report(RankReport(rank=spec.rank, pid=os.getpid(), error=error.info()))
            raise
        assert self.engine is not None
        self._rendezvous.report(
            RankReport(
                rank=spec.rank,
                pid=os.getpid(),
                control_address=None if port is None else join_address(spec.control_host or spec.bind_host, port),
                num_blocks=self.engine.num_blocks,
                block_bytes=self.engine.layout.block_bytes,
                load_s=time.monotonic() - started_s,
                model=self._loaded,
            )
        )
        log.info(
            "rank_serves",
            rank=spec.name,
            num_blocks=self.engine.num_blocks,
            kv_bytes=self.engine.arena.num_bytes,
            device=str(self.engine.arena.device),
            max_model_len=self.engine.max_model_len,
            load_s=round(time.monotonic() - started_s, 2),
        )

    async def _start(self) -> int | None:
        spec = self.spec
        model = self._model
        if model is None:
            model = await asyncio.to_thread(open_model, spec.config.model.path, spec.config.model.load)
        device = await asyncio.to_thread(self._choose_device, spec)
        if spec.is_elastic:  # the first roster is there before the first ranks are
            first = await asyncio.to_thread(self._rendezvous.roster_after, -1)
            self._joins = first.lives[spec.dp_rank] != spec.life
        groups = await asyncio.to_thread(self._connect_groups, model, device)
        self.engine = engine = await asyncio.to_thread(self._build_engine, model, groups, device)
        self._loaded = _loaded(model, engine)
        self._engine_thread = EngineThread(engine)
        self._exits.callback(self._engine_thread.close)
        self._sync = self._make_sync(model)
        self._exits.push_async_callback(self._sync.close)
        meeting = self._rendezvous.meeting()
        if model.config.moe is not None and spec.num_ranks > 1:
            self.placements = Placements(
                spec,
                engine,
                self._sync,
                self._clock,
                meeting,
                self._break,
                is_empty=self._joins,
                on_end=self._end_engine if spec.is_elastic else None,
            )
            self._exits.push_async_callback(self.placements.close)
        await self._sync.start(meeting, spec.bind_host, MEET_TIMEOUT_S)
        if self.placements is not None:
            await self.placements.start()
        self._transfers, endpoint = await self._start_transfers(engine)
        await meeting.publish(
            self._endpoint_key(spec.rank), base64.b64encode(msgspec.msgpack.encode(endpoint)).decode()
        )
        endpoints = await self._endpoints(meeting.lookup)
        member = await self._join_group(engine)
        if not spec.is_lead:
            self.part = follower_part(spec, engine, self._sync, self._transfers, endpoints, self._clock)
            return None
        self.part = lead_part(
            spec,
            model,
            engine,
            self._engine_thread,
            self._sync,
            self._transfers,
            endpoints,
            self._clock,
            None if self.placements is None else self.placements.epochs,
            lambda: None if self.placements is None else self.placements.status(),
        )
        if member is not None:
            member.worker = self.part.worker
        assert self.part.server is not None
        port = await self.part.server.start()
        self._exits.push_async_callback(self.part.server.stop, 0.2)
        return port

    async def run(self) -> None:
        """Step until cancelled, or until its group needs it no longer. Raises EngineError when it cannot go on."""
        assert self.part is not None
        part = self.part
        if part.loop is not None:
            stepping: Awaitable[None] = part.loop.run()
        else:
            epochs = None if self.placements is None else self.placements.epochs
            stepping = follow(self._engine_thread, self._sync, part.on_tell, epochs)
        tasks = [
            asyncio.ensure_future(work)
            for work in (stepping, self._tick(part), self._watch_lease(), asyncio.shield(self._ended))
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        await self._exits.aclose()

    # ---- parts of the start

    def _endpoint_key(self, rank: Rank) -> str:
        """Where a rank of this worker says how KV is written to it."""
        return f"endpoint/{self.spec.worker_epoch}/{rank}"

    def _make_sync(self, model: LoadedModel) -> StepSync:
        spec = self.spec
        if not spec.is_elastic:
            return StepSync(
                epoch=spec.epoch,
                rank=spec.rank,
                data_parallel=spec.data_parallel,
                tensor_parallel=spec.tensor_parallel,
                shared=model.config.moe is not None,
            )
        return ElasticSync(
            epoch=spec.epoch,
            life=spec.worker_epoch,
            rank=spec.rank,
            data_parallel=spec.data_parallel,
            tensor_parallel=spec.tensor_parallel,
            clock=self._clock,
        )

    async def _join_group(self, engine: TorchEngine) -> Member | None:
        """Of an elastic engine: be a member as soon as a roster says so."""
        if not isinstance(self._sync, ElasticSync):
            return None
        assert isinstance(engine.dispatcher, NixlDispatcher)
        assert self.placements is not None
        self._exits.callback(engine.dispatcher.close)
        member = Member(
            self.spec,
            self._rendezvous,
            engine.dispatcher,
            self._engine_thread,
            self._sync,
            self.placements,
            on_failure=self._break,
            on_left=self._left,
        )
        self._exits.push_async_callback(member.close)
        await member.start()
        return member

    def _connect_groups(self, model: LoadedModel, device: torch.device) -> Groups:
        """The ranks to compute with; DP ranks of a model without experts are strangers to each other."""
        spec = self.spec
        shared = model.config.moe is not None
        if spec.is_elastic and not shared:
            raise ConfigError(
                f"the nixl dispatcher is for models with experts, and {model.config.architecture} has none"
            )
        if spec.num_ranks == 1 or (not shared and spec.tensor_parallel == 1):
            return Groups()
        return Groups.connect(
            self._rendezvous.groups_store(),
            rank=spec.rank if shared else Rank(spec.tp_rank),
            tensor_parallel=spec.tensor_parallel,
            data_parallel=spec.data_parallel if shared else 1,
            device=device,
            timeout_s=MEET_TIMEOUT_S,
            name=f"{spec.worker_epoch}/groups" if shared else f"{spec.epoch}/groups/{spec.dp_rank}",
            elastic=spec.is_elastic,
        )

    def _build_engine(self, model: LoadedModel, groups: Groups, device: torch.device) -> TorchEngine:
        config, section = self.spec.config, self.spec.section
        on_gpu = device.type == "cuda"
        return build_engine(
            model.config,
            model.source,
            dtype=model.config.dtype if config.model.dtype == "auto" else config.model.dtype,
            block_size=section.block_size or config.kv.block_size,
            groups=groups,
            num_blocks=section.num_blocks or config.kv.num_blocks,
            max_model_len=config.model.max_model_len,
            max_num_batched_tokens=section.max_num_batched_tokens,
            memory_fraction=config.kv.memory_fraction or (GPU_MEMORY_FRACTION if on_gpu else CPU_MEMORY_FRACTION),
            kv_max_bytes=config.kv.max_bytes or (sys.maxsize if on_gpu else CPU_MAX_KV_BYTES),
            ranks_on_host=self.spec.ranks_on_gpu if on_gpu else self.spec.ranks_on_host,
            device=device,
            redundant_experts=section.redundant_experts,
            dispatcher=section.dispatcher if section.data_parallel > 1 else "auto",
            dispatch_dtype=section.dispatch_dtype if section.data_parallel > 1 else "auto",
            micro_batches=section.micro_batches,
            replica_choice=section.replica_choice,
            expert_slots_per_rank=_expert_slots(section, model),
            without_experts=self._joins,
            eos_token_ids=model.eos_token_ids,
            progress=lambda done, total: self._rendezvous.progress("weights", done, total),
        )

    async def _start_transfers(self, engine: TorchEngine) -> tuple[TransferThread, RankEndpoint]:
        loop = asyncio.get_running_loop()
        use_device = partial(_use_device, engine.arena.device)

        def connect() -> Backend:
            use_device()
            return self._backend_factory(self.spec, engine.layout, engine.arena.registered)

        backend = await asyncio.to_thread(connect)
        endpoint = backend.endpoint()

        def on_events(events: list[Event]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to tell
                loop.call_soon_threadsafe(self._on_events, events)

        def on_failure(error: BaseException) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._break, EngineError(f"the transfer thread failed: {error!r}"))

        thread = TransferThread(backend, on_events, on_failure, name=f"transfer-{self.spec.name}", on_start=use_device)
        thread.start()
        self._exits.push_async_callback(asyncio.to_thread, thread.stop)
        return thread, endpoint

    async def _endpoints(self, lookup: Callable[[str], Awaitable[str]]) -> list[RankEndpoint]:
        """Of all TP ranks of this worker, in order."""
        first = self.spec.dp_rank * self.spec.tensor_parallel
        ranks = [Rank(first + tp_rank) for tp_rank in range(self.spec.tensor_parallel)]
        found = [await lookup(self._endpoint_key(rank)) for rank in ranks]
        return [msgspec.msgpack.decode(base64.b64decode(text), type=RankEndpoint) for text in found]

    # ---- while it runs

    def _on_events(self, events: list[Event]) -> None:
        if self.part is not None:
            self.part.on_events(events)

    def _break(self, error: EngineError) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    def _end_engine(self, error: EngineError) -> None:
        """Of an elastic engine: without this rank the others cannot go on either."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._tell_end(error))

    async def _tell_end(self, error: EngineError) -> None:
        with contextlib.suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(END_S):
                await asyncio.to_thread(self._rendezvous.end_engine, error.message)
        self._break(error)

    def _left(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    async def _tick(self, part: Part) -> None:
        while True:
            has_deadlines = part.tick()
            await asyncio.sleep(TICK_S if has_deadlines else CALM_TICK_S)

    async def _watch_lease(self) -> None:
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            try:
                async with asyncio.timeout(LEASE_S):  # a partitioned store does not answer at all
                    held = await asyncio.to_thread(self._rendezvous.lease_held)
            except TimeoutError:
                held = False
            if not held:
                raise EngineError("the supervisor has given this rank up, or gave no sign for a lease: it ends")


def _loaded(model: LoadedModel, engine: TorchEngine) -> Loaded:
    path, placement = str(model.path), engine.placement
    if placement is None:
        return Loaded(path, engine.fingerprint.weights)
    return Loaded(path, engine.fingerprint.weights, placement.num_experts, placement.slots_per_rank)


def _expert_slots(section: EngineSection, model: LoadedModel) -> int | None:
    """Of an elastic engine enough to lose any one DP rank, unless the configuration says; None: what is needed."""
    moe = model.config.moe
    if section.expert_slots_per_rank is not None or moe is None or not section.elastic:
        return section.expert_slots_per_rank
    shape = section.data_parallel, section.tensor_parallel
    num_ranks = section.data_parallel * section.tensor_parallel
    needed = -(-(moe.num_experts + section.redundant_experts) // num_ranks)
    return max(needed, slots_to_lose_one(moe.num_experts, *shape) or 0)


async def serve_rank(spec: RankSpec, stopping: asyncio.Event) -> None:
    """Serve until `stopping`. Raises PdClusterError."""
    rendezvous = await asyncio.to_thread(StoreRendezvous, spec)
    server = RankServer(spec, rendezvous, choose_device=own_device)
    stopped: asyncio.Future[Any] = asyncio.ensure_future(stopping.wait())
    try:
        if not await _unless(stopped, server.start()):
            return
        gc.collect()
        gc.freeze()  # what a loaded rank holds lives as long as the rank: later collections need not walk it
        await _unless(stopped, server.run())
    finally:
        stopped.cancel()
        await server.stop()


async def _unless(stopped: "asyncio.Future[Any]", work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` to its end, or cancel it when `stopped` comes first; whether it ended by itself."""
    task: asyncio.Future[Any] = asyncio.ensure_future(work)
    await asyncio.wait({stopped, task}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False


def run_rank(spec: RankSpec, stop: threading.Event) -> None:
    """Serve on a new event loop until `stop` is set; blocks. Raises PdClusterError."""
    if spec.cpus is not None:
        bind(spec.cpus)
    narrow_to_one(spec.section.device, spec.rank, os.environ)
    import uvloop

    torch.set_num_threads(spec.threads)

    async def main() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=lambda: (stop.wait(), loop.call_soon_threadsafe(stopping.set)), name="stop", daemon=True
        ).start()
        await serve_rank(spec, stopping)

    # not uvloop.run: on the way out it waits for executor threads, which may wait for a rank that is gone
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(main())


def main() -> None:
    """The process launcher's rank: the spec comes on stdin, SIGTERM stops it."""
    spec = read_spec()
    logs.configure_logging(process=spec.name)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the supervisor's to handle
    try:
        run_rank(spec, stop)
    except PdClusterError as error:
        log.error("rank_failed", rank=spec.name, code=error.code, reason=error.message)
        sys.stderr.flush()
        os._exit(1)  # a step may still be running on its thread, waiting for a rank that is gone
    os._exit(0)


if __name__ == "__main__":
    main()
