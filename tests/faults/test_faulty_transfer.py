"""A transport that misbehaves by seed under every rank: never a wrong token, and nothing is lost for good.

Each request ends with the tokens it would have got, after retries maybe, or with an error of ours that says what
happened. What a broken write may still reach stays in quarantine, for all to see, until its writer is proved dead.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest
from harness import (
    CHECKPOINTS,
    Faulty,
    LocalCluster,
    Output,
    assert_same,
    config_of,
    push_unit_by_unit,
    request,
    until,
)

from pd_cluster.errors import PdClusterError
from pd_cluster.transfer.faulty import Faults

SHORT = {"kv__transfer_deadline_s": 0.4, "kv__lease_s": 2.0, "router__max_retries": 6}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"prefill__tensor_parallel": 2, "decode__tensor_parallel": 2, "decode__data_parallel": 2}),
    ("deepseek_v3_yarn", {"prefill__tensor_parallel": 2, "decode__data_parallel": 2, "decode__block_size": 32}),
    ("qwen3_moe", {"decode__tensor_parallel": 2, "prefill__block_size": 48}),
]
MIXES = {
    "repeat": (Faults(repeat=0.5), SHAPES[:1]),
    "delay": (Faults(delay=0.6, max_delay_polls=30), SHAPES[1:2]),
    "fail": (Faults(fail=0.15), SHAPES[2:]),
    "tear": (Faults(tear=0.15), SHAPES[:1]),
    "drop": (Faults(drop=0.12), SHAPES[1:2]),
    "corrupt": (Faults(corrupt=0.15), SHAPES[2:]),
    "all": (Faults(drop=0.02, fail=0.04, tear=0.04, corrupt=0.04, repeat=0.2, delay=0.3), SHAPES),
}
"""Faults, and the shapes of cluster that meet them."""


@pytest.fixture(autouse=True)
def many_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    push_unit_by_unit(monkeypatch)


def prompts_of(seed: int) -> list[list[int]]:
    lengths = [1, 15, 16, 17, 40, 47, 48, 49, 64, 90]
    return [[3 + (seed * 31 + 7 * i * i + 13 * n + i) % 500 for i in range(n)] for n in lengths]


async def alone(model: str, prompts: list[list[int]]) -> list[Output]:
    """What each request gets alone."""
    if (key := (model, str(prompts))) not in known:
        async with LocalCluster(config_of(CHECKPOINTS / model, colocated=True, kv__num_blocks=128)) as cluster:
            known[key] = [await cluster.greedy(prompt, max_tokens=8, logprobs=2) for prompt in prompts]
    return known[key]


known: dict[tuple[str, str], list[Output]] = {}


async def outcome(cluster: LocalCluster, prompt: list[int], name: str) -> Output | PdClusterError:
    try:
        return await asyncio.wait_for(cluster.generate(request(prompt, name, max_tokens=8, logprobs=2)), 60)
    except PdClusterError as error:
        return error


async def ask(cluster: LocalCluster, prompts: list[list[int]], name: str) -> list[Output | PdClusterError]:
    return list(await asyncio.gather(*(outcome(cluster, p, f"{name}-{i}") for i, p in enumerate(prompts))))


def check(outcomes: list[Output | PdClusterError], expected: list[Output]) -> Counter[str]:
    """Right tokens or a clear error; what there was of each."""
    seen: Counter[str] = Counter()
    for found, right in zip(outcomes, expected, strict=True):
        if isinstance(found, PdClusterError):
            assert type(found) is not PdClusterError, f"an error without a class: {found}"
            assert found.message
            seen[found.code] += 1
        else:
            assert_same(found, right)
            seen["right"] += 1
            seen["retries"] += found.timings.num_retries
    return seen


@pytest.mark.parametrize("mix", MIXES)
async def test_every_request_ends_right_or_with_a_clear_error_and_nothing_is_lost(mix: str) -> None:
    faults, shapes = MIXES[mix]
    total, injected = Counter[str](), Counter[str]()
    prompts = prompts_of(1)
    for seed, (model, shape) in enumerate(shapes):
        expected = await alone(model, prompts)
        keys = SHORT | shape | {"kv__verify": faults.corrupt > 0, "prefill__max_num_batched_tokens": 16}
        faulty = Faulty(faults, seed)
        async with LocalCluster(config_of(CHECKPOINTS / model, **keys), wrap=faulty.wrap) as cluster:
            total += check(await ask(cluster, prompts, "faulty"), expected)
            faulty.stop()
            await cluster.until_free()
            healthy = check(await ask(cluster, prompts, "healthy"), expected)
            assert healthy == Counter(right=len(prompts), retries=0)
        injected += Counter(faulty.num_injected)
    print(f"{mix}: {dict(total)}, injected {dict(injected)}")
    drawn = {name for name in faults.__struct_fields__ if 0 < getattr(faults, name) < 1}
    assert mix == "all" or injected.keys() >= drawn
    assert total["right"] >= 0.9 * len(shapes) * len(prompts)
    if drawn <= {"repeat", "delay"}:
        assert total["right"] == len(shapes) * len(prompts)
        assert total["retries"] == 0, "these are no faults to anybody"
    else:
        assert total["retries"] > 0


async def test_bytes_that_may_still_land_keep_their_blocks_in_sight_until_their_writer_is_dead() -> None:
    """Every write fails without being quiet, and lands no sooner than after the test; only the death of one side frees
    the other's blocks.
    """
    faulty = Faulty(Faults(late=1.0, max_delay_polls=1 << 60), 0)
    prompts = [prompts_of(seed)[4] for seed in range(3)]  # of three blocks, with a few tokens more, too
    keys = {"kv__lease_s": 0.2, "router__max_retries": 2, "kv__prefix_cache": False}
    expected = await alone("deepseek_v3_yarn", prompts)
    async with LocalCluster(config_of(CHECKPOINTS / "deepseek_v3_yarn", **keys), wrap=faulty.wrap) as cluster:
        for victim, witness in (("prefill", "decode"), ("decode", "prefill")):
            faulty.start()
            seen = check(await ask(cluster, prompts, f"late-{victim}"), expected)
            faulty.stop()
            assert seen == Counter(transfer_failed=len(prompts))
            num_blocks = 3 * 3 * len(prompts)  # three attempts of each

            def all_kept(num_blocks: int = num_blocks) -> bool:
                quarantined = cluster.load("decode").num_quarantined_blocks
                return quarantined == cluster.load("prefill").num_reserved_blocks == num_blocks

            await until(all_kept)
            assert cluster.load("prefill").num_pending_sends == 9
            await asyncio.sleep(0.3)  # no lease frees them
            assert all_kept()
            assert cluster.load("decode").oldest_stranded_s > 0.3
            assert check(await ask(cluster, prompts, f"meanwhile-{victim}"), expected)["right"] == len(prompts)
            assert not cluster.is_free()
            dead = cluster.engine(f"{victim}-0")
            await cluster.kill(dead)
            await asyncio.sleep(0.05)
            if victim == "prefill":
                assert cluster.load(witness).num_quarantined_blocks == num_blocks, "a broken stream is no proof"
            cluster.bury(dead)
            await until(lambda witness=witness: not stranded(cluster, witness))  # type: ignore[misc]
            await cluster.start_engine(f"{victim}-0")
            assert check(await ask(cluster, prompts, f"after-{victim}"), expected)["right"] == len(prompts)
            await cluster.until_free()


def stranded(cluster: LocalCluster, role: str) -> int:
    load = cluster.load(role)
    return load.num_quarantined_blocks + load.num_reserved_blocks
