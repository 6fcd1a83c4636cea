"""The GPU's expert kernels against plain torch: gate, permutation, grouped products, FP8."""

import pytest
import torch
from torch import Tensor

from pd_cluster.kernels.gpu import fp8, gate, grouped_gemm, permute
from pd_cluster.kernels.gpu.gate import GateRule, Slots
from pd_cluster.kernels.gpu.launch import INTERPRETED
from pd_cluster.model.config import MoeConfig
from pd_cluster.model.gate import Gate
from pd_cluster.model.moe import SlotMap, token_mix
from pd_cluster.parallel.placement import spread
from pd_cluster.parallel.slot_table import max_copies, slot_table

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

RULES = {
    "deepseek_v3": GateRule(4, True, 4, 2, 2, True, 2.5),
    "deepseek_v2_greedy": GateRule(3, scale=1.5),
    "deepseek_v2_group": GateRule(3, False, 4, 2, 1, False, 16.0),
    "qwen3": GateRule(4, normalises=True),
    "mixtral": GateRule(2, normalises=True),
}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("num_experts", [20, 32])
def test_the_gate_equals_the_models(kind: str, num_experts: int) -> None:
    rule = RULES[kind]
    hidden, weight = random(9, 16), random(num_experts, 16, seed=2)
    bias = random(num_experts, seed=3) if kind == "deepseek_v3" else None
    config = MoeConfig(
        gate=kind,  # type: ignore[arg-type]
        num_experts=num_experts,
        num_experts_per_tok=rule.top_k,
        intermediate_size=8,
        num_groups=rule.num_groups,
        topk_groups=rule.topk_groups,
        norm_topk_prob=rule.normalises,
        routed_scaling_factor=rule.scale,
    )
    placement = spread(num_experts, 4, 1, redundant=7)
    choice = SlotMap(slot_table(placement, 0, max_copies(placement)), DEVICE)
    ids, positions = torch.arange(9, device=DEVICE) * 11, torch.arange(9, device=DEVICE) + 3
    mix = token_mix(ids, positions)
    with_padding = mix.clone()
    with_padding[7:] = -1
    slots = Slots(choice.slots_EC, choice.thresholds_EC)
    load, expected_load = (torch.ones(num_experts, dtype=torch.int64, device=DEVICE) for _ in range(2))
    logits = hidden @ weight.T
    experts, chosen_slots, weights = gate.gate(logits, bias, with_padding, slots, rule, load)
    plain_experts, plain_weights = Gate(config, weight, bias)(hidden)
    assert torch.equal(experts, plain_experts)
    torch.testing.assert_close(weights, plain_weights, rtol=1e-5, atol=1e-6)
    assert torch.equal(chosen_slots[:7], choice(plain_experts, mix)[:7])
    assert chosen_slots[7:].eq(-1).all()
    assert load.sum() == num_experts + 7 * rule.top_k
    reference = gate.gate_reference(logits, bias, with_padding, slots, rule, expected_load)
    for result, expected in zip((experts, chosen_slots, weights), reference, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(load, expected_load)


def test_negative_biased_scores_win_over_masked_groups() -> None:
    logits, bias = random(5, 16), torch.full((16,), -3.0, device=DEVICE)
    slots = Slots(torch.arange(16, device=DEVICE).view(16, 1), torch.full((16, 1), 1 << 16, device=DEVICE))
    rule = GateRule(4, True, 4, 1, 2, True)
    load = torch.zeros(16, dtype=torch.int64, device=DEVICE)
    mix = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    experts, _, _ = gate.gate(logits, bias, mix, slots, rule, load)
    assert (experts // 4 == experts[:, :1] // 4).all()


def test_a_gate_without_tokens_is_no_work() -> None:
    load = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    slots = Slots(none.view(0, 1), none.view(0, 1))
    experts, _, _ = gate.gate(random(0, 4), None, none, slots, GateRule(2), load)
    assert experts.shape == (0, 2)


SLOTS = {
    "spread": torch.tensor([[2, 0], [5, 2], [0, 3], [2, 5], [3, 0]]),
    "all to one": torch.full((40, 3), 4),
    "other ranks and padding": torch.tensor([[-1, 9], [1, -1], [6, 1]]),
    "nothing here": torch.tensor([[-1], [6]]),
    "no tokens": torch.zeros((0, 2), dtype=torch.int64),
}


@pytest.mark.parametrize("name", SLOTS)
@DTYPES
def test_pairs_are_sorted_by_slot_and_come_back(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permute, "PAIRS", 32)
    slots = SLOTS[name].to(DEVICE)
    T, K = slots.shape
    counts, pair_of, place_of = permute.order_by_slot(slots, 6)
    for result, expected in zip((counts, pair_of, place_of), permute.order_by_slot_reference(slots, 6), strict=True):
        assert torch.equal(result, expected)
    x, weights = random(T, 33, dtype=dtype), random(T, K, seed=2)
    permuted = permute.permute(x, pair_of, K)
    assert torch.equal(permuted, permute.permute_reference(x, pair_of, K))
    result = permute.unpermute(permuted, place_of, weights)
    epsilon = 4 * torch.finfo(dtype).eps
    expected = permute.unpermute_reference(permuted, place_of, weights)
    torch.testing.assert_close(result, expected, rtol=epsilon, atol=epsilon)


def test_pairs_are_added_to_their_rows_in_order() -> None:
    rows = torch.tensor([3, 0, 3, 1, 3], device=DEVICE)
    values, weights = random(5, 9), random(5, seed=2)
    result = permute.add_pairs(values, rows, weights, 5)
    expected = torch.zeros(5, 9, device=DEVICE).index_add_(0, rows, values * weights.unsqueeze(1))
    torch.testing.assert_close(result, expected)
    assert not result[[2, 4]].any()
    assert permute.add_pairs(values[:0], rows[:0], weights[:0], 2).eq(0).all()


COUNTS = [[3, 0, 17, 1], [0, 0, 0, 0], [40, 0, 0, 0], [0, 0, 0, 2]]


@pytest.mark.parametrize("counts", COUNTS)
@DTYPES
def test_grouped_products(counts: list[int], dtype: torch.dtype) -> None:
    K, N, P = 50, 37, 40
    x, weight = random(P, K, dtype=dtype), random(4, N * K + 14, dtype=dtype, seed=2)[:, : N * K].unflatten(1, (N, K))
    on_device = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    result = grouped_gemm.grouped_gemm(x, weight, on_device, P)[: sum(counts)]
    expected = grouped_gemm.grouped_gemm_reference(x, weight, counts)
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(result.float(), expected, rtol=tolerance, atol=tolerance)
    pairs = torch.arange(P - 1, -1, -1, dtype=torch.int32, device=DEVICE)
    indexed = grouped_gemm.grouped_gemm(x, weight, on_device, P, pairs, 3)[: sum(counts)]
    expected = grouped_gemm.grouped_gemm_reference(x[pairs.long() // 3], weight, counts)
    torch.testing.assert_close(indexed.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("counts", [[3, 0, 17, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize(("N", "K"), [(40, 72), (130, 256)])
def test_grouped_products_in_fp8(N: int, K: int, counts: list[int]) -> None:
    x, factors = fp8.quantise_reference(random(24, K, dtype=torch.bfloat16))
    weight = random(4, N, K, seed=2).to(torch.float8_e4m3fn)
    weight_factors = random(4, -(-N // 128), -(-K // 128), seed=3).abs()
    on_device = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    result = grouped_gemm.grouped_gemm_fp8(x, factors, weight, weight_factors, on_device, 24)[: sum(counts)]
    wide = grouped_gemm.dequantise_blocks_reference(weight, weight_factors)
    expected = grouped_gemm.grouped_gemm_reference(fp8.dequantise(x, factors), wide, counts)
    assert result.dtype is torch.bfloat16
    scale = expected.abs().max().item() if len(expected) else 1.0
    torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=4e-3 * scale)


@DTYPES
@pytest.mark.parametrize("size", [128, 200])
def test_rows_are_quantised_by_groups_of_128(size: int, dtype: torch.dtype) -> None:
    x = random(5, size, dtype=dtype) * torch.tensor([1e-6, 1.0, 3e4, 0.0, 1.0], device=DEVICE).to(dtype).unsqueeze(1)
    q, factors = fp8.quantise(x)
    expected_q, expected_factors = fp8.quantise_reference(x)
    torch.testing.assert_close(factors, expected_factors, rtol=1e-6, atol=0.0)
    assert q.dtype is torch.float8_e4m3fn
    # a division may round the other way, then a value falls into the neighbouring e4m3
    torch.testing.assert_close(q.float(), expected_q.float(), rtol=0.13, atol=2**-9)
    assert q.float().sub(expected_q.float()).ne(0).float().mean() < 0.01
    torch.testing.assert_close(fp8.dequantise(q, factors), x.float(), rtol=0.07, atol=2**-9 * factors.max().item())
    assert not q[3].float().any()


@DTYPES
def test_silu_and_product_with_and_without_quantisation(dtype: torch.dtype) -> None:
    x = random(3, 2 * 200 + 4, dtype=dtype)[:, 2:-2]
    plain = fp8.silu_mul_reference(x)
    epsilon = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(fp8.silu_mul(x), plain, rtol=epsilon, atol=epsilon)
    q, factors = fp8.silu_mul_quantise(x)
    expected_q, expected_factors = fp8.quantise_reference(plain)
    torch.testing.assert_close(factors, expected_factors, rtol=epsilon, atol=0.0)
    torch.testing.assert_close(q.float(), expected_q.float(), rtol=0.13, atol=2**-9)
    assert fp8.silu_mul_quantise(x[:0])[0].shape == (0, 200)


@DTYPES
def test_experts_as_a_whole(dtype: torch.dtype) -> None:
    """Sort, gate and up, silu, down, back: as a loop over tokens and their experts."""
    T, K, H, size, S = 11, 2, 24, 20, 5
    x = random(T, H, dtype=dtype)
    gate_up, down = random(S, 2 * size, H, dtype=dtype, seed=2) / 4, random(S, H, size, dtype=dtype, seed=3) / 4
    weights = random(T, K, seed=4).softmax(-1)
    slots = torch.stack([torch.randperm(S, generator=torch.Generator().manual_seed(t))[:K] for t in range(T)])
    slots = slots.to(DEVICE)
    counts, pair_of, place_of = permute.order_by_slot(slots, S)
    inner = fp8.silu_mul(grouped_gemm.grouped_gemm(x, gate_up, counts, T * K, pair_of, K))
    result = permute.unpermute(grouped_gemm.grouped_gemm(inner, down, counts, T * K), place_of, weights)
    for t in range(T):
        expected = sum(
            weights[t, k] * (fp8.silu_mul_reference((x[t] @ gate_up[s].T)[None]) @ down[s].T)[0].float()
            for k, s in enumerate(slots[t].tolist())
        )
        torch.testing.assert_close(
            result[t].float(), expected, rtol=2e-2, atol=1e-5 if dtype is torch.float32 else 2e-2
        )
