"""Tokens of a step over copies of experts: every token has its place, ranks are even, and C and Python agree."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.errors import EngineError
from pd_cluster.kernels import native
from pd_cluster.parallel import step_choice
from pd_cluster.parallel.balance import plan
from pd_cluster.parallel.placement import Placement
from pd_cluster.parallel.replicas import (
    choose,
    least_hottest_time,
    pour,
    ranks_of_copies,
    thresholds,
    weights,
)
from pd_cluster.parallel.slot_table import slot_table
from pd_cluster.parallel.step_choice import Ints, quotas, step_slots


def drawn(placement: Placement, num_tokens: int, top_k: int, seed: int) -> Ints:
    """Distinct experts for each token, some much more often than others."""
    rng = np.random.default_rng(seed)
    score_E = rng.normal(0.0, rng.uniform(0.0, 2.0), placement.num_experts)
    noise = rng.gumbel(size=(num_tokens, placement.num_experts))
    return np.argsort(-(score_E + noise), axis=1)[:, :top_k].astype(np.int64)


def placements(num_experts: int, num_ranks: int, redundant: int, seed: int) -> Placement:
    load = np.random.default_rng(seed).lognormal(0.0, 1.0, (1, num_experts))
    return plan(load, num_ranks, redundant=redundant)


def slots_of(placement: Placement, experts_TK: Ints, turn: int = 0) -> Ints:
    table = slot_table(placement, 0, placement.num_ranks)
    ranks, per_rank = placement.num_ranks, placement.slots_per_rank
    return step_slots(experts_TK, table.slots_EC, table.width, num_ranks=ranks, slots_per_rank=per_rank, turn=turn)


cases = st.tuples(
    st.integers(2, 12), st.integers(1, 6), st.integers(0, 12), st.integers(0, 40), st.integers(0, 9), st.integers(0, 99)
)


@settings(max_examples=80, deadline=None)
@given(case=cases)
def test_every_token_goes_to_a_copy_of_its_expert_and_c_does_what_python_does(case: tuple[int, ...]) -> None:
    num_experts, num_ranks, redundant, num_tokens, turn, seed = case
    placement = placements(num_experts, num_ranks, redundant, seed)
    experts_TK = drawn(placement, num_tokens, min(2, num_experts), seed)
    slots_TK = slots_of(placement, experts_TK, turn)
    held = np.array([-1 if e is None else e for e in placement.layers[0].slots])
    assert (held[slots_TK] == experts_TK).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_choice, "_compiled", lambda: None)
        assert (slots_of(placement, experts_TK, turn) == slots_TK).all()


@pytest.mark.skipif(native.library() is None, reason="no C compiler")
def test_c_does_what_python_does_for_two_copies_on_one_rank() -> None:
    table = np.array([[0, 1, 2], [3, 4, 3], [5, 5, 5]], np.int64)  # ranks of two slots
    experts = np.random.default_rng(0).integers(0, 3, (31, 1))
    fast = step_slots(experts, table, 3, num_ranks=3, slots_per_rank=2)
    slow = np.empty_like(fast)
    assert step_choice._choose(experts.reshape(-1), table, 3, 3, 2, 0, slow.reshape(-1)) == -1
    assert (fast == slow).all()
    assert np.bincount(fast.reshape(-1)).sum() == 31


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_ranks_stay_a_few_tokens_from_the_least_that_the_placement_allows(case: tuple[int, ...]) -> None:
    num_experts, num_ranks, redundant, num_tokens, _, seed = case
    placement = placements(num_experts, num_ranks, redundant, seed)
    experts_TK = drawn(placement, num_tokens, min(2, num_experts), seed)
    ranks_E, speeds = ranks_of_copies(placement, 0), [1.0] * num_ranks
    count_E = np.bincount(experts_TK.reshape(-1), minlength=num_experts).tolist()
    quota_E = quotas(count_E, ranks_E, num_ranks)
    assert [sum(quota) for quota in quota_E] == count_E
    loads_R = np.bincount(slots_of(placement, experts_TK).reshape(-1) // placement.slots_per_rank, minlength=num_ranks)
    by_quota = np.zeros(num_ranks, np.int64)
    for quota, ranks in zip(quota_E, ranks_E, strict=True):
        for tokens, rank in zip(quota, ranks, strict=True):
            by_quota[rank] += tokens
    assert (by_quota == loads_R).all()
    best = pour([float(n) for n in count_E], ranks_E, speeds, 500)
    least = least_hottest_time(count_E, ranks_E, speeds, best.loads_R)
    assert loads_R.max() <= least * 1.02 + 2


def test_ranks_that_each_even_out_their_own_tokens_even_out_the_step() -> None:
    """32 ranks, 64 tokens each: better than by weighted hash and near what one mind would do."""
    loads = np.random.default_rng(3).lognormal(0.0, 0.8, (1, 256))
    placement = plan(loads, 32, redundant=64)
    table = thresholds(weights(placement, 0, loads[0].tolist()))
    slots = slot_table(placement, 0, 32).slots_EC
    rng = np.random.default_rng(4)
    found: dict[str, list[float]] = {"alone": [], "together": [], "hash": []}
    for _ in range(6):
        score = np.log(loads[0]) + rng.gumbel(size=(2048, 256))
        experts_TK = np.argsort(-score, axis=1)[:, :8]
        alone = [slots_of(placement, part, rank) for rank, part in enumerate(np.split(experts_TK, 32))]
        copies = choose(experts_TK, rng.integers(0, 1 << 31, 2048), table)
        outcomes = {"alone": np.concatenate(alone), "together": slots_of(placement, experts_TK)}
        outcomes["hash"] = slots[experts_TK, copies]
        for name, slots_TK in outcomes.items():
            loads_R = np.bincount(slots_TK.reshape(-1) // placement.slots_per_rank, minlength=32)
            found[name].append(loads_R.max() / loads_R.mean())
    alone_, together, hashed = (float(np.mean(found[name])) for name in ("alone", "together", "hash"))
    assert together <= alone_ < together + 0.04
    assert hashed > alone_ + 0.03


def test_turns_keep_lone_tokens_of_many_ranks_off_one_copy() -> None:
    placement = plan(np.array([[30.0, 1.0]]), 4, redundant=2)
    copies = len(placement.copies(0)[0])
    assert copies == 3
    one_token = np.zeros((1, 1), np.int64)
    taken = [int(slots_of(placement, one_token, turn)[0, 0]) for turn in range(6)]
    assert sorted(set(taken)) == sorted(placement.copies(0)[0])
    assert taken[:3] == taken[3:]


@pytest.mark.parametrize("expert", [-1, 8, 1 << 40])
@pytest.mark.parametrize("compiled", [True, False])
def test_an_expert_that_does_not_exist_is_refused_by_number(
    expert: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(step_choice, "_compiled", lambda: None)
    placement = placements(8, 2, 2, 0)
    with pytest.raises(EngineError, match=f"a token chose expert {expert} of 8"):
        slots_of(placement, np.array([[1, 2], [3, expert]], np.int64))


def test_no_tokens_are_no_trouble() -> None:
    assert slots_of(placements(8, 2, 2, 0), np.empty((0, 2), np.int64)).shape == (0, 2)


@pytest.mark.skipif(native.library() is None, reason="no C compiler")
def test_it_costs_little_in_every_layer_of_a_step() -> None:
    placement = placements(256, 32, 32, 0)
    experts_TK = drawn(placement, 64, 8, 1)
    table = slot_table(placement, 0, 32)
    times = []
    for _ in range(50):
        start_s = time.perf_counter()
        step_slots(experts_TK, table.slots_EC, table.width, num_ranks=32, slots_per_rank=9)
        times.append(time.perf_counter() - start_s)
    assert np.median(times) < 500e-6  # some 15 us; Python takes milliseconds
