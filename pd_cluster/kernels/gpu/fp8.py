"""Rows to FP8: e4m3 values with a float32 factor for every 128 of them, alone or fused with the gate of an MLP.

A group's largest magnitude becomes 448. In the interpreter, whose own cast to e4m3 is wrong, torch casts.
"""

# Triton compiles its functions from their source: they have no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

# P rows, N values, I intermediate size, B groups of 128

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from pd_cluster.kernels.gpu.launch import INTERPRETED, launch

GROUP = 128
E4M3_MAX = 448.0


@triton.jit
def _quantise(
    x, q, factors, x_stride, N: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr, LARGEST: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    n = group * GROUP + tl.arange(0, GROUP)
    inside = n < N
    value = tl.load(x + row * x_stride + n, mask=inside, other=0.0)
    if GATED:
        up = tl.load(x + row * x_stride + N + n, mask=inside, other=0.0)
        wide = value.to(tl.float32)
        # rounded where separate operators round
        silu = (wide / (1.0 + tl.exp(-wide))).to(value.dtype).to(tl.float32)
        value = (silu * up.to(tl.float32)).to(value.dtype)
    wide = value.to(tl.float32)
    largest = tl.max(tl.abs(wide))
    factor = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    scaled = tl.minimum(tl.maximum(wide / factor, -LARGEST), LARGEST)
    tl.store(q + row * N + n, scaled.to(q.dtype.element_ty), mask=inside)
    tl.store(factors + row * tl.num_programs(1) + group, factor)


@triton.jit
def _silu_mul(x, out, x_stride, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    gate = tl.load(x + row * x_stride + n, mask=inside, other=0.0)
    up = tl.load(x + row * x_stride + N + n, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * N + n, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)


def quantise(x_PN: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [P, N] and factors float32 [P, ceil(N / 128)]."""
    return _launch(x_PN, x_PN.shape[1], gated=False)


def silu_mul_quantise(x_PN: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of [P, gate | up], as e4m3 [P, I] and factors."""
    return _launch(x_PN, x_PN.shape[1] // 2, gated=True)


def silu_mul(x_PN: Tensor) -> Tensor:
    """silu(gate) * up of [P, gate | up]: [P, I]."""
    P, N = len(x_PN), x_PN.shape[1] // 2
    assert x_PN.stride(1) == 1
    out = x_PN.new_empty((P, N))
    if P:
        launch(_silu_mul, (P, -(-N // 1024)), x_PN, out, x_PN.stride(0), N=N, BLOCK=1024)
    return out


def _launch(x: Tensor, N: int, *, gated: bool) -> tuple[Tensor, Tensor]:
    P = len(x)
    assert x.stride(1) == 1
    q = torch.empty((P, N), dtype=torch.float32 if INTERPRETED else torch.float8_e4m3fn, device=x.device)
    factors = torch.empty((P, -(-N // GROUP)), dtype=torch.float32, device=x.device)
    if P:
        launch(
            _quantise, (P, factors.shape[1]), x, q, factors, x.stride(0),
            N=N, GROUP=GROUP, GATED=gated, LARGEST=E4M3_MAX, num_warps=1,
        )  # fmt: skip
    return q.to(torch.float8_e4m3fn), factors


def quantise_reference(x_PN: Tensor) -> tuple[Tensor, Tensor]:
    P, N = x_PN.shape
    num_groups = -(-N // GROUP)
    groups = functional.pad(x_PN.float(), (0, num_groups * GROUP - N)).view(P, num_groups, GROUP)
    largest = groups.abs().amax(-1)
    factors = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    q = (groups / factors.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return q.view(P, -1)[:, :N].to(torch.float8_e4m3fn), factors


def silu_mul_reference(x_PN: Tensor) -> Tensor:
    half = x_PN.shape[1] // 2
    return functional.silu(x_PN[:, :half]) * x_PN[:, half:]


def dequantise(q_PN: Tensor, factors_PB: Tensor) -> Tensor:
    """float32 [P, N]."""
    return q_PN.float() * factors_PB.repeat_interleave(GROUP, dim=1)[:, : q_PN.shape[1]]
