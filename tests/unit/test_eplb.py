"""The baseline gives the numbers that its authors published."""

import numpy as np
import pytest

from pd_cluster.bench.placement import weighted_ratios
from pd_cluster.parallel.balance import plan
from pd_cluster.parallel.eplb import Ints, global_eplb, hierarchical_eplb
from pd_cluster.parallel.replicas import weights

PUBLISHED = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    np.float64,
)


def max_over_mean(slots_LP: Ints, num_ranks: int) -> list[float]:
    ratios = []
    for slots, load_E in zip(slots_LP, PUBLISHED, strict=True):
        share_E = load_E / np.bincount(slots)
        loads_R = share_E[slots].reshape(num_ranks, -1).sum(1)
        ratios.append(loads_R.max() / loads_R.mean())
    return ratios


def test_hierarchical_balancing_of_the_published_example() -> None:
    slots = hierarchical_eplb(PUBLISHED, 16, 8, num_groups=4, num_nodes=2)
    assert max_over_mean(slots, 8) == pytest.approx([1.208, 1.242], abs=5e-4)


def test_global_balancing_of_the_published_example() -> None:
    assert max_over_mean(global_eplb(PUBLISHED, 16, 8), 8) == pytest.approx([1.073, 1.190], abs=5e-4)


def test_the_planner_reaches_the_best_that_the_published_example_allows() -> None:
    placement = plan(PUBLISHED, 8, redundant=4, weighted=False)
    slots = np.array([layer.slots for layer in placement.layers], np.int64)
    assert max_over_mean(slots, 8) == pytest.approx([1.053, 1.190], abs=5e-4)


def test_weights_on_copies_go_below_what_even_splitting_allows() -> None:
    ratios = weighted_ratios(plan(PUBLISHED, 8, redundant=4), PUBLISHED)
    assert ratios[0] < 1.03
    assert ratios[1] < 1.10


def test_hierarchical_balancing_keeps_a_group_within_a_node() -> None:
    slots_LP = hierarchical_eplb(PUBLISHED, 16, 8, num_groups=4, num_nodes=2)
    for slots in slots_LP:
        first_node, second_node = set((slots[:8] // 3).tolist()), set((slots[8:] // 3).tolist())
        assert len(first_node) == len(second_node) == 2
        assert first_node.isdisjoint(second_node)


def test_the_baseline_wastes_a_slot_where_the_planner_does_not() -> None:
    """Two experts with all the load: the baseline puts copies of one on one rank."""
    load = np.array([[100.0, 1.0, 1.0, 1.0]])
    slots = global_eplb(load, 8, 2)[0].reshape(2, 4)
    assert any(len(set(row)) < 4 for row in slots.tolist())
    placement = plan(load, 2, redundant=4)
    assert all(sorted(placement.rank_slots(0, r)) == [0, 1, 2, 3] for r in (0, 1))  # type: ignore[arg-type]
    assert weights(placement, 0, load[0].tolist()) == [[0.5, 0.5]] * 4
