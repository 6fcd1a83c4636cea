"""The same numbers when heads, vocabulary and experts are cut over ranks (threads of this process, over gloo)."""

from collections.abc import Callable

import msgspec
import pytest
import torch
from golden import GREEDY, MOE_NAMES, NAMES, TOLERANCE, Cluster, model, prompts, reference

from pd_cluster.engine.plan import NewSequence, StepPlan, Work
from pd_cluster.engine.torch_engine import build_engine
from pd_cluster.errors import ConfigError
from pd_cluster.ids import BlockId, Rank, RequestId
from pd_cluster.model.config import GqaConfig, RopeConfig
from pd_cluster.model.gqa import kv_heads
from pd_cluster.parallel.groups import Groups

Clusters = Callable[..., Cluster]
STEPS = 5


def check(name: str, outputs: list, indices: list[int], num_tokens: int = STEPS) -> None:
    expected = reference(name)
    for i, seq in zip(indices, outputs, strict=True):
        assert seq.output == expected[f"prompt{i}.greedy_ids"][:num_tokens].tolist()
        difference = torch.stack(seq.logits) - expected[f"prompt{i}.greedy_logits"][:num_tokens]
        assert difference.abs().max() < TOLERANCE


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel_ranks_agree_with_the_reference(cluster: Clusters, name: str, tp: int) -> None:
    ranks = cluster(name, tp=tp)
    for i, logits_TV in enumerate(ranks.prefill_logits(prompts(name))):
        assert (logits_TV - reference(name)[f"prompt{i}.logits"]).abs().max() < TOLERANCE
    (outputs,) = ranks.generate([prompts(name)], STEPS)
    check(name, outputs, [0, 1, 2, 3])


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("name", MOE_NAMES)
def test_experts_spread_over_ranks_agree_with_the_reference(cluster: Clusters, name: str, dp: int, tp: int) -> None:
    """Ranks finish at different steps and idle then; three ranks do not divide the experts."""
    longest_first = prompts(name)[::-1]
    groups = [longest_first[rank::dp] for rank in range(dp)]
    outputs = cluster(name, dp=dp, tp=tp).generate(groups, STEPS)
    for rank in range(dp):
        check(name, outputs[rank], [3, 2, 1, 0][rank::dp])


@pytest.mark.parametrize("name", ["deepseek_v3_yarn", "qwen3_moe_mixed_tied"])
def test_redundant_experts_change_nothing(cluster: Clusters, name: str) -> None:
    outputs = cluster(name, dp=2, redundant_experts=6).generate([prompts(name)[:2], prompts(name)[2:]], STEPS)
    check(name, outputs[0], [0, 1])
    check(name, outputs[1], [2, 3])


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_copies_chosen_by_the_counts_of_steps_change_nothing(cluster: Clusters, dp: int, tp: int) -> None:
    """With one DP rank both ranks have all tokens and must choose alike, or an expert is added twice or not at all."""
    name = "deepseek_v3_yarn"
    groups = [prompts(name)[rank::dp] for rank in range(dp)]
    outputs = cluster(name, dp=dp, tp=tp, redundant_experts=6, replica_choice="step").generate(groups, STEPS)
    for rank in range(dp):
        check(name, outputs[rank], [0, 1, 2, 3][rank::dp])


@pytest.mark.parametrize("name", ["deepseek_v3_noq_64e", "mixtral"])
def test_exchanging_within_one_dp_rank_equals_the_replicated_form(cluster: Clusters, name: str) -> None:
    (outputs,) = cluster(name, tp=2, dispatcher="collective").generate([prompts(name)], STEPS)
    check(name, outputs, [0, 1, 2, 3])


def test_idle_ranks_take_part_until_all_are_idle(cluster: Clusters) -> None:
    name = "deepseek_v3_yarn"
    ranks = cluster(name, dp=2, tp=2)
    before = [sum(map(sum, engine.expert_load())) for engine in ranks.engines]
    outputs = ranks.generate([[], [prompts(name)[2]]], STEPS)
    check(name, outputs[1], [2])
    results = ranks.run_step([StepPlan(step=9), StepPlan(step=9)])  # returns at once: nobody has work
    assert [result.sampled for result in results] == [[], []]
    config = model(name).config
    assert config.moe is not None
    num_tokens = len(prompts(name)[2]) + STEPS - 1
    after = [sum(map(sum, engine.expert_load())) for engine in ranks.engines]
    assert sum(after) - sum(before) == num_tokens * config.moe.num_experts_per_tok * config.num_moe_layers
    assert after[:2] == before[:2]


