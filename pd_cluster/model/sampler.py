"""From logits to the next token of each sequence: penalties, bias, temperature, truncation, then one draw.

The draw's noise is one uniform number, a pure function of the request's seed and of the position it is drawn for, and
the draw inverts the cumulative distribution in float64. So a token depends on nothing but its own row: not on the
batch, the worker or the device. Order: repetition, frequency and presence penalty, logit bias, `min_tokens`,
temperature, min_p, top_k, top_p. Log probabilities are those of the raw logits.
"""

# S sequences of the batch, V vocabulary, R rows of one part of it, C candidates

import math
from collections.abc import Callable

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from pd_cluster.request import SamplingParams, TokenLogprobs

_MASK = 2**64 - 1
_NUM_CANDIDATES = 1024  # sorted first; the whole vocabulary only when these do not hold the kept set
_ROWS_AT_ONCE = 32  # bounds the float64 copies of the logits


class SampleRow(Struct, frozen=True):
    """How one row is sampled. `position`: index in its sequence of the token that is drawn. `history`: all token ids so
    far, prompt then output, int64, of which the last `num_output` are output; needed when `sampling.needs_history`.
    """

    sampling: SamplingParams
    position: int
    num_output: int
    history: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: splitmix64's finaliser (Steele et al. 2014) over seed, then over
    position.
    """
    return (_mix(_mix(seed) + position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


Highest = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Each row's highest value and its first column; a NaN wins."""


def highest_of_rows(logits_SV: Tensor) -> tuple[Tensor, Tensor]:
    values_S, columns_S = logits_SV.max(dim=1)
    return values_S, columns_S


