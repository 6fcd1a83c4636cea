"""The toy engine: tokens computed by hand, and a wrong side, a lost block or a wrong plan noticed."""

import ctypes

import pytest

from pd_cluster.engine.plan import NewSequence, Sampled, StepPlan, Work
from pd_cluster.engine.toy import DECODE, PREFILL, ToyEngine, toy_tokens
from pd_cluster.errors import EngineError
from pd_cluster.ids import BlockId, RequestId
from pd_cluster.request import SamplingParams

A = RequestId("a")


def new(token_ids: list[int], num_prompt: int, num_computed: int, blocks: list[int], **sampling: object) -> NewSequence:
    return NewSequence(
        request_id=A,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt,
        num_computed=num_computed,
        block_ids=[BlockId(b) for b in blocks],
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
    )


def step(engine: ToyEngine, plan: StepPlan) -> list[int | None]:
    engine.launch(plan, [plan.num_tokens])
    return [s.token_id for s in engine.collect().sampled]


def run(engine: ToyEngine, prompt: list[int], num_tokens: int, blocks: list[int]) -> list[int | None]:
    first = StepPlan(step=0, add=[new(prompt, len(prompt), 0, blocks)], work=[Work(A, len(prompt), True)])
    tokens = step(engine, first)
    for index in range(1, num_tokens):
        tokens += step(engine, StepPlan(step=index, work=[Work(A, 1, True)]))
    return tokens


def test_first_tokens_are_those_computed_by_hand() -> None:
    engine = ToyEngine(num_blocks=4, vocab_size=100)
    # prompt [7, 2]: 1*8*3 + 2*3*3 = 42; then 42 + 3*43*5 = 687
    assert run(engine, [7, 2], 2, [1]) == [42, 87]
    assert toy_tokens([7, 2], 2, vocab_size=100) == [42, 87]
    assert engine.written_by([BlockId(1)], 4) == [PREFILL, PREFILL, DECODE, 0]


def test_chunked_prefill_over_scattered_blocks_draws_the_same_tokens() -> None:
    prompt = [5 * i % 200 for i in range(40)]
    engine = ToyEngine(num_blocks=8, block_size=16)
    plan = StepPlan(step=0, add=[new(prompt, 40, 0, [6, 1, 3])], work=[Work(A, 25, False)])
    assert step(engine, plan) == []
    tokens = step(engine, StepPlan(step=1, work=[Work(A, 15, True)]))
    for index in range(2, 12):
        grow = {A: [BlockId(0)]} if index == 3 else {}
        tokens += step(engine, StepPlan(step=index, grow=grow, work=[Work(A, 1, True)]))
    assert tokens == toy_tokens(prompt, 11)


@pytest.mark.parametrize(("source_block", "target_block"), [(16, 32), (32, 16), (48, 16)])
def test_decode_goes_on_from_moved_memory(source_block: int, target_block: int) -> None:
    prompt = list(range(90))
    prefill = ToyEngine(num_blocks=12, block_size=source_block, role="prefill")
    decode = ToyEngine(num_blocks=12, block_size=target_block, role="decode")
    source = [BlockId(b) for b in range(prefill.layout.num_blocks_for(90))][::-1]
    target = [BlockId(11 - b) for b in range(decode.layout.num_blocks_for(92))]
    first = run(prefill, prompt, 1, list(source))
    unit_bytes = prefill.layout.unit_bytes
    for unit in range(6):
        src = prefill.arena.index(source, unit * 16) * 4
        dst = decode.arena.index(target, unit * 16) * 4
        ctypes.memmove(decode.arena.base_address + dst, prefill.arena.base_address + src, unit_bytes)
    plan = StepPlan(step=0, add=[new([*prompt, *first], 90, 90, target)], work=[Work(A, 1, True)])  # type: ignore[list-item]
    second = step(decode, plan)
    assert [*first, *second] == toy_tokens(prompt, 2)


def test_decode_side_that_computes_the_prompt_is_noticed() -> None:
    prompt = list(range(20))
    assert run(ToyEngine(num_blocks=4, role="decode"), prompt, 4, [0, 1]) != toy_tokens(prompt, 4)
    assert run(ToyEngine(num_blocks=4, role="both"), prompt, 4, [0, 1]) == toy_tokens(prompt, 4)


def test_lost_block_is_noticed() -> None:
    prompt = list(range(20))
    engine = ToyEngine(num_blocks=4, role="decode")
    plan = StepPlan(step=0, add=[new([*prompt, 1], 20, 20, [0, 1])], work=[Work(A, 1, True)])
    assert step(engine, plan) != toy_tokens(prompt, 2)[1:]


def test_resumed_request_draws_what_it_would_have_drawn() -> None:
    prompt = list(range(20))
    tokens = toy_tokens(prompt, 8)
    resumed = run(ToyEngine(num_blocks=4, role="prefill"), prompt, 1, [0, 1])
    engine = ToyEngine(num_blocks=4, role="prefill")
    plan = StepPlan(step=0, add=[new(prompt + tokens[:5], 20, 0, [0, 1])], work=[Work(A, 25, True)])
    assert resumed == tokens[:1]
    assert step(engine, plan) == tokens[5:6]


def test_stop_tokens_do_not_come_before_min_tokens() -> None:
    prompt = [7, 2]
    first = toy_tokens(prompt, 1)[0]
    engine = ToyEngine(num_blocks=1, eos_token_ids=frozenset({first}))
    plan = StepPlan(
        step=0, add=[new(prompt, 2, 0, [0], min_tokens=1, stop_token_ids=(first + 1,))], work=[Work(A, 2, True)]
    )
    assert step(engine, plan) == [first + 2]


def test_logprobs_come_when_asked_for() -> None:
    engine = ToyEngine(num_blocks=1)
    plan = StepPlan(step=0, add=[new([1], 1, 0, [0], logprobs=2)], work=[Work(A, 1, True)])
    engine.launch(plan, [1])
    [sampled] = engine.collect().sampled
    assert isinstance(sampled, Sampled)
    assert sampled.logprobs is not None
    assert sampled.logprobs.top_ids == [sampled.token_id]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(step=0, work=[Work(A, 1, True)]), "unknown sequence"),
        (StepPlan(step=0, drop=[A]), "drops unknown"),
        (StepPlan(step=0, add=[new([1], 1, 0, [0])] * 2), "twice"),
        (StepPlan(step=0, add=[new([1, 2], 2, 0, [0])], work=[Work(A, 1, True)]), "2 tokens of which 0"),
        (StepPlan(step=0, add=[new([1, 2], 2, 0, [0])], work=[Work(A, 3, True)]), "2 tokens of which 0"),
        (StepPlan(step=0, add=[new([1] * 17, 17, 0, [0])], work=[Work(A, 17, True)]), "17 tokens in 1 blocks"),
    ],
)
def test_wrong_plan_is_refused(plan: StepPlan, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ToyEngine(num_blocks=2).launch(plan, [plan.num_tokens])