@pytest.mark.parametrize("shape", [{"tp": 2}, {"dp": 2}])
def test_every_token_is_counted_once_in_the_expert_load(cluster: Clusters, shape: dict[str, int]) -> None:
    name = "qwen3_moe"
    ranks = cluster(name, **shape)
    before = sum(sum(map(sum, engine.expert_load())) for engine in ranks.engines)
    ranks.generate([[prompts(name)[1]], [prompts(name)[2]]][: ranks.dp], 2)
    after = sum(sum(map(sum, engine.expert_load())) for engine in ranks.engines)
    num_tokens = sum(len(ids) + 1 for ids in prompts(name)[1 : 1 + ranks.dp])
    assert after - before == num_tokens * 4 * 3


def test_ranks_hold_only_their_part(cluster: Clusters) -> None:
    name = "qwen3_moe"
    one, two, four = (cluster(name, tp=tp).engines for tp in (1, 2, 4))
    assert [engine.layout.head_ids for engine in four] == [(0,), (0,), (1,), (1,)]
    assert [engine.layout.head_ids for engine in two] == [(0,), (1,)]
    assert {engine.fingerprint for engine in one + two + four} == {one[0].fingerprint}
    assert [engine.expert_slots() for engine in four] == [[4, 4, 4, 4]] * 4
    layers = [engine.model.layers[0] for engine in (one[0], four[0])]
    assert layers[0].attention.qkv.weight_NH.shape == (4 * 32 + 2 * 2 * 32, 64)
    assert layers[1].attention.qkv.weight_NH.shape == (32 + 2 * 32, 64)
    assert four[3].model.vocabulary.head_VH.shape == (128, 64)
    experts = four[1].model.moe_layers[0].experts
    assert list(experts) == [1]
    assert experts[Rank(1)].gate_up_SNH.shape == (4, 64, 64)


def test_kv_heads_whose_queries_span_ranks_are_held_by_each() -> None:
    config = GqaConfig(num_heads=12, num_kv_heads=4, head_dim=8)
    assert [kv_heads(config, rank, 6).held for rank in range(6)] == [(0,), (0, 1), (1,), (2,), (2, 3), (3,)]
    assert kv_heads(config, 1, 6).read == (0, 1)
    uneven = GqaConfig(num_heads=15, num_kv_heads=3, head_dim=8)
    assert kv_heads(uneven, 1, 5).held == (0, 1)
    assert kv_heads(uneven, 1, 5).read == (0, 0, 1)  # queries 3, 4 read head 0 and query 5 head 1


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "tp"), [(12, 4, 6), (15, 3, 5), (6, 1, 3)])
def test_heads_cut_across_groups_compute_the_same(num_heads: int, num_kv_heads: int, tp: int) -> None:
    config = msgspec.structs.replace(
        model("llama").config,
        attention=GqaConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16),
        rope=RopeConfig(theta=1e4, dim=16),
        hidden_size=32,
        intermediate_size=60,
        vocab_size=101,
    )
    ids = [[5, 9, 77, 3, 100, 0, 41], list(range(40))]
    whole, cut = Cluster(config), Cluster(config, tp=tp)
    for a, b in zip(whole.prefill_logits(ids), cut.prefill_logits(ids), strict=True):
        assert (a - b).abs().max() < TOLERANCE
    (expected,), (outputs,) = whole.generate([ids], 4), cut.generate([ids], 4)
    assert [seq.output for seq in outputs] == [seq.output for seq in expected]
    whole.close()
    cut.close()


@pytest.mark.parametrize(("name", "tp"), [("llama", 3), ("deepseek_v3_yarn", 8), ("mixtral", 3)])
def test_heads_that_do_not_divide_are_refused_by_number(name: str, tp: int) -> None:
    groups = Groups(rank=Rank(0), tensor_parallel=tp)
    loaded = model(name)
    with pytest.raises(ConfigError, match=rf"must divide .* got {tp}"):
        build_engine(loaded.config, loaded.source, dtype="float32", block_size=16, num_blocks=4, groups=groups)


def test_tensor_parallel_ranks_see_each_others_sample(cluster: Clusters) -> None:
    """A token drawn in one step is the input of the next, on ranks that exchange no tokens."""
    ranks = cluster("llama", tp=2)
    ids = prompts("llama")[1]
    new = NewSequence(
        request_id=RequestId("a"),
        token_ids=ids,
        num_prompt_tokens=len(ids),
        num_computed=0,
        block_ids=[BlockId(0)],
        sampling=GREEDY,
    )
    ranks.run_step([StepPlan(step=0, add=[new], work=[Work(RequestId("a"), len(ids), True)])])
    (result,) = ranks.run_step([StepPlan(step=1, work=[Work(RequestId("a"), 1, True)], drop=[])])
    assert result.sampled[0].token_id == reference("llama")["prompt1.greedy_ids"][1]
    ranks.run_step([StepPlan(step=2, drop=[RequestId("a")])])
