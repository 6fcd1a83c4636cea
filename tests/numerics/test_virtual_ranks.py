"""Expert parallelism from 8 ranks to DeepSeek-V3's widest decode group, 320, in one process: 256 experts, with and
without copies, before and after placements change, whatever the tokens do.
"""

import time
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from golden import GREEDY, TOLERANCE, Cluster, model, prefill
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pd_cluster.engine.plan import NewSequence, StepPlan, Work
from pd_cluster.engine.torch_engine import TorchEngine, build_engine
from pd_cluster.errors import ConfigError, EngineError
from pd_cluster.ids import BlockId, Rank, RequestId
from pd_cluster.model.config import MlaConfig, ModelConfig, MoeConfig
from pd_cluster.model.expert_arena import is_intact
from pd_cluster.model.moe import Moe
from pd_cluster.model.random_weights import RandomSource
from pd_cluster.model.source import open_model
from pd_cluster.model.step_map import StepMap, choose_by_step
from pd_cluster.parallel.balance import plan
from pd_cluster.parallel.placement import Placement, spread
from pd_cluster.parallel.replicas import weights
from pd_cluster.parallel.slot_table import slot_tables
from pd_cluster.parallel.stages import loads, stages

NUM_EXPERTS, NUM_RANKS, REDUNDANT = 256, 320, 64
PROMPTS = [[(7 * i * i + 3 * i) % 97 for i in range(length)] for length in (1, 19, 40)]

