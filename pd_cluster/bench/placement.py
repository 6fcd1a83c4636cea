"""How evenly the planner spreads measured expert loads over ranks, next to EPLB's two modes and to what is possible.

Three questions. *Window*: the hottest rank over the mean for the loads that were planned for, each copy with an even
part of its expert's load, and with the planner's weights. *Drift*: loads change at random and the placement follows;
what it costs in experts moved, and what it reaches, against a plan made afresh. *Steps*: a step of a few thousand
tokens is noisier than a window; steps are drawn from the loads, and tokens choose copies evenly by hash, by weighted
hash, or poured over the copies by the step's own counts, all ranks' together or each rank's by itself, against the
least that the placement allows for that step.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from pd_cluster.bench import exhaustive
from pd_cluster.errors import ConfigError
from pd_cluster.parallel.balance import hottest_copy_bound, plan, to_slots, with_shared_expert
from pd_cluster.parallel.drift import rebalance
from pd_cluster.parallel.eplb import Floats, Ints, global_eplb, hierarchical_eplb
from pd_cluster.parallel.placement import Placement, spread
from pd_cluster.parallel.replicas import least_hottest_time, pour, ranks_of_copies
from pd_cluster.parallel.slot_table import slot_table
from pd_cluster.parallel.step_choice import step_slots

REPEATS = 3

SHAPES = ((32, 32, False), (64, 64, False), (144, 32, False), (320, 63, True))
"""Ranks, redundant copies, and whether the shared expert is placed as one more: the shapes of known deployments."""

CHOICE_TOKENS = (32, 64, 128, 256)
"""Tokens of one rank for which choosing their copies is timed."""

T = TypeVar("T")


def read_loads(path: Path) -> Floats:
    """[L, E] from JSON: rows of counts, or an object with such rows as `logical_count`. Rows of zeros (dense layers)
    are left out. Raises ConfigError when the file is something else.
    """
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any] | list[list[float]])
        rows = content.get("logical_count") if isinstance(content, dict) else content
        loads_LE = msgspec.convert(rows, list[list[float]])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} must hold rows of tokens per expert, as JSON: {error}") from error
    loads_LE = [row for row in loads_LE if any(row)]
    if not loads_LE or len(set(map(len, loads_LE))) > 1 or min(map(min, loads_LE)) < 0:
        raise ConfigError(f"{path} must hold equally long rows of tokens per expert, none negative, one not zero")
    return np.array(loads_LE, np.float64)


def run(
    loads: Path,
    *,
    ep: int,
    redundant: int,
    groups: int = 8,
    ranks_per_node: int = 8,
    shared_top_k: int | None = None,
    top_k: int = 8,
    drift: float = 0.15,
    step_tokens: int = 4096,
    steps: int = 4,
    seed: int = 0,
) -> dict[str, Any]:
    """`shared_top_k`: place the shared expert as one more, its load from this many routed experts per token; else steps
    are of tokens with `top_k` experts. Ratios are of the hottest rank to the mean; `mean_max_over_mean` averages them
    over layers, `worst` is the largest.
    """
    loads_LE = read_loads(loads)
    if shared_top_k is not None:
        loads_LE = with_shared_expert(loads_LE, shared_top_k)
    num_layers, num_experts = loads_LE.shape
    placement, ms = _timed(lambda: plan(loads_LE, ep, redundant=redundant))
    even_L, weighted_L = even_ratios(to_slots(placement), loads_LE), weighted_ratios(placement, loads_LE)
    bound_L = np.maximum(hottest_copy_bound(loads_LE, redundant) / loads_LE.mean(1) / num_experts * ep, 1.0)
    baselines = _baselines(loads_LE, ep, redundant, groups, ranks_per_node)
    best_LB = np.array([b["ratios"] for b in baselines.values() if b is not None and "ratios" in b])
    return {
        "ep": ep,
        "redundant": redundant,
        "layers": num_layers,
        "experts": num_experts,
        **_summary(even_L, ms),
        "weighted": _summary(weighted_L),
        "bound": _summary(bound_L),
        "over_bound": _summary(even_L / bound_L),
        "contiguous": _summary(even_ratios(to_slots(spread(num_experts, ep, num_layers, redundant)), loads_LE)),
        **{name: b and {k: v for k, v in b.items() if k != "ratios"} for name, b in baselines.items()},
        "layers_above_eplb": int((even_L > best_LB.min(0) * (1 + 1e-12)).sum()) if len(best_LB) else None,
        "drift": _drift(placement, loads_LE, drift, redundant, seed),
        "steps": _steps(
            placement, loads_LE, step_tokens, shared_top_k or top_k, int(shared_top_k is not None), steps, seed
        ),
    }


def run_all(loads: Path, *, drift: float = 0.15, step_tokens: int = 4096) -> dict[str, Any]:
    """`SHAPES` one after the other, and small layers against every placement there is."""
    shapes = [
        run(loads, ep=ep, redundant=redundant, shared_top_k=8 if shared else None, drift=drift, step_tokens=step_tokens)
        for ep, redundant, shared in SHAPES
    ]
    return {"shapes": shapes, "exhaustive": exhaustive.run()}


def even_ratios(slots_LRS: Ints, loads_LE: Floats) -> Floats:
    """[L] hottest rank over mean with every copy taking an even part; an empty slot holds E."""
    ratios = []
    for slots_RS, load_E in zip(slots_LRS, loads_LE, strict=True):
        copies = np.bincount(slots_RS.ravel(), minlength=len(load_E) + 1)
        loads_R = (np.append(load_E, 0.0) / np.maximum(copies, 1))[slots_RS].sum(1)
        ratios.append(loads_R.max() / loads_R.mean())
    return np.array(ratios)


def weighted_ratios(placement: Placement, loads_LE: Floats) -> Floats:
    """[L] hottest rank over mean with the planner's weights."""
    ratios = []
    for layer, load_E in enumerate(loads_LE):
        loads_R = pour(load_E.tolist(), ranks_of_copies(placement, layer), [1.0] * placement.num_ranks).loads_R
        ratios.append(max(loads_R) / sum(loads_R) * len(loads_R))
    return np.array(ratios)


