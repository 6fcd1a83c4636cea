"""What a plan promises for loads as skewed as real ones, and what it refuses."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from pd_cluster.bench import placement as placement_bench
from pd_cluster.bench.placement import even_ratios, run, table, weighted_ratios
from pd_cluster.cli.main import app
from pd_cluster.errors import ConfigError
from pd_cluster.ids import ExpertId, Rank
from pd_cluster.parallel.balance import hottest_copy_bound, plan, to_slots, with_shared_expert
from pd_cluster.parallel.drift import rebalance
from pd_cluster.parallel.eplb import Floats, global_eplb, hierarchical_eplb
from pd_cluster.parallel.placement import Placement, spread


def skewed(num_layers: int = 6, num_experts: int = 256, seed: int = 0, sigma: float = 0.8) -> Floats:
    return np.random.default_rng(seed).lognormal(0.0, sigma, (num_layers, num_experts)) * 1000


@pytest.mark.parametrize(("ep", "redundant", "average", "worst"), [(32, 32, 1.001, 1.002), (64, 64, 1.004, 1.01)])
def test_wide_plans_are_even_to_a_thousandth(ep: int, redundant: int, average: float, worst: float) -> None:
    loads = skewed()
    ratios = even_ratios(to_slots(plan(loads, ep, redundant=redundant)), loads)
    assert ratios.mean() <= average
    assert ratios.max() <= worst
    num_slots = 256 + redundant
    baselines = global_eplb(loads, num_slots, ep), hierarchical_eplb(loads, num_slots, ep, 8, ep // 8)
    for slots_LP in baselines:
        assert (ratios <= even_ratios(slots_LP.reshape(6, ep, -1), loads)).all()


def test_two_slots_to_a_rank_come_near_the_bound_that_copies_set() -> None:
    loads = skewed()
    placement = plan(loads, 144, redundant=32)
    ratios = even_ratios(to_slots(placement), loads)
    bound = np.maximum(hottest_copy_bound(loads, 32) / loads.sum(1) * 144, 1.0)
    assert (ratios / bound).mean() <= 1.09
    assert (ratios <= even_ratios(global_eplb(loads, 288, 144).reshape(6, 144, 2), loads) * (1 + 1e-9)).all()


def test_the_shared_expert_is_an_item_like_any_other() -> None:
    """EP320: one slot to a rank, and every token visits the shared expert, so it gets as many copies as it needs."""
    loads = with_shared_expert(skewed(2), top_k=8)
    assert loads[:, 256] == pytest.approx(loads[:, :256].sum(1) / 8)
    placement = plan(loads, 320, redundant=63)
    assert placement.slots_per_rank == 1
    hottest = [max(load / len(c) for load, c in zip(loads[k], placement.copies(k), strict=True)) for k in range(2)]
    assert hottest == pytest.approx(hottest_copy_bound(loads, 63), rel=1e-4)
    assert all(len(placement.copies(layer)[256]) > 10 for layer in range(2))


def test_a_fast_rank_gets_more_and_a_dead_one_nothing() -> None:
    loads = skewed(2, 64)
    placement = plan(loads, 8, redundant=6, live=[0, 1, 2, 4, 5, 6, 7], speeds=[2, 1, 1, 1, 1, 1, 1, 1])
    for layer in range(2):
        assert set(placement.rank_slots(layer, Rank(3))) == {None}
        copies = placement.copies(layer)
        loads_R = np.zeros(8)
        for expert, slots in enumerate(copies):
            for slot in slots:
                loads_R[placement.owner(slot)] += loads[layer, expert] / len(slots)
        assert loads_R[0] == pytest.approx(2 * loads_R[1], rel=0.02)
        assert loads_R[[1, 2, 4, 5, 6, 7]] == pytest.approx(loads_R[1], rel=0.02)


def test_with_nodes_a_group_of_experts_stays_on_one_node() -> None:
    loads = skewed(3, 64)
    placement = plan(loads, 16, redundant=16, num_groups=8, num_nodes=4)
    baseline = hierarchical_eplb(loads, 80, 16, 8, 4).reshape(3, 16, 5)
    for layer in range(3):
        for group in range(8):
            slots = [s for e in range(group * 8, group * 8 + 8) for s in placement.copies(layer)[e]]
            assert len({placement.owner(s) // 4 for s in slots}) == 1
    assert (weighted_ratios(placement, loads) <= even_ratios(baseline, loads)).all()


def test_experts_that_never_ran_and_layers_without_load_are_spread() -> None:
    loads = np.zeros((2, 16))
    loads[0, :4] = 100.0
    placement = plan(loads, 4)
    assert len({placement.owner(s) for e in range(4) for s in placement.copies(0)[e]}) == 4
    assert [len([e for e in placement.rank_slots(1, Rank(r)) if e is not None]) for r in range(4)] == [4] * 4


def test_the_same_numbers_give_the_same_digest() -> None:
    loads = skewed(2, 64)
    first, again = plan(loads, 8, redundant=8), plan(loads.copy(), 8, redundant=8)
    assert first.digest() == again.digest()
    loads[1, 3] *= 3
    assert plan(loads, 8, redundant=8).digest() != first.digest()


def test_a_plan_that_does_not_fit_is_refused_with_the_numbers() -> None:
    loads = skewed(1, 16)
    with pytest.raises(ConfigError, match="16 experts and 4 redundant copies do not fit 4 ranks of 4 slots"):
        plan(loads, 4, redundant=4, slots_per_rank=4)
    with pytest.raises(ConfigError, match="16 experts in 3 groups do not divide over 2 nodes"):
        plan(loads, 4, num_groups=3, num_nodes=2)
    with pytest.raises(ConfigError, match="speeds must be 4 positive numbers"):
        plan(loads, 4, speeds=[1, 1, 0, 1])
    with pytest.raises(ConfigError, match="live ranks must be some of 0 to 3"):
        plan(loads, 4, live=[4])


# ---- drift


@pytest.mark.parametrize(("ep", "redundant"), [(32, 32), (64, 64)])
def test_a_drifted_load_is_followed_with_a_tenth_of_the_moves(ep: int, redundant: int) -> None:
    loads = skewed()
    placement = plan(loads, ep, redundant=redundant)
    drifted = loads * np.exp(np.random.default_rng(1).normal(0.0, 0.15, loads.shape))
    followed, afresh = rebalance(placement, drifted), plan(drifted, ep, redundant=redundant)
    assert followed.epoch == placement.epoch + 1
    assert (weighted_ratios(followed, drifted) <= 1.03 * weighted_ratios(afresh, drifted)).all()
    assert np.mean(followed.moved(placement)) <= 0.1 * np.mean(afresh.moved(placement))
    limited = rebalance(placement, drifted, max_moves=5)
    assert max(limited.moved(placement)) <= 5
    assert weighted_ratios(limited, drifted).mean() < weighted_ratios(placement, drifted).mean()


def test_two_slots_to_a_rank_follow_a_drifted_load_with_a_tenth_of_the_moves() -> None:
    """Swaps and copies at the hottest rank are soon stuck there; rings of moves are not."""
    loads = skewed(4)
    placement = plan(loads, 144, redundant=32)
    drifted = loads * np.exp(np.random.default_rng(1).normal(0.0, 0.15, loads.shape))
    followed, afresh = rebalance(placement, drifted, max_moves=26), plan(drifted, 144, redundant=32)
    ratios = weighted_ratios(followed, drifted) / weighted_ratios(afresh, drifted)
    assert ratios.mean() <= 1.035
    assert ratios.max() <= 1.08
    assert max(followed.moved(placement)) <= 26 <= 0.1 * min(afresh.moved(placement))
    for layer in range(4):
        assert None not in followed.layers[layer].slots, "every copy is still in use"


def test_a_load_that_did_not_change_moves_nothing() -> None:
    loads = skewed(2, 64)
    placement = plan(loads, 8, redundant=8)
    assert rebalance(placement, loads).moved(placement) == [0, 0]


def test_experts_lost_with_a_rank_are_put_back_on_the_others() -> None:
    loads = skewed(2, 32)
    placement = plan(loads, 4, redundant=8, slots_per_rank=14)
    lost = {e for e in placement.rank_slots(0, Rank(2)) if len(placement.copies(0)[e or 0]) == 1} - {None}
    survivors = rebalance(placement, loads, live=[0, 1, 3], slots_in_use=13)
    assert set(survivors.rank_slots(0, Rank(2))) == {None}
    assert all(survivors.copies(0)[e] for e in lost if e is not None)
    assert (weighted_ratios_of(survivors, loads, [0, 1, 3]) < 1.03).all()
    joined = rebalance(survivors, loads, slots_in_use=10)
    assert (weighted_ratios(joined, loads) < 1.03).all()
    with pytest.raises(ConfigError, match="32 experts do not fit 2 ranks of 14 slots"):
        rebalance(placement, loads, live=[0, 1])


def weighted_ratios_of(placement: Placement, loads: Floats, live: list[int]) -> Floats:
    return weighted_ratios(placement, loads) * len(live) / placement.num_ranks


def test_moved_counts_experts_new_to_a_rank() -> None:
    placement = spread(8, 2, 1)
    slots = list(placement.layers[0].slots)
    slots[0], slots[1] = slots[1], slots[0]  # within a rank: nothing to load
    slots[2], slots[7] = slots[7], slots[2]
    other = msgspec.structs.replace(placement, layers=(type(placement.layers[0])(tuple(slots)),))
    assert other.moved(placement) == [2]
    assert ExpertId(7) in other.rank_slots(0, Rank(0))


# ---- the bench


def test_the_bench_prints_a_table_and_one_line_of_json(tmp_path: Path) -> None:
    loads = tmp_path / "loads.json"
    loads.write_bytes(msgspec.json.encode({"logical_count": [[0] * 64, *skewed(3, 64).tolist()]}))
    arguments = ["bench", "placement", "--loads", str(loads), "--ep", "16", "--redundant", "16"]
    text = CliRunner().invoke(app, arguments)
    assert text.exit_code == 0, text.output
    assert "EP16, 64 experts + 16 copies, 3 layers" in text.output
    assert "EPLB hierarchical" in text.output
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.output.count("\n") == 1
    result = msgspec.json.decode(done.output)
    for mode in (result, result["eplb_global"], result["eplb_hierarchical"]):
        assert 1.0 <= mode["mean_max_over_mean"] <= mode["worst"]
        assert mode["ms"] > 0
    assert result["mean_max_over_mean"] < result["eplb_global"]["mean_max_over_mean"]
    assert result["layers_above_eplb"] == 0


def test_eplb_is_global_where_its_groups_do_not_divide_over_the_nodes(tmp_path: Path) -> None:
    loads = tmp_path / "loads.json"
    loads.write_bytes(msgspec.json.encode(skewed(2, 64).tolist()))
    result = run(loads, ep=24, redundant=8, ranks_per_node=8, steps=1)
    assert result["eplb_hierarchical"]["as_global"]
    assert result["eplb_hierarchical"]["worst"] == result["eplb_global"]["worst"]
    assert "EPLB hierarchical (as global)" in table(result)
    assert run(loads, ep=24, redundant=9, steps=1)["eplb_hierarchical"] is None


def test_all_shapes_and_small_layers_are_shown_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_bench, "SHAPES", ((8, 8, False), (40, 7, True)))
    loads = tmp_path / "loads.json"
    loads.write_bytes(msgspec.json.encode(skewed(2, 32).tolist()))
    arguments = ["bench", "placement", "--all", "--loads", str(loads)]
    text = CliRunner().invoke(app, arguments)
    assert "EP8, 32 experts + 8 copies" in text.output
    assert "EP40, 33 experts + 7 copies" in text.output
    assert "24 small layers against every placement there is" in text.output
    result = msgspec.json.decode(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert [shape["ep"] for shape in result["shapes"]] == [8, 40]
    small = result["exhaustive"]
    assert 1.0 - 1e-6 <= small["mean_over_optimum"] <= 1.01
    assert small["worst_over_optimum"] <= 1.08
    assert small["optimal"] >= 12


def test_water_filling_a_step_is_within_a_percent_of_its_optimum(tmp_path: Path) -> None:
    loads = tmp_path / "loads.json"
    loads.write_bytes(msgspec.json.encode(skewed(4).tolist()))
    steps = run(loads, ep=32, redundant=32, steps=2)["steps"]
    assert 1.0 <= steps["water_filling_over_optimum"]["mean_max_over_mean"] <= 1.01
    assert steps["optimum"]["worst"] <= steps["weighted_hash"]["worst"]
    by_rank = steps["water_filling_by_rank"]["mean_max_over_mean"]
    assert steps["water_filling"]["mean_max_over_mean"] <= by_rank
    assert by_rank < steps["weighted_hash"]["mean_max_over_mean"] - 0.01
    assert list(steps["water_filling_us"]) == ["32", "64", "128", "256"]


@pytest.mark.parametrize("content", ["{}", "[[1, 2], [3]]", "[[0, 0]]", "[[1, -1]]", "not json"])
def test_a_file_without_loads_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "loads.json"
    path.write_text(content)
    done = CliRunner().invoke(app, ["bench", "placement", "--loads", str(path)])
    assert done.exit_code == 2
    assert "loads.json must hold" in done.output
