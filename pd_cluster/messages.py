"""The structs on the control stream between a router and a worker.

A frame carries one `ToWorker` or `ToRouter` batch, msgpack-encoded. Every batch names the engine epoch it belongs to: a
restarted worker refuses what was meant for its former life, and a router drops what a former life says.
"""

import msgspec
from msgspec import Struct, field

from pd_cluster.engine.plan import TokenLogprobs
from pd_cluster.errors import ErrorInfo
from pd_cluster.ids import BlockId, EngineEpoch, EngineId, RequestId, RouterId, TransferId, UnitHash, WorkerId
from pd_cluster.parallel.placement_status import PlacementStatus
from pd_cluster.request import FinishReason, Request
from pd_cluster.transfer.contract import WorkerEndpoint

PROTOCOL_VERSION = 1


# ---- router to worker


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """Opens the stream; the worker answers Welcome or ends the stream with a status that says why."""

    router_id: RouterId
    protocol: int = PROTOCOL_VERSION


class Prefill(Struct, frozen=True, kw_only=True, tag="prefill"):
    """Compute the KV of `request` and its next token, then hold the KV until pushed or aborted."""

    request: Request
    transfer_id: TransferId
    deadline_s: float  # remaining, never absolute


class Reserve(Struct, frozen=True, kw_only=True, tag="reserve"):
    """Keep blocks for `request`, whose KV `source` will write; answered by Granted or Failed. Waits in line until
    `deadline_s`.
    """

    request: Request
    transfer_id: TransferId
    source: WorkerId
    source_epoch: EngineEpoch
    deadline_s: float


class Push(Struct, frozen=True, kw_only=True, tag="push"):
    """Write the request's KV from token `num_cached_tokens` on into `block_ids` of the target."""

    request_id: RequestId
    transfer_id: TransferId
    target: WorkerId
    target_epoch: EngineEpoch
    endpoint: WorkerEndpoint | None  # sent once for each target epoch
    block_ids: list[BlockId]
    num_cached_tokens: int
    deadline_s: float


class Generate(Struct, frozen=True, kw_only=True, tag="generate"):
    """Do all of `request` here: prefill what is not cached, then decode (colocated, or prefill on decode)."""

    request: Request
    deadline_s: float


class Abort(Struct, frozen=True, kw_only=True, tag="abort"):
    """Forget the request; free its blocks at once, or when its writer has stopped. Unknown ids are fine.

    With `transfer_id`, from a router to a source: answered by Stopped when nothing more is written for it, also when
    the source never knew it or is long done, so that a router whose words were lost gets to know.
    """

    request_id: RequestId
    transfer_id: TransferId | None = None


class ExtendLease(Struct, frozen=True, kw_only=True, tag="extend"):
    """The router still follows these transfers: their reservations live `lease_s` longer from arrival."""

    transfer_ids: list[TransferId]
    lease_s: float


class SourceStopped(Struct, frozen=True, kw_only=True, tag="source_stopped"):
    """Proof that nothing more will be written for this transfer: the source said so, or its process is dead."""

    transfer_id: TransferId


class EngineDead(Struct, frozen=True, kw_only=True, tag="engine_dead"):
    """The supervisor saw every process of that engine epoch die."""

    dead: EngineEpoch


class Drain(Struct, frozen=True, kw_only=True, tag="drain"):
    """Take nothing new, finish what runs."""


ToWorkerMessage = Hello | Prefill | Reserve | Push | Generate | Abort | ExtendLease | SourceStopped | EngineDead | Drain


# ---- worker to router


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """What a worker is; constant for one epoch."""

    worker_id: WorkerId
    engine_id: EngineId
    dp_rank: int
    can_prefill: bool
    can_decode: bool
    model: str  # name of the checkpoint as the worker loaded it
    tensor_parallel: int
    data_parallel: int
    num_blocks: int
    block_size: int
    block_bytes: int  # over all TP ranks
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    experts_per_rank: list[int] = field(default_factory=list)  # expert slots on each rank of the engine
    endpoint: WorkerEndpoint | None = None  # of workers that take KV or send it
    engine_epoch: EngineEpoch | None = None  # of its engine, when its DP ranks live and die one by one


class Welcome(Struct, frozen=True, kw_only=True, tag="welcome"):
    info: WorkerInfo


