"""How evenly the planner spreads measured expert loads over ranks, next to EPLB's two modes and to what is possible.

Three questions. *Window*: the hottest rank over the mean for the loads that were planned for, each copy with an even
part of its expert's load, and with the planner's weights. *Drift*: loads change at random and the placement follows;
what it costs in experts moved, and what it reaches, against a plan made afresh. *Steps*: a step of a few thousand
tokens is noisier than a window; steps are drawn from the loads, and tokens choose copies evenly by hash, by weighted
hash, or by quotas poured from the step's own counts, against the least that the placement allows for that step.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from pd_cluster.errors import ConfigError
from pd_cluster.parallel.balance import hottest_copy_bound, plan, to_slots, with_shared_expert
from pd_cluster.parallel.drift import rebalance
from pd_cluster.parallel.eplb import Floats, Ints, global_eplb, hierarchical_eplb
from pd_cluster.parallel.placement import Placement, spread
from pd_cluster.parallel.replicas import least_hottest_time, pour, quotas, ranks_of_copies

REPEATS = 3

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
    drift: float = 0.15,
    step_tokens: int = 4096,
    steps: int = 4,
    seed: int = 0,
) -> dict[str, Any]:
    """`shared_top_k`: place the shared expert as one more, its load from this many routed experts per token. Ratios are
    of the hottest rank to the mean; `mean_max_over_mean` averages them over layers, `worst` is the largest.
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
        "steps": _steps(placement, loads_LE, step_tokens, steps, seed),
    }


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
    """EPLB's two modes; None where it cannot be used because something does not divide."""
    num_experts = loads_LE.shape[1]
    num_slots, num_nodes = num_experts + redundant, max(ep // ranks_per_node, 1)
    divides = num_slots % ep == 0
    in_groups = divides and not (num_experts % groups or groups % num_nodes or ep % num_nodes)
    calls: dict[str, Callable[[], Ints] | None] = {
        "eplb_global": (lambda: global_eplb(loads_LE, num_slots, ep)) if divides else None,
        "eplb_hierarchical": (lambda: hierarchical_eplb(loads_LE, num_slots, ep, groups, num_nodes))
        if in_groups and num_nodes > 1
        else None,
    }
    result: dict[str, dict[str, Any] | None] = {}
    for name, call in calls.items():
        result[name] = None
        if call is not None:
            slots_LP, ms = _timed(call)
            ratios = even_ratios(slots_LP.reshape(len(loads_LE), ep, -1), loads_LE)
            result[name] = {**_summary(ratios, ms), "ratios": ratios}
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
        "over_afresh_worst": float((followed_L / afresh_L).max()),
    }


def _steps(placement: Placement, loads_LE: Floats, tokens: int, num_steps: int, seed: int) -> dict[str, Any]:
    """Steps of `tokens` tokens that each go to 8 experts, drawn from the loads."""
    rng = np.random.default_rng(seed)
    num_ranks = placement.num_ranks
    speeds = [1.0] * num_ranks
    found: dict[str, list[float]] = {"even_hash": [], "weighted_hash": [], "water_filling": [], "optimum": []}
    microseconds = []
    for layer, load_E in enumerate(loads_LE):
        ranks_E = ranks_of_copies(placement, layer)
        even_E = [[1.0 / len(r)] * len(r) for r in ranks_E]
        parts = pour(load_E.tolist(), ranks_E, speeds).parts
        weighted_E = [[p / sum(part) for p in part] if sum(part) else even_E[e] for e, part in enumerate(parts)]
        for _ in range(num_steps):
            count_E = rng.multinomial(tokens * 8, load_E / load_E.sum()).tolist()
            start_s = time.process_time()
            quota_E = quotas(count_E, ranks_E, speeds)
            microseconds.append((time.process_time() - start_s) * 1e6)
            mean = sum(count_E) / num_ranks
            for name, part_E in (("even_hash", even_E), ("weighted_hash", weighted_E)):
                drawn = [
                    rng.multinomial(n, p).tolist() if len(p) > 1 else [n] for n, p in zip(count_E, part_E, strict=True)
                ]
                found[name].append(max(_rank_loads(drawn, ranks_E, num_ranks)) / mean)
            found["water_filling"].append(max(_rank_loads(quota_E, ranks_E, num_ranks)) / mean)
            exact = pour([float(n) for n in count_E], ranks_E, speeds, 500)
            found["optimum"].append(least_hottest_time(count_E, ranks_E, speeds, exact.loads_R) / mean)
    over = np.array(found["water_filling"]) / np.array(found["optimum"])
    return {
        "tokens": tokens,
        "num_steps": num_steps * len(loads_LE),
        **{name: _summary(np.array(ratios)) for name, ratios in found.items()},
        "water_filling_over_optimum": _summary(over),
        "water_filling_us": round(float(np.median(microseconds))),
    }


def _rank_loads(part_E: list[list[int]], ranks_E: list[list[int]], num_ranks: int) -> list[int]:
    loads_R = [0] * num_ranks
    for part, ranks in zip(part_E, ranks_E, strict=True):
        for load, rank in zip(part, ranks, strict=True):
            loads_R[rank] += load
    return loads_R


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    drift, steps = result["drift"], result["steps"]
    rows: list[tuple[str, dict[str, Any] | None]] = [
        ("planner, even split", result),
        ("planner, weighted", result["weighted"]),
        ("EPLB global", result["eplb_global"]),
        ("EPLB hierarchical", result["eplb_hierarchical"]),
        ("contiguous", result["contiguous"]),
        ("bound: max(mean, hottest copy)", result["bound"]),
        ("", None),
        (f"drift of {drift['sigma']:.0%}: unchanged", drift["unchanged"]),
        ("  only weights changed", drift["only_weights_changed"]),
        ("  followed", drift["followed"]),
        ("  planned afresh", drift["afresh"]),
        ("", None),
        (f"steps of {steps['tokens']} tokens: even hash", steps["even_hash"]),
        ("  weighted hash", steps["weighted_hash"]),
        ("  water-filling", steps["water_filling"]),
        ("  optimum of each step", steps["optimum"]),
        ("  water-filling / optimum", steps["water_filling_over_optimum"]),
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
    lines.append(f"water-filling takes {steps['water_filling_us']} us for a layer of a step")
    return "\n".join(lines) + "\n"
