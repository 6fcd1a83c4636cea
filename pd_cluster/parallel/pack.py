"""Tokens packed by destination rank and unpacked by expert slot: the part that every exchanging dispatcher shares.

A source sends each rank one copy of a token that has any of its experts there, and for each such (token, expert) pair
the row, the local slot and the weight. The destination sorts all pairs by slot. Results come back one row per copy,
and a token's copies are added in the order of their ranks, in float32. Plain torch, no rank-local choice anywhere:
equal inputs give equal bits.
"""

# T tokens, K experts per token, H hidden size, C copies (token, destination rank), P pairs (token, expert), D ranks

from typing import NamedTuple

import torch
from torch import Tensor

from pd_cluster.errors import EngineError
from pd_cluster.ids import Rank
from pd_cluster.parallel.dispatch import Arrived


class Packed(NamedTuple):
    """What one source sends: copies sorted by (destination, token), pairs sorted by copy. Row numbers count from the
    destination's first.
    """

    num_tokens: int
    token_C: Tensor
    pair_row_P: Tensor
    pair_slot_P: Tensor
    pair_weight_P: Tensor
    copy_counts: list[int]  # [D]
    pair_counts: list[int]  # [D]


def pack(slots_TK: Tensor, weights_TK: Tensor, num_ranks: int, slots_per_rank: int) -> Packed:
    """Group (token, slot) pairs by the slots' owners. `slots_TK` int64. Raises EngineError for one that is not within
    num_ranks * slots_per_rank.
    """
    num_tokens, num_chosen = slots_TK.shape
    if num_tokens:
        lowest, highest = (int(bound) for bound in slots_TK.aminmax())
        if lowest < 0 or highest >= num_ranks * slots_per_rank:
            raise unknown_slot(lowest if lowest < 0 else highest, num_ranks * slots_per_rank)
    device = slots_TK.device
    slots_P = slots_TK.reshape(-1)
    token_P = torch.arange(num_tokens, device=device).repeat_interleave(num_chosen)
    owner_P = slots_P.div(slots_per_rank, rounding_mode="floor")
    # one copy for each distinct (owner, token); `unique` sorts, so copies come by owner, then by token
    copies, copy_P = torch.unique(owner_P * max(num_tokens, 1) + token_P, return_inverse=True)
    owner_C = copies.div(max(num_tokens, 1), rounding_mode="floor")
    copy_counts_D = torch.bincount(owner_C, minlength=num_ranks)
    by_copy = torch.argsort(copy_P, stable=True)
    first_copy_D = copy_counts_D.cumsum(0) - copy_counts_D
    owner_sorted_P = owner_P[by_copy]
    return Packed(
        num_tokens=num_tokens,
        token_C=copies % max(num_tokens, 1),
        pair_row_P=copy_P[by_copy] - first_copy_D[owner_sorted_P],
        pair_slot_P=slots_P[by_copy] % slots_per_rank,
        pair_weight_P=weights_TK.reshape(-1)[by_copy],
        copy_counts=copy_counts_D.tolist(),
        pair_counts=torch.bincount(owner_P, minlength=num_ranks).tolist(),
    )


def unknown_slot(slot: int, num_slots: int) -> EngineError:
    return EngineError(f"a token was routed to expert slot {slot}, but there are only slots 0 to {num_slots - 1}")


def unpack(
    rank: Rank,
    hidden_RH: Tensor,
    pair_row_P: Tensor,
    pair_slot_P: Tensor,
    pair_weight_P: Tensor,
    copy_counts: list[int],
    pair_counts: list[int],
    slots_per_rank: int,
) -> Arrived:
    """What `rank` received from all sources, in source order, with `copy_counts` rows and `pair_counts` pairs from
    each.
    """
    device = hidden_RH.device
    first_rows = torch.tensor(copy_counts, device=device).cumsum(0) - torch.tensor(copy_counts, device=device)
    row_P = pair_row_P + first_rows.repeat_interleave(torch.tensor(pair_counts, device=device))
    # sources come in order and rows ascend within each: a stable sort by slot keeps rows ascending within a slot
    by_slot = torch.argsort(pair_slot_P, stable=True)
    slot_counts = torch.bincount(pair_slot_P, minlength=slots_per_rank).tolist()
    return Arrived(rank, hidden_RH, row_P[by_slot], pair_slot_P[by_slot], pair_weight_P[by_slot], slot_counts)


def add_up(packed: Packed, returned_CH: Tensor) -> Tensor:
    """[T, H]: the sums that came back, added per token in the order of the ranks they came from."""
    return sum_rows(returned_CH, packed.token_C, packed.num_tokens).to(returned_CH.dtype)


def sum_rows(values_PH: Tensor, row_P: Tensor, num_rows: int) -> Tensor:
    """float32 [num_rows, H]: values added to their rows in the order given, which fixes the rounding."""
    out_RH = torch.zeros((num_rows, values_PH.shape[1]), dtype=torch.float32, device=values_PH.device)
    if values_PH.device.type == "cpu":
        return out_RH.index_add_(0, row_P, values_PH.float())
    # a GPU adds atomically in any order: take the k-th value of every row at a time instead
    by_row = torch.argsort(row_P, stable=True)
    counts_R = torch.bincount(row_P, minlength=num_rows)
    first_R = counts_R.cumsum(0) - counts_R
    for k in range(int(counts_R.max()) if len(row_P) else 0):
        has_R = (counts_R > k).nonzero().squeeze(1)
        out_RH[has_R] += values_PH[by_row[first_R[has_R] + k]].float()
    return out_RH
