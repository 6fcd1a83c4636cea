"""A request as the scheduler follows it: its tokens, its blocks, and how far their KV is planned and computed.

    num_computed <= num_scheduled <= len(token_ids) + num_pending_samples

`num_scheduled` counts tokens whose KV will exist once every planned step has completed, `num_computed` those whose KV
exists. They differ while steps are in flight, and a step may be planned on tokens that the one before it is still
drawing (`num_pending_samples`).
"""

from enum import StrEnum

from pd_cluster.engine.plan import NewSequence
from pd_cluster.ids import BlockId, RequestId
from pd_cluster.kv.hashing import UnitChain
from pd_cluster.request import FinishReason, Request, SamplingParams


class State(StrEnum):
    WAITING = "waiting"  # no blocks
    RUNNING = "running"
    HELD = "held"  # prefilled; its blocks wait for the push
    ENDED = "ended"


NEXT: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.ENDED}),
    State.RUNNING: frozenset({State.WAITING, State.HELD, State.ENDED}),  # back to WAITING: preempted
    State.HELD: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}


class Sequence:
    __slots__ = (
        "added_s",
        "block_ids",
        "chain",
        "in_engine",
        "num_cached_tokens",
        "num_computed",
        "num_in_flight",
        "num_pending_samples",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_scheduled",
        "prefill_only",
        "request_id",
        "sampling",
        "started",
        "state",
        "token_ids",
    )

    def __init__(self, request: Request, *, prefill_only: bool, now_s: float) -> None:
        self.request_id: RequestId = request.id
        self.token_ids = list(request.token_ids)
        self.num_prompt_tokens = request.num_prompt_tokens
        self.sampling: SamplingParams = request.sampling
        self.prefill_only = prefill_only
        self.added_s = now_s
        self.state = State.WAITING
        self.chain = UnitChain(request.cache_salt)
        self.block_ids: list[BlockId] = []
        self.num_scheduled = 0
        self.num_computed = 0
        self.num_prefill_tokens = len(self.token_ids)  # what has no KV when it starts, cached ones included
        self.num_cached_tokens = 0
        self.num_published_blocks = 0  # full blocks offered to the prefix cache
        self.num_in_flight = 0  # planned steps that have not completed
        self.num_pending_samples = 0  # of them, how many draw a token
        self.in_engine = False
        self.started = False  # its start was reported

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_unscheduled(self) -> int:
        """Tokens to compute next; 1 for a sequence that decodes."""
        return len(self.token_ids) + self.num_pending_samples - self.num_scheduled

    def move(self, state: State) -> None:
        assert state in NEXT[self.state], f"{self.request_id}: {self.state} to {state}"
        self.state = state

    def may_continue(self, max_len: int) -> bool:
        """Whether a further step is certain not to overrun its limits, given what is in flight."""
        if not self.num_pending_samples:
            return True
        num_planned = self.num_output_tokens + self.num_pending_samples
        return (
            not self.prefill_only
            and num_planned < self.sampling.max_tokens
            and len(self.token_ids) + self.num_pending_samples < max_len
        )

    def append(self, token_id: int, eos_token_ids: frozenset[int], max_len: int) -> FinishReason | None:
        """Add the token drawn, and say whether it ends the request. The rule of `min_tokens` is the sampler's: so many
        tokens come before one that may stop.
        """
        sampling, token_ids = self.sampling, self.token_ids
        num_before = len(token_ids) - self.num_prompt_tokens
        token_ids.append(token_id)
        if num_before >= sampling.min_tokens and (
            token_id in sampling.stop_token_ids or (not sampling.ignore_eos and token_id in eos_token_ids)
        ):
            return FinishReason.STOP
        if num_before + 1 >= sampling.max_tokens or len(token_ids) >= max_len:
            return FinishReason.LENGTH
        return None

    def requeue(self) -> None:
        """Back in line with its tokens; its KV is computed again."""
        assert not self.num_in_flight
        self.move(State.WAITING)
        self.block_ids = []
        self.num_scheduled = self.num_computed = self.num_published_blocks = 0
        self.num_prefill_tokens = len(self.token_ids)
        self.in_engine = False

    def to_engine(self) -> NewSequence:
        """Introduce it, before work is scheduled on it."""
        assert not self.num_in_flight
        self.in_engine = True
        return NewSequence(
            request_id=self.request_id,
            token_ids=self.token_ids.copy(),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed=self.num_scheduled,
            block_ids=self.block_ids.copy(),
            sampling=self.sampling,
        )
