"""Questions about placements, and the process that answers them."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from pd_cluster.engine.planning import Planner
from pd_cluster.errors import EngineError
from pd_cluster.ids import ExpertId, Rank
from pd_cluster.parallel.load_window import TriggerPolicy
from pd_cluster.parallel.placement import LayerPlacement, Placement, spread
from pd_cluster.parallel.planner import Question, all_weights, answer, best_weights
from pd_cluster.parallel.stages import check_stage, missing

NUM_RANKS, NUM_EXPERTS, NUM_LAYERS = 4, 16, 3
RANKS = [Rank(r) for r in range(NUM_RANKS)]


def question(
    kind: str = "rebalance", *, slots: int = 6, redundant: int = 0, seed: int = 0, **changes: object
) -> Question:
    """Loads that make the first experts, and so the first ranks, hot."""
    placement = spread(NUM_EXPERTS, NUM_RANKS, NUM_LAYERS, redundant, slots)
    heat = np.linspace(3.0, 1.0, NUM_EXPERTS) * 20_000
    loads_LE = np.random.default_rng(seed).poisson(heat, (NUM_LAYERS, NUM_EXPERTS)).astype(np.int64)
    made = Question(
        kind=kind,  # type: ignore[arg-type]
        placement=placement,
        weights=[{} for _ in range(NUM_LAYERS)],
        loads=loads_LE.tobytes(),
        live=RANKS,
        staying=RANKS,
        expert_bytes=1,
        policy=TriggerPolicy(),
    )
    return msgspec.structs.replace(made, **changes)


def loads_of(asked: Question) -> np.ndarray:
    return np.frombuffer(asked.loads, np.int64).reshape(NUM_LAYERS, NUM_EXPERTS)


def without(placement: Placement, rank: int, of: int = NUM_LAYERS) -> Placement:
    """Its experts doubled on the next rank, so that it may be given up."""
    size, layers = placement.slots_per_rank, []
    for layer in placement.layers[:of]:
        slots = list(layer.slots)
        held = [e for e in slots[rank * size : (rank + 1) * size] if e is not None]
        to = (rank + 1) % NUM_RANKS * size
        free = [s for s in range(to, to + size) if slots[s] is None]
        for slot, expert in zip(free, held, strict=False):
            slots[slot] = expert
        layers.append(LayerPlacement(tuple(slots)))
    return msgspec.structs.replace(placement, layers=tuple(layers))


def test_a_better_placement_is_reached_through_stages_that_fit() -> None:
    asked = question()
    found = answer(asked)
    assert found.ratio is not None
    assert found.predicted is not None
    assert found.ratio > 1.2
    assert found.predicted < 1.05
    before = asked.placement
    for stage in found.stages:
        check_stage(before, stage.placement)
        before = stage.placement
    assert answer(msgspec.structs.replace(asked, kind="look")).ratio == pytest.approx(found.ratio)
    after = msgspec.structs.replace(
        asked, kind="look", placement=found.stages[-1].placement, weights=found.stages[-1].weights
    )
    assert answer(after).ratio == pytest.approx(found.predicted, abs=1e-6)


def full(asked: Question) -> Question:
    """The same with every slot taken: experts 0 to 2 and 4 have two copies."""
    held = [[0, 1, 2, 3, 4], [4, 5, 6, 7, 0], [8, 9, 10, 11, 1], [12, 13, 14, 15, 2]]
    layer = LayerPlacement(tuple(ExpertId(expert) for rank in held for expert in rank))
    placement = msgspec.structs.replace(asked.placement, slots_per_rank=5, layers=(layer,) * NUM_LAYERS)
    return msgspec.structs.replace(asked, placement=placement)


def test_without_empty_slots_copies_make_room_or_only_their_weights_change() -> None:
    for seed in range(4):
        asked = full(question(seed=seed))
        found = answer(asked)
        assert found.ratio is not None
        assert found.predicted is not None
        assert found.predicted < found.ratio - 0.05
        last = found.stages[-1]
        assert all(None not in layer.slots for layer in last.placement.layers), "as many copies as before"
        if len(found.stages) == 1:
            assert last.placement == msgspec.structs.replace(asked.placement, epoch=1)
            assert any(shares != [0.5, 0.5] for layer in last.weights for shares in layer.values())
            return
    pytest.fail("every change needed loads")


def test_without_copies_and_empty_slots_it_says_what_to_raise() -> None:
    found = answer(question(slots=4))
    assert not found.stages
    assert "raise expert_slots_per_rank" in found.reason


def test_what_is_even_stays() -> None:
    even = np.full((NUM_LAYERS, NUM_EXPERTS), 10_000, np.int64).tobytes()
    found = answer(question(loads=even))
    assert not found.stages
    assert "less than" in found.reason
    few = np.ones((NUM_LAYERS, NUM_EXPERTS), np.int64).tobytes()
    assert answer(question("look", loads=few)).ratio is None


def test_lost_experts_come_back_first_and_in_one_stage() -> None:
    asked = question("move", live=RANKS[1:], staying=RANKS[1:], slots=8)
    assert missing(asked.placement, frozenset(RANKS[1:]))
    found = answer(asked)
    assert not missing(found.stages[0].placement, frozenset(RANKS[1:]))
    last = found.stages[-1].placement
    assert all(set(last.rank_slots(layer, RANKS[0])) == {None} for layer in range(NUM_LAYERS))


def test_an_empty_rank_is_given_experts() -> None:
    asked = question("move", slots=8)
    placement = without(asked.placement, 2)
    left = answer(msgspec.structs.replace(asked, placement=placement, staying=[Rank(0), Rank(1), Rank(3)]))
    emptied = left.stages[-1].placement
    assert all(set(emptied.rank_slots(layer, Rank(2))) == {None} for layer in range(NUM_LAYERS))
    back = answer(msgspec.structs.replace(asked, placement=emptied)).stages[-1].placement
    assert all(any(e is not None for e in back.rank_slots(layer, Rank(2))) for layer in range(NUM_LAYERS))


def test_what_does_not_fit_is_refused_by_name() -> None:
    found = answer(question("move", staying=RANKS[:2], slots=6))
    assert found.error is not None
    assert found.error.code == "not_supported"
    assert "expert_slots_per_rank 6: each would need 8" in found.error.message


@pytest.mark.parametrize(("num_ranks", "lost"), [(3, 1), (4, 1), (4, 2), (6, 1)])
def test_whatever_the_loads_were_ranks_may_be_lost_leave_and_come_back(num_ranks: int, lost: int) -> None:
    """With no more slots than the ranks that stay need for all experts."""
    rng = np.random.default_rng(num_ranks + lost)
    everyone = [Rank(rank) for rank in range(num_ranks)]
    slots = -(-NUM_EXPERTS // (num_ranks - lost))
    asked = question(slots=slots, placement=spread(NUM_EXPERTS, num_ranks, NUM_LAYERS, 0, slots), live=everyone)

    def after(kind: str, live: list[Rank], staying: list[Rank]) -> Question:
        """Under loads drawn anew, of which a few experts get most."""
        loads = (rng.pareto(1.0, (NUM_LAYERS, NUM_EXPERTS)) * 10_000).astype(np.int64)
        changed = msgspec.structs.replace(asked, kind=kind, loads=loads.tobytes(), live=live, staying=staying)
        found = answer(changed)
        assert found.error is None, found.error
        if not found.stages:
            return changed
        last = found.stages[-1]
        assert not missing(last.placement, frozenset(staying))
        return msgspec.structs.replace(changed, placement=last.placement, weights=last.weights)

    for _ in range(8):
        asked = after("rebalance", everyone, everyone)
        gone = sorted(rng.choice(num_ranks, lost, replace=False).tolist())
        staying = [rank for rank in everyone if rank not in gone]
        asked = after("move", staying if rng.random() < 0.5 else everyone, staying)
        asked = after("rebalance", staying, staying)
        asked = after("move", everyone, everyone)


def test_weights_name_only_experts_with_several_copies() -> None:
    asked = question(redundant=2)
    some = best_weights(asked.placement, loads_of(asked))
    assert {expert for layer in some for expert in layer} == {ExpertId(0), ExpertId(1)}
    for layer, shares_E in enumerate(all_weights(asked.placement, some)):
        assert [len(shares) for shares in shares_E] == [len(c) for c in asked.placement.copies(layer)]
        assert all(sum(shares) == pytest.approx(1) for shares in shares_E)


@pytest.mark.parametrize("num_bytes", [None, 1000, 5])
def test_the_process_of_a_hub_that_was_killed_ends_without_a_word(num_bytes: int | None) -> None:
    """After a whole question, and in the middle of one."""
    body = msgspec.msgpack.encode(question())
    process = subprocess.Popen(
        [sys.executable, "-m", "pd_cluster.engine.planning"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        process.stdout.close()
        process.stdin.write((len(body).to_bytes(8, "big") + body)[:num_bytes])
        process.stdin.close()
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


async def test_the_process_answers_as_the_function_does_and_is_replaced_when_it_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = Planner()
    try:
        assert await planner.ask(question()) == answer(question())
        process = planner._process
        assert process is not None
        assert (
            await planner.ask(question("move")) == answer(question("move")) == await planner.ask_here(question("move"))
        )
        assert planner._process is process
        process.kill()
        process.wait()
        assert await planner.ask(question("look")) == answer(question("look"))
        assert planner._process is not process
        assert planner._process is not None
        assert planner._process.stdin is not None
        planner._process.stdin.write((3).to_bytes(8, "big") + b"abc")
        with pytest.raises(EngineError, match="planning process failed"):
            await planner.ask(question())
        assert await planner.ask(question("look")) == answer(question("look"))
        process = planner._process
        assert process is not None
        process.kill()
        process.wait()
        monkeypatch.setattr(process, "poll", lambda: None)  # it ends between the look at it and the question
        with pytest.raises(EngineError, match="planning process failed"):
            await planner.ask(question())
        assert await planner.ask(question("look")) == answer(question("look"))
    finally:
        planner.close()
