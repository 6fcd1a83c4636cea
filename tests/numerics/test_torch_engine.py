"""The engine's contract with plans, its memory, and what it refuses."""

import pytest
import torch
from golden import GREEDY, TOLERANCE, Cluster, model, prompts, reference

from pd_cluster.engine.plan import NewSequence, StepPlan, StepResult, Work
from pd_cluster.engine.torch_engine import TorchEngine, build_engine
from pd_cluster.errors import ConfigError, EngineError
from pd_cluster.ids import BlockId, RequestId
from pd_cluster.kv.layout import KvLayout
from pd_cluster.parallel.placement import spread
from pd_cluster.request import SamplingParams

A, B = RequestId("a"), RequestId("b")


def small(name: str = "llama", **options: object) -> TorchEngine:
    loaded = model(name)
    options = {"dtype": "float32", "block_size": 16, "num_blocks": 20, **options}
    return build_engine(loaded.config, loaded.source, **options)  # type: ignore[arg-type]


def run(engine: TorchEngine, plan: StepPlan) -> StepResult:
    engine.launch(plan, [plan.num_tokens])
    return engine.collect()


def new(
    request_id: RequestId, ids: list[int], blocks: list[int], num_computed: int = 0, sampling: SamplingParams = GREEDY
) -> NewSequence:
    return NewSequence(
        request_id=request_id,
        token_ids=ids,
        num_prompt_tokens=len(ids),
        num_computed=num_computed,
        block_ids=[BlockId(block) for block in blocks],
        sampling=sampling,
    )


@pytest.mark.parametrize("name", ["llama", "deepseek_v3_yarn"])
def test_a_sequence_continues_on_kv_that_came_from_elsewhere(name: str) -> None:
    """What a handoff does: the blocks of one engine, of another block size, copied into another's."""
    ids = prompts(name)[2]
    prefill, decode = small(name, block_size=32), small(name, block_size=16)
    result = run(prefill, StepPlan(step=0, add=[new(A, ids, [3, 5])], work=[Work(A, len(ids), True)]))
    first = result.sampled[0].token_id
    assert first is not None
    unit = prefill.layout.unit_bytes
    assert unit == decode.layout.unit_bytes
    for source, target in zip((6, 7, 10), (19, 0, 8), strict=True):  # units of blocks 3 and 5; blocks of one unit
        received = decode.arena.bytes[target * unit : (target + 1) * unit]
        received.copy_(prefill.arena.bytes[source * unit : (source + 1) * unit])
    assert prefill.fingerprint == decode.fingerprint
    add = [new(A, [*ids, first], [19, 0, 8], num_computed=len(ids))]
    tokens = [first]
    for step in range(1, 12):
        result = run(decode, StepPlan(step=step, add=add, work=[Work(A, 1, True)]))
        add = []
        assert result.sampled[0].token_id is not None
        tokens.append(result.sampled[0].token_id)
    assert tokens == reference(name)["prompt2.greedy_ids"][:12].tolist()


def test_a_step_may_be_launched_before_the_last_is_collected() -> None:
    engine = small()
    ids = prompts("llama")[1]
    engine.launch(StepPlan(step=0, add=[new(A, ids, [0])], work=[Work(A, len(ids), True)]), [len(ids)])
    engine.launch(StepPlan(step=1, work=[Work(A, 1, True)]), [1])  # on the token that step 0 draws
    results = [engine.collect(), engine.collect()]
    assert [result.step for result in results] == [0, 1]
    assert [r.sampled[0].token_id for r in results] == reference("llama")["prompt1.greedy_ids"][:2].tolist()


def test_seeded_sampling_does_not_depend_on_the_batch() -> None:
    engine = small("qwen3_moe")
    sampling = SamplingParams(temperature=1.0, seed=7, top_p=0.9, logprobs=2, repetition_penalty=1.1)
    ids = prompts("qwen3_moe")[1]

    def draw(others: list[NewSequence]) -> list[int | None]:
        add = [*others, new(A, ids, [9], sampling=sampling)]
        tokens: list[int | None] = []
        for step in range(4):
            work = [Work(s.request_id, 1 if step else len(s.token_ids), True) for s in [*others, add[-1]]]
            result = run(engine, StepPlan(step=step, add=[] if step else add, work=work))
            mine = result.sampled[-1]
            assert mine.request_id == A
            assert mine.logprobs is not None
            tokens.append(mine.token_id)
        run(engine, StepPlan(step=9, drop=[s.request_id for s in add]))
        return tokens

    assert draw([]) == draw([new(B, prompts("qwen3_moe")[2], [0, 1, 2])])


