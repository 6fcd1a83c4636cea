"""Many small matrix products in one launch: rows sorted by slot, each against its slot's weight.

A program finds its slot from the counts on the device, so no host waits for them and an empty slot costs nothing. Rows
may be read through an index, which saves the copy of a permutation. FP8 operands are e4m3: activations with a factor
for 128 values of a row, weights with one for a block of 128 x 128, applied to the float32 sums of each 128.
"""

# Triton compiles its functions from their source: they have no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

# P rows, N outputs, K inputs, S slots, B blocks of 128

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_cluster.kernels.gpu.launch import dot, launch, power_of_two, precision

BLOCK = 128
"""Values that share a factor."""


@triton.jit
def _find(counts, block, M: tl.constexpr, S: tl.constexpr, BS: tl.constexpr):
    """The slot of a block of M rows (S: none), its first row and the end of the slot's rows."""
    s = tl.arange(0, BS)
    count_S = tl.load(counts + s, mask=s < S, other=0)
    blocks_S = (count_S + M - 1) // M
    ends_S = tl.cumsum(blocks_S, 0)
    slot = tl.sum(((ends_S <= block) & (s < S)).to(tl.int32))
    first_row = tl.sum(tl.where(s < slot, count_S, 0))
    first_block = tl.sum(tl.where(s < slot, blocks_S, 0))
    count = tl.sum(tl.where(s == slot, count_S, 0))
    return slot, first_row + (block - first_block) * M, first_row + count


