"""The block pool: all or nothing, lowest ids first, least recently used evicted first, double frees refused."""

import pytest

from pd_cluster.ids import BlockId
from pd_cluster.kv.block_pool import BlockPool


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(b) for b in blocks]


def test_allocates_lowest_ids_first_so_that_blocks_form_runs() -> None:
    pool = BlockPool(8)
    assert pool.allocate(3) == ids(0, 1, 2)
    assert pool.allocate(2) == ids(3, 4)
    pool.free(ids(1, 4, 3))
    assert pool.allocate(4) == ids(1, 3, 4, 5)


def test_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(4)
    evicted: list[BlockId] = []
    pool.on_evict = evicted.append
    held = pool.allocate(2)
    assert held is not None
    pool.mark_cached(held[0])
    pool.free(held)
    assert pool.allocate(5) is None
    assert evicted == []
    assert pool.num_free == 4
    assert pool.allocate(0) == []
    pool.check({})


def test_block_is_free_only_after_its_last_reference() -> None:
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.retain(block_ids)
    pool.free(block_ids)
    assert pool.num_free == 0
    pool.check({BlockId(0): 1})
    pool.free(block_ids)
    assert pool.num_free == 1


def test_block_freed_twice_is_an_error() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.free(block_ids)
    with pytest.raises(AssertionError, match="block 0 freed twice"):
        pool.free(block_ids)


def test_cached_blocks_are_evicted_least_recently_used_first_and_only_when_free_ones_run_out() -> None:
    pool = BlockPool(4)
    evicted: list[BlockId] = []
    pool.on_evict = evicted.append
    block_ids = pool.allocate(3)
    assert block_ids is not None
    for block_id in block_ids:
        pool.mark_cached(block_id)
    pool.free(ids(2, 1, 0))
    pool.retain(ids(2))  # used again
    pool.free(ids(2))
    assert pool.allocate(1) == ids(3)
    assert evicted == []
    assert pool.allocate(2) == ids(0, 1)
    assert evicted == ids(1, 0)
    assert pool.is_cached(BlockId(2))


def test_retained_idle_block_is_not_evicted() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(2)
    assert block_ids is not None
    pool.mark_cached(BlockId(0))
    pool.free(block_ids)
    pool.retain(ids(0))
    assert pool.allocate(2) is None
    assert pool.allocate(1) == ids(1)


def test_uncached_idle_block_becomes_free() -> None:
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.mark_cached(BlockId(0))
    pool.free(block_ids)
    pool.unmark_cached(BlockId(0))
    pool.check({})
    assert pool.num_free == 1


@pytest.mark.parametrize("holders", [{}, {BlockId(0): 2}, {BlockId(0): 1, BlockId(1): 1}])
def test_check_notices_holders_that_disagree(holders: dict[BlockId, int]) -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check(holders)
