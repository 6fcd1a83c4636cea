"""Attention over paged KV in torch: batched decode of one token each, causal prefill against a paged prefix.

Pages are the 16-token units of `kv/layout.py`, read with index_select: one copy of contiguous rows. Decode is two
batched multiplications around a softmax, since a fused attention is many times slower at query length 1 with grouped
heads. Scores and softmax are float32. A unit's unwritten tokens must be finite: they are masked.
"""

# N sequences, T tokens, Q query heads, K key/value heads, G queries per key head, D head dim, V value dim, P pages,
# S keys (16 P), U units of the arena, W tokens of a unit (16), C latent dim, R rope dim

from typing import NamedTuple

import torch
from torch import Tensor

SCORE_BYTES = 32 << 20
"""Prefill computes scores for so many query rows at a time that they fit in this."""
MAX_QUERY_ROWS = 64
EXPANDED_BYTES = 128 << 20
"""MLA prefill expands latents into keys and values for so many heads at a time that they fit in this."""


class GqaPages(NamedTuple):
    """One layer's keys and values: views of the arena, [U, K, 16, D] each, and the same as rows [U * K, 16 * D]."""

    keys_UKWD: Tensor
    values_UKWD: Tensor
    key_rows: Tensor
    value_rows: Tensor


class MlaPages(NamedTuple):
    """One layer's latents: a view [U, 16, C + R] of the arena, and the same as rows [U, 16 * (C + R)]."""

    latent_UWC: Tensor
    latent_rows: Tensor


class Writes(NamedTuple):
    """Where the step's tokens go: unit and offset inside it, int64 [T] each."""

    units_T: Tensor
    offsets_T: Tensor


class DecodeGroup(NamedTuple):
    """Sequences of about equal length with one new token each: tokens [start, end) of the batch.

    `rows` (int64, [N * K * P]) are rows of the pages, shorter sequences filled up with their own last page;
    `hidden_N1S` marks keys past the end.
    """

    start: int
    end: int
    rows: Tensor
    hidden_N1S: Tensor


class PrefillSegment(NamedTuple):
    """New tokens [start, end) of one sequence behind `num_prefix` tokens with KV; `rows` (int64, [K * P]) hold both."""

    start: int
    end: int
    num_prefix: int
    rows: Tensor


def write_gqa(pages: GqaPages, writes: Writes, keys_TKD: Tensor, values_TKD: Tensor) -> None:
    pages.keys_UKWD[writes.units_T, :, writes.offsets_T] = keys_TKD
    pages.values_UKWD[writes.units_T, :, writes.offsets_T] = values_TKD


def write_mla(pages: MlaPages, writes: Writes, latent_TC: Tensor) -> None:
    pages.latent_UWC[writes.units_T, writes.offsets_T] = latent_TC