@triton.jit
def _gemm(
    x, weight, counts, rows, out, divisor, x_stride, slot_stride,
    N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, INDEXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot, first, end = _find(counts, tl.program_id(1), BM, S, BS)
    if slot >= S:
        return
    m = first + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row_M = m.to(tl.int64)
    if INDEXED:
        row_M = tl.load(rows + m, mask=m < end, other=0).to(tl.int64) // divisor
    x_at = x + row_M[:, None] * x_stride + k[None, :]
    w_at = weight + slot.to(tl.int64) * slot_stride + n[None, :] * K + k[:, None]
    is_row = (m < end)[:, None]
    is_out = (n < N)[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        if K % BK == 0:
            a = tl.load(x_at, mask=is_row, other=0.0)
            b = tl.load(w_at, mask=is_out, other=0.0)
        else:
            a = tl.load(x_at, mask=is_row & (k < K - start)[None, :], other=0.0)
            b = tl.load(w_at, mask=is_out & (k < K - start)[:, None], other=0.0)
        acc = dot(a, b, acc, PRECISION)
        x_at += BK
        w_at += BK
    out_at = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=is_row & is_out)


@triton.jit
def _gemm_fp8(
    x, x_factors, weight, weight_factors, counts, rows, out, divisor, x_stride, x_factor_stride,
    N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    slot, first, end = _find(counts, tl.program_id(1), BM, S, BS)
    if slot >= S:
        return
    num_n_blocks: tl.constexpr = (N + BK - 1) // BK
    num_k_blocks: tl.constexpr = (K + BK - 1) // BK
    m = first + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row_M = m.to(tl.int64)
    if INDEXED:
        row_M = tl.load(rows + m, mask=m < end, other=0).to(tl.int64) // divisor
    x_at = x + row_M[:, None] * x_stride + k[None, :]
    w_at = weight + (slot.to(tl.int64) * N + n)[None, :] * K + k[:, None]
    x_factor_at = x_factors + row_M * x_factor_stride
    # a tile is no wider than a block of weights and begins with one: one factor serves it
    w_factor_at = weight_factors + (slot * num_n_blocks + tl.program_id(0) * BN // BK) * num_k_blocks
    is_row = (m < end)[:, None]
    is_out = (n < N)[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        if K % BK == 0:
            a = tl.load(x_at, mask=is_row, other=0.0)
            b = tl.load(w_at, mask=is_out, other=0.0)
        else:
            a = tl.load(x_at, mask=is_row & (k < K - start)[None, :], other=0.0)
            b = tl.load(w_at, mask=is_out & (k < K - start)[:, None], other=0.0)
        factor_M = tl.load(x_factor_at, mask=m < end, other=0.0) * tl.load(w_factor_at)
        acc += dot(a, b, tl.zeros([BM, BN], tl.float32), "ieee") * factor_M[:, None]
        x_at += BK
        w_at += BK
        x_factor_at += 1
        w_factor_at += 1
    out_at = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=is_row & is_out)


def _rows_of_tile(num_rows: int, num_slots: int) -> int:
    """As many as a slot gets, about: decode has few rows for each expert."""
    return min(128, power_of_two(-(-num_rows // num_slots), 16))


def _num_blocks(num_rows: int, num_slots: int, rows_of_tile: int) -> int:
    """No fewer than the blocks that any counts can need."""
    return num_rows // rows_of_tile + min(num_slots, num_rows)


def grouped_gemm(
    x_RK: Tensor, weight_SNK: Tensor, counts_S: Tensor, num_rows: int, rows_P: Tensor | None = None, divisor: int = 1
) -> Tensor:
    """[P, N]: row p of x against its slot's weight. `counts_S` int32: rows of each slot, in their order. Slots may lie
    apart, each is contiguous.

    With `rows_P`, row p is row `rows_P[p] // divisor` of x. Rows behind the sum of the counts are not written.
    `num_rows` is P, or a bound.
    """
    S, N, K = weight_SNK.shape
    out = x_RK.new_empty((num_rows, N))
    assert x_RK.stride(1) == 1
    assert weight_SNK.stride()[1:] == (K, 1)
    if num_rows:
        wide = x_RK.element_size() > 2
        M = 16 if wide else _rows_of_tile(num_rows, S)
        columns, inputs = (32, 32) if wide else (128, 64)
        launch(
            _gemm,
            (-(-N // columns), _num_blocks(num_rows, S, M)),
            *(x_RK, weight_SNK, counts_S, counts_S if rows_P is None else rows_P, out, divisor),
            *(x_RK.stride(0), weight_SNK.stride(0)),
            N=N, K=K, S=S, BS=power_of_two(S), BM=M, BN=columns, BK=inputs, INDEXED=rows_P is not None,
            PRECISION=precision(x_RK.dtype), num_warps=8 if M >= 128 else 4, num_stages=3,
        )  # fmt: skip
    return out


def grouped_gemm_fp8(
    x_RK: Tensor,
    x_factors_RB: Tensor,
    weight_SNK: Tensor,
    weight_factors_SBB: Tensor,
    counts_S: Tensor,
    num_rows: int,
    rows_P: Tensor | None = None,
    divisor: int = 1,
) -> Tensor:
    """bfloat16 [P, N], as `grouped_gemm`. `weight_factors_SBB` float32 [S, ceil(N / 128), ceil(K / 128)]."""
    S, N, K = weight_SNK.shape
    out = torch.empty((num_rows, N), dtype=torch.bfloat16, device=x_RK.device)
    assert x_RK.stride(1) == 1
    assert weight_SNK.is_contiguous()
    assert weight_factors_SBB.is_contiguous()
    if num_rows:
        M = _rows_of_tile(num_rows, S)
        launch(
            _gemm_fp8,
            (-(-N // BLOCK), _num_blocks(num_rows, S, M)),
            *(x_RK, x_factors_RB, weight_SNK, weight_factors_SBB, counts_S, counts_S if rows_P is None else rows_P),
            *(out, divisor, x_RK.stride(0), x_factors_RB.stride(0)),
            N=N, K=K, S=S, BS=power_of_two(S), BM=M, BN=BLOCK, BK=BLOCK, INDEXED=rows_P is not None,
            num_warps=8 if M >= 64 else 4, num_stages=3,
        )  # fmt: skip
    return out


def grouped_gemm_reference(x_PK: Tensor, weight_SNK: Tensor, counts: list[int]) -> Tensor:
    """float32 [sum of counts, N], one slot at a time."""
    parts = x_PK[: sum(counts)].float().split(counts)
    return torch.cat([rows @ weight.float().T for rows, weight in zip(parts, weight_SNK, strict=True)])


def dequantise_blocks_reference(weight_SNK: Tensor, factors_SBB: Tensor) -> Tensor:
    """float32 [S, N, K]."""
    _, N, K = weight_SNK.shape
    wide = factors_SBB.repeat_interleave(BLOCK, dim=1).repeat_interleave(BLOCK, dim=2)
    return weight_SNK.float() * wide[:, :N, :K]
