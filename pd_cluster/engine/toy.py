"""An engine whose tokens can be computed by hand, and whose KV is real memory that real transfers can move.

The KV of token `t` at position `p` is two 32-bit words, in an arena laid out by `KvLayout` with one layer and one head:

    k = t + 1                 0 shows memory that nobody wrote
    v = PREFILL or DECODE     which side computed it

and the token that follows a sequence of n tokens is read from the arena, whoever wrote it:

    next = sum over p < n of (p + 1) * k[p] * w[p], modulo the vocabulary
    w[p] = v[p] in the prompt; in the output DECODE, when v[p] is PREFILL or DECODE

An engine of role `prefill` writes PREFILL, one of role `decode` DECODE, and one that does `both` PREFILL for the prompt
and DECODE for the output. So a decode side that computes a prompt by itself, or a transfer that loses, moves or mixes
up a block, ends in other tokens (`toy_tokens` says the right ones), while a request resumed from its tokens, whose
output is then prefilled, does not. (A prompt that repeats a cached output does: what was decoded stays DECODE.)
"""

import ctypes
import mmap
from collections import deque
from typing import Literal

from msgspec import Struct

from pd_cluster.engine.plan import NewSequence, Sampled, StepPlan, StepResult, TokenLogprobs, Work
from pd_cluster.errors import EngineError
from pd_cluster.ids import BlockId, RequestId
from pd_cluster.kv.layout import KvFingerprint, KvLayout
from pd_cluster.request import UNIT_TOKENS

PREFILL = 3
DECODE = 5

Role = Literal["prefill", "decode", "both"]


def toy_tokens(prompt: list[int], num_tokens: int, vocab_size: int = 251) -> list[int]:
    """The output that every right division of the work between a prefill and a decode side leads to."""
    token_ids = list(prompt)
    total = sum((p + 1) * (t + 1) * PREFILL for p, t in enumerate(token_ids))
    for _ in range(num_tokens):
        token_ids.append(total % vocab_size)
        total += len(token_ids) * (token_ids[-1] + 1) * DECODE
    return token_ids[len(prompt) :]


class ToyArena:
    """`num_blocks` zeroed blocks at a fixed, page-aligned address; `bytes` and `words` are views of the same memory."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * layout.block_bytes
        self._pages = mmap.mmap(-1, self.num_bytes)
        self.bytes = memoryview(self._pages)
        self.words = self.bytes.cast("I")
        self.base_address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def index(self, block_ids: list[BlockId], position: int) -> int:
        """Where in `words` the k of a token lies; its v lies UNIT_TOKENS further."""
        block, offset = divmod(position, self.layout.block_size)
        unit = block_ids[block] * self.layout.units_per_block + offset // UNIT_TOKENS
        return unit * 2 * UNIT_TOKENS + offset % UNIT_TOKENS


class _Sequence(Struct):
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int
    block_ids: list[BlockId]
    new: NewSequence


class ToyEngine:
    """Implements `plan.Engine`, and refuses plans that a real engine would compute wrongly."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = UNIT_TOKENS,
        role: Role = "both",
        vocab_size: int = 251,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.layout = KvLayout(
            kind="gqa", num_layers=1, head_ids=(0,), token_values=2, dtype="float32", block_size=block_size
        )
        self.fingerprint = KvFingerprint(
            weights=f"toy-{vocab_size}",
            kind="gqa",
            num_layers=1,
            num_kv_heads=1,
            token_values=2,
            dtype="float32",
            rope="none",
        )
        self.arena = ToyArena(self.layout, num_blocks)
        self.vocab_size = vocab_size
        self.role: Role = role
        self._eos_token_ids = eos_token_ids
        self._sequences: dict[RequestId, _Sequence] = {}
        self._results: deque[StepResult] = deque()

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def launch(self, plan: StepPlan, step_tokens: list[int]) -> None:
        if plan.num_tokens not in step_tokens:
            raise EngineError(f"step {plan.step}: {plan.num_tokens} tokens planned, the ranks agreed on {step_tokens}")
        for request_id in plan.drop:
            if self._sequences.pop(request_id, None) is None:
                raise EngineError(f"step {plan.step} drops unknown sequence {request_id}")
        for new in plan.add:
            if new.request_id in self._sequences:
                raise EngineError(f"step {plan.step} adds sequence {new.request_id} twice")
            self._sequences[new.request_id] = _Sequence(
                list(new.token_ids), new.num_prompt_tokens, new.num_computed, list(new.block_ids), new
            )
        for request_id, block_ids in plan.grow.items():
            self._find(request_id).block_ids += block_ids
        sampled = [s for work in plan.work if (s := self._run(work)) is not None]
        self._results.append(StepResult(step=plan.step, sampled=sampled))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def written_by(self, block_ids: list[BlockId], num_tokens: int) -> list[int]:
        """Who computed the KV of each token: PREFILL, DECODE, or what else lies there."""
        return [self.arena.words[self.arena.index(block_ids, p) + UNIT_TOKENS] for p in range(num_tokens)]

    def expert_load(self) -> list[list[int]]:
        return []

    def _find(self, request_id: RequestId) -> _Sequence:
        seq = self._sequences.get(request_id)
        if seq is None:
            raise EngineError(f"the plan names unknown sequence {request_id}")
        return seq

    def _run(self, work: Work) -> Sampled | None:
        seq = self._find(work.request_id)
        end = seq.num_computed + work.num_tokens
        if work.num_tokens < 1 or end > len(seq.token_ids) or work.sample != (end == len(seq.token_ids)):
            raise EngineError(f"{work} for {len(seq.token_ids)} tokens of which {seq.num_computed} have KV")
        if end > len(seq.block_ids) * self.layout.block_size:
            raise EngineError(f"{work.request_id}: {end} tokens in {len(seq.block_ids)} blocks")
        for position in range(seq.num_computed, end):
            in_prompt = position < seq.num_prompt_tokens
            index = self.arena.index(seq.block_ids, position)
            self.arena.words[index] = seq.token_ids[position] + 1
            self.arena.words[index + UNIT_TOKENS] = (
                PREFILL if self.role == "prefill" or (self.role == "both" and in_prompt) else DECODE
            )
        seq.num_computed = end
        if not work.sample:
            return None
        token_id = self._next_token(seq)
        seq.token_ids.append(token_id)
        num_logprobs = seq.new.sampling.logprobs
        logprobs = None
        if num_logprobs is not None:
            logprobs = TokenLogprobs(0.0, 1, [token_id][:num_logprobs], [0.0][:num_logprobs])
        return Sampled(work.request_id, token_id, logprobs)

    def _next_token(self, seq: _Sequence) -> int:
        total = 0
        for position in range(len(seq.token_ids)):
            index = self.arena.index(seq.block_ids, position)
            key, value = self.arena.words[index], self.arena.words[index + UNIT_TOKENS]
            weight = DECODE if position >= seq.num_prompt_tokens and value == PREFILL else value
            total += (position + 1) * key * weight
        token_id = total % self.vocab_size
        sampling = seq.new.sampling
        if len(seq.token_ids) - seq.num_prompt_tokens < sampling.min_tokens:
            banned = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._eos_token_ids)
            while token_id in banned:
                token_id = (token_id + 1) % self.vocab_size
        return token_id
