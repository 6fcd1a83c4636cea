"""Pairs of (token, expert) in the order of their slots, and results back in the order of their tokens.

The order is stable: within a slot, pairs keep theirs. So sums are added in one order and bits repeat, which atomic
additions would not give. Nothing is read back to the host: slots' counts stay on the device. A pair whose slot is
outside [0, S) belongs to another rank, or to padding, and is left out.
"""

# Triton compiles its functions from their source: they have no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

# T tokens, K experts per token, P pairs (T K), S slots, H hidden size, R rows

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_cluster.kernels.gpu.launch import launch, power_of_two

PAIRS = 1024
"""Pairs that a program looks at together."""


@triton.jit(do_not_specialize=["num_pairs"])
def _count(slots, counts, num_pairs, BLOCK: tl.constexpr):
    slot = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        p = start + tl.arange(0, BLOCK)
        total += tl.sum((tl.load(slots + p, mask=p < num_pairs, other=-1) == slot).to(tl.int32))
    tl.store(counts + slot, total)


@triton.jit(do_not_specialize=["num_pairs"])
def _order(slots, counts, pair_of, place_of, num_pairs, S: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(0)
    s = tl.arange(0, BS)
    place = tl.sum(tl.load(counts + s, mask=s < slot, other=0))
    for start in range(0, num_pairs, BLOCK):
        p = start + tl.arange(0, BLOCK)
        here = tl.load(slots + p, mask=p < num_pairs, other=-1) == slot
        to = place + tl.cumsum(here.to(tl.int32), 0) - 1
        tl.store(pair_of + to, p, mask=here)
        tl.store(place_of + p, to, mask=here)
        place += tl.sum(here.to(tl.int32))


@triton.jit
def _gather(x, row_of, divisor, out, x_stride, H: tl.constexpr, BH: tl.constexpr):
    to = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    row = tl.load(row_of + to).to(tl.int64)
    value = tl.load(x + row // divisor * x_stride + h, mask=h < tl.where(row >= 0, H, 0), other=0.0)
    tl.store(out + to * H + h, value, mask=h < H)


@triton.jit
def _sum_rows(values, place_of, weights, starts, out, fixed, H: tl.constexpr, BH: tl.constexpr, FIXED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    if FIXED:
        first, end = row * fixed, (row + 1) * fixed
    else:
        first, end = tl.load(starts + row), tl.load(starts + row + 1)
    acc = tl.zeros([BH], tl.float32)
    for index in range(first, end):
        place = tl.load(place_of + index).to(tl.int64)
        at = index if FIXED else place
        value = tl.load(values + place * H + h, mask=h < tl.where(place >= 0, H, 0), other=0.0).to(tl.float32)
        weight = tl.load(weights + at, mask=place >= 0, other=0.0)
        acc += value * weight
    tl.store(out + row * H + h, acc.to(out.dtype.element_ty), mask=h < H)


def order_by_slot(slots_TK: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts int32 [S]; the pair at each place, int32 [P], -1 behind the last; the place of each pair, int32 [P], -1
    for pairs left out. `slots_TK` int64.
    """
    slots_P = slots_TK.reshape(-1)
    P = len(slots_P)
    counts_S = torch.empty(num_slots, dtype=torch.int32, device=slots_P.device)
    pair_of_P = torch.full((P,), -1, dtype=torch.int32, device=slots_P.device)
    place_of_P = torch.full_like(pair_of_P, -1)
    block = min(PAIRS, power_of_two(P, 16))
    launch(_count, (num_slots,), slots_P, counts_S, P, BLOCK=block)
    launch(
        _order, (num_slots,), slots_P, counts_S, pair_of_P, place_of_P, P, S=num_slots, BS=power_of_two(num_slots),
        BLOCK=block,
    )  # fmt: skip
    return counts_S, pair_of_P, place_of_P


def permute(x_TH: Tensor, pair_of_P: Tensor, top_k: int) -> Tensor:
    """[P, H]: the token of each pair, in the order of places; zeros behind the last."""
    return gather_rows(x_TH, pair_of_P, top_k)


def gather_rows(x_TH: Tensor, row_of_R: Tensor, divisor: int = 1) -> Tensor:
    """[R, H]: row `row_of_R // divisor` of x, zeros where it is below 0."""
    R, H = len(row_of_R), x_TH.shape[1]
    out = x_TH.new_empty((R, H))
    if R:
        block = min(power_of_two(H), 2048)
        launch(_gather, (R, -(-H // block)), x_TH, row_of_R, divisor, out, x_TH.stride(0), H=H, BH=block)
    return out


def unpermute(values_PH: Tensor, place_of_P: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, H]: each token's pairs, weighted and added in float32 in the order of its experts."""
    T, K = weights_TK.shape
    return _add_up(values_PH, place_of_P, weights_TK, place_of_P, T, K)


def add_pairs(values_PH: Tensor, row_P: Tensor, weights_P: Tensor, num_rows: int) -> Tensor:
    """[R, H]: weighted values added to their rows in float32, in the order given. `row_P` int64."""
    by_row_P = torch.argsort(row_P, stable=True)
    starts = torch.zeros(num_rows + 1, dtype=torch.int64, device=row_P.device)
    starts.scatter_add_(0, row_P + 1, torch.ones_like(row_P)).cumsum_(0)
    return _add_up(values_PH, by_row_P, weights_P, starts, num_rows, 0)


def _add_up(values: Tensor, places: Tensor, weights: Tensor, starts: Tensor, num_rows: int, fixed: int) -> Tensor:
    H = values.shape[1]
    out = values.new_empty((num_rows, H))
    if num_rows:
        block = min(power_of_two(H), 1024)
        launch(
            _sum_rows, (num_rows, -(-H // block)), values, places, weights, starts, out, fixed,
            H=H, BH=block, FIXED=fixed > 0,
        )  # fmt: skip
    return out


def order_by_slot_reference(slots_TK: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    slots_P = slots_TK.reshape(-1)
    here_P = (slots_P >= 0) & (slots_P < num_slots)
    counts_S = torch.bincount(slots_P[here_P], minlength=num_slots).int()
    order = torch.argsort(slots_P.masked_fill(~here_P, num_slots), stable=True).int()
    num_here = int(here_P.sum())
    pair_of_P = torch.full_like(order, -1)
    pair_of_P[:num_here] = order[:num_here]
    place_of_P = torch.full_like(order, -1)
    place_of_P[order[:num_here].long()] = torch.arange(num_here, dtype=torch.int32, device=order.device)
    return counts_S, pair_of_P, place_of_P


def permute_reference(x_TH: Tensor, pair_of_P: Tensor, top_k: int) -> Tensor:
    rows = x_TH[pair_of_P.clamp(min=0).long() // top_k]
    return rows.masked_fill((pair_of_P < 0).unsqueeze(1), 0)


def unpermute_reference(values_PH: Tensor, place_of_P: Tensor, weights_TK: Tensor) -> Tensor:
    T, K = weights_TK.shape
    weighted = values_PH.float()[place_of_P.clamp(min=0).long()] * weights_TK.reshape(-1, 1)
    weighted = weighted.masked_fill((place_of_P < 0).unsqueeze(1), 0)
    return weighted.view(T, K, values_PH.shape[1]).sum(1).to(values_PH.dtype)
