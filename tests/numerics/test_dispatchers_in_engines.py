"""Engines of several ranks compute the same whichever way their tokens travel, also when they travel as FP8."""

from collections.abc import Callable

import pytest
import torch
from golden import TOLERANCE, Cluster, prompts, reference

from pd_cluster.model.moe import ExpertSlots
from pd_cluster.parallel.codec import FP8_ERROR, RAW, Fp8
from pd_cluster.parallel.dispatch import combine
from pd_cluster.parallel.local import LocalDispatcher

Clusters = Callable[..., Cluster]
STEPS = 4


def outputs_of(ranks: Cluster, name: str) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and logits of the four prompts; the longest go to the first rank, so that ranks idle at times."""
    longest_first = prompts(name)[::-1]
    groups = ranks.generate([longest_first[rank :: ranks.dp] for rank in range(ranks.dp)], STEPS)
    return [(seq.output, torch.stack(seq.logits)) for group in groups for seq in group]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("name", ["deepseek_v3_yarn", "mixtral"])
def test_one_sided_writes_and_collectives_give_equal_bits(
    cluster: Clusters, name: str, dp: int, tp: int, dtype: str
) -> None:
    by_collective = outputs_of(cluster(name, dp=dp, tp=tp, dtype=dtype, dispatcher="collective"), name)
    one_sided = cluster(name, dp=dp, tp=tp, dtype=dtype, dispatcher="nixl")
    for ours, theirs in zip(outputs_of(one_sided, name), by_collective, strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])
    assert not any(engine.dispatcher.take_void() for engine in one_sided.engines)  # type: ignore[union-attr]


def test_fp8_on_the_way_to_experts_gives_equal_bits_by_either_way(cluster: Clusters) -> None:
    name = "mixtral"
    by_collective, by_nixl = (
        outputs_of(cluster(name, dp=2, dispatcher=dispatcher, dispatch_dtype="fp8"), name)
        for dispatcher in ("collective", "nixl")
    )
    for ours, theirs in zip(by_nixl, by_collective, strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])
    exact = reference(name)["prompt3.greedy_logits"][0]
    assert (by_nixl[0][1][0] - exact).abs().max() > TOLERANCE, "they did travel as FP8"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_experts_is_near_when_its_tokens_travel_as_fp8(dtype: torch.dtype) -> None:
    """Within the relative error of a value, 1/16, and well within: rounding errors of many values cancel."""
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(50, 256, generator=generator).to(dtype)
    gate_up = torch.randn(12, 2 * 64, 256, generator=generator).to(dtype) / 16
    down = torch.randn(12, 256, 64, generator=generator).to(dtype) / 8
    slots_TK = torch.rand(50, 12, generator=generator).topk(4).indices
    weights_TK = torch.rand(50, 4, generator=generator)
    results = []
    for codec in (RAW, Fp8()):
        combining = LocalDispatcher(4, 3, codec).dispatch(0, hidden_TH, slots_TK, weights_TK)
        slots = [slice(3 * rank, 3 * rank + 3) for rank in range(4)]
        experts = [ExpertSlots(gate_up[run], down[run]) for run in slots]
        results.append(combine(combining, [experts[a.rank](a) for a in combining.arrived()]).double())
    error = float((results[1] - results[0]).norm() / results[0].norm())
    assert 1e-3 < error < FP8_ERROR[0]
