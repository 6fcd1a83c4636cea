"""What the scheduler tells its worker: what a step brought, and what a reservation holds."""

from typing import NamedTuple

from msgspec import Struct

from pd_cluster.engine.plan import TokenLogprobs
from pd_cluster.errors import ErrorInfo
from pd_cluster.ids import BlockId, RequestId
from pd_cluster.messages import TokenDelta
from pd_cluster.request import FinishReason


class Reservation(Struct, frozen=True):
    """Blocks kept for a request whose KV comes from elsewhere; the first `num_cached_tokens` tokens have theirs
    already.
    """

    block_ids: list[BlockId]
    num_cached_tokens: int


class StartedRequest(NamedTuple):
    request_id: RequestId
    num_cached_tokens: int
    queued_s: float


class Progress(NamedTuple):
    """KV of the first `num_computed` tokens of a prefill-only request is in its blocks."""

    request_id: RequestId
    num_computed: int


class PrefilledRequest(NamedTuple):
    """A prefill-only request drew its token. Without a `finish` its blocks are held until `release`."""

    request_id: RequestId
    token_id: int
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
    num_cached_tokens: int


class FailedRequest(NamedTuple):
    """The request ended here by an error of its own; its blocks are free."""

    request_id: RequestId
    error: ErrorInfo


class StepOutcome(Struct):
    started: list[StartedRequest] = []  # those that `take_started` has not given out before; likewise `preempted`
    tokens: list[TokenDelta] = []
    progress: list[Progress] = []
    prefilled: list[PrefilledRequest] = []
    preempted: list[RequestId] = []  # off this worker (preempt="evict"), to be resumed from their tokens
    failed: list[FailedRequest] = []
