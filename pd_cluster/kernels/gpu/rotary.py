"""Rotary embedding and the writing of KV on a GPU: queries, keys and values leave a projection once.

A rotated head lies in halves whichever way its pairs came (see `model/rope.py`). Angles are float32 [T, 1, R / 2],
made once a step. A token whose unit is below 0 is padding: its keys and values go nowhere.
"""

# Triton compiles its functions from their source: they have no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

# T tokens, Q query heads, K key/value heads, D head dim, R rotary dim, C latent dim, U units, W tokens of a unit

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_cluster.kernels.gpu.launch import launch, power_of_two
from pd_cluster.kernels.paged import GqaPages, MlaPages, Writes


@triton.jit
def _rotate(
    x, weight, q_out, keys, values, cos, sin, unit_T, offset_T, eps,
    token_stride, x_head_stride, q_token_stride, q_head_stride, unit_stride, kv_head_stride,
    Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORMS: tl.constexpr, BH: tl.constexpr, BHALF: tl.constexpr, BREST: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    num_rotated: tl.constexpr = (Q + K + BH - 1) // BH
    unit = tl.zeros([], tl.int64)
    offset = tl.zeros([], tl.int64)
    if K > 0:
        unit = tl.load(unit_T + t)
        offset = tl.load(offset_T + t)
    if tl.program_id(1) < num_rotated:
        h = tl.program_id(1) * BH + tl.arange(0, BH)
        i = tl.arange(0, BHALF)
        rest = R + tl.arange(0, BREST)
        if INTERLEAVED:
            one, two = 2 * i, 2 * i + 1
        else:
            one, two = i, i + R // 2
        is_head = (h < Q + K)[:, None]
        paired = is_head & (i < R // 2)[None, :]
        unpaired = is_head & (rest < D)[None, :]
        from_H = x + t * token_stride + h * x_head_stride
        first = tl.load(from_H[:, None] + one[None, :], mask=paired, other=0.0).to(tl.float32)
        second = tl.load(from_H[:, None] + two[None, :], mask=paired, other=0.0).to(tl.float32)
        tail = tl.load(from_H[:, None] + rest[None, :], mask=unpaired, other=0.0).to(tl.float32)
        if NORMS:
            dtype: tl.constexpr = x.dtype.element_ty
            squares_H = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(tail * tail, 1)
            factor = tl.rsqrt(squares_H / D + eps)[:, None]
            w_H = weight + h * D
            w_first = tl.load(w_H[:, None] + one[None, :], mask=paired, other=0.0).to(tl.float32)
            w_second = tl.load(w_H[:, None] + two[None, :], mask=paired, other=0.0).to(tl.float32)
            w_tail = tl.load(w_H[:, None] + rest[None, :], mask=unpaired, other=0.0).to(tl.float32)
            # rounded where separate operators round
            first = ((first * factor).to(dtype).to(tl.float32) * w_first).to(dtype).to(tl.float32)
            second = ((second * factor).to(dtype).to(tl.float32) * w_second).to(dtype).to(tl.float32)
            tail = ((tail * factor).to(dtype).to(tl.float32) * w_tail).to(dtype).to(tl.float32)
        c = tl.load(cos + t * (R // 2) + i, mask=i < R // 2, other=0.0)[None, :]
        s = tl.load(sin + t * (R // 2) + i, mask=i < R // 2, other=0.0)[None, :]
        low = (first * c - second * s).to(q_out.dtype.element_ty)
        high = (second * c + first * s).to(q_out.dtype.element_ty)
        same = tail.to(q_out.dtype.element_ty)
        is_q = (h < Q)[:, None]
        to_q = q_out + t * q_token_stride + h * q_head_stride
        tl.store(to_q[:, None] + i[None, :], low, mask=paired & is_q)
        tl.store(to_q[:, None] + (i + R // 2)[None, :], high, mask=paired & is_q)
        tl.store(to_q[:, None] + rest[None, :], same, mask=unpaired & is_q)
        if K > 0:
            is_k = ((h >= Q) & (h < tl.where(unit >= 0, Q + K, 0)))[:, None]
            to_k = keys + unit * unit_stride + (h - Q) * kv_head_stride + offset * D
            tl.store(to_k[:, None] + i[None, :], low, mask=paired & is_k)
            tl.store(to_k[:, None] + (i + R // 2)[None, :], high, mask=paired & is_k)
            tl.store(to_k[:, None] + rest[None, :], same, mask=unpaired & is_k)
    else:
        h = (tl.program_id(1) - num_rotated) * BH + tl.arange(0, BH)
        d = tl.arange(0, BD)
        keep = (h < tl.where(unit >= 0, K, 0))[:, None] & (d < D)[None, :]
        from_H = x + t * token_stride + (Q + K + h) * x_head_stride
        value = tl.load(from_H[:, None] + d[None, :], mask=keep, other=0.0)
        to_v = values + unit * unit_stride + h * kv_head_stride + offset * D
        tl.store(to_v[:, None] + d[None, :], value, mask=keep)


@triton.jit
def _write_latent(
    x, weight, latent, cos, sin, unit_T, offset_T, eps, token_stride, unit_stride,
    C: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, BC: tl.constexpr, BHALF: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    unit = tl.load(unit_T + t)
    offset = tl.load(offset_T + t)
    dtype: tl.constexpr = latent.dtype.element_ty
    to = latent + unit * unit_stride + offset * (C + R)
    x += t * token_stride
    c = tl.arange(0, BC)
    value = tl.load(x + c, mask=c < C, other=0.0).to(tl.float32)
    normed = (value * tl.rsqrt(tl.sum(value * value) / C + eps)).to(dtype).to(tl.float32)
    scaled = normed * tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(to + c, scaled.to(dtype), mask=c < tl.where(unit >= 0, C, 0))
    i = tl.arange(0, BHALF)
    paired = i < R // 2
    if INTERLEAVED:
        one, two = 2 * i, 2 * i + 1
    else:
        one, two = i, i + R // 2
    first = tl.load(x + C + one, mask=paired, other=0.0).to(tl.float32)
    second = tl.load(x + C + two, mask=paired, other=0.0).to(tl.float32)
    cos_I = tl.load(cos + t * (R // 2) + i, mask=paired, other=0.0)
    sin_I = tl.load(sin + t * (R // 2) + i, mask=paired, other=0.0)
    keep = i < tl.where(unit >= 0, R // 2, 0)
    tl.store(to + C + i, (first * cos_I - second * sin_I).to(dtype), mask=keep)
    tl.store(to + C + R // 2 + i, (second * cos_I + first * sin_I).to(dtype), mask=keep)


def rotate_and_write(
    qkv_THD: Tensor,
    num_heads: int,
    norm_weight: Tensor | None,
    eps: float,
    angles: tuple[Tensor, Tensor],
    rotary_dim: int,
    interleaved: bool,
    pages: GqaPages,
    writes: Writes,
) -> Tensor:
    """Rotated queries [T, Q, D] of [T, Q + 2 K, D]; rotated keys and plain values go to `writes` in `pages`.

    `norm_weight` [Q + K, D]: RMSNorm of each query and key head before the rotation.
    """
    T, _, D = qkv_THD.shape
    keys, values = pages.keys_UKWD, pages.values_UKWD
    assert keys.stride() == values.stride()
    assert keys.stride(2) == D
    num_kv_heads = keys.shape[1]
    q = qkv_THD.new_empty((T, num_heads, D))
    if T:
        _launch(
            qkv_THD, norm_weight, q, keys, values, angles, writes, eps, keys.stride(0), keys.stride(1),
            num_heads, num_kv_heads, rotary_dim, interleaved,
        )  # fmt: skip
    return q


def rotate_queries(q_TQR: Tensor, out_TQR: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool) -> None:
    """Rotate whole heads [T, Q, R] into `out_TQR`; both may be parts of wider heads."""
    T, Q, R = q_TQR.shape
    if T:
        none = Writes(q_TQR, q_TQR)
        _launch(q_TQR, None, out_TQR, out_TQR, out_TQR, angles, none, 0.0, 0, 0, Q, 0, R, interleaved)


def _launch(
    x: Tensor, weight: Tensor | None, q: Tensor, keys: Tensor, values: Tensor, angles: tuple[Tensor, Tensor],
    writes: Writes, eps: float, unit_stride: int, head_stride: int, Q: int, K: int, R: int, interleaved: bool,
) -> None:  # fmt: skip
    T, _, D = x.shape
    assert x.stride(2) == 1
    assert q.stride(2) == 1
    rows = 8
    constants: dict[str, Any] = {
        "Q": Q, "K": K, "D": D, "R": R, "INTERLEAVED": interleaved, "NORMS": weight is not None, "BH": rows,
        "BHALF": power_of_two(R // 2), "BREST": power_of_two(D - R), "BD": power_of_two(D),
    }  # fmt: skip
    launch(
        _rotate,
        (T, -(-(Q + K) // rows) + -(-K // rows)),
        *(x, x if weight is None else weight, q, keys, values, *angles, writes.units_T, writes.offsets_T, eps),
        *(x.stride(0), x.stride(1), q.stride(0), q.stride(1), unit_stride, head_stride),
        **constants,
    )


def write_latents(
    x_TC: Tensor,
    norm_weight: Tensor,
    eps: float,
    angles: tuple[Tensor, Tensor],
    interleaved: bool,
    pages: MlaPages,
    writes: Writes,
) -> None:
    """[c_kv | k_rope] rows [T, C + R] to `writes` in `pages`: the latent normalised by `norm_weight` [C], the rest
    rotated.
    """
    T, width = x_TC.shape
    C = len(norm_weight)
    latent = pages.latent_UWC
    assert x_TC.stride(1) == 1
    assert latent.stride(1) == width
    if T:
        launch(
            _write_latent, (T,), x_TC, norm_weight, latent, *angles, writes.units_T, writes.offsets_T, eps,
            x_TC.stride(0), latent.stride(0), C=C, R=width - C, INTERLEAVED=interleaved, BC=power_of_two(C),
            BHALF=power_of_two((width - C) // 2),
        )  # fmt: skip


def rotate_reference(x_THD: Tensor, angles: tuple[Tensor, Tensor], rotary_dim: int, interleaved: bool) -> Tensor:
    """[T, H, D] rotated, in halves."""
    cos, sin = angles
    half = rotary_dim // 2
    x = x_THD.float()
    if interleaved:
        first, second = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    else:
        first, second = x[..., :half], x[..., half:rotary_dim]
    rotated = [first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:]]
    return torch.cat(rotated, dim=-1).to(x_THD.dtype)