def _summary(ratios: Floats, ms: float | None = None) -> dict[str, float]:
    result = {"mean_max_over_mean": float(ratios.mean()), "worst": float(ratios.max())}
    return result if ms is None else {**result, "ms": ms}


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    """The result, and the least CPU milliseconds of a few calls."""
    times = []
    for _ in range(REPEATS):
        start_s = time.process_time()
        result = call()
        times.append(time.process_time() - start_s)
    return result, round(min(times) * 1e3, 2)


def _baselines(
    loads_LE: Floats, ep: int, redundant: int, groups: int, ranks_per_node: int
) -> dict[str, dict[str, Any] | None]:
    """EPLB's two modes; None where it cannot be used because something does not divide. Where groups do not divide
    over the nodes its hierarchical mode is the global one, by its authors' rule.
    """
    num_experts = loads_LE.shape[1]
    num_slots, num_nodes = num_experts + redundant, max(ep // ranks_per_node, 1)
    result: dict[str, dict[str, Any] | None] = {"eplb_global": None, "eplb_hierarchical": None}
    if num_slots % ep:
        return result

    def measure(call: Callable[[], Ints]) -> dict[str, Any]:
        slots_LP, ms = _timed(call)
        ratios = even_ratios(slots_LP.reshape(len(loads_LE), ep, -1), loads_LE)
        return {**_summary(ratios, ms), "ratios": ratios}

    result["eplb_global"] = everywhere = measure(lambda: global_eplb(loads_LE, num_slots, ep))
    if groups % num_nodes:
        result["eplb_hierarchical"] = {**everywhere, "as_global": True}
    elif num_experts % groups == ep % num_nodes == 0:
        hierarchical = measure(lambda: hierarchical_eplb(loads_LE, num_slots, ep, groups, num_nodes))
        result["eplb_hierarchical"] = {**hierarchical, "as_global": False}
    return result


def _drift(placement: Placement, loads_LE: Floats, sigma: float, redundant: int, seed: int) -> dict[str, Any]:
    drifted_LE = loads_LE * np.exp(np.random.default_rng(seed).normal(0.0, sigma, loads_LE.shape))
    afresh = plan(drifted_LE, placement.num_ranks, redundant=redundant)
    num_slots = loads_LE.shape[1] + redundant
    followed, ms = _timed(lambda: rebalance(placement, drifted_LE, max_moves=num_slots // 11))
    full_L, moved_L = np.array(afresh.moved(placement)), np.array(followed.moved(placement))
    afresh_L, followed_L = weighted_ratios(afresh, drifted_LE), weighted_ratios(followed, drifted_LE)
    return {
        "sigma": sigma,
        "unchanged": _summary(even_ratios(to_slots(placement), drifted_LE)),
        "only_weights_changed": _summary(weighted_ratios(placement, drifted_LE)),
        "followed": {**_summary(followed_L, ms), "moved_slots": float(moved_L.mean())},
        "afresh": {**_summary(afresh_L), "moved_slots": float(full_L.mean())},
        "moved_share_worst": float((moved_L / np.maximum(full_L, 1)).max()),
        "over_afresh": _summary(followed_L / afresh_L),
    }


def _steps(
    placement: Placement, loads_LE: Floats, tokens: int, top_k: int, num_shared: int, num_steps: int, seed: int
) -> dict[str, Any]:
    """Steps of `tokens` tokens, spread over the ranks, that each go to `top_k` experts drawn from the loads, and to the
    last `num_shared` ones besides.
    """
    rng = np.random.default_rng(seed)
    num_ranks, per_rank = placement.num_ranks, placement.slots_per_rank
    speeds = [1.0] * num_ranks
    names = ("even_hash", "weighted_hash", "water_filling", "water_filling_by_rank", "optimum")
    found: dict[str, list[float]] = {name: [] for name in names}
    num_tokens_R = [len(part) for part in np.array_split(np.empty(tokens), num_ranks)]
    num_routed = loads_LE.shape[1] - num_shared
    for layer, load_E in enumerate(loads_LE):
        ranks_E = ranks_of_copies(placement, layer)
        even_E = [[1.0 / len(r)] * len(r) for r in ranks_E]
        parts = pour(load_E.tolist(), ranks_E, speeds).parts
        weighted_E = [[p / sum(part) for p in part] if sum(part) else even_E[e] for e, part in enumerate(parts)]
        choose = _chooser(placement, layer)
        for _ in range(num_steps):
            routed = load_E[:num_routed] / load_E[:num_routed].sum()
            drawn_R = [[*rng.multinomial(n * top_k, routed), *[n] * num_shared] for n in num_tokens_R]
            count_RE = np.array(drawn_R)
            count_E = count_RE.sum(0).tolist()
            mean = sum(count_E) / num_ranks
            for name, part_E in (("even_hash", even_E), ("weighted_hash", weighted_E)):
                drawn = [
                    rng.multinomial(n, p).tolist() if len(p) > 1 else [n] for n, p in zip(count_E, part_E, strict=True)
                ]
                found[name].append(max(_rank_loads(drawn, ranks_E, num_ranks)) / mean)
            for name, sources in (
                ("water_filling", count_RE.sum(0, keepdims=True)),
                ("water_filling_by_rank", count_RE),
            ):
                slots_P = np.concatenate([choose(_pairs(own_E), turn) for turn, own_E in enumerate(sources)])
                found[name].append(np.bincount(slots_P // per_rank, minlength=num_ranks).max() / mean)
            exact = pour([float(n) for n in count_E], ranks_E, speeds, 500)
            found["optimum"].append(least_hottest_time(count_E, ranks_E, speeds, exact.loads_R) / mean)
    optimum = np.array(found["optimum"])
    return {
        "tokens": tokens,
        "num_steps": num_steps * len(loads_LE),
        **{name: _summary(np.array(ratios)) for name, ratios in found.items()},
        "water_filling_over_optimum": _summary(np.array(found["water_filling"]) / optimum),
        "water_filling_by_rank_over_optimum": _summary(np.array(found["water_filling_by_rank"]) / optimum),
        "water_filling_us": _choice_us(placement, loads_LE[0], top_k, seed),
    }


def _chooser(placement: Placement, layer: int) -> Callable[[Ints, int], Ints]:
    table = slot_table(placement, layer, placement.num_ranks)
    num_ranks, per_rank = placement.num_ranks, placement.slots_per_rank

    def choose(experts: Ints, turn: int) -> Ints:
        return step_slots(experts, table.slots_EC, table.width, num_ranks=num_ranks, slots_per_rank=per_rank, turn=turn)

    return choose


def _pairs(count_E: Ints) -> Ints:
    """An entry for each (token, expert); in which order changes no count."""
    return np.repeat(np.arange(len(count_E)), count_E)


def _choice_us(placement: Placement, load_E: Floats, top_k: int, seed: int) -> dict[str, float]:
    """By tokens of a rank: median microseconds to choose their copies in one layer."""
    rng = np.random.default_rng(seed)
    choose = _chooser(placement, 0)
    result = {}
    for tokens in CHOICE_TOKENS:
        batches = [rng.choice(len(load_E), (tokens, top_k), p=load_E / load_E.sum()) for _ in range(20)]
        times = []
        for experts_TK in batches:
            start_s = time.perf_counter()
            choose(experts_TK, 0)
            times.append(time.perf_counter() - start_s)
        result[str(tokens)] = round(float(np.median(times)) * 1e6, 1)
    return result


def _rank_loads(part_E: list[list[int]], ranks_E: list[list[int]], num_ranks: int) -> list[int]:
    loads_R = [0] * num_ranks
    for part, ranks in zip(part_E, ranks_E, strict=True):
        for load, rank in zip(part, ranks, strict=True):
            loads_R[rank] += load
    return loads_R


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    drift, steps, hierarchical = result["drift"], result["steps"], result["eplb_hierarchical"]
    is_global = hierarchical is not None and hierarchical["as_global"]
    rows: list[tuple[str, dict[str, Any] | None]] = [
        ("planner, even split", result),
        ("planner, weighted", result["weighted"]),
        ("EPLB global", result["eplb_global"]),
        ("EPLB hierarchical" + (" (as global)" if is_global else ""), hierarchical),
        ("contiguous", result["contiguous"]),
        ("bound: max(mean, hottest copy)", result["bound"]),
        ("", None),
        (f"drift of {drift['sigma']:.0%}: unchanged", drift["unchanged"]),
        ("  only weights changed", drift["only_weights_changed"]),
        ("  followed", drift["followed"]),
        ("  planned afresh", drift["afresh"]),
        ("  followed / planned afresh", drift["over_afresh"]),
        ("", None),
        (f"steps of {steps['tokens']} tokens: even hash", steps["even_hash"]),
        ("  weighted hash", steps["weighted_hash"]),
        ("  water-filling", steps["water_filling"]),
        ("  each rank by itself", steps["water_filling_by_rank"]),
        ("  optimum of each step", steps["optimum"]),
        ("  water-filling / optimum", steps["water_filling_over_optimum"]),
        ("  each rank by itself / optimum", steps["water_filling_by_rank_over_optimum"]),
    ]
    lines = [
        f"EP{result['ep']}, {result['experts']} experts + {result['redundant']} copies, {result['layers']} layers: "
        "hottest rank over mean",
        f"{'':34}{'mean':>9}{'worst':>9}{'CPU ms':>9}{'moved':>9}",
    ]
    for name, row in rows:
        if row is None:
            lines.append(f"{name:34}{'-':>9}" if name else "")
            continue
        ms, moved = row.get("ms", math.nan), row.get("moved_slots", math.nan)
        cells = f"{row['mean_max_over_mean']:9.4f}{row['worst']:9.4f}"
        cells += f"{ms:9.1f}" if not math.isnan(ms) else " " * 9
        cells += f"{moved:9.1f}" if not math.isnan(moved) else ""
        lines.append(f"{name:34}{cells}".rstrip())
    costs = ", ".join(f"{us:.0f} us for {tokens}" for tokens, us in steps["water_filling_us"].items())
    lines.append(f"water-filling the tokens of one rank, a layer: {costs}")
    return "\n".join(lines) + "\n"


def tables(result: dict[str, Any]) -> str:
    """What `run_all` found, for people."""
    small = result["exhaustive"]
    return "\n".join(
        [
            *(table(shape) for shape in result["shapes"]),
            f"{small['instances']} small layers against every placement there is: the best one found for "
            f"{small['optimal']}, hottest rank over the best one's {small['mean_over_optimum']:.4f} on average, "
            f"{small['worst_over_optimum']:.4f} at worst\n",
        ]
    )
