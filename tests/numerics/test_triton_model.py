"""Whole models through the GPU's launches, in Triton's interpreter, against plain torch's logits."""

import numpy as np
import pytest
import torch
from golden import GREEDY, TOLERANCE, model, prompts
from torch import Tensor

from pd_cluster.engine.plan import NewSequence, StepPlan, Work
from pd_cluster.engine.torch_engine import TorchEngine, build_engine
from pd_cluster.ids import BlockId, RequestId
from pd_cluster.kernels.gpu import attention
from pd_cluster.kernels.gpu.launch import INTERPRETED
from pd_cluster.model.batch import Span
from pd_cluster.model.device import DeviceMla, DeviceTransformer
from pd_cluster.model.device_batch import DeviceBatch, GraphShape, empty_decodes, fill
from pd_cluster.parallel.local import LocalDispatcher
from pd_cluster.parallel.placement import spread

CPU = torch.device("cpu")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
A, B = RequestId("a"), RequestId("b")


def engine_of(name: str, *, launches: bool = True, **options: object) -> TorchEngine:
    """An engine of plain torch, or the same with its model exchanged for launches."""
    loaded = model(name)
    engine = build_engine(
        loaded.config,
        loaded.source,
        dtype="float32",
        block_size=16,
        num_blocks=8,
        device=DEVICE if launches else CPU,
        **options,  # type: ignore[arg-type]
    )
    if launches and not isinstance(engine.model, DeviceTransformer):
        engine.model = DeviceTransformer(engine.model)
    return engine


def new(request_id: RequestId, ids: list[int], blocks: list[int]) -> NewSequence:
    return NewSequence(
        request_id=request_id,
        token_ids=ids,
        num_prompt_tokens=len(ids),
        num_computed=0,
        block_ids=[BlockId(block) for block in blocks],
        sampling=GREEDY,
    )


def logits_of(engine: TorchEngine, name: str, monkeypatch: pytest.MonkeyPatch, num_steps: int = 3) -> Tensor:
    """Of two prompts at once, one of them in two pieces, the second beside a decode of the other; then two decodes."""
    first, second = prompts(name)[2][:4], prompts(name)[2][:19]
    seen: list[Tensor] = []
    run = engine._run

    def record(spans: list[Span], step_tokens: list[int]) -> Tensor:
        seen.append(run(spans, step_tokens))
        return seen[-1]

    monkeypatch.setattr(engine, "_run", record)
    add = [new(A, first, [7]), new(B, second, [5, 2])]
    plans = [
        StepPlan(step=0, add=add, work=[Work(A, len(first), True), Work(B, 12, False)]),
        StepPlan(step=1, work=[Work(A, 1, True), Work(B, len(second) - 12, True)]),
        StepPlan(step=2, work=[Work(A, 1, True), Work(B, 1, True)]),
    ]
    for plan in plans[:num_steps]:
        engine.launch(plan, [plan.num_tokens])
        engine.collect()
    return torch.cat(seen).cpu()


CASES = [
    ("qwen3_tied", "cheaper"),
    ("mixtral", "cheaper"),
    ("deepseek_v3_yarn", "absorbed"),
    ("deepseek_v2_group", "expanded"),
]
if not INTERPRETED:  # minutes in the interpreter
    CASES += [("llama_tied_llama3rope", "cheaper"), ("qwen3_moe", "cheaper"), ("deepseek_v3_yarn", "expanded")]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_logits_equal_the_torch_layers(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "EXPANDED_BYTES", 10_000)  # some heads at a time
    engine, plain = engine_of(name), engine_of(name, launches=False)
    for layer in engine.model.layers:
        if isinstance(layer.attention, DeviceMla):
            layer.attention.plain.prefill_form = form  # type: ignore[assignment]
    difference = logits_of(engine, name, monkeypatch) - logits_of(plain, name, monkeypatch)
    assert difference.shape[0] == 5
    assert difference.abs().max() < TOLERANCE
    assert engine.expert_load() == plain.expert_load()


def test_virtual_ranks_with_copies_give_the_same_logits_and_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "mixtral"
    config = model(name).config
    assert config.moe is not None
    placement = spread(config.moe.num_experts, 2, config.num_moe_layers, redundant=2)
    ranks, plain = engine_of(name, placement=placement, dispatcher="local"), engine_of(name, launches=False)
    assert isinstance(ranks.model.moe_layers[0].dispatcher, LocalDispatcher)
    difference = logits_of(ranks, name, monkeypatch, 1) - logits_of(plain, name, monkeypatch, 1)
    assert difference.abs().max() < TOLERANCE
    assert ranks.expert_load() == plain.expert_load()


def test_an_idle_rank_enters_the_expert_layers_without_tokens() -> None:
    engine = engine_of("mixtral")
    hidden = engine.model(engine.model.batch([], DEVICE), engine.arena.layers)
    assert hidden.shape == (0, engine.model.config.hidden_size)


def test_a_padded_decode_step_computes_the_same_and_counts_no_padding() -> None:
    engine = engine_of("mixtral")
    launches, pages, kv = engine.model, engine.arena.layers, engine.arena.bytes
    assert isinstance(launches, DeviceTransformer)
    before = kv.clone()

    def outcome(batch: DeviceBatch) -> tuple[Tensor, list[list[int]], Tensor]:
        kv.copy_(before)
        for moe in engine.model.moe_layers:
            moe.load_E.zero_()
        hidden = launches.forward(batch, pages)
        return hidden, engine.expert_load(), kv.view(torch.float32).clone()

    places = [(4, [3]), (20, [0, 6]), (2, [5])]
    spans = [Span(at, at + 1, np.array([9 + at]), np.array(units), True) for at, units in places]
    whole = launches.batch(spans, DEVICE)
    assert isinstance(whole, DeviceBatch)
    padded = empty_decodes(GraphShape.of(whole), whole.work.read_K)
    assert padded.num_tokens == 4
    for few in (spans, spans[:1]):  # what an earlier step left behind must not show
        batch = launches.batch(few, DEVICE)
        assert isinstance(batch, DeviceBatch)
        fill(padded, batch)
        result, expected = outcome(padded), outcome(batch)
        torch.testing.assert_close(result[0][: len(few)], expected[0], rtol=1e-5, atol=1e-5)
        assert result[1] == expected[1]
        torch.testing.assert_close(result[2], expected[2], rtol=1e-5, atol=1e-5)
        assert expected[2].any()
