"""Every placement of a small layer, as the yardstick for the planner where that can be tried."""

# E experts, R ranks

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from pd_cluster.parallel.balance import plan
from pd_cluster.parallel.replicas import ranks_of_copies

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SHAPES = ((5, 3, 1), (6, 3, 3), (5, 4, 3), (6, 4, 2))
"""Experts, ranks and redundant copies."""


def best_of_all_placements(load_E: Floats, num_ranks: int, slots_per_rank: int, redundant: int) -> float:
    """The hottest rank of the best placement there is, each placement with its best split."""
    subsets = [c for size in range(1, num_ranks + 1) for c in itertools.combinations(range(num_ranks), size)]
    holds = np.array([[rank in c for rank in range(num_ranks)] for c in subsets], np.int64)
    within = np.array([[set(c) <= set(d) for d in subsets] for c in subsets], np.float64)
    sizes = holds.sum(1)
    order = np.argsort(-load_E)
    best = np.inf

    def place(index: int, used_R: Ints, forced: Floats, spare: int) -> None:
        """`forced`: for each set of ranks the load that must be computed within it."""
        nonlocal best
        hottest = float((forced / sizes).max())
        if hottest >= best:
            return
        if index == len(order):
            best = hottest
            return
        for choice, held in enumerate(holds):
            if sizes[choice] - 1 <= spare and (used_R + held <= slots_per_rank).all():
                more = forced + within[choice] * load_E[order[index]]
                place(index + 1, used_R + held, more, spare - int(sizes[choice]) + 1)

    place(0, np.zeros(num_ranks, np.int64), np.zeros(len(subsets)), redundant)
    return float(best)


def best_split(load_E: Floats, ranks_E: list[list[int]], num_ranks: int) -> float:
    """The hottest rank under the best split over given copies: what must be computed within a set of ranks, divided by
    its size, for the worst of all sets.
    """
    return max(
        float(sum(load for load, ranks in zip(load_E, ranks_E, strict=True) if set(ranks) <= set(chosen)) / size)
        for size in range(1, num_ranks + 1)
        for chosen in itertools.combinations(range(num_ranks), size)
    )


def run(instances: int = 6, seed: int = 0) -> dict[str, Any]:
    """The planner's hottest rank over the best possible, for random loads of `instances` layers of each small shape."""
    over = []
    for num_experts, num_ranks, redundant in SHAPES:
        for number in range(instances):
            rng = np.random.default_rng((seed, num_experts, num_ranks, number))
            load_E = rng.lognormal(0.0, rng.uniform(0.0, 2.0), num_experts) * 100
            placement = plan(load_E[None], num_ranks, redundant=redundant)
            found = best_split(load_E, ranks_of_copies(placement, 0), num_ranks)
            over.append(found / best_of_all_placements(load_E, num_ranks, placement.slots_per_rank, redundant))
    return {
        "instances": len(over),
        "optimal": sum(ratio <= 1 + 1e-6 for ratio in over),
        "mean_over_optimum": float(np.mean(over)),
        "worst_over_optimum": max(over),
    }
