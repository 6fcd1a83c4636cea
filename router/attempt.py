"""The plain values of a request in flight: limits, workers, its transfer, its present attempt, its timings."""

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

from pd_cluster import messages as m
from pd_cluster.engine.plan import TokenLogprobs
from pd_cluster.errors import PdClusterError
from pd_cluster.ids import EngineEpoch, RequestId, TransferId, WorkerId
from pd_cluster.request import FinishReason, Phase
from router.policy import Choice

if TYPE_CHECKING:
    from router.flight import Flight

MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0


class Limits(Struct, frozen=True, kw_only=True):
    """How patient a router is."""

    max_retries: int = 3
    transfer_deadline_s: float = 30.0
    reserve_wait_s: float = 30.0  # how long one decode worker may keep us in its line before we ask another
    outage_patience_s: float = 30.0  # how long a started request waits for some worker to come back
    slack_s: float = 1.0  # over deadlines that workers watch themselves


class Leg(Struct, frozen=True):
    """A worker in the life in which we asked it."""

    worker_id: WorkerId
    epoch: EngineEpoch


class Link(Struct, kw_only=True, eq=False):
    """One transfer and what is known about its source, as far as the target's blocks depend on it."""

    transfer_id: TransferId
    source: Leg
    target: Leg
    wire_id: RequestId
    push_sent: bool = False
    quiet: bool = False  # the source writes nothing more
    closed: bool = False  # both sides were told to abort


class Timings(Struct, kw_only=True):
    """Where the time went; seconds. Of the last attempt, but for TTFT, TPOT and the counts."""

    queued_s: float = 0.0  # from submission to the start of the first prefill
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0  # mean time per output token after the first
    e2e_s: float = 0.0
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found by the first prefill
    num_output_tokens: int = 0
    num_retries: int = 0
    num_preemptions: int = 0


class Delta(Struct, frozen=True):
    """New tokens for the client; `finish` and `timings` come with the last one."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    timings: Timings | None = None


class Port(Protocol):
    """What a flight may do to the world."""

    def now_s(self) -> float: ...

    def choose_prefill(self, flight: "Flight", avoid: frozenset[WorkerId]) -> Choice: ...

    def choose_decode(self, flight: "Flight", source: Leg, avoid: frozenset[WorkerId]) -> Choice: ...

    def send(self, leg: Leg, message: m.ToWorkerMessage) -> None: ...

    def push(self, link: Link, granted: m.Granted, deadline_s: float) -> None: ...

    def open_link(self, link: Link) -> None: ...

    def close_link(self, link: Link) -> None: ...

    def settle_link(self, link: Link) -> None: ...

    def load_prefill(self, leg: Leg, num_tokens: int) -> None: ...

    def load_decode(self, leg: Leg, num_tokens: int) -> None: ...

    def mark_incompatible(self, source: Leg, target: Leg, reason: str) -> None: ...

    def moved(self, flight: "Flight", before: Phase, after: Phase) -> None: ...

    def renamed(self, flight: "Flight", before: RequestId | None, after: RequestId | None) -> None: ...

    def deliver(self, flight: "Flight", delta: Delta) -> None: ...

    def fail(self, flight: "Flight", error: PdClusterError) -> None: ...

    def retried(self, flight: "Flight", error: PdClusterError) -> None: ...


class Attempt(Struct, kw_only=True, eq=False):
    """One try on one pair of workers; all that is forgotten when the next begins."""

    wire_id: RequestId
    transfer_id: TransferId
    prefill: Leg
    first_index: int  # of the output token that prefill draws
    num_tokens: int  # given to prefill
    decode: Leg | None = None  # equal to `prefill` when one worker does it all
    link: Link | None = None
    granted_s: float | None = None
    started: bool = False  # prefill computes, or did
    prefilled: bool = False
    adopted: bool = False
    flows: bool = False  # tokens come from decode, and nothing is left to be settled
    num_prefill_tokens: int = 0  # as told to the directory
    num_decode_tokens: int = 0
    pending: list[m.TokenDelta] = field(default_factory=list)  # decode overtook prefill's word
    avoid_decode: set[WorkerId] = field(default_factory=set)
    backoff_s: float = MIN_BACKOFF_S
    reserve_at_s: float | None = None  # ask a decode worker again
    reserve_until_s: float | None = None  # the answer to Reserve is due
    transfer_until_s: float | None = None  # Adopted is due

    @property
    def colocated(self) -> bool:
        return self.decode == self.prefill

    @property
    def all_pushed(self) -> bool:
        return self.link is not None and self.link.quiet

    @property
    def settled(self) -> bool:
        """Whether the source's end of the transfer is behind us."""
        return self.adopted or self.all_pushed

    def computes_at(self, leg: Leg) -> bool:
        """Whether that worker has the request in its steps."""
        if leg == self.decode and self.adopted:
            return True
        return leg == self.prefill and self.started and not self.prefilled

    # ---- what the directory adds to a worker's load until its next heartbeat

    def occupy_prefill(self, port: Port, num_tokens: int) -> None:
        self.num_prefill_tokens = num_tokens
        port.load_prefill(self.prefill, num_tokens)

    def vacate_prefill(self, port: Port) -> None:
        if self.num_prefill_tokens:
            port.load_prefill(self.prefill, -self.num_prefill_tokens)
            self.num_prefill_tokens = 0

    def occupy_decode(self, port: Port) -> None:
        assert self.decode is not None
        self.num_decode_tokens = self.num_tokens
        port.load_decode(self.decode, self.num_tokens)

    def vacate_decode(self, port: Port) -> None:
        if self.num_decode_tokens and self.decode is not None:
            port.load_decode(self.decode, -self.num_decode_tokens)
            self.num_decode_tokens = 0
