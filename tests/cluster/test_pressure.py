"""Little memory and many requests at once: every answer is what the request gets alone, nothing sticks or leaks."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from harness import CHECKPOINTS, LocalCluster, Output, assert_same, config_of, request

from pd_cluster.engine.outcome import StepOutcome
from pd_cluster.engine.plan import StepResult
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.engine.sequence import Sequence
from pd_cluster.errors import ContextTooLong
from pd_cluster.request import FinishReason

NUM_REQUESTS = 50

Work = list[tuple[list[int], int]]
"""Prompts, and how many tokens each request generates."""


def work_of(seed: int) -> Work:
    """Mixed lengths; a sixth needs more than half a pool of 12 blocks, some nearly the model's 128 tokens."""
    rng = random.Random(seed)
    work = []
    for index in range(NUM_REQUESTS):
        length = rng.randrange(97, 120) if index % 6 == 0 else rng.choice([1, 15, 16, 17, 31, 33, 48, 60])
        prompt = [rng.randrange(3, 512) for _ in range(length)]
        work.append((prompt, rng.randrange(1, min(32, 128 - length) + 1)))
    return work


async def answers(cluster: LocalCluster, work: Work) -> list[Output]:
    """All at once."""
    return await cluster.served(cluster.greedy(prompt, max_tokens=num, logprobs=2) for prompt, num in work)


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Output]]:
    """What each request gets alone, by model."""
    return {}


async def expected(alone: dict[str, list[Output]], model: str, work: Work) -> list[Output]:
    if model not in alone:
        async with LocalCluster(config_of(CHECKPOINTS / model, colocated=True, kv__prefix_cache=False)) as cluster:
            alone[model] = [await cluster.greedy(prompt, max_tokens=num, logprobs=2) for prompt, num in work]
    return alone[model]


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Preemptions, by the scheduler's policy."""
    counts: Counter[str] = Counter()
    original = Scheduler._preempt

    def counting(self: Scheduler, seq: Sequence) -> None:
        counts[self._preempt_policy] += 1
        original(self, seq)

    monkeypatch.setattr(Scheduler, "_preempt", counting)
    return counts


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "split": ("deepseek_v3_yarn", {}),
    "colocated": ("deepseek_v3_yarn", {"colocated": True}),
    "prefill_tp2_decode_dp2": (
        "qwen3_moe",
        {"prefill__tensor_parallel": 2, "decode__data_parallel": 2, "decode__num_blocks": 8},
    ),
    "decode_of_larger_blocks": ("qwen3_moe", {"decode__block_size": 48, "decode__num_blocks": 4}),
    "prefill_of_larger_blocks": ("deepseek_v3_yarn", {"prefill__block_size": 32, "prefill__num_blocks": 6}),
    "few_sequences": ("deepseek_v3_yarn", {"decode__max_num_seqs": 3, "prefill__max_num_seqs": 2}),
    "small_steps_over_nixl": (
        "qwen3_moe",
        {"prefill__max_num_batched_tokens": 24, "decode__max_num_batched_tokens": 4},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_fifty_requests_in_twelve_blocks_all_get_what_they_get_alone(
    shape: str, alone: dict[str, list[Output]], preempted: Counter[str]
) -> None:
    model, keys = SHAPES[shape]
    work = work_of(3)
    want = await expected(alone, model, work)
    preempted.clear()
    config = config_of(CHECKPOINTS / model, **({"kv__num_blocks": 12} | keys))
    async with LocalCluster(config, nixl="nixl" in shape) as cluster:
        outputs = await answers(cluster, work)
        free_s = await cluster.until_free()
    for output, right in zip(outputs, want, strict=True):
        assert_same(output, right)
        assert output.finish is FinishReason.LENGTH
        assert output.timings.num_retries == 0
        assert output.timings.num_output_tokens == len(right.token_ids)
    print(f"{shape}: preempted {dict(preempted)}, free {1000 * free_s:.0f} ms after the last token")
    if shape in ("split", "colocated"):
        assert preempted["requeue" if shape == "colocated" else "evict"] > 0, "there was no pressure"
    assert sum(output.timings.num_preemptions for output in outputs) == preempted["evict"]


async def test_what_can_never_fit_is_refused_by_name_and_disturbs_nobody(alone: dict[str, list[Output]]) -> None:
    """Prefill could hold the long prompts; decode has room for 96 tokens."""
    model, work = "deepseek_v3_yarn", work_of(3)
    want = await expected(alone, model, work)
    short = [index for index, (prompt, num) in enumerate(work) if len(prompt) + num <= 96]
    pools = {"prefill__num_blocks": 12, "decode__num_blocks": 6}
    async with LocalCluster(config_of(CHECKPOINTS / model, **pools)) as cluster:

        async def refused(length: int) -> None:
            with pytest.raises(ContextTooLong, match=rf"{length} tokens.*at most 95"):
                await cluster.greedy([7] * length)

        outputs, _ = await asyncio.gather(
            answers(cluster, [work[index] for index in short]),
            asyncio.gather(*(refused(length) for length in (96, 97, 127, 128, 500))),
        )
        grows = await cluster.greedy([7] * 95, max_tokens=30)
        assert (grows.finish, len(grows.token_ids)) == (FinishReason.LENGTH, 1)
        grows = await cluster.greedy([7] * 90, max_tokens=30)
        assert (grows.finish, len(grows.token_ids)) == (FinishReason.LENGTH, 6)
    for output, index in zip(outputs, short, strict=True):
        assert_same(output, want[index])


async def test_full_decode_workers_hold_prefill_back_and_everything_is_served_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sequence at a time on decode, in a pool that holds two: prefill must not run away with the whole queue."""
    keys = {"decode__num_blocks": 8, "decode__max_num_seqs": 1}
    keys |= {"prefill__num_blocks": 32, "prefill__max_num_batched_tokens": 48}
    most_held = 0
    original = Scheduler.complete

    def complete(self: Scheduler, result: StepResult) -> StepOutcome:
        nonlocal most_held
        outcome = original(self, result)
        most_held = max(most_held, self.load().num_held_blocks)  # decode holds none
        return outcome

    monkeypatch.setattr(Scheduler, "complete", complete)
    async with LocalCluster(config_of(CHECKPOINTS / "deepseek_v3_yarn", **keys)) as cluster:
        prompts = [[index + 3, *range(3, 50)] for index in range(24)]  # three blocks each, nothing shared
        outputs = await cluster.served(cluster.greedy(prompt, max_tokens=12) for prompt in prompts)
    print(f"at most {most_held} of 32 blocks held on prefill")
    assert all(len(output.token_ids) == 12 for output in outputs)
    assert 16 - 3 < most_held <= 16 + 3, "the budget is half the pool, and one request may overshoot it"


async def test_more_requests_than_the_queue_holds_are_turned_away_and_the_rest_served() -> None:
    async with LocalCluster(config_of(CHECKPOINTS / "deepseek_v3_yarn", router__max_queue=8)) as cluster:
        made = [request([5, 6, 7, index + 3], f"q{index}", max_tokens=4) for index in range(30)]
        outputs = await asyncio.gather(*(cluster.generate(each) for each in made), return_exceptions=True)
        served = [output for output in outputs if isinstance(output, Output)]
        refused = [output for output in outputs if not isinstance(output, Output)]
        assert len(served) == 8
        assert {getattr(error, "code", None) for error in refused} == {"overloaded"}
        assert all(len(output.token_ids) == 4 for output in served)
