"""A request: its token ids so far and how to sample the next one; any worker can continue it.

Sampling noise is a pure function of `seed` and the position of the token that is sampled, so a request that moves to
another worker draws what it would have drawn.
"""

import math
from enum import StrEnum

from msgspec import Struct, field

from pd_cluster.errors import ContextTooLong, InvalidRequest
from pd_cluster.ids import RequestId

UNIT_TOKENS = 16
"""The cluster-wide unit of prefix hashes, of KV layout and of transfers; every block size is a multiple of it."""

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How tokens are chosen. `temperature` 0 is greedy; logprobs are of the distribution before temperature."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    seed: int = 0  # always set: a front end draws one when the user gave none
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # how many alternatives to report; 0: only the chosen token's
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest that names the parameter, its bounds and the value given."""

        def check(name: str, value: float, low: float, high: float) -> None:
            if not (math.isfinite(value) and low <= value <= high):
                bounds = f"{low:.10g} and {high:.10g}"
                raise InvalidRequest(f"{name} must be between {bounds}, got {value}", param=name.split(maxsplit=1)[0])

        check("temperature", self.temperature, 0.0, 100.0)
        check("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be above 0; use temperature 0 for greedy decoding", param="top_p")
        check("min_p", self.min_p, 0.0, 1.0)
        check("top_k", self.top_k, 0, 2**31 - 1)
        check("seed", self.seed, 0, MAX_SEED)
        check("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check("min_tokens", self.min_tokens, 0, self.max_tokens)
        check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check("repetition_penalty", self.repetition_penalty, 1e-3, 100.0)
        if self.logprobs is not None:
            check("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for token_id in self.stop_token_ids:
            check("stop_token_ids", token_id, 0, vocab_size - 1)
        for token_id, bias in self.logit_bias.items():
            check("logit_bias token id", token_id, 0, vocab_size - 1)
            check("logit_bias", bias, -100.0, 100.0)

    @property
    def needs_history(self) -> bool:
        """Whether choosing a token needs the tokens generated so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


class Request(Struct, frozen=True, kw_only=True):
    """What a worker needs to begin or continue: prompt, tokens already generated, sampling parameters.

    `token_ids` is prompt then output; `num_prompt_tokens` tells them apart. A fresh request has no output yet.
    """

    id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str = ""  # requests share cached prefixes only with the same salt

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def validate(self, vocab_size: int, max_model_len: int) -> None:
        """Raise InvalidRequest for an empty prompt, ids out of range or a prompt with no room for one more token."""
        self.sampling.validate(vocab_size)
        if not 1 <= self.num_prompt_tokens <= len(self.token_ids):
            raise InvalidRequest("the prompt is empty: send at least one token", param="prompt")
        if max(self.token_ids) >= vocab_size or min(self.token_ids) < 0:
            raise InvalidRequest(f"prompt token ids must be between 0 and {vocab_size - 1}", param="prompt")
        if len(self.token_ids) >= max_model_len:
            raise ContextTooLong(
                f"the prompt has {len(self.token_ids)} tokens and this model's context is {max_model_len}: "
                f"shorten it to at most {max_model_len - 1}",
                param="prompt",
            )


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Natural logs of probabilities before temperature: the chosen token's, its rank (1: likeliest), the likeliest."""

    chosen: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Phase(StrEnum):
    """Where a request is, as its router sees it."""

    QUEUED = "queued"  # sent to a prefill worker that has not started it
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"  # prefill is done, decode has not adopted it
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"


NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.QUEUED, Phase.PREFILLING, Phase.DECODING, Phase.ABORTED}),
    # back to QUEUED: a retry or a resume after a lost worker, a failed transfer or a preemption
    Phase.PREFILLING: frozenset({Phase.QUEUED, Phase.TRANSFERRING, Phase.FINISHED, Phase.ABORTED}),
    Phase.TRANSFERRING: frozenset({Phase.QUEUED, Phase.DECODING, Phase.FINISHED, Phase.ABORTED}),
    Phase.DECODING: frozenset({Phase.QUEUED, Phase.FINISHED, Phase.ABORTED}),
    Phase.FINISHED: frozenset(),
    Phase.ABORTED: frozenset(),
}