CONFIG: ModelConfig = msgspec.structs.replace(
    model("deepseek_v3_yarn").config,
    vocab_size=97,
    hidden_size=32,
    num_layers=3,
    intermediate_size=64,
    attention=MlaConfig(
        num_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
    ),
    moe=MoeConfig(
        gate="deepseek_v3",
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=8,
        intermediate_size=16,
        num_shared_experts=1,
        num_groups=8,
        topk_groups=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    moe_layers=(1, 2),
)


def build(num_ranks: int, redundant: int = 0, **options: Any) -> TorchEngine:
    placement = options.pop("placement", None) or spread(NUM_EXPERTS, num_ranks, 2, redundant)
    return build_engine(
        CONFIG,
        RandomSource(CONFIG),
        dtype="float32",
        block_size=16,
        num_blocks=16,
        placement=placement,
        dispatcher=options.pop("dispatcher", "local" if num_ranks > 1 else "auto"),
        **options,
    )


one = cache(lambda: build(1))


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return logits(one())


@pytest.fixture(scope="module")
def many() -> TorchEngine:
    return build(NUM_RANKS, REDUNDANT)


def logits(engine: TorchEngine, prompts: list[list[int]] = PROMPTS) -> Tensor:
    with torch.inference_mode():
        return engine.model.logits(prefill(engine, prompts))


# ---- any number of ranks


@pytest.mark.parametrize(("num_ranks", "redundant"), [(8, 0), (8, 24), (32, 32), (64, 64), (144, 32), (320, 64)])
def test_any_number_of_ranks_computes_what_one_does(num_ranks: int, redundant: int, expected: Tensor) -> None:
    engine = build(num_ranks, redundant)
    assert sum(engine.expert_slots()) == NUM_EXPERTS + redundant
    assert (logits(engine) - expected).abs().max() < TOLERANCE
    tokens = sum(map(len, PROMPTS))
    assert [sum(layer) for layer in engine.expert_load()] == [8 * tokens] * 2  # every choice counted, none twice


@pytest.mark.parametrize(("num_ranks", "redundant"), [(8, 24), (64, 64)])
def test_copies_chosen_by_the_counts_of_the_step_compute_the_same(
    num_ranks: int, redundant: int, expected: Tensor
) -> None:
    engine = build(num_ranks, redundant, replica_choice="step")
    assert isinstance(engine.model.moe_layers[0].choice, StepMap)
    assert (logits(engine) - expected).abs().max() < TOLERANCE


def test_in_bfloat16_steps_choose_copies_as_well_as_hashes_do() -> None:
    """The bundled model with packed experts: which copy computes makes no difference but to rounding."""
    demo = open_model("demo")
    config = demo.config
    assert config.moe is not None

    def engine(num_ranks: int, **options: Any) -> TorchEngine:
        placement = spread(config.moe.num_experts, num_ranks, config.num_moe_layers, 8 if num_ranks > 1 else 0)  # type: ignore[union-attr]
        sizes = {"dtype": "bfloat16", "block_size": 16, "num_blocks": 16}
        return build_engine(config, demo.source, placement=placement, **sizes, **options)  # type: ignore[arg-type]

    alone = logits(engine(1))
    errors = {
        choice: (logits(engine(4, dispatcher="local", replica_choice=choice)) - alone).abs().median()
        for choice in ("hash", "step")
    }
    assert errors["step"] < 2 * errors["hash"]
    assert errors["step"] < 0.1 * alone.std()


def test_copies_are_chosen_by_hash_on_a_gpu(many: TorchEngine) -> None:
    moe: Any = SimpleNamespace(choice=SimpleNamespace(slots_EC=torch.empty((4, 1), device="meta")))
    with pytest.raises(ConfigError, match='replica_choice = "step" needs device = "cpu"'):
        choose_by_step([moe], many.model.moe_layers[0].dispatcher, spread(4, 2, 1))


def test_fp8_dispatch_rounds_what_experts_see_and_nothing_else(expected: Tensor) -> None:
    """However many ranks, rows are rounded once on their way; and little comes of it."""
    alone = logits(build(1, dispatcher="local", dispatch_dtype="fp8"))
    wide = logits(build(32, 32, dispatch_dtype="fp8"))
    assert (wide - alone).abs().max() < TOLERANCE
    error = (wide - expected).norm() / expected.norm()
    assert 1e-4 < error < 1 / 16  # no value is off by more than a 16th, and half of them by less than a 50th


# ---- placements that change


def swap(engine: TorchEngine, wanted: Placement, seed: int) -> int:
    """Go to `wanted` stage by stage as ranks do: experts come from the slots of others or from the checkpoint, are
    verified, and slots that are given up are filled with NaN. The number of loads.
    """
    assert engine.placement is not None
    assert engine.model.experts is not None
    store, arenas = engine.model.experts
    size, columns = wanted.slots_per_rank, engine.model.moe_layers[0].choice.slots_EC.shape[1]
    window = np.random.default_rng(seed).lognormal(0.0, 1.0, (2, NUM_EXPERTS)).tolist()
    num_loads = 0
    for stage in stages(engine.placement, wanted, max_loads_per_rank=8):
        for rank, arena in arenas.items():
            for load in loads(engine.placement, stage, rank):
                record = arena.record(load.layer, load.slot % size)
                if load.sources:
                    source = load.sources[0]
                    record.copy_(arenas[Rank(source // size)].record(load.layer, source % size))
                else:
                    store.load(arena, load.layer, load.slot % size, load.expert, sealed=True)
                assert is_intact(record, load.layer, load.expert)
                num_loads += 1
        shares = [weights(stage, layer, window[layer]) for layer in range(2)]
        engine.use(stage, slot_tables(stage, columns, shares))
        for layer, placed in enumerate(stage.layers):
            for slot, expert in enumerate(placed.slots):
                if expert is None:
                    arenas[Rank(slot // size)].record(layer, slot % size).fill_(0xFF)
    assert {frozenset(stage_slots(engine.placement, r)) for r in range(8)} == {
        frozenset(stage_slots(wanted, r)) for r in range(8)
    }
    return num_loads


def stage_slots(placement: Placement, rank: int) -> list[tuple[int, int]]:
    held = [(layer, e) for layer in range(2) for e in placement.rank_slots(layer, Rank(rank)) if e is not None]
    return sorted(held)


def random_placement(seed: int, slots_per_rank: int) -> Placement:
    rng = np.random.default_rng(seed)
    window = rng.lognormal(0.0, 1.5, (2, NUM_EXPERTS))
    return plan(window, 8, redundant=int(rng.integers(0, 40)), slots_per_rank=slots_per_rank)


@pytest.fixture(scope="module")
def swapping() -> TorchEngine:
    return build(8, placement=spread(NUM_EXPERTS, 8, 2, 0, 44))


@settings(max_examples=5, deadline=None)
@given(seeds=st.lists(st.integers(0, 2**16), min_size=1, max_size=3))
def test_after_any_number_of_swaps_the_logits_are_those_of_one_rank(
    swapping: TorchEngine, expected: Tensor, seeds: list[int]
) -> None:
    for seed in seeds:
        swap(swapping, random_placement(seed, 44), seed)
        assert (logits(swapping) - expected).abs().max() < TOLERANCE


def test_after_twenty_random_swaps_the_logits_are_those_of_one_rank(swapping: TorchEngine, expected: Tensor) -> None:
    num_loads = sum(swap(swapping, random_placement(seed, 44), seed) for seed in range(100, 120))
    assert num_loads > 20 * NUM_EXPERTS
    assert (logits(swapping) - expected).abs().max() < TOLERANCE


def test_a_slot_given_up_is_read_no_more(swapping: TorchEngine, expected: Tensor) -> None:
    """That the test above could fail: a map that still names such a slot finds NaN there."""
    swap(swapping, random_placement(7, 44), 7)
    assert swapping.placement is not None
    assert (logits(swapping) - expected).abs().max() < TOLERANCE
    empty = swapping.placement.layers[0].slots.index(None)
    moe = swapping.model.moe_layers[0]
    kept = moe.choice.slots_EC.clone()
    moe.choice.slots_EC[moe.load_E.argmax()] = empty
    assert not torch.isfinite(logits(swapping)).all()
    moe.choice.slots_EC.copy_(kept)
    assert (logits(swapping) - expected).abs().max() < TOLERANCE


# ---- whatever the tokens do


def test_ranks_without_tokens_take_part(many: TorchEngine) -> None:
    """One token among 320 ranks, and none at all."""
    assert (logits(many, [[5]]) - logits(one(), [[5]])).abs().max() < TOLERANCE
    hidden = many.model(many.model.batch([], torch.device("cpu")), many.arena.layers)
    assert hidden.shape == (0, CONFIG.hidden_size)


@pytest.mark.parametrize("choice", ["hash", "step"])
def test_all_tokens_may_choose_the_same_experts(choice: str) -> None:
    """All on one rank of eight, in spite of their copies elsewhere or by means of them."""
    engine, alone = build(8, 24, replica_choice=choice), build(1)
    for moe in (*engine.model.moe_layers, *alone.model.moe_layers):
        assert moe.gate.bias_E is not None
        moe.gate.bias_E[:32] += 100.0  # the experts of rank 0, in one group
        moe.gate.bias_E[:8] += 100.0
    assert (logits(engine) - logits(alone)).abs().max() < TOLERANCE
    tokens = sum(map(len, PROMPTS))
    assert engine.expert_load()[0][:9] == [tokens] * 8 + [0]


def test_a_slow_rank_and_an_idle_one_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks as threads that exchange rows; one has nothing to compute, another takes its time."""
    prompts = [[PROMPTS[1]], [], [PROMPTS[0]], [PROMPTS[2]]]
    ranks = Cluster(CONFIG, dp=4, num_blocks=16, redundant_experts=16)
    slow = 0

    for moe in ranks.engines[2].model.moe_layers:
        prompt_experts = moe.experts[Rank(2)]

        def slowly(arrived: Any, experts: Any = prompt_experts) -> Tensor:
            nonlocal slow
            slow += 1
            time.sleep(0.03)
            return experts(arrived)  # type: ignore[no-any-return]

        monkeypatch.setattr(moe, "experts", {Rank(2): slowly})
    alone = Cluster(CONFIG, num_blocks=16)
    found, wanted = ranks.generate(prompts, 3), alone.generate([[*PROMPTS]], 3)
    ranks.close()
    alone.close()
    assert slow >= 6
    for got, same in ((found[0][0], wanted[0][1]), (found[2][0], wanted[0][0]), (found[3][0], wanted[0][2])):
        assert got.output == same.output
        for row, other in zip(got.logits, same.logits, strict=True):
            assert (row - other).abs().max() < TOLERANCE


@pytest.mark.parametrize("slot", [-1, 8 * 32])
def test_a_slot_that_does_not_exist_is_refused_by_number(slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(8)
    moe = engine.model.moe_layers[1]
    monkeypatch.setattr(moe, "choice", lambda experts_TK, mix_T: torch.full_like(experts_TK, slot))
    with pytest.raises(EngineError, match=f"expert slot {slot}, but there are only slots 0 to 255"):
        step(engine)


@pytest.mark.parametrize("expert", [-1, NUM_EXPERTS])
@pytest.mark.parametrize("choice", ["hash", "step"])
def test_an_expert_that_does_not_exist_is_refused_by_number(
    expert: int, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(8, 24, replica_choice=choice)
    moe = engine.model.moe_layers[0]
    gate = moe.gate

    def broken(hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        experts_TK, weights_TK = gate(hidden_TH)
        experts_TK[-1, 3] = expert
        return experts_TK, weights_TK

    monkeypatch.setattr(moe, "gate", broken)
    with pytest.raises(EngineError, match=f"a token chose expert {expert} of 256"):
        step(engine)


def step(engine: TorchEngine) -> None:
    sequence = NewSequence(
        request_id=RequestId("r"),
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        num_computed=0,
        block_ids=[BlockId(0)],
        sampling=GREEDY,
    )
    engine.launch(StepPlan(step=1, add=[sequence], work=[Work(RequestId("r"), 3, True)]), [3])
    engine.collect()


# ---- that errors show


@pytest.fixture
def used_slots(many: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Tensor]:
    """Slots that layer 1 chose in the last run, over all ranks."""
    moe = many.model.moe_layers[0]
    seen: list[Tensor] = []
    choice = moe.choice

    def record(experts_TK: Tensor, mix_T: Tensor) -> Tensor:
        seen.append(choice(experts_TK, mix_T))
        return seen[-1]

    monkeypatch.setattr(moe, "choice", record)
    return lambda: seen[-1].unique()  # noqa: PLW0108


def test_both_copies_of_redundant_experts_are_used(many: TorchEngine, used_slots: Callable[[], Tensor]) -> None:
    logits(many)
    copies = many.placement.copies(0)  # type: ignore[union-attr]
    used = set(used_slots().tolist())
    assert any(len(slots) == 2 and set(slots) <= used for slots in copies)


def test_one_corrupted_slot_is_noticed(many: TorchEngine, expected: Tensor, used_slots: Callable[[], Tensor]) -> None:
    logits(many)
    slot = int(used_slots()[-1])  # one slot a rank
    weights = many.model.moe_layers[0].experts[Rank(slot)].down_SHI
    kept = weights.clone()
    weights[0, 0] += 1.0
    assert (logits(many) - expected).abs().max() > 10 * TOLERANCE
    weights.copy_(kept)
    assert (logits(many) - expected).abs().max() < TOLERANCE


def test_two_swapped_entries_of_the_map_are_noticed(many: TorchEngine, expected: Tensor) -> None:
    moe: Moe = many.model.moe_layers[1]
    popular = moe.load_E.topk(2).indices
    table = moe.choice.slots_EC
    kept = table.clone()
    table[popular] = table[popular.flip(0)]
    assert (logits(many) - expected).abs().max() > 10 * TOLERANCE
    table.copy_(kept)
    assert (logits(many) - expected).abs().max() < TOLERANCE
