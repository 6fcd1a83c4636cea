"""Two slots to a rank: the fewest ranks that join, and what following a drifted load may never break."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.parallel.local_search import LayerSearch
from pd_cluster.parallel.pairing import fewest_to_cover, follow_pairs, num_moves

spans = st.tuples(st.integers(0, 8), st.integers(1, 5)).map(lambda s: (float(s[0]), float(s[0] + s[1])))


def covers(asked: list[tuple[float, float]], free: list[float], given: list[tuple[float, float]]) -> bool:
    points = [i + 0.5 for i in range(14)]
    return all(
        sum(a <= p < b for a, b in asked) <= sum(p < end for end in free) + sum(a <= p < b for a, b in given)
        for p in points
    )


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(spans, max_size=4),
    free=st.lists(st.integers(0, 9).map(float), max_size=2),
    offered=st.lists(spans, max_size=8),
)
def test_a_sweep_finds_the_fewest_that_cover(
    asked: list[tuple[float, float]], free: list[float], offered: list[tuple[float, float]]
) -> None:
    best = next(
        (
            size
            for size in range(len(offered) + 1)
            if any(covers(asked, free, list(chosen)) for chosen in itertools.combinations(offered, size))
        ),
        None,
    )
    given_ids = [(start, end, i) for i, (start, end) in enumerate(offered)]
    taken = fewest_to_cover(asked, free, given_ids, len(offered))
    assert (taken is None) == (best is None)
    if taken is not None and best is not None:
        assert len(taken) == len(set(taken)) == best
        assert covers(asked, free, [offered[i] for i in taken])
        assert best == 0 or fewest_to_cover(asked, free, given_ids, best - 1) is None


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.integers(1, 16),
    spare=st.integers(0, 8),
    most=st.sampled_from([None, 0, 2, 5]),
)
def test_following_keeps_every_copy_within_the_budget_and_never_heats_the_hottest_rank(
    seed: int, num_ranks: int, spare: int, most: int | None
) -> None:
    rng = np.random.default_rng(seed)
    num_experts = max(2 * num_ranks - spare, num_ranks, 2)
    row = np.arange(2 * num_ranks)
    start = np.where(row < num_experts, row, rng.integers(0, num_experts + 1, row.shape)).reshape(2, num_ranks).T
    twice = start[:, 0] == start[:, 1]
    start[twice, 1] = num_experts
    load = rng.lognormal(0.0, rng.uniform(0.0, 1.5), num_experts)
    speed = np.ones(num_ranks)
    before = LayerSearch(start.copy(), load, speed).hottest()
    slots, hottest = follow_pairs(start, load, max_moves=most, move_price=0.0005)
    assert slots.shape == start.shape
    assert set(range(num_experts)) <= set(slots.ravel().tolist())
    assert np.count_nonzero(slots == num_experts) == np.count_nonzero(start == num_experts)
    assert ((slots[:, 0] != slots[:, 1]) | (slots[:, 0] == num_experts)).all()
    assert num_moves(start, slots, num_experts) <= (2 * num_ranks if most is None else most)
    assert hottest <= before + 1e-9
    assert abs(LayerSearch(slots.copy(), load, speed).hottest() - hottest) < 1e-9
