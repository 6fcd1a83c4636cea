"""How ranks find each other's experts: by the life of their worker, and nobody who is not there."""

import asyncio
from functools import cache

import pytest
from harness import config_of

from pd_cluster.clock import SystemClock
from pd_cluster.engine.step_sync import StepSync
from pd_cluster.engine.torch_engine import TorchEngine, build_engine
from pd_cluster.errors import EngineError, TransferFailed
from pd_cluster.ids import EngineEpoch, EngineId, Rank
from pd_cluster.launch.meeting import Board, LocalRendezvous
from pd_cluster.launch.placements import Placements
from pd_cluster.launch.spec import RankSpec
from pd_cluster.model.random_weights import RandomSource
from pd_cluster.model.source import open_model
from pd_cluster.parallel.placement import spread

EPOCH = EngineEpoch("engine")
NUM_RANKS = 2


@cache
def engine() -> TorchEngine:
    """Two ranks, with one slot more than they need."""
    config = open_model("demo").config
    assert config.moe is not None
    num_experts = config.moe.num_experts
    return build_engine(
        config,
        RandomSource(config),
        dtype="float32",
        block_size=16,
        num_blocks=4,
        placement=spread(num_experts, NUM_RANKS, len(config.moe_layers), 0, num_experts // NUM_RANKS + 1),
        dispatcher="local",
    )


def rank(number: int, board: Board, life: str | None) -> Placements:
    spec = RankSpec(
        role="decode",
        engine_id=EngineId("decode-0"),
        epoch=EPOCH,
        life=None if life is None else EngineEpoch(life),
        rank=Rank(number),
        data_parallel=NUM_RANKS,
        tensor_parallel=1,
        config=config_of("demo"),
        store_host="",
        store_port=0,
    )

    def fail(error: EngineError) -> None:
        raise error

    sync = StepSync(epoch=EPOCH, rank=Rank(number), data_parallel=NUM_RANKS, tensor_parallel=1, shared=True)
    return Placements(spec, engine(), sync, SystemClock(), LocalRendezvous(board).meeting(), fail)


async def test_ranks_of_one_engine_find_each_others_experts() -> None:
    board = Board()
    ranks = [rank(number, board, life=None) for number in range(NUM_RANKS)]
    try:
        for each in ranks:
            await each.start()
        async with asyncio.timeout(5.0):
            assert await ranks[0]._lookup(Rank(1)) != await ranks[1]._lookup(Rank(0))
    finally:
        for each in ranks:
            await each.close()


async def test_experts_of_a_member_are_looked_up_in_its_present_life_only() -> None:
    board = Board()
    mine, theirs = rank(0, board, life="a"), rank(1, board, life="c")
    try:
        await theirs.start()
        async with asyncio.timeout(5.0):
            with pytest.raises(TransferFailed, match="rank 1 is not there"):
                await mine._lookup(Rank(1))
            mine.lives = {Rank(0): EngineEpoch("a"), Rank(1): EngineEpoch("c")}
            assert await mine._lookup(Rank(1))
        mine.lives = {Rank(0): EngineEpoch("a"), Rank(1): EngineEpoch("d")}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):  # that one has not come up yet
                await mine._lookup(Rank(1))
    finally:
        await mine.close()
        await theirs.close()


async def test_a_rank_that_never_met_the_others_closes_all_the_same() -> None:
    await rank(0, Board(), life=None).close()
