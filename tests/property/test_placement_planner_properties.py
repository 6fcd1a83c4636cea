"""Small placements against every possible one, and any placement against the baseline and against its own rules."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.bench.exhaustive import best_of_all_placements, best_split
from pd_cluster.bench.placement import even_ratios, weighted_ratios
from pd_cluster.errors import NotSupported
from pd_cluster.ids import Rank
from pd_cluster.parallel.balance import FAR, plan
from pd_cluster.parallel.drift import rebalance
from pd_cluster.parallel.eplb import Floats, global_eplb
from pd_cluster.parallel.placement import Placement
from pd_cluster.parallel.replicas import (
    HASH_BITS,
    choose,
    least_hottest_time,
    pour,
    ranks_of_copies,
    thresholds,
    weights,
)
from pd_cluster.parallel.stages import check_stage, loads, missing, stages
from pd_cluster.parallel.step_choice import quotas

seeds = st.integers(0, 2**32 - 1)


def drawn_loads(seed: int, num_experts: int, num_layers: int = 1) -> Floats:
    """Skewed more or less; some experts without any load."""
    rng = np.random.default_rng(seed)
    result = rng.lognormal(0.0, rng.uniform(0.0, 2.0), (num_layers, num_experts)) * 100
    result[rng.random(result.shape) < 0.05] = 0.0
    result[:, 0] += 1.0
    return result


@pytest.mark.parametrize(("num_experts", "num_ranks", "redundant"), [(5, 3, 1), (6, 3, 3), (5, 4, 3), (6, 4, 2)])
def test_small_plans_are_close_to_the_best_of_all_placements(num_experts: int, num_ranks: int, redundant: int) -> None:
    over = []
    for seed in range(12):
        load = drawn_loads(seed, num_experts)
        placement = plan(load, num_ranks, redundant=redundant)
        found = best_split(load[0], ranks_of_copies(placement, 0), num_ranks)
        over.append(found / best_of_all_placements(load[0], num_ranks, placement.slots_per_rank, redundant))
    assert min(over) >= 1.0 - 1e-6
    assert np.mean(over) <= 1.01
    assert max(over) <= 1.08


@settings(max_examples=80, deadline=None)
@given(seed=seeds, num_ranks=st.integers(2, 16), per_rank=st.integers(1, 6), spare=st.integers(0, 20))
def test_a_plan_is_never_above_the_baseline_and_wastes_no_slot(
    seed: int, num_ranks: int, per_rank: int, spare: int
) -> None:
    num_slots = num_ranks * per_rank
    num_experts = max(num_slots - spare, num_slots // 2, 1)
    load = drawn_loads(seed, num_experts, 2)
    placement = plan(load, num_ranks, redundant=num_slots - num_experts)
    for layer in range(2):
        for ranks in ranks_of_copies(placement, layer):
            assert len(set(ranks)) == len(ranks), "two copies of one expert on one rank"
    baseline = even_ratios(global_eplb(load, num_slots, num_ranks).reshape(2, num_ranks, per_rank), load)
    assert (weighted_ratios(placement, load) <= baseline * FAR).all()


@settings(max_examples=60, deadline=None)
@given(seed=seeds, num_ranks=st.integers(2, 6), num_experts=st.integers(2, 14), redundant=st.integers(0, 8))
def test_pouring_reaches_the_least_hottest_rank_and_proves_it(
    seed: int, num_ranks: int, num_experts: int, redundant: int
) -> None:
    load = drawn_loads(seed, num_experts)
    placement = plan(drawn_loads(seed + 1, num_experts), num_ranks, redundant=redundant)
    ranks_E, speeds = ranks_of_copies(placement, 0), [1.0] * num_ranks
    poured = pour(load[0].tolist(), ranks_E, speeds, 500)
    for part, expected in zip(poured.parts, load[0], strict=True):
        assert min(part) >= 0.0
        assert sum(part) == pytest.approx(expected)
    best = best_split(load[0], ranks_E, num_ranks)
    assert max(poured.loads_R) == pytest.approx(best, rel=5e-3)
    assert least_hottest_time(load[0].tolist(), ranks_E, speeds, poured.loads_R) <= best * (1 + 1e-9)
    for split in weights(placement, 0, load[0].tolist()):
        assert sum(split) == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, num_ranks=st.integers(2, 6), num_experts=st.integers(2, 14), redundant=st.integers(0, 8))
def test_quotas_keep_every_token_and_stay_a_few_tokens_from_the_optimum(
    seed: int, num_ranks: int, num_experts: int, redundant: int
) -> None:
    counts = np.random.default_rng(seed).integers(0, 200, num_experts).tolist()
    placement = plan(drawn_loads(seed, num_experts), num_ranks, redundant=redundant)
    ranks_E = ranks_of_copies(placement, 0)
    result = quotas(counts, ranks_E, num_ranks)
    assert [sum(part) for part in result] == counts
    loads_R = [0] * num_ranks
    for part, ranks in zip(result, ranks_E, strict=True):
        assert min(part) >= 0
        for load, rank in zip(part, ranks, strict=True):
            loads_R[rank] += load
    best = best_split(np.array(counts, float), ranks_E, num_ranks)
    assert max(loads_R) <= best * 1.005 + 3


def test_hashed_tokens_split_as_the_weights_say_in_any_column() -> None:
    rng = np.random.default_rng(0)
    table = thresholds([[1.0], [0.7, 0.3], [0.2, 0.3, 0.5], [0.0, 1.0]])
    mix = rng.integers(0, 2**31, 50_000)
    experts = np.tile([0, 1, 2, 3], (len(mix), 1))
    chosen = choose(experts, mix, table)
    for column, expected in enumerate(([1.0], [0.7, 0.3], [0.2, 0.3, 0.5], [0.0, 1.0])):
        shares = np.bincount(chosen[:, column], minlength=len(expected)) / len(mix)
        assert shares == pytest.approx(expected, abs=0.01)
    swapped = choose(experts[:, ::-1], mix, table)
    assert (swapped == chosen[:, ::-1]).all(), "the column must not matter"
    assert table.max() == 1 << HASH_BITS


@settings(max_examples=60, deadline=None)
@given(
    seed=seeds,
    num_ranks=st.integers(2, 6),
    num_experts=st.integers(6, 20),
    redundant=st.integers(0, 6),
    shadows=st.integers(1, 3),
    budget=st.sampled_from([None, 1, 3]),
)
def test_stages_lead_from_any_placement_to_any_other_without_touching_a_live_slot(
    seed: int, num_ranks: int, num_experts: int, redundant: int, shadows: int, budget: int | None
) -> None:
    per_rank = -(-(num_experts + redundant) // num_ranks) + shadows
    first, wanted = (
        plan(drawn_loads(s, num_experts, 2), num_ranks, redundant=redundant, slots_per_rank=per_rank)
        for s in (seed, seed + 1)
    )
    path = stages(first, wanted, max_loads_per_rank=budget)
    now = first
    for stage in path:
        check_stage(now, stage)  # and a Placement refuses to lack an expert
        for rank in range(num_ranks):
            needed = loads(now, stage, Rank(rank))
            assert all(source is not None for load in needed for source in load.sources[:1])
            if budget is not None and len({load.layer for load in needed}) > 1:
                assert len(needed) <= budget
        now = stage
    assert now.epoch == len(path)
    assert now.moved(wanted) == wanted.moved(now) == [0, 0]


@settings(max_examples=60, deadline=None)
@given(seed=seeds, num_ranks=st.integers(3, 6), num_experts=st.integers(6, 20), dead=st.integers(0, 5))
def test_the_group_goes_on_without_a_rank_and_takes_it_back(
    seed: int, num_ranks: int, num_experts: int, dead: int
) -> None:
    per_rank = 2 * -(-num_experts // num_ranks) + 2
    load = drawn_loads(seed, num_experts, 2)
    first = plan(load, num_ranks, redundant=2, slots_per_rank=per_rank)
    live = frozenset(Rank(r) for r in range(num_ranks)) - {Rank(dead % num_ranks)}
    in_use = -(-(num_experts + 2) // len(live))
    path = stages(first, rebalance(first, load, live=sorted(live), slots_in_use=in_use), live=live)
    # whatever the dead rank alone had is loaded by the first stages, and from the store
    lost = missing(first, live)
    needed = [x for old, new in itertools.pairwise([first, *path]) for r in live for x in loads(old, new, r, live)]
    assert {(x.layer, x.expert) for x in needed if not x.sources} >= set(lost)
    assert not missing(path[-1], live)
    assert all(path[-1].rank_slots(k, Rank(dead % num_ranks)) == (None,) * per_rank for k in range(2))
    back = stages(path[-1], rebalance(path[-1], load, slots_in_use=in_use))
    assert not back or not missing(back[-1], live | {Rank(dead % num_ranks)})


def test_a_change_with_no_empty_slot_is_refused_by_name() -> None:
    def holding(*slots: int) -> Placement:
        shape = plan(np.ones((1, 4)), 2)
        return Placement(
            epoch=0,
            num_ranks=2,
            num_experts=4,
            slots_per_rank=2,
            layers=(type(shape.layers[0])(slots),),  # type: ignore[arg-type]
        )

    with pytest.raises(NotSupported, match="MoE layer 0 does not fit: rank 0 has no empty slot for 1 more experts"):
        stages(holding(0, 1, 2, 3), holding(0, 2, 1, 3))
    assert stages(holding(0, 1, 2, 3), holding(1, 0, 3, 2)) == []