def test_plans_that_do_not_fit_the_sequences_are_refused() -> None:
    engine = small()
    ids = list(range(3, 23))
    with pytest.raises(EngineError, match="unknown sequence a"):
        run(engine, StepPlan(step=0, drop=[A]))
    run(engine, StepPlan(step=1, add=[new(A, ids, [0])], work=[Work(A, 16, False)]))
    for plan, message in (
        (StepPlan(step=2, add=[new(A, ids, [0])]), "adds sequence a twice"),
        (StepPlan(step=2, work=[Work(A, 4, True)]), "do not fit in its blocks"),
        (StepPlan(step=2, work=[Work(A, 5, True)]), "for 20 tokens of which 16 have KV"),
        (StepPlan(step=2, work=[Work(A, 4, False)]), "for 20 tokens of which 16 have KV"),
        (StepPlan(step=2, work=[Work(B, 1, True)]), "unknown sequence b"),
    ):
        with pytest.raises(EngineError, match=message):
            run(engine, plan)
    run(engine, StepPlan(step=3, grow={A: [BlockId(7)]}, work=[Work(A, 4, True)]))
    assert engine.num_sequences == 1


def test_blocks_are_measured_when_their_number_is_not_given() -> None:
    cluster = Cluster("deepseek_v3_yarn", tp=2, num_blocks=None, kv_max_bytes=1 << 20, max_num_batched_tokens=64)
    one, two = cluster.engines
    assert one.num_blocks == two.num_blocks == (1 << 20) // one.layout.block_bytes
    assert one.max_model_len == 128
    assert [sum(map(sum, engine.expert_load())) for engine in (one, two)] == [0, 0]  # warm-up is no load
    cluster.close()


def test_a_context_or_placement_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="64 does not fit: a rank has room for 48"):
        small(num_blocks=3, max_model_len=64)
    for longest, message in ((-1, "at least 1, got -1"), (1 << 30, "exceeds the model's context")):
        with pytest.raises(ConfigError, match=message):
            small(num_blocks=None, max_model_len=longest)  # before anything is measured
    with pytest.raises(ConfigError, match="the placement is for 2 ranks, the engine has 1"):
        small("mixtral", placement=spread(8, 2, 3))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        small(redundant_experts=1)
    with pytest.raises(ConfigError, match="multiple of 16"):
        small(block_size=24)


def test_layout_and_fingerprint_say_what_a_peer_needs() -> None:
    gqa, mla = small("qwen3_moe"), small("deepseek_v3_yarn", block_size=32)
    assert gqa.layout == KvLayout(
        kind="gqa", num_layers=3, head_ids=(0, 1), token_values=64, dtype="float32", block_size=16
    )
    assert mla.layout == KvLayout(
        kind="mla", num_layers=3, head_ids=(0,), token_values=40, dtype="float32", block_size=32
    )
    assert gqa.fingerprint.num_kv_heads == 2
    assert mla.fingerprint.num_kv_heads == 1
    assert mla.fingerprint == small("deepseek_v3_yarn").fingerprint  # the block size may differ
    other = small("deepseek_v3_yarn", dtype="bfloat16").fingerprint
    assert mla.fingerprint.difference(other) == "dtype 'float32' against 'bfloat16'"


@pytest.mark.parametrize("name", ["deepseek_v3_bf16_mtp", "deepseek_v3_fp8", "qwen3_moe", "llama"])
def test_bfloat16_stays_near_float32(name: str) -> None:
    cluster = Cluster(name, dtype="bfloat16")
    for i, logits_TV in enumerate(cluster.prefill_logits(prompts(name))):
        expected = reference(name)[f"prompt{i}.logits"]
        errors_T = (logits_TV - expected).norm(dim=1) / expected.norm(dim=1)
        assert TOLERANCE < errors_T.median() < 0.05  # the median: a rounded score may choose another expert
        assert torch.isfinite(logits_TV).all()
    cluster.close()
