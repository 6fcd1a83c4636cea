"""Experts move under traffic in real engines of four ranks: tokens stay, a change that fails leaves all as it was."""

import asyncio
import random

import msgspec
import pytest
from harness import LocalCluster, Output, assert_same, config_of, until

from pd_cluster.config import ClusterConfig
from pd_cluster.engine.epoch_hub import EpochHub
from pd_cluster.errors import ChecksumMismatch, NotSupported
from pd_cluster.ids import ExpertId, Rank
from pd_cluster.launch.placements import Placements
from pd_cluster.launch.rank import RankServer
from pd_cluster.model.expert_arena import is_intact
from pd_cluster.parallel.placement import LayerPlacement, Placement
from pd_cluster.parallel.planner import Answer, Question, Stage
from pd_cluster.parallel.stages import stages

PROMPTS = [[(7 * i * i + 3 * i + s) % 500 + 3 for i in range(20 + s)] for s in range(6)]


def config(tp: int = 1, **values: object) -> ClusterConfig:
    return config_of(
        "demo",
        decode__data_parallel=4 // tp,
        decode__tensor_parallel=tp,
        decode__expert_slots_per_rank=12,
        **{"decode__rebalance": "off", **values},
    )


class Group:
    """An engine of a cluster."""

    def __init__(self, cluster: LocalCluster, engine_id: str = "decode-0") -> None:
        self.ranks: list[RankServer] = cluster.engine(engine_id)
        self.parts: list[Placements] = [rank.placements for rank in self.ranks if rank.placements is not None]
        assert len(self.parts) == len(self.ranks) > 1

    @property
    def hub(self) -> EpochHub:
        hub = self.parts[0].hub
        assert hub is not None
        return hub

    async def go_to(self, wanted: Placement) -> int:
        """Through stages to `wanted`; how many there were."""
        path = stages(self.hub.placement, wanted, max_loads_per_rank=8)
        async with asyncio.timeout(20):
            await self.hub.change([Stage(stage, [{} for _ in stage.layers]) for stage in path])
        return len(path)

    async def until_settled(self) -> None:
        await until(lambda: self.hub.is_idle and not any(part.stats.is_changing for part in self.parts))

    def check(self) -> None:
        """All ranks run the placement that the hub means, and hold its experts undamaged."""
        placement = self.hub.placement
        for rank in self.ranks:
            engine = rank.engine
            assert engine is not None
            assert engine.model.experts is not None
            assert engine.placement == placement
            arena = engine.model.experts.arenas[rank.spec.rank]
            for layer in range(len(placement.layers)):
                for slot, expert in enumerate(placement.rank_slots(layer, rank.spec.rank)):
                    assert expert is None or is_intact(arena.record(layer, slot), layer, expert)


def swapped(current: Placement, seed: int) -> Placement:
    """Some experts exchanged between ranks, and one more copy of another."""
    rng, layers = random.Random(seed), []
    size, num_ranks = current.slots_per_rank, current.num_ranks
    for layer in range(len(current.layers)):
        held = [[e for e in current.rank_slots(layer, Rank(r)) if e is not None] for r in range(num_ranks)]
        for _ in range(3):
            a, b = rng.sample(range(num_ranks), 2)
            i, j = rng.randrange(len(held[a])), rng.randrange(len(held[b]))
            if held[a][i] not in held[b] and held[b][j] not in held[a]:
                held[a][i], held[b][j] = held[b][j], held[a][i]
        copied, rank = ExpertId(rng.randrange(current.num_experts)), rng.randrange(num_ranks)
        if copied not in held[rank] and len(held[rank]) < size - 2:
            held[rank].append(copied)
        layers.append(LayerPlacement(tuple(s for h in held for s in (*h, *[None] * (size - len(h))))))
    return msgspec.structs.replace(current, epoch=current.epoch + 1, layers=tuple(layers))


async def answers(cluster: LocalCluster) -> list[Output]:
    return await cluster.all_greedy(PROMPTS, max_tokens=40, logprobs=2)


@pytest.mark.parametrize(("tp", "dispatcher"), [(1, "auto"), (2, "auto"), (1, "nixl"), (2, "nixl")])
async def test_swaps_under_traffic_change_no_token(tp: int, dispatcher: str) -> None:
    async with LocalCluster(config(tp, decode__dispatcher=dispatcher)) as cluster:
        expected = await answers(cluster)
        group = Group(cluster)
        running = asyncio.ensure_future(answers(cluster))
        num_stages = 0
        for seed in range(6):
            num_stages += await group.go_to(swapped(group.hub.placement, seed))
        for output, same in zip(await running, expected, strict=True):
            assert_same(output, same)
        await group.go_to(swapped(group.hub.placement, 99))  # nothing runs: empty steps decide
        await group.until_settled()
        group.check()
        stats = [part.stats for part in group.parts]
        assert {each.num_swaps for each in stats} == {each.epoch for each in stats} == {group.hub.placement.epoch}
        assert group.hub.placement.epoch > num_stages >= 6
        assert {each.num_abandoned for each in stats} == {0}
        for output, same in zip(await answers(cluster), expected, strict=True):
            assert_same(output, same)
        assert stats[0].bytes_moved == sum(each.bytes_loaded for each in stats) > 0


