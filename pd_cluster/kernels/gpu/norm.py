"""RMSNorm on a GPU, with the addition that comes before it: one read and one write of the hidden states."""

# Triton compiles its functions from their source: they have no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

# T tokens, H hidden size

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_cluster.kernels.gpu.launch import launch, power_of_two


@triton.jit
def _norm(
    x, add, weight, summed, out, x_stride, add_stride, eps, H: tl.constexpr, BH: tl.constexpr, ADDS: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BH)
    inside = h < H
    row = tl.load(x + t * x_stride + h, mask=inside, other=0.0)
    if ADDS:
        more = tl.load(add + t * add_stride + h, mask=inside, other=0.0)
        row = (row.to(tl.float32) + more.to(tl.float32)).to(row.dtype)
        tl.store(summed + t * H + h, row, mask=inside)
    value = row.to(tl.float32)
    normed = (value * tl.rsqrt(tl.sum(value * value) / H + eps)).to(row.dtype)
    scaled = normed.to(tl.float32) * tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t * H + h, scaled.to(row.dtype), mask=inside)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """[T, H]. Rows of `x_TH` may lie apart."""
    out = x_TH.new_empty(x_TH.shape)
    _launch(x_TH, x_TH, weight_H, x_TH, out, eps, adds=False)
    return out


def add_rms_norm(x_TH: Tensor, add_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum x + add, rounded to its dtype, and that sum normalised: [T, H] each."""
    summed, out = x_TH.new_empty(x_TH.shape), x_TH.new_empty(x_TH.shape)
    _launch(x_TH, add_TH, weight_H, summed, out, eps, adds=True)
    return summed, out


def _launch(x: Tensor, add: Tensor, weight: Tensor, summed: Tensor, out: Tensor, eps: float, *, adds: bool) -> None:
    T, H = x.shape
    assert x.stride(1) == 1
    assert add.stride(1) == 1
    if T:
        launch(
            _norm, (T,), x, add, weight, summed, out, x.stride(0), add.stride(0), eps,
            H=H, BH=power_of_two(H), ADDS=adds, num_warps=8 if H > 2048 else 4,
        )  # fmt: skip


def rms_norm_reference(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    x = x_TH.float()
    normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(x_TH.dtype)
    return normed * weight_H


def add_rms_norm_reference(x_TH: Tensor, add_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    summed = x_TH + add_TH
    return summed, rms_norm_reference(summed, weight_H, eps)
