"""What an engine's hub asks when expert loads, or its ranks, have changed, and the answer: the stages to pass through.

Pure, and the same in every process: `engine/planning.py` asks one of its own, and leaves the interpreter to the steps.
"""

# L MoE layers, E experts

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct

from pd_cluster.errors import ConfigError, ErrorInfo, NotSupported
from pd_cluster.ids import ExpertId, Rank
from pd_cluster.parallel.drift import rebalance
from pd_cluster.parallel.load_window import Ints, Trigger, TriggerPolicy, layer_loads, predicted_ratio
from pd_cluster.parallel.placement import Placement
from pd_cluster.parallel.placement_status import LayerLoad
from pd_cluster.parallel.replicas import weights
from pd_cluster.parallel.stages import missing, stages

Weights = list[dict[ExpertId, list[float]]]
"""[L] of the experts that have several copies, their shares in slot order; others have one copy, or even shares."""

MAX_LOADS_PER_RANK = 8
"""Of one stage while steps run: stages stay short, so that a rank that fails costs little."""


class Question(Struct, frozen=True, kw_only=True, array_like=True):
    """`look`: only the ratio. `rebalance`: a better placement, if it is worth it. `move`: every expert somewhere on
    `staying`, nothing elsewhere.
    """

    kind: Literal["look", "rebalance", "move"]
    placement: Placement
    weights: Weights
    loads: bytes  # int64 [L, E]
    live: list[Rank]
    staying: list[Rank]  # of the live ones, those that may hold experts
    expert_bytes: int
    policy: TriggerPolicy


class Stage(Struct, frozen=True, array_like=True):
    """A placement with the weights of its copies."""

    placement: Placement
    weights: Weights


class Answer(Struct, frozen=True, kw_only=True, array_like=True):
    """`ratio`: of the current placement, None while counts say too little. `error`: what does not fit."""

    ratio: float | None = None
    layers: list[LayerLoad] = []  # to a look
    predicted: float | None = None
    stages: list[Stage] = []
    reason: str = ""
    error: ErrorInfo | None = None


def all_weights(placement: Placement, some: Weights) -> list[list[list[float]]]:
    """[L][E] the shares of all copies, as `slot_tables` takes them."""
    return [
        [
            some[layer].get(ExpertId(expert)) or [1.0 / len(slots)] * len(slots)
            for expert, slots in enumerate(placement.copies(layer))
        ]
        for layer in range(len(placement.layers))
    ]


def best_weights(placement: Placement, loads_LE: Ints) -> Weights:
    result: Weights = []
    for layer, load_E in enumerate(loads_LE):
        shares_E = weights(placement, layer, load_E.tolist())
        result.append({ExpertId(e): shares for e, shares in enumerate(shares_E) if len(shares) > 1})
    return result


def answer(question: Question) -> Answer:
    """Errors are part of it: nothing is raised for what does not fit."""
    current = question.placement
    loads_LE = np.frombuffer(question.loads, np.int64).reshape(len(current.layers), current.num_experts)
    trigger = Trigger(question.policy)
    shares = all_weights(current, question.weights)
    if question.kind == "look":
        return Answer(
            ratio=trigger.ratio(current, loads_LE, shares, live=question.live),
            layers=layer_loads(current, loads_LE, shares, live=question.live),
        )
    try:
        if question.kind == "move":
            return _move(question, loads_LE)
        return _rebalance(question, loads_LE, trigger)
    except (NotSupported, ConfigError) as error:
        return Answer(error=error.info())


def _rebalance(question: Question, loads_LE: Ints, trigger: Trigger) -> Answer:
    """Move experts if that is worth it, else give their copies other weights if that is."""
    current, live = question.placement, question.live
    shares = all_weights(current, question.weights)
    reason = ""
    for candidate in (_wanted(question, loads_LE), current):
        try:
            path = stages(
                current, candidate, max_loads_per_rank=MAX_LOADS_PER_RANK, live=frozenset(Rank(r) for r in live)
            )
        except NotSupported as error:  # no empty slots to go through
            reason = error.message
            continue
        last = path[-1] if path else msgspec.structs.replace(current, epoch=current.epoch + 1)
        verdict = trigger.judge(
            current, last, loads_LE, expert_bytes=question.expert_bytes, now_s=0.0, weights_LEC=shares, live=live
        )
        reason = f"{reason}; {verdict.reason}" if reason else verdict.reason
        if verdict.worth_it:
            made = [Stage(each, best_weights(each, loads_LE)) for each in path or [last]]
            return Answer(ratio=verdict.before, predicted=verdict.after, stages=made, reason=verdict.reason)
    return Answer(reason=reason)


def _move(question: Question, loads_LE: Ints) -> Answer:
    """First, in one stage if they fit so, what no live rank holds: no step may run without. Then the rest in turns."""
    current, live = question.placement, frozenset(Rank(r) for r in question.live)
    done: list[Placement] = []
    if missing(current, live):
        least = _wanted(question, loads_LE, max_moves=0)
        for stage in stages(current, least, live=live):
            done.append(stage)
            if not missing(stage, live):
                break
    start = done[-1] if done else current
    done += _balanced_path(msgspec.structs.replace(question, placement=start), loads_LE, live)
    made = [Stage(each, best_weights(each, loads_LE)) for each in done]
    predicted = predicted_ratio(done[-1] if done else current, loads_LE, live=question.staying)
    return Answer(predicted=predicted, stages=made, reason=f"experts on ranks {_names(question.staying)}")


def _balanced_path(question: Question, loads_LE: Ints, live: frozenset[Rank]) -> list[Placement]:
    """Stages to experts on the staying ranks alone, balanced if there are empty slots to go through, else with as few
    moves as do: an engine goes on unbalanced rather than not at all.
    """
    try:
        wanted = _wanted(question, loads_LE)
        return stages(question.placement, wanted, max_loads_per_rank=MAX_LOADS_PER_RANK, live=live)
    except NotSupported:
        wanted = _wanted(question, loads_LE, max_moves=0)
        return stages(question.placement, wanted, max_loads_per_rank=MAX_LOADS_PER_RANK, live=live)


def _wanted(question: Question, loads_LE: Ints, max_moves: int | None = None) -> Placement:
    """A move leaves at least one slot of a rank empty, where experts allow it, so that the next change has room."""
    current, staying = question.placement, question.staying
    least = -(-current.num_experts // len(staying))
    if least > current.slots_per_rank:
        raise NotSupported(
            f"{current.num_experts} experts do not fit ranks {_names(staying)} with expert_slots_per_rank "
            f"{current.slots_per_rank}: each would need {least}"
        )
    fullest = max(
        sum(e is not None for e in current.rank_slots(layer, rank))
        for layer in range(len(current.layers))
        for rank in staying
    )
    room = current.slots_per_rank - (question.kind == "move")
    in_use = max(least, min(fullest, room))
    return rebalance(
        current, loads_LE.astype(np.float64), live=[int(r) for r in staying], slots_in_use=in_use, max_moves=max_moves
    )


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