class Sampler:
    """Holds the model's facts only. Columns from `vocab_size` on, the padding of some checkpoints, are never chosen."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], highest: Highest = highest_of_rows) -> None:
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._highest = highest

    @torch.inference_mode()
    def sample(self, logits_SV: Tensor, rows: list[SampleRow]) -> list[tuple[int | None, TokenLogprobs | None]]:
        """The next token of each row of float32 logits, with its log probabilities where asked for.

        The token is None when the row has a NaN or no finite maximum: that fails its request, not the engine.
        """
        assert logits_SV.shape[0] == len(rows), (logits_SV.shape, len(rows))
        assert logits_SV.dtype == torch.float32, logits_SV.dtype
        if not rows:
            return []
        raw_SV = logits_SV[:, : self.vocab_size]
        max_S, argmax_S = self._highest(raw_SV)
        valid = [math.isfinite(highest) for highest in max_S.tolist()]
        tokens: list[int | None] = [t if ok else None for t, ok in zip(argmax_S.tolist(), valid, strict=True)]

        adjusted = [i for i, row in enumerate(rows) if valid[i] and self._adjusts(row)]
        drawn = [i for i, row in enumerate(rows) if valid[i] and row.sampling.temperature > 0]
        for part in _parts(sorted({*adjusted, *drawn})):
            logits_RV = raw_SV[part].double()
            for index, i in enumerate(part):
                if self._adjusts(rows[i]):
                    self._adjust(logits_RV[index], rows[i])
            for i, token_id in zip(part, _choose(logits_RV, [rows[i] for i in part]), strict=True):
                tokens[i] = token_id

        result: list[tuple[int | None, TokenLogprobs | None]] = [(token_id, None) for token_id in tokens]
        reported = [i for i, row in enumerate(rows) if tokens[i] is not None and row.sampling.logprobs is not None]
        for part in _parts(reported):
            chosen = [token_id for i in part if (token_id := tokens[i]) is not None]
            logprobs = _logprobs(raw_SV[part], chosen, [rows[i].sampling.logprobs or 0 for i in part])
            for i, token_id, values in zip(part, chosen, logprobs, strict=True):
                result[i] = (token_id, values)
        return result

    def _adjusts(self, row: SampleRow) -> bool:
        sampling = row.sampling
        return sampling.needs_history or bool(sampling.logit_bias) or row.num_output < sampling.min_tokens

    def _adjust(self, logits_V: Tensor, row: SampleRow) -> None:
        """Penalties, bias and banned stops, in place."""
        sampling = row.sampling
        if sampling.needs_history:
            assert row.history is not None, "penalties need the tokens so far"
            history = torch.from_numpy(row.history).to(logits_V.device)
            if sampling.repetition_penalty != 1:
                seen = torch.unique(history)
                values = logits_V[seen]
                penalty = sampling.repetition_penalty
                logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
            if row.num_output:
                seen, counts = torch.unique(history[-row.num_output :], return_counts=True)
                logits_V[seen] -= sampling.frequency_penalty * counts + sampling.presence_penalty
        if sampling.logit_bias:
            bias = torch.tensor(list(sampling.logit_bias.values()), dtype=logits_V.dtype, device=logits_V.device)
            logits_V[list(sampling.logit_bias)] += bias
        if row.num_output < sampling.min_tokens:
            stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)}
            logits_V[[t for t in stops if t < self.vocab_size]] = -torch.inf


def _parts(indices: list[int]) -> list[list[int]]:
    return [indices[start : start + _ROWS_AT_ONCE] for start in range(0, len(indices), _ROWS_AT_ONCE)]


def _choose(logits_RV: Tensor, rows: list[SampleRow]) -> list[int | None]:
    """One token of each row of adjusted float64 logits: the likeliest, or a draw. None where nothing can be chosen."""
    max_R, argmax_R = logits_RV.max(dim=1)
    valid = torch.isfinite(max_R).tolist()
    tokens: list[int | None] = [t if ok else None for t, ok in zip(argmax_R.tolist(), valid, strict=True)]
    drawn = [i for i, row in enumerate(rows) if valid[i] and row.sampling.temperature > 0]
    if not drawn:
        return tokens
    params = [rows[i].sampling for i in drawn]
    device = logits_RV.device
    temperature_R = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
    noise = [uniform(rows[i].sampling.seed, rows[i].position) for i in drawn]
    uniform_R = torch.tensor(noise, dtype=torch.float64, device=device)
    # the largest weight is 1, so that no temperature overflows
    weights_RV = logits_RV[drawn].sub_(max_R[drawn, None]).div_(temperature_R[:, None]).exp_()
    if any(p.min_p for p in params):
        min_p_R = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)
        weights_RV.masked_fill_(weights_RV < min_p_R[:, None], 0.0)

    plain = [r for r, p in enumerate(params) if not p.top_k and p.top_p >= 1]
    if plain:
        for r, token_id in zip(plain, _invert(weights_RV[plain], uniform_R[plain]).tolist(), strict=True):
            tokens[drawn[r]] = token_id
    truncated = [r for r, p in enumerate(params) if p.top_k or p.top_p < 1]
    if truncated:
        chosen = _draw_truncated(weights_RV[truncated], uniform_R[truncated], [params[r] for r in truncated])
        for r, token_id in zip(truncated, chosen.tolist(), strict=True):
            tokens[drawn[r]] = token_id
    return tokens


def _invert(weights_RC: Tensor, uniform_R: Tensor) -> Tensor:
    """The first column at which the cumulative weight exceeds the uniform's share of the total: int64 [R]."""
    cumulative_RC = weights_RC.cumsum(dim=1)
    total_R1 = cumulative_RC[:, -1:]
    target_R1 = uniform_R[:, None] * total_R1
    # a share that rounds up to the total belongs to the last column with weight
    target_R1 = torch.minimum(target_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    return torch.searchsorted(cumulative_RC, target_R1, right=True)[:, 0]


def _draw_truncated(weights_RV: Tensor, uniform_R: Tensor, params: list[SamplingParams]) -> Tensor:
    """Draw among the top_k largest weights, of them among the fewest that have top_p of the mass. Equal weights: lower
    id first.
    """
    vocab_size = weights_RV.shape[1]
    device = weights_RV.device
    top_k_R1 = torch.tensor([[min(p.top_k or vocab_size, vocab_size)] for p in params], device=device)
    top_p_R1 = torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=device)
    num_candidates = min(vocab_size, _NUM_CANDIDATES)
    chosen_R = torch.zeros(len(params), dtype=torch.int64, device=device)
    rest = torch.arange(len(params), device=device)
    while len(rest):
        limit_R1 = top_k_R1[rest]
        ids_RC = weights_RV[rest].topk(num_candidates, dim=1, sorted=False).indices.sort(dim=1).values
        values_RC, order_RC = weights_RV[rest].gather(1, ids_RC).sort(dim=1, descending=True, stable=True)
        ids_RC = ids_RC.gather(1, order_RC)
        in_top_k_RC = torch.arange(num_candidates, device=device) < limit_R1
        values_RC = torch.where(in_top_k_RC, values_RC, 0.0)
        through_RC = values_RC.cumsum(dim=1)
        total_R1 = through_RC[:, -1:]  # what top_p is a share of: the mass of the top k, or of all
        if num_candidates < vocab_size and num_candidates < int(limit_R1.max()):
            all_R1 = weights_RV[rest].cumsum(dim=1)[:, -1:]
            total_R1 = torch.where(limit_R1 <= num_candidates, total_R1, all_R1)
        before_RC = through_RC.roll(1, dims=1)
        before_RC[:, 0] = 0.0
        kept_RC = in_top_k_RC & ((before_RC < top_p_R1[rest] * total_R1) | (top_p_R1[rest] >= 1))
        columns_R = _invert(torch.where(kept_RC, values_RC, 0.0), uniform_R[rest])
        chosen_R[rest] = ids_RC.gather(1, columns_R[:, None])[:, 0]
        if num_candidates == vocab_size:
            break
        # sure when no column outside the candidates can belong to the kept ones, nor equal the last of them
        smallest_R = values_RC.gather(1, kept_RC.sum(dim=1)[:, None] - 1)[:, 0]
        outside_R = weights_RV[rest].gather(1, ids_RC[:, -1:])[:, 0]
        sure_R = (smallest_R > outside_R) | (smallest_R == 0)
        sure_R &= ((limit_R1 <= num_candidates) | (limit_R1 == vocab_size))[:, 0]
        rest = rest[~sure_R]
        num_candidates = vocab_size
    return chosen_R


def _logprobs(raw_RV: Tensor, chosen: list[int], num_tops: list[int]) -> list[TokenLogprobs]:
    """float32 log probabilities of raw logits: of the chosen token, its rank, and the likeliest `num_tops`."""
    logprobs_RV = torch.log_softmax(raw_RV, dim=1)
    chosen_R1 = torch.tensor(chosen, device=raw_RV.device)[:, None]
    chosen_logprobs = logprobs_RV.gather(1, chosen_R1)[:, 0].tolist()
    ranks = ((raw_RV > raw_RV.gather(1, chosen_R1)).sum(dim=1) + 1).tolist()
    tops = logprobs_RV.topk(min(max(num_tops), raw_RV.shape[1]), dim=1)
    top_ids, top_logprobs = tops.indices.tolist(), tops.values.tolist()
    return [
        TokenLogprobs(chosen_logprobs[r], ranks[r], top_ids[r][:num_top], top_logprobs[r][:num_top])
        for r, num_top in enumerate(num_tops)
    ]