async def test_experts_move_between_tensor_parallel_ranks_that_see_all_tokens() -> None:
    """Every rank chooses slots for all tokens, so all must flip at one step: a prefill and a decode engine of one DP
    rank each.
    """
    values = {"prefill__tensor_parallel": 2, "prefill__expert_slots_per_rank": 19}
    async with LocalCluster(config(4, **values)) as cluster:
        expected = await answers(cluster)
        groups = [Group(cluster, "prefill-0"), Group(cluster, "decode-0")]
        running = asyncio.ensure_future(answers(cluster))
        for seed in range(3):
            for group in groups:
                await group.go_to(swapped(group.hub.placement, seed))
        outputs = [*await running, *await answers(cluster)]
        for output, same in zip(outputs, expected * 2, strict=True):
            assert_same(output, same)
        for group in groups:
            await group.until_settled()
            group.check()
            assert group.hub.placement.epoch >= 3


async def test_damaged_loads_and_slow_ranks_abandon_and_leave_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalCluster(config()) as cluster:
        expected = await answers(cluster)
        group = Group(cluster)
        before = group.hub.placement
        memory = group.parts[2]._memory
        assert memory is not None

        def damaged(*_: object) -> object:
            raise ChecksumMismatch("it arrived damaged")
            yield True

        with monkeypatch.context() as patch:
            patch.setattr(memory, "_from_peer", damaged)
            patch.setattr(memory, "_from_store", damaged)
            running = asyncio.ensure_future(answers(cluster))
            await group.go_to(swapped(before, 1))
            await until(lambda: group.parts[3].stats.num_abandoned == 1)
            assert group.hub.placement == before
            assert "rank 2: it arrived damaged" in group.parts[0].stats.last_reason
            await running

        def stuck(*_: object) -> object:
            while True:
                yield False

        with monkeypatch.context() as patch:
            patch.setattr(memory, "_from_peer", stuck)
            patch.setattr(group.hub, "_stage_s", 0.3)
            await group.go_to(swapped(before, 1))
            await until(lambda: group.parts[3].stats.num_abandoned == 2)
            assert "not loaded in time on rank 2" in group.parts[0].stats.last_reason
        memory._jobs.clear()
        group.parts[2].epochs._ending.clear()  # what is stuck for ever here ends by its deadline elsewhere
        group.parts[2].epochs._owner_of.clear()
        group.parts[2].epochs._advance()
        await group.until_settled()
        group.check()
        await group.go_to(swapped(before, 1))
        assert group.hub.placement.epoch > before.epoch
        for output, same in zip(await answers(cluster), expected, strict=True):
            assert_same(output, same)
        await group.until_settled()
        group.check()


async def test_experts_leave_ranks_and_come_back_and_what_does_not_fit_is_refused_by_name() -> None:
    async with LocalCluster(config()) as cluster:
        expected = await answers(cluster)
        group = Group(cluster)
        running = asyncio.ensure_future(answers(cluster))
        three = frozenset(Rank(r) for r in (0, 1, 3))
        await asyncio.wait_for(group.hub.request_placement(three), 20)
        assert not any(group.hub.placement.rank_slots(layer, Rank(2)) != (None,) * 12 for layer in range(3))
        with pytest.raises(NotSupported, match="expert_slots_per_rank 12: each would need 16"):
            await asyncio.wait_for(group.hub.request_placement(frozenset({Rank(0), Rank(1)})), 20)
        await asyncio.wait_for(group.hub.request_placement(frozenset(Rank(r) for r in range(4))), 20)
        assert all(any(e is not None for e in group.hub.placement.rank_slots(layer, Rank(2))) for layer in range(3))
        for output, same in zip(await running, expected, strict=True):
            assert_same(output, same)
        await group.until_settled()
        group.check()
        for output, same in zip(await answers(cluster), expected, strict=True):
            assert_same(output, same)


async def test_a_rank_that_is_busier_than_others_gives_experts_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trigger of a whole engine, with its counts, its planning process and its stages."""
    monkeypatch.setattr("pd_cluster.engine.epochs.REPORT_S", 0.05)
    monkeypatch.setattr("pd_cluster.engine.epoch_hub.LOOK_S", 0.1)
    values = {
        "decode__rebalance": "auto",
        "decode__rebalance_threshold": 1.05,
        "decode__rebalance_sustain_s": 0.3,
        "decode__rebalance_cooldown_s": 0.5,
    }
    async with LocalCluster(config(**values)) as cluster:
        expected = await answers(cluster)
        group = Group(cluster)
        hub = group.hub
        ratios: list[float] = []
        plans: list[Answer] = []
        ask = hub._planner.ask

        async def recorded(question: Question) -> Answer:
            answer = await ask(question)
            if question.kind == "look" and answer.ratio is not None:
                ratios.append(answer.ratio)
            elif answer.stages:
                plans.append(answer)
                ratios.clear()
            return answer

        monkeypatch.setattr(hub._planner, "ask", recorded)
        async with asyncio.timeout(100):
            while not plans or len(ratios) < 5:
                outputs = await cluster.all_greedy(PROMPTS * 3, max_tokens=40)
                for output, same in zip(outputs, expected * 3, strict=True):
                    assert_same(output, same)
        last = plans[-1]
        assert last.ratio is not None
        assert last.predicted is not None
        assert last.ratio > 1.05
        assert last.predicted < last.ratio - 0.02
        assert ratios[-1] == pytest.approx(last.predicted, abs=0.1), "it falls as predicted"
        assert ratios[-1] < last.ratio
        assert hub.stats.predicted == last.predicted
        print(f"{last.ratio:.3f}, predicted {last.predicted:.3f}, then {ratios[-1]:.3f}")
        assert group.hub.placement.epoch >= len(last.stages)
        await group.until_settled()
        group.check()
