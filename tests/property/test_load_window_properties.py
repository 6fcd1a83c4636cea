"""Counts over a window are conserved whatever restarts, and the trigger fires neither early, nor twice, nor never."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.errors import ConfigError
from pd_cluster.parallel.balance import plan
from pd_cluster.parallel.drift import rebalance
from pd_cluster.parallel.load_window import Floats, Ints, LoadWindow, Trigger, TriggerPolicy, enough, predicted_ratio
from pd_cluster.parallel.placement import spread
from pd_cluster.parallel.replicas import weights

LAYERS, EXPERTS, TOP_K = 2, 6, 2
WINDOW_S, BUCKETS = 10.0, 5


class Rank:
    """Totals as a rank keeps them."""

    def __init__(self) -> None:
        self.life = 0
        self.totals = np.zeros((LAYERS, EXPERTS), np.int64)

    def route(self, num_tokens: int, rng: np.random.Generator) -> Ints:
        new = np.zeros_like(self.totals)
        for row in new:
            for _ in range(num_tokens):
                row[rng.choice(EXPERTS, TOP_K, replace=False)] += 1
        self.totals += new
        return new


events = st.lists(
    st.tuples(
        st.sampled_from(["route", "route", "route", "restart", "forget"]),
        st.integers(0, 2),
        st.integers(0, 5),
        st.floats(0.0, 4.0),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(events=events, seed=st.integers(0, 1000), tells_life=st.booleans())
def test_the_window_holds_what_was_reported_within_it(
    events: list[tuple[str, int, int, float]], seed: int, tells_life: bool
) -> None:
    rng = np.random.default_rng(seed)
    window = LoadWindow(LAYERS, EXPERTS, window_s=WINDOW_S, num_buckets=BUCKETS)
    ranks = [Rank() for _ in range(3)]
    now_s, reported, seen = 0.0, [], [True, True, True]
    for source, rank in enumerate(ranks):
        window.observe(source, rank.totals, now_s, life="0")
    for kind, source, tokens, later_s in events:
        now_s += later_s
        num_tokens = tokens
        rank = ranks[source]
        if kind == "forget":
            window.forget(source)
            seen[source] = False
            continue
        if kind == "restart":
            had = int(rank.totals.sum())
            rank.totals[:] = 0
            rank.life += 1
            if not tells_life and had <= num_tokens * LAYERS * TOP_K:
                num_tokens = 0  # nobody could tell such a restart from more tokens
                if had == 0:
                    rank.life -= 1
        new = rank.route(num_tokens, rng)
        observed = window.observe(source, rank.totals, now_s, life=str(rank.life) if tells_life else "")
        if seen[source]:
            reported.append((now_s, new))
            assert observed == num_tokens * TOP_K * LAYERS
        else:
            assert observed == 0
        seen[source] = True
        loads = window.loads(now_s)
        zero = np.zeros_like(loads)
        surely = sum((n for t, n in reported if t > now_s - WINDOW_S + WINDOW_S / BUCKETS), zero)
        perhaps = sum((n for t, n in reported if t >= now_s - WINDOW_S), zero)
        assert (surely <= loads).all()
        assert (loads <= perhaps).all()
        assert len(set(loads.sum(1).tolist())) == 1
        assert loads[0].sum() % TOP_K == 0
    assert not window.loads(now_s + WINDOW_S + WINDOW_S / BUCKETS).any()


def test_what_a_rank_counted_before_it_was_seen_is_in_no_window() -> None:
    window = LoadWindow(1, 2)
    assert window.observe(0, [[1000, 5]], 0.0) == 0
    assert window.observe(0, [[1001, 7]], 1.0) == 3
    assert window.loads(1.0).tolist() == [[1, 2]]


def test_a_restart_counts_from_zero_even_when_its_totals_are_larger() -> None:
    window = LoadWindow(1, 2)
    window.observe(0, [[10, 10]], 0.0, life="a")
    assert window.observe(0, [[30, 30]], 1.0, life="b") == 60
    assert window.observe(0, [[2, 40]], 2.0, life="b") == 42  # it shrank: another restart, which nobody told of


# ---- the trigger

POLICY = TriggerPolicy(threshold=1.2, release=1.1, sustain_s=5.0, cooldown_s=20.0)


@settings(max_examples=100, deadline=None)
@given(
    looks=st.lists(
        st.tuples(st.floats(0.1, 4.0), st.one_of(st.none(), st.sampled_from([1.0, 1.05, 1.15, 1.19, 1.2, 1.5, 3.0]))),
        max_size=60,
    )
)
def test_it_fires_only_after_a_sustained_ratio_and_not_within_the_cooldown(
    looks: list[tuple[float, float | None]],
) -> None:
    trigger = Trigger(POLICY)
    now_s, last_fired_s = 0.0, -100.0
    seen: list[tuple[float, float | None]] = []
    for later_s, ratio in looks:
        now_s += later_s
        seen.append((now_s, ratio))
        fires = trigger.due(ratio, now_s)
        # the run of looks that were never released, back to the last fire
        run: list[tuple[float, float]] = []
        for when, value in reversed(seen):
            if value is None or value < 1.1 or when <= last_fired_s:
                break
            run.append((when, value))
        risen = [when for when, value in run if value >= 1.2]
        should = bool(risen) and now_s - min(risen) >= 5.0 and risen[0] == now_s and now_s - last_fired_s >= 20.0
        assert fires is should
        if fires:
            trigger.planned(now_s)
            last_fired_s = now_s


def test_it_fires_in_time_and_again_after_the_cooldown() -> None:
    trigger = Trigger(POLICY)
    fired = []
    for now_s in range(60):
        if trigger.due(1.3, float(now_s)):
            fired.append(now_s)
            trigger.planned(float(now_s))
    assert fired == [5, 25, 45]


def test_a_release_above_the_threshold_is_refused() -> None:
    with pytest.raises(ConfigError, match="release between 1"):
        Trigger(TriggerPolicy(threshold=1.2, release=1.3))


# ---- judging plans


def skewed(num_layers: int = 3, num_experts: int = 64, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).lognormal(8.0, 0.9, (num_layers, num_experts))


def test_a_better_plan_is_worth_loading_until_experts_are_too_heavy() -> None:
    loads = skewed()
    current = spread(64, 8, 3, redundant=8)
    planned = rebalance(current, loads)
    trigger = Trigger(POLICY)
    light = trigger.judge(current, planned, loads, expert_bytes=1 << 20, now_s=0.0)
    assert light.worth_it
    assert light.before > 1.4
    assert light.after < 1.05
    assert light.moved_bytes == sum(planned.moved(current)) << 20
    heavy = trigger.judge(current, planned, loads, expert_bytes=1 << 36, now_s=0.0)
    assert not heavy.worth_it
    assert "of loading cost more" in heavy.reason
    assert not trigger.due(2.0, 19.0)


def test_a_plan_that_gains_little_is_not_worth_it_however_cheap() -> None:
    loads = skewed()
    good = plan(loads, 8, redundant=8)
    drifted = loads * np.random.default_rng(1).lognormal(0.0, 0.02, loads.shape)
    verdict = Trigger(POLICY).judge(good, rebalance(good, drifted), drifted, expert_bytes=1, now_s=0.0)
    assert not verdict.worth_it
    assert "less than 0.05" in verdict.reason


def test_better_weights_alone_move_nothing_and_may_be_worth_it() -> None:
    loads = skewed()
    placement = plan(loads, 8, redundant=24)
    turned = np.ascontiguousarray(loads[:, ::-1])
    stale = [weights(placement, layer, turned[layer].tolist()) for layer in range(3)]
    verdict = Trigger(POLICY).judge(placement, placement, loads, expert_bytes=1 << 40, now_s=0.0, weights_LEC=stale)
    assert verdict.before > verdict.after + 0.05
    assert verdict.worth_it
    assert verdict.moved_bytes == 0


def test_chance_alone_never_makes_a_plan_due() -> None:
    """Even experts and few tokens: counts say nothing yet, or the ratio stays below the release."""
    rng = np.random.default_rng(0)
    placement = spread(64, 32, 1)
    trigger = Trigger(TriggerPolicy(sustain_s=0.0))
    known = 0
    for num_pairs in (1, 10, 100, 1000, 10_000, 80_000, 100_000, 300_000):
        for _ in range(5):
            loads = rng.multinomial(num_pairs, np.full(64, 1 / 64))[None]
            ratio = trigger.ratio(placement, loads)
            assert not trigger.due(ratio, 0.0)
            known += ratio is not None
    assert known == 10
    assert not enough(np.zeros((2, 4)), 4)


def test_layers_without_load_do_not_flatter_the_ratio() -> None:
    placement = spread(4, 2, 3)
    assert predicted_ratio(placement, np.array([[3, 3, 1, 1], [0, 0, 0, 0], [4, 4, 0, 0]])) == pytest.approx(
        (1.5 + 2.0) / 2
    )
    assert predicted_ratio(placement, np.zeros((3, 4))) == 1.0


def test_dead_ranks_are_no_part_of_the_mean() -> None:
    placement = plan(np.ones((1, 6)), 4, live=[0, 1, 2], slots_per_rank=2)
    assert predicted_ratio(placement, np.ones((1, 6)), live=[0, 1, 2]) == pytest.approx(1.0)
