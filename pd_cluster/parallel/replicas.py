"""Which copy of an expert a token goes to: by weights that even out the ranks over a window.

Copies need not share an expert's load evenly. Poured like water, each expert in turn over the ranks that hold it until
nothing changes, the loads reach the lowest hottest rank that the placement allows: they minimise the sum of squares
over a base of a polymatroid, and the minimiser also has the least maximum. From loads averaged over a window come
`weights`, by which a token's hash chooses its copy (`choose`). `step_choice` does the same for the counts of one step.

Everything here is a pure function of its arguments, so ranks with the same numbers choose alike without a word.
"""

# E experts, C copies of an expert, R ranks, T tokens, K experts per token

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pd_cluster.parallel.placement import Placement

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_ROUNDS = 50
CLOSE = 1e-4
"""Rounds end once no part changed by more than this share of a rank's mean load."""

HASH_BITS = 16
"""A token's hash is this wide when it meets the weights."""


class Pouring(NamedTuple):
    """Loads over copies: `parts[expert]` in the order of the expert's ranks, and what every rank got."""

    parts: list[list[float]]
    loads_R: list[float]


def ranks_of_copies(placement: Placement, layer: int) -> list[list[int]]:
    """[E] the rank of each copy of each expert, in slot order."""
    return [[int(placement.owner(slot)) for slot in slots] for slots in placement.copies(layer)]


def pour(
    load_E: Sequence[float], ranks_E: list[list[int]], speed_R: Sequence[float], max_rounds: int = MAX_ROUNDS
) -> Pouring:
    """Split each expert's load over its ranks so that the hottest rank's time, load over speed, is least.

    Starts from even parts; the first round already comes within a few percent. `least_hottest_time` says how close.
    """
    parts = [[load / len(ranks)] * len(ranks) for load, ranks in zip(load_E, ranks_E, strict=True)]
    loads_R = [0.0] * len(speed_R)
    for part, ranks in zip(parts, ranks_E, strict=True):
        for load, rank in zip(part, ranks, strict=True):
            loads_R[rank] += load
    pouring = Pouring(parts, loads_R)
    pour_on(pouring, load_E, ranks_E, speed_R, max_rounds)
    return pouring


def pour_on(
    pouring: Pouring, load_E: Sequence[float], ranks_E: list[list[int]], speed_R: Sequence[float], max_rounds: int
) -> None:
    """Continue from `pouring`, in place."""
    parts, loads_R = pouring
    several = [e for e, ranks in enumerate(ranks_E) if len(ranks) > 1]
    several.sort(key=lambda e: -load_E[e])
    enough = CLOSE * sum(loads_R) / len(speed_R)
    for _ in range(max_rounds):
        largest = 0.0
        for expert in several:
            ranks, part = ranks_E[expert], parts[expert]
            below = [loads_R[rank] - old for rank, old in zip(ranks, part, strict=True)]
            poured = _fill(load_E[expert], below, [speed_R[rank] for rank in ranks])
            for rank, under, new, old in zip(ranks, below, poured, part, strict=True):
                loads_R[rank] = under + new
                largest = max(largest, abs(new - old))
            parts[expert] = poured
        if largest <= enough:
            break


def _fill(load: float, below: list[float], speeds: list[float]) -> list[float]:
    """Pour `load` over vessels that are `speeds` wide and hold `below`, up to one level."""
    if len(below) == 2:
        first = (load + below[0] + below[1]) / (speeds[0] + speeds[1]) * speeds[0] - below[0]
        first = min(max(first, 0.0), load)
        return [first, load - first]
    heights = [under / speed for under, speed in zip(below, speeds, strict=True)]
    width = volume = level = 0.0
    for height, under, speed in sorted(zip(heights, below, speeds, strict=True)):
        if width and level <= height:
            break
        width += speed
        volume += under
        level = (load + volume) / width
    return [max(level * speed - under, 0.0) for under, speed in zip(below, speeds, strict=True)]


def least_hottest_time(
    load_E: Sequence[float], ranks_E: list[list[int]], speed_R: Sequence[float], loads_R: Sequence[float]
) -> float:
    """A lower bound on the hottest rank's time under any split, from the ranks that `loads_R` makes hottest.

    Experts whose copies are all on the k hottest ranks must be computed there, however they are split. At the optimum
    one k makes the bound equal to the hottest rank's time, so this certifies a result of `pour`.
    """
    order = sorted(range(len(speed_R)), key=lambda r: -loads_R[r] / speed_R[r])
    place = {rank: index for index, rank in enumerate(order)}
    forced = [0.0] * len(speed_R)
    for load, ranks in zip(load_E, ranks_E, strict=True):
        forced[max(place[r] for r in ranks)] += load
    best = volume = width = 0.0
    for rank, load in zip(order, forced, strict=True):
        volume += load
        width += speed_R[rank]
        best = max(best, volume / width)
    return best


def weights(
    placement: Placement, layer: int, load_E: Sequence[float], speed_R: Sequence[float] | None = None
) -> list[list[float]]:
    """[E] for each copy, in slot order, its share of the expert's tokens; they add up to 1."""
    ranks_E = ranks_of_copies(placement, layer)
    parts = pour(load_E, ranks_E, speed_R or [1.0] * placement.num_ranks).parts
    even = [[1.0 / len(part)] * len(part) for part in parts]
    return [[p / sum(part) for p in part] if sum(part) > 0 else same for part, same in zip(parts, even, strict=True)]


def rank_loads(
    placement: Placement, layer: int, load_E: Sequence[float], weights_EC: list[list[float]] | None = None
) -> list[float]:
    """[R] what each rank gets of `load_E` when copies take the shares of `weights_EC`, default the best there are."""
    ranks_E = ranks_of_copies(placement, layer)
    if weights_EC is None:
        return pour(load_E, ranks_E, [1.0] * placement.num_ranks).loads_R
    loads_R = [0.0] * placement.num_ranks
    for load, ranks, shares in zip(load_E, ranks_E, weights_EC, strict=True):
        for rank, part in zip(ranks, shares, strict=True):
            loads_R[rank] += load * part
    return loads_R


def thresholds(weights_E: list[list[float]]) -> Ints:
    """[E, C] cumulative weights on the scale of the hash; the last copy of an expert, and padding, are at the top."""
    most = max(len(w) for w in weights_E)
    top = 1 << HASH_BITS
    table_EC = np.full((len(weights_E), most), top)
    for row, part in zip(table_EC, weights_E, strict=True):
        row[: len(part) - 1] = np.round(np.cumsum(part[:-1]) * top)
    return table_EC


def choose(experts_TK: Ints, mix_T: Ints, thresholds_EC: Ints) -> Ints:
    """[T, K] which copy (index in slot order) of each expert. `mix_T`, below 2**31, is the token's hash; it is mixed
    with the expert, so that the same token takes unrelated choices for different experts, in whatever column.
    """
    mixed = (mix_T[:, None] + experts_TK * 0x9E3779B1) & 0x7FFFFFFF
    hashed = (mixed * 0x85EBCA6B & 0x7FFFFFFF) >> (31 - HASH_BITS)
    chosen: Ints = (hashed[..., None] >= thresholds_EC[experts_TK]).sum(-1)
    return chosen
