"""What the scheduler tells an engine to do in one step, and what the engine answers.

An engine keeps, per sequence, its token ids, how many of them have KV, and its blocks; a plan carries only changes. All
TP ranks of a worker run the same plan and sample the same tokens, so no token travels between them. A sequence lives
from `add` to `drop`.
"""

from typing import Protocol

from msgspec import Struct

from pd_cluster.ids import BlockId, RequestId
from pd_cluster.request import SamplingParams, TokenLogprobs

__all__ = [
    "Engine",
    "NewSequence",
    "Sampled",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
    "Work",
]


class NewSequence(Struct, frozen=True, kw_only=True):
    """A sequence new to the engine: all its token ids, the first `num_computed` of which have KV in `block_ids`."""

    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int
    block_ids: list[BlockId]
    sampling: SamplingParams


class Work(Struct, frozen=True):
    """Compute KV for a sequence's next `num_tokens` tokens; `sample`: these reach its last token, choose the next."""

    request_id: RequestId
    num_tokens: int
    sample: bool


class StepPlan(Struct, frozen=True, kw_only=True):
    """One step. Order: drop, add, grow, work. An empty plan is a step of an idle rank: it still joins collectives.

    A void step changed what is known of sequences, but computed nothing: `again` is what is left of it.
    """

    step: int
    drop: list[RequestId] = []
    add: list[NewSequence] = []
    grow: dict[RequestId, list[BlockId]] = {}  # blocks appended to a sequence
    work: list[Work] = []

    @property
    def num_tokens(self) -> int:
        return sum([w.num_tokens for w in self.work])

    def again(self) -> "StepPlan":
        """The same work, for an engine that has applied the rest of this plan. KV is written to the same places, and
        what is sampled depends on nothing but seeds and positions, so it may be done any number of times.
        """
        return StepPlan(step=self.step, work=self.work)


class Sampled(Struct, frozen=True, array_like=True):
    """The token chosen for a sequence; None when its logits are not numbers, which fails that request alone."""

    request_id: RequestId
    token_id: int | None
    logprobs: TokenLogprobs | None = None


class StepResult(Struct, frozen=True, kw_only=True):
    step: int
    sampled: list[Sampled]
    compute_s: float = 0.0
    void: bool = False  # a peer's part was missing: sequences have no more tokens, nor more that have KV, than before


class Engine(Protocol):
    """One rank's model. `launch` starts a step and returns; `collect` waits for the oldest launched one.

    Both are called from one thread. They raise EngineError, after which the engine is unusable.
    """

    def launch(self, plan: StepPlan, step_tokens: list[int]) -> None:
        """Start `plan`. `step_tokens`: how many tokens each DP rank of the engine computes in this step."""

    def collect(self) -> StepResult:
        """The result of the oldest launched step; on every TP rank the same tokens, or void on every one."""
