"""Routers by hand: what each family chooses by, and what it weights with."""

import torch

from pd_cluster.model.config import MoeConfig
from pd_cluster.model.gate import Gate
from pd_cluster.model.moe import SlotMap, token_mix
from pd_cluster.parallel.placement import spread
from pd_cluster.parallel.replicas import choose
from pd_cluster.parallel.slot_table import max_copies, slot_table


def gate_of(logits: list[float], bias: list[float] | None = None, **config: object) -> tuple[list[int], list[float]]:
    """What one token whose router logits are `logits` is sent to."""
    weight_EH = torch.tensor(logits)[:, None]
    moe = MoeConfig(num_experts=len(logits), intermediate_size=8, **config)  # type: ignore[arg-type]
    experts, weights = Gate(moe, weight_EH, None if bias is None else torch.tensor(bias))(torch.ones(1, 1))
    return experts[0].tolist(), weights[0].tolist()


def sigmoid(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).sigmoid())


def close(values: list[float], expected: list[float]) -> bool:
    return bool(torch.allclose(torch.tensor(values), torch.tensor(expected), atol=1e-6))


def test_v3_chooses_by_biased_scores_and_weights_by_unbiased_ones() -> None:
    experts, weights = gate_of(
        [2.0, 1.0, 0.0, -1.0],
        bias=[-0.9, 0.0, 0.5, 0.0],
        gate="deepseek_v3",
        num_experts_per_tok=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    assert experts == [2, 1]  # 0.5 + 0.5, then 0.73; expert 0 falls to -0.02
    total = sigmoid(0.0) + sigmoid(1.0)
    assert close(weights, [2.5 * sigmoid(0.0) / total, 2.5 * sigmoid(1.0) / total])


def test_v3_scales_once_without_normalising() -> None:
    _, weights = gate_of(
        [1.0, 0.0], bias=[0.0, 0.0], gate="deepseek_v3", num_experts_per_tok=2, routed_scaling_factor=2.5
    )
    assert close(weights, [2.5 * sigmoid(1.0), 2.5 * sigmoid(0.0)])


def test_v3_never_leaves_its_groups_even_when_all_biased_scores_are_negative() -> None:
    experts, _ = gate_of(
        [0.0, 0.0, 3.0, 3.0, 0.0, 0.0],
        bias=[-2.0] * 6,
        gate="deepseek_v3",
        num_experts_per_tok=2,
        num_groups=3,
        topk_groups=1,
    )
    assert sorted(experts) == [2, 3]  # a mask of 0 would beat the scores of the kept group


def test_v3_ranks_groups_by_their_two_best() -> None:
    experts, _ = gate_of(
        [3.0, -9.0, -9.0, 1.0, 1.0, -9.0],
        bias=[0.0] * 6,
        gate="deepseek_v3",
        num_experts_per_tok=2,
        num_groups=2,
        topk_groups=1,
    )
    assert sorted(experts) == [3, 4]


def test_v2_ranks_groups_by_their_best_and_only_scales() -> None:
    logits = [3.0, -9.0, -9.0, 1.0, 1.0, -9.0]
    experts, weights = gate_of(
        logits,
        gate="deepseek_v2_group",
        num_experts_per_tok=2,
        num_groups=2,
        topk_groups=1,
        routed_scaling_factor=4.0,
    )
    assert experts[0] == 0
    assert set(experts) < {0, 1, 2}
    assert close(weights[:1], [4 * float(torch.tensor(logits).softmax(0)[0])])


def test_v2_greedy_is_a_softmax_over_all() -> None:
    logits = [1.0, 2.0, 0.5]
    experts, weights = gate_of(logits, gate="deepseek_v2_greedy", num_experts_per_tok=2)
    assert experts == [1, 0]
    assert close(weights, torch.tensor(logits).softmax(0)[[1, 0]].tolist())


def test_qwen3_normalises_only_when_told() -> None:
    logits = [1.0, 2.0, 0.5]
    probabilities = torch.tensor(logits).softmax(0)[[1, 0]]
    _, plain = gate_of(logits, gate="qwen3", num_experts_per_tok=2)
    _, normalised = gate_of(logits, gate="qwen3", num_experts_per_tok=2, norm_topk_prob=True)
    assert close(plain, probabilities.tolist())
    assert close(normalised, (probabilities / probabilities.sum()).tolist())


def test_mixtral_is_the_softmax_of_the_chosen_logits() -> None:
    experts, weights = gate_of([1.0, 2.0, 0.5, -1.0], gate="mixtral", num_experts_per_tok=2)
    assert experts == [1, 0]
    assert close(weights, torch.tensor([2.0, 1.0]).softmax(0).tolist())


def test_no_tokens_route_nowhere() -> None:
    moe = MoeConfig(
        gate="deepseek_v3", num_experts=8, num_experts_per_tok=2, intermediate_size=8, num_groups=4, topk_groups=2
    )
    experts, weights = Gate(moe, torch.randn(8, 3), torch.zeros(8))(torch.zeros(0, 3))
    assert experts.shape == weights.shape == (0, 2)


def test_bfloat16_rows_are_scored_in_float32() -> None:
    moe = MoeConfig(gate="qwen3", num_experts=2, num_experts_per_tok=1, intermediate_size=8)
    weight_EH = torch.tensor([[1.0], [1.001]])  # equal in bfloat16
    experts, weights = Gate(moe, weight_EH, None)(torch.ones(1, 1, dtype=torch.bfloat16))
    assert experts.tolist() == [[1]]
    assert weights.dtype == torch.float32


def test_copies_are_chosen_by_token_and_position_not_by_batch() -> None:
    placement = spread(4, 4, num_layers=1, redundant=4)
    choice = SlotMap(slot_table(placement, 0, max_copies(placement)), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    tokens, positions = torch.randint(0, 1000, (2, 400), generator=generator)
    experts_TK = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(400)])
    slots = choice(experts_TK, token_mix(tokens, positions))
    holders = torch.tensor([-1 if e is None else e for e in placement.layers[0].slots])
    assert torch.equal(holders[slots], experts_TK)
    order = torch.randperm(400, generator=generator)[:37]
    again = choice(experts_TK[order], token_mix(tokens[order], positions[order]))
    assert torch.equal(again, slots[order])
    mixes, table = token_mix(tokens, positions).numpy(), choice.thresholds_EC.numpy()
    assert choice.slots_EC[experts_TK, torch.from_numpy(choose(experts_TK.numpy(), mixes, table))].equal(slots)
    counts = torch.bincount(slots.reshape(-1), minlength=8)
    assert counts.min() > 60  # of 100: both copies work
    assert counts.sum() == 800
