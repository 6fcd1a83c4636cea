"""The role table: what a lead and a follower of each role are made of.

| role      | lead                                        | follower                |
|-----------|---------------------------------------------|-------------------------|
| prefill   | PrefillWorker, PushRank, loop, server       | PushRank                |
| decode    | DecodeWorker, FillRank, loop, server        | FillRank                |
| colocated | as decode, and it takes whole requests only | FillRank, never used    |
"""

from collections.abc import Callable

from msgspec import Struct

from decode_worker.fill_rank import FillNotice, FillRank
from decode_worker.fill_rank import decode_input as decode_fill_input
from decode_worker.fill_rank import encode as encode_fill
from decode_worker.service import DecodeWorker
from pd_cluster.clock import Clock
from pd_cluster.engine.loop import EngineLoop, EngineThread, Epochs
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.engine.step_sync import StepSync
from pd_cluster.engine.torch_engine import TorchEngine
from pd_cluster.ids import BlockId
from pd_cluster.kv.layout import KvLayout
from pd_cluster.launch.spec import RankSpec
from pd_cluster.messages import WorkerInfo
from pd_cluster.model.source import LoadedModel
from pd_cluster.parallel.placement_status import PlacementStatus
from pd_cluster.rpc.security import Security
from pd_cluster.rpc.server import ControlServer
from pd_cluster.transfer.checksum import checksum
from pd_cluster.transfer.contract import Arena, Backend, Event, RankEndpoint, SourceRecord, WorkerEndpoint
from pd_cluster.transfer.plan import written_ranges
from pd_cluster.transfer.thread import TransferThread
from prefill_worker.push_outputs import RankNotice
from prefill_worker.push_rank import PushRank
from prefill_worker.push_rank import decode_input as decode_push_input
from prefill_worker.push_rank import encode as encode_push
from prefill_worker.pushes import Pushes
from prefill_worker.service import PrefillWorker

HELD_FRACTION = 0.5
"""Prefill starts nothing new while requests that wait for their push hold more of its blocks than this."""

BackendFactory = Callable[[RankSpec, KvLayout, Arena], Backend]


def nixl_backend(spec: RankSpec, layout: KvLayout, arena: Arena) -> Backend:
    from pd_cluster.transfer.nixl import NixlBackend

    return NixlBackend(spec.worker_epoch, spec.rank, layout, arena)


class Part(Struct, kw_only=True, eq=False):
    """What runs around a rank's engine. `loop`, `server` and `worker` belong to leads."""

    on_events: Callable[[list[Event]], None]
    on_tell: Callable[[bytes], None]  # from the lead, at a follower
    tick: Callable[[], bool]  # look at deadlines; whether there are any
    loop: EngineLoop | None = None
    server: ControlServer | None = None
    worker: PrefillWorker | DecodeWorker | None = None
    scheduler: Scheduler | None = None


def follower_part(
    spec: RankSpec,
    engine: TorchEngine,
    sync: StepSync,
    transfers: TransferThread,
    endpoints: list[RankEndpoint],
    clock: Clock,
) -> Part:
    if spec.role == "prefill":
        push_rank = _push_rank(
            spec, engine, transfers, endpoints, clock, lambda notice: sync.tell_lead(encode_push(notice))
        )
        return Part(
            on_events=push_rank.on_events,
            on_tell=lambda payload: push_rank.apply(decode_push_input(payload)),
            tick=push_rank.tick,
        )
    fill_rank = _fill_rank(spec, engine, transfers, lambda notice: sync.tell_lead(encode_fill(notice)))
    return Part(
        on_events=fill_rank.on_events,
        on_tell=lambda payload: fill_rank.apply(decode_fill_input(payload)),
        tick=lambda: False,
    )