def decode_gqa(q_NQD: Tensor, pages: GqaPages, group: DecodeGroup, num_kv_heads: int, scale: float) -> Tensor:
    """[N, Q, D]: each sequence's last token against all its keys."""
    N, Q, D = q_NQD.shape
    keys = pages.key_rows.index_select(0, group.rows).view(N * num_kv_heads, -1, D)
    values = pages.value_rows.index_select(0, group.rows).view(N * num_kv_heads, -1, D)
    q = q_NQD.reshape(N * num_kv_heads, Q // num_kv_heads, D)
    return _attend(q, keys, values, group.hidden_N1S, N, scale).view(N, Q, D)


def decode_mla(q_NQC: Tensor, pages: MlaPages, group: DecodeGroup, kv_lora_rank: int, scale: float) -> Tensor:
    """[N, Q, C]: absorbed queries [N, Q, C + R] against the latents; the caller expands the result to values."""
    N, _, width = q_NQC.shape
    latent = pages.latent_rows.index_select(0, group.rows).view(N, -1, width)
    return _attend(q_NQC, latent, latent[..., :kv_lora_rank], group.hidden_N1S, N, scale)


def _attend(q: Tensor, keys: Tensor, values: Tensor, hidden_N1S: Tensor, num_sequences: int, scale: float) -> Tensor:
    scores = torch.bmm(q.float(), keys.float().transpose(1, 2)).mul_(scale)
    scores.view(num_sequences, -1, scores.shape[-1]).masked_fill_(hidden_N1S, float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    return torch.bmm(probs, values.float()).to(q.dtype)


def prefill_gqa(q_TQD: Tensor, pages: GqaPages, segment: PrefillSegment, num_kv_heads: int, scale: float) -> Tensor:
    """[T, Q, D]: the new tokens of one sequence against its prefix and themselves."""
    T, _, D = q_TQD.shape
    num_keys = segment.num_prefix + T
    keys_KSD = pages.key_rows.index_select(0, segment.rows).view(num_kv_heads, -1, D)[:, :num_keys]
    values_KSD = pages.value_rows.index_select(0, segment.rows).view(num_kv_heads, -1, D)[:, :num_keys]
    return causal(q_TQD, keys_KSD, values_KSD, segment.num_prefix, scale)


def prefill_mla_absorbed(
    q_TQC: Tensor, pages: MlaPages, segment: PrefillSegment, kv_lora_rank: int, scale: float
) -> Tensor:
    """[T, Q, C]: absorbed queries against the latents, one shared head."""
    latent_SC = pages.latent_rows.index_select(0, segment.rows).view(-1, q_TQC.shape[-1])
    latent_1SC = latent_SC[: segment.num_prefix + len(q_TQC)].unsqueeze(0)
    return causal(q_TQC, latent_1SC, latent_1SC[..., :kv_lora_rank], segment.num_prefix, scale)


def prefill_mla_expanded(
    q_TQD: Tensor, pages: MlaPages, segment: PrefillSegment, expand_QNC: Tensor, value_dim: int, scale: float
) -> Tensor:
    """[T, Q, V]: latents expanded to keys and values by `expand_QNC` [Q, nope + V, C], some heads at a time."""
    T, Q, D = q_TQD.shape
    kv_lora_rank, nope_dim = expand_QNC.shape[2], expand_QNC.shape[1] - value_dim
    num_keys = segment.num_prefix + T
    width = kv_lora_rank + D - nope_dim
    latent_SC = pages.latent_rows.index_select(0, segment.rows).view(-1, width)[:num_keys]
    compressed_SC, k_rope_SR = latent_SC[:, :kv_lora_rank], latent_SC[:, kv_lora_rank:]
    head_bytes = num_keys * (D + value_dim) * 4
    step = min(Q, max(1, EXPANDED_BYTES // head_bytes))
    parts = []
    for first in range(0, Q, step):
        expand = expand_QNC[first : first + step]
        expanded_HSN = torch.matmul(compressed_SC, expand.transpose(1, 2))
        k_rope = k_rope_SR.expand(len(expand), -1, -1)
        keys_HSD = torch.cat([expanded_HSN[..., :nope_dim], k_rope], dim=-1)
        parts.append(
            causal(q_TQD[:, first : first + step], keys_HSD, expanded_HSN[..., nope_dim:], segment.num_prefix, scale)
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def causal(q_TQD: Tensor, keys_KSD: Tensor, values_KSV: Tensor, num_prefix: int, scale: float) -> Tensor:
    """[T, Q, V]: query t sees keys up to `num_prefix` + t. Rows are taken some at a time, against what they see."""
    T, Q, D = q_TQD.shape
    K, S, V = values_KSV.shape
    keys_KDS, values_KSV = keys_KSD.float().transpose(1, 2), values_KSV.float()
    q_KGTD = q_TQD.float().transpose(0, 1).reshape(K, Q // K, T, D)
    out_TQV = q_TQD.new_empty((T, Q, V))
    step = min(T, MAX_QUERY_ROWS, max(1, SCORE_BYTES // (Q * S * 4)))
    future = torch.ones((step, step), dtype=torch.bool, device=q_TQD.device).triu_(1)
    for first in range(0, T, step):
        last = min(first + step, T)
        rows, seen = last - first, num_prefix + last
        q = q_KGTD[:, :, first:last].reshape(K, -1, D)
        scores = torch.bmm(q, keys_KDS[:, :, :seen]).mul_(scale).view(K, -1, rows, seen)
        scores[..., seen - rows :].masked_fill_(future[:rows, :rows], float("-inf"))
        probs = torch.softmax(scores, dim=-1).view(K, -1, seen)
        out_TQV[first:last] = torch.bmm(probs, values_KSV[:, :seen]).view(Q, rows, V).transpose(0, 1)
    return out_TQV
