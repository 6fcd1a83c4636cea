"""The bundled model through the demo's own layout."""

import json
from typing import Any

import pytest
from harness import LocalCluster, config_of

from pd_cluster.model.source import DEMO

LAYOUT = {"prefill__tensor_parallel": 2, "decode__data_parallel": 2, "kv__num_blocks": 128}


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((DEMO / "reference.json").read_text())["cases"]
    return loaded


async def test_stories_are_the_references_in_float32(cases: list[dict[str, Any]]) -> None:
    async with LocalCluster(config_of("demo", **LAYOUT)) as cluster:
        outputs = await cluster.all_greedy([case["prompt_ids"] for case in cases], max_tokens=64)
    for case, output in zip(cases, outputs, strict=True):
        assert output.token_ids == case["greedy_ids"][:64]


async def test_in_bfloat16_idle_decode_ranks_take_part_and_stories_begin_alike(cases: list[dict[str, Any]]) -> None:
    async with LocalCluster(config_of("demo", model__dtype="bfloat16", **LAYOUT)) as cluster:
        for case in cases[:2]:  # one at a time: the other decode rank has nothing to do
            output = await cluster.greedy(case["prompt_ids"], max_tokens=16)
            assert output.token_ids[:8] == case["greedy_ids"][:8]
