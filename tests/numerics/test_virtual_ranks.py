"""DeepSeek-V3's widest decode group in one process: 320 ranks, one slot each, for 256 experts and 64 copies."""

from collections.abc import Callable

import msgspec
import pytest
import torch
from golden import TOLERANCE, model, prefill
from torch import Tensor

from pd_cluster.engine.torch_engine import TorchEngine, build_engine
from pd_cluster.ids import Rank
from pd_cluster.model.config import MlaConfig, ModelConfig, MoeConfig
from pd_cluster.model.moe import Moe
from pd_cluster.model.random_weights import RandomSource
from pd_cluster.parallel.placement import spread

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


def build(num_ranks: int, redundant: int) -> TorchEngine:
    return build_engine(
        CONFIG,
        RandomSource(CONFIG),
        dtype="float32",
        block_size=16,
        num_blocks=16,
        placement=spread(NUM_EXPERTS, num_ranks, 2, redundant),
        dispatcher="local" if num_ranks > 1 else "auto",
    )


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return logits(build(1, 0))


@pytest.fixture(scope="module")
def many() -> TorchEngine:
    return build(NUM_RANKS, REDUNDANT)


def logits(engine: TorchEngine) -> Tensor:
    with torch.inference_mode():
        return engine.model.logits(prefill(engine, PROMPTS))


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


def test_320_ranks_compute_what_one_does(many: TorchEngine, expected: Tensor) -> None:
    assert many.expert_slots() == [1] * NUM_RANKS
    assert (logits(many) - expected).abs().max() < TOLERANCE


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