def lead_part(
    spec: RankSpec,
    model: LoadedModel,
    engine: TorchEngine,
    thread: EngineThread,
    sync: StepSync,
    transfers: TransferThread,
    endpoints: list[RankEndpoint],
    clock: Clock,
    epochs: Epochs | None = None,
    placement: Callable[[], PlacementStatus | None] = lambda: None,
) -> Part:
    scheduler = _scheduler(spec, model, engine)
    if spec.role == "prefill":
        prefill = PrefillWorker(
            scheduler=scheduler,
            sync=sync,
            clock=clock,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            expert_load=engine.expert_load,
            placement=placement,
        )
        push_rank = _push_rank(spec, engine, transfers, endpoints, clock, lambda notice: prefill.on_notice(0, notice))
        loop = EngineLoop(scheduler=scheduler, thread=thread, sync=sync, role=prefill, clock=clock, epochs=epochs)
        server = _server(spec, model, engine, endpoints, prefill)
        prefill.attach(loop, server, push_rank)
        return Part(
            on_events=push_rank.on_events,
            on_tell=_nobody,
            tick=push_rank.tick,
            loop=loop,
            server=server,
            worker=prefill,
            scheduler=scheduler,
        )
    decode = DecodeWorker(
        scheduler=scheduler,
        sync=sync,
        clock=clock,
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        block_size=engine.layout.block_size,
        lease_s=spec.config.kv.lease_s,
        expert_load=engine.expert_load,
        placement=placement,
    )
    fill_rank = _fill_rank(spec, engine, transfers, lambda notice: decode.on_notice(0, notice))
    loop = EngineLoop(scheduler=scheduler, thread=thread, sync=sync, role=decode, clock=clock, epochs=epochs)
    server = _server(spec, model, engine, endpoints, decode)
    decode.attach(loop, server, fill_rank)
    return Part(
        on_events=fill_rank.on_events,
        on_tell=_nobody,
        tick=decode.tick,
        loop=loop,
        server=server,
        worker=decode,
        scheduler=scheduler,
    )


def _nobody(payload: bytes) -> None:
    raise AssertionError("a lead is told nothing by another lead")


def _scheduler(spec: RankSpec, model: LoadedModel, engine: TorchEngine) -> Scheduler:
    section = spec.section
    return Scheduler(
        num_blocks=engine.num_blocks,
        block_size=engine.layout.block_size,
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=section.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        eos_token_ids=frozenset(model.eos_token_ids),
        prefix_cache=spec.config.kv.prefix_cache,
        max_held_blocks=int(engine.num_blocks * HELD_FRACTION),
        preempt="requeue" if spec.role == "colocated" else "evict",
        ttft_target_s=section.ttft_target_s or None,
    )


def _server(
    spec: RankSpec,
    model: LoadedModel,
    engine: TorchEngine,
    endpoints: list[RankEndpoint],
    handler: PrefillWorker | DecodeWorker,
) -> ControlServer:
    section = spec.section
    info = WorkerInfo(
        worker_id=spec.worker_id,
        engine_id=spec.engine_id,
        dp_rank=spec.dp_rank,
        can_prefill=spec.role != "decode",
        can_decode=spec.role != "prefill",
        model=model.name,
        tensor_parallel=spec.tensor_parallel,
        data_parallel=spec.data_parallel,
        num_blocks=engine.num_blocks,
        block_size=engine.layout.block_size,
        block_bytes=sum(endpoint.layout.block_bytes for endpoint in endpoints),
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=section.max_num_batched_tokens,
        experts_per_rank=engine.expert_slots(),
        endpoint=WorkerEndpoint(
            engine_id=spec.engine_id,
            epoch=spec.worker_epoch,
            dp_rank=spec.dp_rank,
            fingerprint=engine.fingerprint,
            ranks=endpoints,
        ),
        engine_epoch=spec.epoch if spec.is_elastic else None,
    )
    host = spec.control_host or spec.bind_host
    security = Security.from_config(spec.config.security)
    return ControlServer(handler, info, spec.worker_epoch, host=host, port=spec.control_port, security=security)


def _push_rank(
    spec: RankSpec,
    engine: TorchEngine,
    transfers: TransferThread,
    endpoints: list[RankEndpoint],
    clock: Clock,
    on_notice: Callable[[RankNotice], None],
) -> PushRank:
    read = engine.arena.read if spec.config.kv.verify else None
    pushes = Pushes(
        spec.tp_rank,
        [endpoint.layout for endpoint in endpoints],
        engine.fingerprint,
        clock,
        checksum=None
        if read is None
        else lambda ranges: checksum(read, [(copy.src_offset, copy.num_bytes) for copy in ranges]),
        late_write_s=spec.config.kv.late_write_s,
    )
    return PushRank(pushes, transfers, on_notice)


def _fill_rank(
    spec: RankSpec, engine: TorchEngine, transfers: TransferThread, on_notice: Callable[[FillNotice], None]
) -> FillRank:
    if not spec.config.kv.verify:
        return FillRank(spec.worker_epoch, engine.layout, transfers, on_notice, None)
    read, layout = engine.arena.read, engine.layout

    def verify(record: SourceRecord, block_ids: list[BlockId]) -> bool:
        ranges = written_ranges(layout, record.head_ids, block_ids, record.first_unit, record.num_units)
        return checksum(read, ranges) == record.checksum

    return FillRank(spec.worker_epoch, layout, transfers, on_notice, verify)
