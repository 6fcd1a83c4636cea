"""Whole 16-token units of an arena to a dense buffer and back: KV that is staged, spilled or brought home.

A unit is one contiguous range over all heads and layers, so this is a copy of rows chosen by index. Indices below 0
are skipped.
"""

# Triton compiles its functions from their source: they have no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

# U units of the arena, N units to copy, V values of a unit

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_cluster.kernels.gpu.launch import launch

WORDS = 4096
"""Four-byte words that one program copies."""


@triton.jit
def _copy_units(arena, dense, units, num_words, GATHERS: tl.constexpr, WORDS: tl.constexpr):
    n = tl.program_id(1).to(tl.int64)
    unit = tl.load(units + n)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    keep = word < tl.where(unit >= 0, num_words, 0)
    here = arena + unit * num_words + word
    there = dense + n * num_words + word
    if GATHERS:
        tl.store(there, tl.load(here, mask=keep, other=0), mask=word < num_words)
    else:
        tl.store(here, tl.load(there, mask=keep, other=0), mask=keep)


def gather_units(units_UV: Tensor, units_N: Tensor) -> Tensor:
    """[N, V]: the chosen units (int64 indices), zeros where the index is below 0."""
    dense = units_UV.new_empty((len(units_N), units_UV.shape[1]))
    _launch(units_UV, dense, units_N, gathers=True)
    return dense


def scatter_units(units_UV: Tensor, units_N: Tensor, dense_NV: Tensor) -> None:
    """Write rows of `dense_NV` to the chosen units, which must differ from each other."""
    _launch(units_UV, dense_NV, units_N, gathers=False)


def _launch(arena: Tensor, dense: Tensor, units: Tensor, *, gathers: bool) -> None:
    assert arena.is_contiguous()
    assert dense.is_contiguous()
    arena, dense = arena.view(torch.int32), dense.view(torch.int32)
    num_words = arena.shape[1]
    if len(units):
        grid = (-(-num_words // WORDS), len(units))
        launch(_copy_units, grid, arena, dense, units, num_words, GATHERS=gathers, WORDS=WORDS, num_warps=8)


def gather_units_reference(units_UV: Tensor, units_N: Tensor) -> Tensor:
    rows = units_UV.index_select(0, units_N.clamp(min=0))
    return rows.masked_fill_((units_N < 0).unsqueeze(1), 0)


def scatter_units_reference(units_UV: Tensor, units_N: Tensor, dense_NV: Tensor) -> None:
    keep = units_N >= 0
    units_UV.index_copy_(0, units_N[keep], dense_NV[keep])
