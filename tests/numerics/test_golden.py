"""Every family against transformers: logits at every position, hidden states, chosen experts, 32 greedy tokens."""

from collections.abc import Callable

import pytest
import torch
from golden import MLA_NAMES, MOE_NAMES, NAMES, TOLERANCE, Cluster, model, prefill, prompts, reference
from torch import Tensor

from pd_cluster.kernels.paged import GqaPages
from pd_cluster.model.halves import Stages
from pd_cluster.model.mla import Mla
from pd_cluster.model.transformer import Layer

Clusters = Callable[..., Cluster]


def largest_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def check_greedy(name: str, outputs: list, num_tokens: int) -> None:
    expected = reference(name)
    for i, seq in enumerate(outputs):
        assert seq.output == expected[f"prompt{i}.greedy_ids"][:num_tokens].tolist()
        logits = torch.stack(seq.logits)
        assert largest_difference(logits, expected[f"prompt{i}.greedy_logits"][:num_tokens]) < TOLERANCE


def test_checkpoints_are_there() -> None:
    assert len(NAMES) == 12
    assert len(MOE_NAMES) == 9
    assert len(MLA_NAMES) == 6


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_position_agree(cluster: Clusters, name: str, block_size: int) -> None:
    logits = cluster(name, block_size=block_size).prefill_logits(prompts(name))
    for i, logits_TV in enumerate(logits):
        assert largest_difference(logits_TV, reference(name)[f"prompt{i}.logits"]) < TOLERANCE


@pytest.mark.parametrize("budget", [5, 16, 64])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_agree_whatever_the_chunks(cluster: Clusters, name: str, budget: int) -> None:
    (outputs,) = cluster(name, block_size=16 if budget == 16 else 32).generate([prompts(name)], 32, budget)
    check_greedy(name, outputs, 32)


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_agree_after_every_layer(cluster: Clusters, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = cluster(name, block_size=16).engines[0]
    states: list[Tensor] = []
    plain = Layer.stages

    def record(layer: Layer, x_TH: Tensor, *rest: object) -> Stages:
        states.append(x_TH)
        return (yield from plain(layer, x_TH, *rest))  # type: ignore[arg-type]

    monkeypatch.setattr(Layer, "stages", record)
    with torch.inference_mode():
        states.append(engine.model.norm(prefill(engine, [prompts(name)[1]])))
    assert len(states) == len(engine.model.layers) + 1
    for i, state in enumerate(states):
        assert largest_difference(state, reference(name)[f"prompt1.hidden.{i}"]) < TOLERANCE


@pytest.mark.parametrize("name", MOE_NAMES)
def test_chosen_experts_and_their_weights_agree(cluster: Clusters, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = cluster(name, block_size=16).engines[0]
    expected = reference(name)
    for moe, layer in zip(engine.model.moe_layers, model(name).config.moe_layers, strict=True):
        routed: list[tuple[Tensor, Tensor]] = []
        gate = moe.gate

        def record(x_TH: Tensor, gate=gate, routed=routed) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
            routed.append(gate(x_TH))
            return routed[-1]

        monkeypatch.setattr(moe, "gate", record)
        for i, ids in enumerate(prompts(name)):
            with torch.inference_mode():
                prefill(engine, [ids])
            experts_TK, order = routed[-1][0].sort(-1)
            assert torch.equal(experts_TK.int(), expected[f"prompt{i}.experts.{layer}"])
            weights_TK = routed[-1][1].gather(-1, order)
            assert largest_difference(weights_TK, expected[f"prompt{i}.expert_weights.{layer}"]) < 1e-5
        monkeypatch.undo()


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("name", MLA_NAMES)
def test_both_forms_of_latent_attention_agree(
    cluster: Clusters, name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = cluster(name, block_size=16)
    for layer in engine.engines[0].model.layers:
        assert isinstance(layer.attention, Mla)
        monkeypatch.setattr(layer.attention, "prefill_form", form)
    (outputs,) = engine.generate([prompts(name)], 4, budget=16)
    check_greedy(name, outputs, 4)


@pytest.mark.parametrize("name", ["deepseek_v3_yarn", "qwen3_moe", "llama_tied_llama3rope"])
def test_a_request_alone_does_not_depend_on_what_ran_before(cluster: Clusters, name: str) -> None:
    used = cluster(name, block_size=32)
    engine = used.engines[0]
    (first,) = used.generate([[prompts(name)[2]]], 20, budget=20)
    engine.arena.bytes.view(torch.float32).fill_(float("nan"))  # the worst that an earlier owner can leave
    (second,) = used.generate([[prompts(name)[2]]], 20, budget=20)
    assert torch.equal(torch.stack(first[0].logits), torch.stack(second[0].logits))


@pytest.mark.parametrize("name", ["deepseek_v3_yarn", "mixtral"])
def test_a_request_whose_kv_is_not_a_number_spoils_no_other(cluster: Clusters, name: str) -> None:
    engine = cluster(name, block_size=16)
    layer = engine.engines[0].model.layers[0]
    norm = layer.mlp_norm

    def poison(x_TH: Tensor) -> Tensor:
        y_TH = norm(x_TH).clone()
        y_TH[-1] = float("nan")  # the longest prompt is last in the batch
        return y_TH

    layer.mlp_norm = poison  # type: ignore[assignment]
    try:
        logits = engine.prefill_logits(prompts(name))
    finally:
        layer.mlp_norm = norm
    assert logits[3][-1].isnan().all()
    for i in range(3):
        assert largest_difference(logits[i], reference(name)[f"prompt{i}.logits"]) < TOLERANCE
    (outputs,) = engine.generate([prompts(name)], 4)  # the spoilt blocks are used again
    check_greedy(name, outputs, 4)


def test_pages_are_views_of_the_arena(cluster: Clusters) -> None:
    arena = cluster("llama", block_size=32).engines[0].arena
    assert arena.base_address % 4096 == 0
    pages = arena.layers[1]
    assert isinstance(pages, GqaPages)
    before = arena.bytes.clone()
    pages.keys_UKWD[3, 1, 5, 7] += 1
    changed = (arena.bytes != before).nonzero()
    layout = arena.layout
    value = ((3 * 2 + 1) * layout.num_layers + 1) * layout.row_bytes + (5 * 16 + 7) * 4
    assert value <= int(changed.min())
    assert int(changed.max()) < value + 4