class WorkerLoad(Struct, frozen=True, kw_only=True):
    """A snapshot for the router's predictions."""

    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0  # prompt tokens not computed yet, of waiting and running requests
    num_context_tokens: int = 0  # KV tokens of running requests
    num_free_blocks: int = 0  # free or evictable
    num_reserved_blocks: int = 0
    num_held_blocks: int = 0  # prefilled, not pushed yet
    num_quarantined_blocks: int = 0
    oldest_stranded_s: float = 0.0  # age of the oldest held, reserved or quarantined block
    num_pending_reservations: int = 0
    num_pending_sends: int = 0
    step_s: float = 0.0  # moving average of a step's duration
    prefill_tok_s: float = 0.0  # measured, 0 when unknown
    num_steps: int = 0
    draining: bool = False
    expert_load: list[list[int]] = field(default_factory=list)
    """[MoE layer][expert] tokens that this rank has routed since its start."""
    placement: PlacementStatus | None = None
    """Of the experts of its engine, where ranks share them."""


class Heartbeat(Struct, frozen=True, kw_only=True, tag="heartbeat"):
    load: WorkerLoad


class Started(Struct, frozen=True, kw_only=True, tag="started"):
    """Prefill begins now: time to find a decode worker."""

    request_id: RequestId
    transfer_id: TransferId
    num_cached_tokens: int
    queued_s: float


class Granted(Struct, frozen=True, kw_only=True, tag="granted"):
    """Blocks are kept for the transfer; the first `num_cached_tokens` tokens need no push."""

    request_id: RequestId
    transfer_id: TransferId
    block_ids: list[BlockId]
    num_cached_tokens: int
    lease_s: float


class Prefilled(Struct, frozen=True, kw_only=True, tag="prefilled"):
    """The next token is known; it goes to the client now, whatever the transfer does."""

    request_id: RequestId
    transfer_id: TransferId
    token_id: int
    logprobs: TokenLogprobs | None
    finish: FinishReason | None  # set when this token ends the request: there will be no handoff
    prefill_s: float
    num_cached_tokens: int


class Pushed(Struct, frozen=True, kw_only=True, tag="pushed"):
    """Every planned write of every source rank is with the target."""

    request_id: RequestId
    transfer_id: TransferId
    num_bytes: int
    seconds: float  # from the first post to the last completion


class Stopped(Struct, frozen=True, kw_only=True, tag="stopped"):
    """The source writes nothing more for this transfer (answer to an Abort or after a failure); relayed to the
    target.
    """

    request_id: RequestId
    transfer_id: TransferId


class Adopted(Struct, frozen=True, kw_only=True, tag="adopted"):
    """Decode has the KV and runs the request from now on."""

    request_id: RequestId
    transfer_id: TransferId
    num_bytes: int


class TokenDelta(Struct, frozen=True, array_like=True):
    """Tokens of one request; `first_index` counts from the first output token, so that a repeat is noticed."""

    request_id: RequestId
    first_index: int
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None


class Tokens(Struct, frozen=True, kw_only=True, tag="tokens"):
    """All new tokens of one step for this router."""

    deltas: list[TokenDelta]


class Preempted(Struct, frozen=True, kw_only=True, tag="preempted"):
    """Blocks ran out, or the worker leaves its group: the request is off it, to be resumed from its tokens."""

    request_id: RequestId


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """The request or its transfer ended here with an error; nothing of it is left but what a Stopped will free."""

    request_id: RequestId
    transfer_id: TransferId | None
    error: ErrorInfo


class Quarantine(Struct, frozen=True, array_like=True):
    """Blocks of a transfer that is over, kept because nobody has said yet that its source writes nothing more."""

    transfer_id: TransferId
    request_id: RequestId
    source: WorkerId
    source_epoch: EngineEpoch


class Quarantined(Struct, frozen=True, kw_only=True, tag="quarantined"):
    """What is in quarantine for longer than an answer takes, told to every router for as long as it is: the one whose
    requests these were may be dead, and any other can ask the source by an Abort.
    """

    transfers: list[Quarantine]


class CacheEvents(Struct, frozen=True, kw_only=True, tag="cache"):
    """Changes of the worker's prefix cache, in order: `cleared` first, then removals, then additions."""

    stored: list[UnitHash] = field(default_factory=list)
    removed: list[UnitHash] = field(default_factory=list)
    cleared: bool = False


class Drained(Struct, frozen=True, kw_only=True, tag="drained"):
    pass


ToRouterMessage = (
    Welcome
    | Heartbeat
    | Started
    | Granted
    | Prefilled
    | Pushed
    | Stopped
    | Adopted
    | Tokens
    | Preempted
    | Failed
    | Quarantined
    | CacheEvents
    | Drained
)


class ToWorker(Struct, frozen=True, array_like=True):
    epoch: EngineEpoch | None  # None only before Welcome
    messages: list[ToWorkerMessage]


class ToRouter(Struct, frozen=True, array_like=True):
    epoch: EngineEpoch
    messages: list[ToRouterMessage]


encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_to_router = msgspec.msgpack.Decoder(ToRouter).decode
