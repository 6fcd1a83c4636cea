"""Attention over paged KV on a GPU: one new token of many sequences, or runs of new tokens behind a prefix.

Pages are the 16-token units of `kv/layout.py`, read where they lie: a key's address comes from its unit's index.
The heads that share a key are rows of one tile, so a key is read once for all of them, and MLA on the absorbed form is
one key head with as many rows as there are query heads, whose values are the first part of its keys.

Decode cuts a sequence's keys into runs of a fixed length, attended by different programs and then combined. The length
depends on the model alone, so a sequence's bits do not depend on its batch. Softmax is online, in float32 and base 2.
"""

# Triton compiles its functions from their source: they have no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

# T tokens, N decodes, G segments, Q query heads, K key heads, D key dim, V value dim, C latent dim, R rope dim,
# U units, W tokens of a unit; in kernels M rows (token, head), S keys, B blocks padded to a power of two

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_cluster.kernels.gpu.launch import backend, dot, launch, power_of_two, precision
from pd_cluster.kernels.paged import GqaPages, MlaPages

UNIT_TOKENS = 16
EXPANDED_BYTES = 1 << 30
"""MLA prefill expands latents for so many heads at a time that they fit in this."""
LOG2_E = 1.4426950408889634
GQA_SPLIT = 512
MLA_SPLIT = 1024
"""Keys that one program of decode attends. A partial result of MLA has 512 values a head: fewer, longer runs."""


class Segments(NamedTuple):
    """A step's sequences, decodes first. `rows_G5` int64: first token, number of new tokens, tokens before them, first
    of its `units` (int64), and a number these kernels do not read. `read_K` int64 maps key heads of the kernels to
    heads of the pages. A segment without any tokens is padding: decode writes zeros for it.
    """

    rows_G5: Tensor
    units: Tensor
    read_K: Tensor
    num_decodes: int
    longest_decode: int  # keys of the longest decode, or a bound
    longest_prefill: int  # most new tokens of a segment that is no decode, or a bound


class NewTokens(NamedTuple):
    """One segment, known to the host: see `Segments.rows_G5`."""

    start: int
    num_tokens: int
    num_prefix: int
    first_unit: int


