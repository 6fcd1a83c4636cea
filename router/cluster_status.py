"""The cluster as one router sees it, as a message: its workers, its requests, and what it has counted."""

from collections import Counter
from importlib.metadata import version

from pd_cluster.ids import EngineId
from pd_cluster.metrics import PREFIX, RouterMetrics
from pd_cluster.parallel.placement_status import PlacementStatus
from pd_cluster.pb.v1 import cluster_pb2 as pb
from pd_cluster.request import Phase
from router.directory import Health, Worker
from router.flight import Flight
from router.members import Members, members
from router.pipeline import Pipeline
from router.placements import placements

VERSION = version("pd-cluster")

HEALTH = {Health.READY: pb.HEALTH_READY, Health.DRAINING: pb.HEALTH_DRAINING, Health.LOST: pb.HEALTH_LOST}
PHASES = {
    Phase.QUEUED: pb.PHASE_QUEUED,
    Phase.PREFILLING: pb.PHASE_PREFILLING,
    Phase.TRANSFERRING: pb.PHASE_TRANSFERRING,
    Phase.DECODING: pb.PHASE_DECODING,
}


def cluster_status(
    pipeline: Pipeline, *, router_id: str, model: str, uptime_s: float, max_requests: int
) -> pb.ClusterStatus:
    """`max_requests`: how many of the requests in flight to list, the oldest first."""
    flights = pipeline.flights
    phases = Counter(flight.phase for flight in flights)
    now_s = pipeline.now_s()
    workers = sorted(pipeline.directory.workers, key=_place)
    return pb.ClusterStatus(
        router_id=router_id,
        version=VERSION,
        model=model,
        uptime_s=uptime_s,
        ready=pipeline.ready,
        workers=[worker_status(worker) for worker in workers],
        phases=pb.PhaseCounts(
            queued=phases[Phase.QUEUED],
            prefilling=phases[Phase.PREFILLING],
            transferring=phases[Phase.TRANSFERRING],
            decoding=phases[Phase.DECODING],
        ),
        totals=_totals(pipeline.metrics),
        requests=[_request(flight, now_s) for flight in flights[:max_requests]],
        placements=[_placement(engine_id, status) for engine_id, status in placements(workers)],
        engines=[_engine(each) for each in members(workers)],
    )


def _place(worker: Worker) -> tuple[bool, str, int]:
    """Prefill first, then by name, whatever the order in which workers attached."""
    return not worker.info.can_prefill, worker.info.engine_id, worker.info.dp_rank


def _role(worker: Worker) -> "pb.Role.ValueType":
    if not worker.info.can_prefill:
        return pb.ROLE_DECODE
    return pb.ROLE_COLOCATED if worker.info.can_decode else pb.ROLE_PREFILL


def _engine(engine: Members) -> pb.EngineStatus:
    return pb.EngineStatus(
        engine_id=engine.engine_id,
        role=_role(engine.one),
        data_parallel=engine.one.info.data_parallel,
        tensor_parallel=engine.one.info.tensor_parallel,
        up=engine.up,
        leaving=engine.leaving,
        away=engine.away,
    )


def worker_status(worker: Worker) -> pb.WorkerStatus:
    info, load = worker.info, worker.load
    return pb.WorkerStatus(
        worker_id=info.worker_id,
        engine_id=info.engine_id,
        epoch=worker.epoch,
        role=_role(worker),
        health=HEALTH[worker.health],
        reason=worker.lost_reason if worker.health is Health.LOST else "",
        data_parallel=info.data_parallel,
        dp_rank=info.dp_rank,
        tensor_parallel=info.tensor_parallel,
        kv=pb.KvStatus(
            num_blocks=info.num_blocks,
            num_free_blocks=load.num_free_blocks,
            num_reserved_blocks=load.num_reserved_blocks,
            num_held_blocks=load.num_held_blocks,
            num_quarantined_blocks=load.num_quarantined_blocks,
            oldest_stranded_s=load.oldest_stranded_s,
            block_size=info.block_size,
            block_bytes=info.block_bytes,
        ),
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        num_running=load.num_running,
        max_num_seqs=info.max_num_seqs,
        num_context_tokens=load.num_context_tokens,
        num_pending_reservations=load.num_pending_reservations,
        num_pending_sends=load.num_pending_sends,
        step_s=load.step_s,
        prefill_tok_s=load.prefill_tok_s,
        num_steps=load.num_steps,
        max_model_len=info.max_model_len,
    )


def _request(flight: Flight, now_s: float) -> pb.RequestStatus:
    timings = flight.timings
    return pb.RequestStatus(
        request_id=flight.id,
        phase=PHASES[flight.phase],
        age_s=now_s - flight.submitted_s,
        num_prompt_tokens=flight.request.num_prompt_tokens,
        num_output_tokens=flight.num_output_tokens,
        num_retries=timings.num_retries,
        prefill_worker=timings.prefill_worker or "",
        decode_worker=timings.decode_worker or "",
    )


def _placement(engine_id: EngineId, status: PlacementStatus) -> pb.PlacementStatus:
    return pb.PlacementStatus(
        engine_id=engine_id,
        epoch=status.epoch,
        num_swaps=status.num_swaps,
        num_abandoned=status.num_abandoned,
        bytes_moved=status.bytes_moved,
        imbalance=status.imbalance,
        is_changing=status.is_changing,
        last_reason=status.last_reason,
        layers=[
            pb.LayerStatus(
                imbalance=layer.ratio,
                hottest=[pb.HotExpert(expert=e.expert, share=e.share, copies=e.copies) for e in layer.hottest],
            )
            for layer in status.layers
        ],
    )


def _totals(metrics: RouterMetrics) -> pb.Totals:
    values: Counter[str] = Counter()
    for family in metrics.registry.collect():
        if family.type in ("counter", "histogram"):
            for sample in family.samples:
                values[sample.name.removeprefix(PREFIX)] += sample.value  # type: ignore[assignment]
    return pb.Totals(
        num_requests=int(values["requests_total"]),
        num_retries=int(values["request_retries_total"]),
        num_prompt_tokens=int(values["prompt_tokens_total"]),
        num_cached_tokens=int(values["prompt_tokens_cached_total"]),
        num_output_tokens=int(values["generation_tokens_total"]),
        kv_transfer_bytes=int(values["kv_transfer_bytes_total"]),
        ttft_sum_s=values["time_to_first_token_seconds_sum"],
        ttft_count=int(values["time_to_first_token_seconds_count"]),
        itl_sum_s=values["inter_token_latency_seconds_sum"],
        itl_count=int(values["inter_token_latency_seconds_count"]),
    )
