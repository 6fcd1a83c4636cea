"""What the client returns: plain typed values, made from the messages of the gRPC API."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TypeVar

from msgspec import Struct

from pd_cluster.pb.v1 import cluster_pb2, inference_pb2
from pd_cluster.request import FinishReason, Phase, TokenLogprobs

FINISH = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}

T = TypeVar("T", bound=Struct)


class Usage(Struct, frozen=True, kw_only=True):
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in a prefix cache
    num_output_tokens: int


class Timings(Struct, frozen=True, kw_only=True):
    """Where the time went, in seconds, as the router that ended the request saw it."""

    queue_s: float
    prefill_s: float
    kv_transfer_s: float
    kv_transfer_bytes: int
    ttft_s: float
    tpot_s: float
    decode_s: float
    e2e_s: float
    num_retries: int
    num_preemptions: int
    prefill_worker: str
    decode_worker: str


class Chunk(Struct, frozen=True, kw_only=True):
    """What is new of a stream. The last chunk has the finish reason, and maybe text that was held back."""

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None


class Completion(Struct, frozen=True, kw_only=True):
    """A whole answer."""

    request_id: str
    model: str
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # one for each token, when asked for
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    num_resumes: int  # how often it went on at another connection


class Model(Struct, frozen=True, kw_only=True):
    name: str
    max_model_len: int
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool
    created_unix_s: int


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class Health(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class KvStatus(Struct, frozen=True, kw_only=True):
    num_blocks: int
    num_free_blocks: int
    num_reserved_blocks: int
    num_held_blocks: int
    num_quarantined_blocks: int
    oldest_stranded_s: float
    block_size: int
    block_bytes: int

    @property
    def usage(self) -> float:
        """Share of the blocks that cannot be had."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


class WorkerStatus(Struct, frozen=True, kw_only=True):
    worker_id: str
    engine_id: str
    epoch: str
    role: Role
    health: Health
    reason: str  # why it was lost
    data_parallel: int
    dp_rank: int
    tensor_parallel: int
    kv: KvStatus
    num_waiting: int
    num_waiting_tokens: int
    num_running: int
    max_num_seqs: int
    num_context_tokens: int
    num_pending_reservations: int
    num_pending_sends: int
    step_s: float
    prefill_tok_s: float
    num_steps: int
    max_model_len: int

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or moves there."""
        stranded = self.kv.num_reserved_blocks + self.kv.num_held_blocks + self.kv.num_quarantined_blocks
        return not (self.num_running + self.num_waiting + self.num_pending_reservations + stranded)


class PhaseCounts(Struct, frozen=True, kw_only=True):
    queued: int
    prefilling: int
    transferring: int
    decoding: int


class Totals(Struct, frozen=True, kw_only=True):
    """Since the router started."""

    num_requests: int
    num_retries: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    kv_transfer_bytes: int
    ttft_sum_s: float
    ttft_count: int
    itl_sum_s: float
    itl_count: int


class RequestStatus(Struct, frozen=True, kw_only=True):
    request_id: str
    phase: Phase
    age_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_retries: int
    prefill_worker: str
    decode_worker: str


class HotExpert(Struct, frozen=True, kw_only=True):
    expert: int
    share: float  # of its layer's load
    copies: int


class LayerStatus(Struct, frozen=True, kw_only=True):
    imbalance: float  # the busiest rank's load over the mean
    hottest: list[HotExpert]


class PlacementStatus(Struct, frozen=True, kw_only=True):
    """Where the experts of an engine are, and how much work they have."""

    engine_id: str
    epoch: int  # rises with every change of which rank holds which expert
    num_swaps: int
    num_abandoned: int
    bytes_moved: int
    imbalance: float  # averaged over layers; 0 while there is too little load to say
    is_changing: bool
    last_reason: str  # why a change was given up or refused, the last time
    layers: list[LayerStatus]  # empty before there was load


class EngineStatus(Struct, frozen=True, kw_only=True):
    """DP ranks of an engine."""

    engine_id: str
    role: Role
    data_parallel: int
    tensor_parallel: int
    up: list[int]  # take requests
    leaving: list[int]  # finish or give away what they have
    away: list[int]  # start, have died, or were ended because the engine shrank


class ClusterStatus(Struct, frozen=True, kw_only=True):
    """The cluster as one router sees it."""

    router_id: str
    version: str
    model: str
    uptime_s: float
    ready: bool
    workers: list[WorkerStatus]
    phases: PhaseCounts
    totals: Totals
    requests: list[RequestStatus]
    placements: list[PlacementStatus] = []  # of engines whose ranks share experts
    engines: list[EngineStatus] = []  # with several DP ranks


def plain(kind: type[T], message: Any, **values: Any) -> T:
    """A struct from the fields of a message that have its names; `values` replace those that are no plain values."""
    fields = {name: getattr(message, name) for name in kind.__struct_fields__ if name not in values}
    return kind(**fields, **values)


def logprobs_of(message: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.chosen, message.rank, list(message.top_ids), list(message.top_logprobs))


def cluster_status(message: cluster_pb2.ClusterStatus) -> ClusterStatus:
    return plain(
        ClusterStatus,
        message,
        workers=[worker_status(worker) for worker in message.workers],
        phases=plain(PhaseCounts, message.phases),
        totals=plain(Totals, message.totals),
        requests=[
            plain(RequestStatus, request, phase=Phase(_word(cluster_pb2.Phase.Name(request.phase))))
            for request in message.requests
        ],
        placements=[placement_status(placement) for placement in message.placements],
        engines=[
            plain(
                EngineStatus,
                engine,
                role=Role(_word(cluster_pb2.Role.Name(engine.role))),
                up=list(engine.up),
                leaving=list(engine.leaving),
                away=list(engine.away),
            )
            for engine in message.engines
        ],
    )


def placement_status(message: cluster_pb2.PlacementStatus) -> PlacementStatus:
    layers = [
        plain(LayerStatus, layer, hottest=[plain(HotExpert, expert) for expert in layer.hottest])
        for layer in message.layers
    ]
    return plain(PlacementStatus, message, layers=layers)


def worker_status(message: cluster_pb2.WorkerStatus) -> WorkerStatus:
    return plain(
        WorkerStatus,
        message,
        role=Role(_word(cluster_pb2.Role.Name(message.role))),
        health=Health(_word(cluster_pb2.Health.Name(message.health))),
        kv=plain(KvStatus, message.kv),
    )


def _word(enum_name: str) -> str:
    """`ROLE_PREFILL` -> `prefill`."""
    return enum_name.partition("_")[2].lower()
