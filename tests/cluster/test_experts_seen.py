"""From the tokens that ranks route to what a router knows of each layer's experts, copies chosen by hash or by step."""

import asyncio

import pytest
from harness import CHECKPOINTS, LocalCluster, config_of

from pd_cluster.engine.epoch_hub import EpochHub
from pd_cluster.model.step_map import StepMap
from pd_cluster.parallel.placement_status import PlacementStatus
from router.placements import placements

PROMPTS = [[3 + (7 * i * i + 31 * k) % 500 for i in range(12 + k)] for k in range(6)]


@pytest.mark.parametrize("choice", ["hash", "step"])
async def test_the_router_learns_which_experts_are_hot_and_tokens_stay_the_same(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EpochHub.__init__.__kwdefaults__, "look_s", 0.2)
    model = CHECKPOINTS / "deepseek_v3_yarn"
    async with LocalCluster(config_of(model)) as alone:
        expected = [output.token_ids for output in await alone.all_greedy(PROMPTS, max_tokens=12)]
    shape = {"decode__data_parallel": 2, "decode__redundant_experts": 4, "decode__replica_choice": choice}
    async with LocalCluster(config_of(model, **shape)) as cluster:
        leads = cluster.engine("decode-0")
        engines = [lead.engine for lead in leads]
        assert all(engine is not None for engine in engines)
        choices = [moe.choice for engine in engines if engine is not None for moe in engine.model.moe_layers]
        assert {isinstance(each, StepMap) for each in choices} == {choice == "step"}

        def seen() -> PlacementStatus | None:
            return dict(placements(cluster.router.directory.workers)).get(leads[0].spec.engine_id)

        status: PlacementStatus | None = None
        async with asyncio.timeout(60):
            while status is None or not status.layers:
                for output, same in zip(await cluster.all_greedy(PROMPTS, max_tokens=12), expected, strict=True):
                    assert output.token_ids == same
                status = seen()
    assert engines[0] is not None
    assert engines[0].placement is not None
    assert len(status.layers) == len(engines[0].placement.layers)
    for number, layer in enumerate(status.layers):
        assert layer.ratio >= 1.0
        assert layer.hottest == sorted(layer.hottest, key=lambda e: -e.share)
        if not status.epoch:
            copies = engines[0].placement.copies(number)
            assert [e.copies for e in layer.hottest] == [len(copies[e.expert]) for e in layer.hottest]
