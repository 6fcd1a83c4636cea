"""Which copy of its expert each token of one step goes to, from that step's own counts.

Weights follow the averages of a window; a step is noisier. Here every rank counts where the tokens at hand want to go
and pours them over the copies so that its own load is as even over the ranks as the placement allows. Ranks do so
each for itself, without a word; the sum of even loads is even. Each begins with another copy (`turn`), so that what is
left over when loads are few does not pile up on the same ranks.

A token's copy then depends on the tokens beside it: the weights are the same ones, but partial sums may be added in
another order, and the last bits of a result with them. Where a request must give the same bits in any batch, copies are
chosen by hash.

All in integers, so that every machine comes to the same slots: in C where there is a compiler, else in Python.
"""

# T tokens, K experts per token, E experts, C columns of a table of slots, R ranks

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from pd_cluster.errors import EngineError
from pd_cluster.kernels import native

Ints = npt.NDArray[np.int64]

ONE = 1 << 10
"""A token, in the fixed point that loads are poured in."""

CLOSE = ONE // 16
MAX_ROUNDS = 24


def step_slots(
    experts_TK: Ints, slots_EC: Ints, width: int, *, num_ranks: int, slots_per_rank: int, turn: int = 0
) -> Ints:
    """[T, K] physical slots. `slots_EC`: the slots of each expert's copies in the first `width` columns, the first one
    again behind the last. `turn`: a number of the rank; where all ranks hold the same tokens it must be the same one.

    Raises EngineError for an expert that does not exist.
    """
    experts_TK = np.ascontiguousarray(experts_TK, np.int64)
    assert slots_EC.flags.c_contiguous, "a table of slots in rows"
    assert slots_EC.dtype == np.int64
    chosen = np.empty_like(experts_TK)
    function = _compiled()
    arguments = (len(slots_EC), slots_EC.shape[1], width)
    if function is None:
        bad = _choose(experts_TK.reshape(-1), slots_EC, width, num_ranks, slots_per_rank, turn, chosen.reshape(-1))
    else:
        bad = function(
            experts_TK.size,
            experts_TK.ctypes.data,
            *arguments,
            slots_EC.ctypes.data,
            num_ranks,
            slots_per_rank,
            turn,
            chosen.ctypes.data,
        )
    if bad >= 0:
        raise EngineError(f"a token chose expert {experts_TK.reshape(-1)[bad]} of {len(slots_EC)}")
    return chosen


def quotas(count_E: Sequence[int], ranks_E: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """[E] tokens for each copy, whose ranks are given, adding up to the step's counts.

    Poured, then rounded so that a rank that was rounded down is rounded up next.
    """
    level_R, owed_R = [0] * num_ranks, [0] * num_ranks
    parts: list[list[int]] = []
    for count, ranks in zip(count_E, ranks_E, strict=True):
        whole, rest = divmod(count * ONE, len(ranks))
        parts.append([whole + (copy < rest) for copy in range(len(ranks))])
        for rank, part in zip(ranks, parts[-1], strict=True):
            level_R[rank] += part
    several = [e for e, ranks in enumerate(ranks_E) if len(ranks) > 1 and count_E[e]]
    several.sort(key=lambda e: (-count_E[e], e))
    for _ in range(MAX_ROUNDS):
        largest = 0
        for expert in several:
            ranks = ranks_E[expert]
            below = [level_R[rank] - part for rank, part in zip(ranks, parts[expert], strict=True)]
            poured = _fill(count_E[expert] * ONE, below)
            for rank, new, old in zip(ranks, poured, parts[expert], strict=True):
                level_R[rank] += new - old
                largest = max(largest, abs(new - old))
            parts[expert] = poured
        if largest <= CLOSE:
            break
    result = [[part // ONE for part in own] for own in parts]
    for expert in several:
        result[expert] = _rounded(count_E[expert], parts[expert], ranks_E[expert], owed_R)
    return result


def _fill(load: int, below: list[int]) -> list[int]:
    """Pour `load` over vessels that hold `below`, up to one level, the lowest first."""
    order = sorted(range(len(below)), key=below.__getitem__)
    width = volume = 0
    while width < len(order) and (not width or (load + volume) // width > below[order[width]]):
        volume += below[order[width]]
        width += 1
    level, rest = divmod(load + volume, width)
    parts = [0] * len(below)
    for index, vessel in enumerate(order[:width]):
        parts[vessel] = level - below[vessel] + (index < rest)
    return parts


def _rounded(count: int, part: list[int], ranks: Sequence[int], owed_R: list[int]) -> list[int]:
    whole = [p // ONE for p in part]
    for rank, p in zip(ranks, part, strict=True):
        owed_R[rank] += p % ONE
    waiting = list(range(len(ranks)))
    for _ in range(count - sum(whole)):
        index = max(waiting, key=lambda c: owed_R[ranks[c]])
        waiting.remove(index)
        whole[index] += 1
        owed_R[ranks[index]] -= ONE
    return whole


def _choose(
    experts_P: Ints, slots_EC: Ints, width: int, num_ranks: int, slots_per_rank: int, turn: int, chosen_P: Ints
) -> int:
    """What the C function does: fills `chosen_P`; the first pair without an expert, else -1."""
    num_experts = len(slots_EC)
    wrong_P = (experts_P < 0) | (experts_P >= num_experts)
    if wrong_P.any():
        return int(wrong_P.argmax())
    count_E = np.bincount(experts_P, minlength=num_experts).tolist()
    slots_E = []
    for row in slots_EC[:, :width].tolist():
        own = row[: row.index(row[0], 1) if row[0] in row[1:] else width]
        slots_E.append(own[turn % len(own) :] + own[: turn % len(own)])
    ranks_E = [[slot // slots_per_rank for slot in own] for own in slots_E]
    quota_E = quotas(count_E, ranks_E, num_ranks)
    order_P = np.argsort(experts_P, kind="stable")
    chosen_P[order_P] = [
        slot
        for own, quota in zip(slots_E, quota_E, strict=True)
        for slot, tokens in zip(own, quota, strict=True)
        for _ in range(tokens)
    ]
    return -1


@cache
def _compiled() -> Callable[..., int] | None:
    library = native.library()
    return None if library is None else library.step_choice