@triton.jit
def _fold(
    q, q_rope, top_M, sum_M, acc, sees_M,
    keys, values, units, unit_stride, token_stride, first, end, scale,
    D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, S: tl.constexpr,
    BD: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys [first, end) into a running softmax; R > 0: keys are [latent | rope] and the latent is the value."""
    d = tl.arange(0, BD)
    v = tl.arange(0, BV)
    for start in range(first, end, S):
        s = start + tl.arange(0, S)
        if MASKED:
            unit_S = tl.load(units + s // 16, mask=s < end, other=0)
        else:
            unit_S = tl.load(units + s // 16)
        at_S = unit_S * unit_stride + (s % 16) * token_stride
        inside = (s < end)[:, None]
        if MASKED or BD != D:
            k = tl.load(keys + at_S[:, None] + d[None, :], mask=inside & (d < D)[None, :], other=0.0)
        else:
            k = tl.load(keys + at_S[:, None] + d[None, :])
        scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], S], tl.float32), PRECISION)
        if R > 0:
            r = tl.arange(0, BR)
            k_rope = tl.load(keys + at_S[:, None] + D + r[None, :], mask=inside & (r < R)[None, :], other=0.0)
            scores = dot(q_rope, tl.trans(k_rope), scores, PRECISION)
        scores = scores * scale
        if MASKED:
            scores = tl.where(s[None, :] < sees_M[:, None], scores, float("-inf"))
        new_top_M = tl.maximum(top_M, tl.max(scores, 1))
        p = tl.exp2(scores - new_top_M[:, None])
        decay_M = tl.exp2(top_M - new_top_M)
        sum_M = sum_M * decay_M + tl.sum(p, 1)
        acc = acc * decay_M[:, None]
        if R > 0:
            acc = dot(p.to(k.dtype), k, acc, PRECISION)
        else:
            if MASKED or BV != V:
                value = tl.load(values + at_S[:, None] + v[None, :], mask=inside & (v < V)[None, :], other=0.0)
            else:
                value = tl.load(values + at_S[:, None] + v[None, :])
            acc = dot(p.to(value.dtype), value, acc, PRECISION)
        top_M = new_top_M
    return top_M, sum_M, acc


@triton.jit
def _decode(
    q, keys, values, segments, units, read, out, partial, log_sum, scale,
    q_token_stride, q_head_stride, unit_stride, head_stride, token_stride, num_splits,
    GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, SPLIT: tl.constexpr,
    M: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    SINGLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    num_blocks: tl.constexpr = (GROUP + M - 1) // M
    group = tl.program_id(1) // num_blocks
    n = tl.program_id(2)
    token = tl.load(segments + n * 5)
    length = tl.load(segments + n * 5 + 1) + tl.load(segments + n * 5 + 2)
    first = split * SPLIT
    end = tl.minimum(first + SPLIT, length).to(tl.int32)
    if not SINGLE:  # noqa: SIM102 - known when compiled
        if first >= length:
            return
    units += tl.load(segments + n * 5 + 3)
    head_offset = tl.load(read + group) * head_stride
    m = (tl.program_id(1) % num_blocks) * M + tl.arange(0, M)
    head_M = group * GROUP + m
    is_row = (m < GROUP)[:, None]
    d = tl.arange(0, BD)
    v = tl.arange(0, BV)
    q_M = q + token * q_token_stride + head_M * q_head_stride
    q_tile = tl.load(q_M[:, None] + d[None, :], mask=is_row & (d < D)[None, :], other=0.0)
    q_rope = q_tile
    if R > 0:
        r = tl.arange(0, BR)
        q_rope = tl.load(q_M[:, None] + D + r[None, :], mask=is_row & (r < R)[None, :], other=0.0)
    top_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BV], tl.float32)
    sees_M = tl.zeros([M], tl.int32) + end
    whole = first + (end - first) // S * S
    top_M, sum_M, acc = _fold(
        q_tile, q_rope, top_M, sum_M, acc, sees_M, keys + head_offset, values + head_offset, units, unit_stride,
        token_stride, first, whole, scale, D, R, V, S, BD, BR, BV, False, PRECISION,
    )  # fmt: skip
    top_M, sum_M, acc = _fold(
        q_tile, q_rope, top_M, sum_M, acc, sees_M, keys + head_offset, values + head_offset, units, unit_stride,
        token_stride, whole, end, scale, D, R, V, S, BD, BR, BV, True, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
    num_heads = tl.num_programs(1) // num_blocks * GROUP
    keep = is_row & (v < V)[None, :]
    if SINGLE:
        at_M = (token * num_heads + head_M) * V
        tl.store(out + at_M[:, None] + v[None, :], acc.to(out.dtype.element_ty), mask=keep)
    else:
        at_M = (n.to(tl.int64) * num_splits + split) * num_heads + head_M
        tl.store(partial + at_M[:, None] * V + v[None, :], acc, mask=keep)
        tl.store(log_sum + at_M, top_M + tl.log2(sum_M), mask=m < GROUP)


@triton.jit
def _combine(
    partial, log_sum, segments, out, num_splits,
    V: tl.constexpr, SPLIT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    token = tl.load(segments + n * 5)
    length = tl.load(segments + n * 5 + 1) + tl.load(segments + n * 5 + 2)
    v = tl.arange(0, BV)
    at = n.to(tl.int64) * num_splits * num_heads + head
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BV], tl.float32)
    for _ in range(0, ((length + SPLIT - 1) // SPLIT).to(tl.int32)):
        part = tl.load(log_sum + at)
        new_top = tl.maximum(top, part)
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(part - new_top)
        acc = acc * decay + weight * tl.load(partial + at * V + v, mask=v < V, other=0.0)
        total = total * decay + weight
        top = new_top
        at += num_heads
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (token * num_heads + head) * V + v, acc.to(out.dtype.element_ty), mask=v < V)


@triton.jit
def _prefill(
    q, keys, values, segments, units, read, out, scale,
    q_token_stride, q_head_stride, unit_stride, head_stride, token_stride,
    GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    M: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # late tokens see most: first they start
    group = tl.program_id(1)
    segments += tl.program_id(2) * 5
    count = tl.load(segments + 1).to(tl.int32)
    if block * M >= count * GROUP:
        return
    first_token = tl.load(segments)
    prefix = tl.load(segments + 2).to(tl.int32)
    units += tl.load(segments + 3)
    head_offset = tl.load(read + group) * head_stride
    m = block * M + tl.arange(0, M)
    within_M = m // GROUP
    head_M = group * GROUP + m % GROUP
    is_row = (within_M < count)[:, None]
    d = tl.arange(0, BD)
    v = tl.arange(0, BV)
    token_M = first_token + within_M
    q_M = q + token_M * q_token_stride + head_M * q_head_stride
    q_tile = tl.load(q_M[:, None] + d[None, :], mask=is_row & (d < D)[None, :], other=0.0)
    q_rope = q_tile
    if R > 0:
        r = tl.arange(0, BR)
        q_rope = tl.load(q_M[:, None] + D + r[None, :], mask=is_row & (r < R)[None, :], other=0.0)
    sees_M = prefix + within_M + 1
    end = prefix + tl.minimum((block * M + M - 1) // GROUP, count - 1) + 1
    whole = (prefix + block * M // GROUP + 1) // S * S
    top_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BV], tl.float32)
    top_M, sum_M, acc = _fold(
        q_tile, q_rope, top_M, sum_M, acc, sees_M, keys + head_offset, values + head_offset, units, unit_stride,
        token_stride, 0, whole, scale, D, R, V, S, BD, BR, BV, False, PRECISION,
    )  # fmt: skip
    top_M, sum_M, acc = _fold(
        q_tile, q_rope, top_M, sum_M, acc, sees_M, keys + head_offset, values + head_offset, units, unit_stride,
        token_stride, whole, end, scale, D, R, V, S, BD, BR, BV, True, PRECISION,
    )  # fmt: skip
    acc = acc / sum_M[:, None]
    num_heads = tl.num_programs(1) * GROUP
    at_M = (token_M * num_heads + head_M) * V
    tl.store(out + at_M[:, None] + v[None, :], acc.to(out.dtype.element_ty), mask=is_row & (v < V)[None, :])


class _Tiles(NamedTuple):
    M: int
    S: int
    num_warps: int
    num_stages: int


def _tiles(rows: int, key_dim: int, dtype: torch.dtype) -> _Tiles:
    """As large as fits the registers of sm_90 and gfx942 without spilling (`aot` says)."""
    if dtype.itemsize > 2:
        return _Tiles(16, 32 if key_dim <= 256 else 16, 8, 2)
    if key_dim > 256:
        if backend() == "hip":
            return _Tiles(min(rows, 32), 16, 4, 2)
        return _Tiles(min(rows, 32), 32, 8 if rows >= 32 else 4, 2)
    if rows <= 64:
        return _Tiles(rows, 64 if key_dim <= 128 or backend() == "cuda" else 32, 4, 2)
    return _Tiles(128, 64, 8, 2) if key_dim <= 128 else _Tiles(64, 32, 8, 2)


class _Keys(NamedTuple):
    """Where a layer's keys and values lie: base tensors, and strides of unit, head and token in values."""

    keys: Tensor
    values: Tensor
    unit_stride: int
    head_stride: int
    token_stride: int
    D: int
    R: int
    V: int
    split: int


def _gqa_keys(pages: GqaPages) -> _Keys:
    keys, values = pages.keys_UKWD, pages.values_UKWD
    assert keys.stride() == values.stride()
    D = keys.shape[3]
    return _Keys(keys, values, keys.stride(0), keys.stride(1), keys.stride(2), D, 0, D, GQA_SPLIT)


def _mla_keys(pages: MlaPages, kv_lora_rank: int) -> _Keys:
    latent = pages.latent_UWC
    R = latent.shape[2] - kv_lora_rank
    return _Keys(latent, latent, latent.stride(0), 0, latent.stride(1), kv_lora_rank, R, kv_lora_rank, MLA_SPLIT)


def attend_gqa(q_TQD: Tensor, pages: GqaPages, segments: Segments, scale: float) -> Tensor:
    """[T, Q, D]: every new token against the keys up to its own. The step's keys are written already."""
    return _attend(q_TQD, _gqa_keys(pages), segments, scale)


def attend_mla(q_TQC: Tensor, pages: MlaPages, segments: Segments, kv_lora_rank: int, scale: float) -> Tensor:
    """[T, Q, C]: absorbed queries [T, Q, C + R] against the latents; the caller expands the result to values."""
    return _attend(q_TQC, _mla_keys(pages, kv_lora_rank), segments, scale)


def _attend(q: Tensor, keys: _Keys, segments: Segments, scale: float) -> Tensor:
    out = q.new_empty((q.shape[0], q.shape[1], keys.V))
    if segments.num_decodes:
        _attend_decodes(q, keys, segments, scale, out)
    if len(segments.rows_G5) > segments.num_decodes:
        _attend_prefills(q, keys, segments, scale, out)
    return out


def _padded(keys: _Keys) -> dict[str, int]:
    return {
        "BD": power_of_two(keys.D, 16),
        "BR": power_of_two(keys.R, 16),
        "BV": power_of_two(keys.V, 16),
    }


def _attend_decodes(q: Tensor, keys: _Keys, segments: Segments, scale: float, out: Tensor) -> None:
    N, Q, K = segments.num_decodes, q.shape[1], len(segments.read_K)
    tiles = _tiles(power_of_two(min(Q // K, 64), 16), keys.D, q.dtype)
    num_splits = max(1, -(-segments.longest_decode // keys.split))
    single = num_splits == 1
    partial = out if single else q.new_empty((N, num_splits, Q, keys.V), dtype=torch.float32)
    log_sum = out if single else q.new_empty((N, num_splits, Q), dtype=torch.float32)
    launch(
        _decode,
        (num_splits, K * -(-(Q // K) // tiles.M), N),
        *(q, keys.keys, keys.values, segments.rows_G5, segments.units, segments.read_K, out, partial, log_sum),
        *(scale * LOG2_E, q.stride(0), q.stride(1), keys.unit_stride, keys.head_stride, keys.token_stride, num_splits),
        GROUP=Q // K, D=keys.D, R=keys.R, V=keys.V, SPLIT=keys.split, M=tiles.M, S=tiles.S, **_padded(keys),
        SINGLE=single, PRECISION=precision(q.dtype), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if not single:
        launch(
            _combine,
            (N, Q),
            *(partial, log_sum, segments.rows_G5, out, num_splits),
            V=keys.V, SPLIT=keys.split, BV=power_of_two(keys.V, 16), num_warps=1,
        )  # fmt: skip


def _attend_prefills(q: Tensor, keys: _Keys, segments: Segments, scale: float, out: Tensor) -> None:
    Q, K = q.shape[1], len(segments.read_K)
    tiles = _tiles(128, keys.D, q.dtype)
    rows_G5 = segments.rows_G5[segments.num_decodes :]
    launch(
        _prefill,
        (-(-segments.longest_prefill * (Q // K) // tiles.M), K, len(rows_G5)),
        *(q, keys.keys, keys.values, rows_G5, segments.units, segments.read_K, out),
        *(scale * LOG2_E, q.stride(0), q.stride(1), keys.unit_stride, keys.head_stride, keys.token_stride),
        GROUP=Q // K, D=keys.D, R=keys.R, V=keys.V, M=tiles.M, S=tiles.S, **_padded(keys),
        PRECISION=precision(q.dtype), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def attend_mla_expanded(
    q_TQD: Tensor, pages: MlaPages, new: NewTokens, units: Tensor, expand_QNC: Tensor, value_dim: int, scale: float
) -> Tensor:
    """[T, Q, V]: one sequence's new tokens, its latents expanded to keys and values by `expand_QNC` [Q, nope + V, C].

    The expansion lies as pages in order, [S, Q, key | value], some heads at a time.
    """
    T, Q, D = q_TQD.shape
    C, nope_dim = expand_QNC.shape[2], expand_QNC.shape[1] - value_dim
    num_units = -(-(new.num_prefix + T) // UNIT_TOKENS)
    latent = pages.latent_UWC.index_select(0, units[new.first_unit : new.first_unit + num_units]).flatten(0, 1)
    S, width = len(latent), D + value_dim
    step = min(Q, max(1, EXPANDED_BYTES // (S * width * q_TQD.element_size())))
    device = q_TQD.device
    row = torch.tensor([[0, T, new.num_prefix, 0, 0]], dtype=torch.int64).to(device, non_blocking=True)
    in_order = torch.arange(num_units, device=device)
    out = q_TQD.new_empty((T, Q, value_dim))
    for first in range(0, Q, step):
        expand_QNC_part = expand_QNC[first : first + step]
        heads = len(expand_QNC_part)
        expanded = torch.matmul(latent[:, :C], expand_QNC_part.flatten(0, 1).T).view(S, heads, -1)
        rows = q_TQD.new_empty((S, heads, width))
        rows[..., :nope_dim] = expanded[..., :nope_dim]
        rows[..., nope_dim:D] = latent[:, C:].unsqueeze(1)
        rows[..., D:] = expanded[..., nope_dim:]
        keys = _Keys(rows, rows[..., D:], UNIT_TOKENS * heads * width, width, heads * width, D, 0, value_dim, 0)
        segments = Segments(row, in_order, torch.arange(heads, device=device), 0, 0, T)
        out[:, first : first + step] = _attend(q_TQD[:, first : first + step], keys, segments, scale)
    return out
