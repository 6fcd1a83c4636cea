"""Prefix hashes and the cache of full blocks: found by content and salt, evicted with their events."""

import pytest

from pd_cluster.ids import BlockId, UnitHash
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.hashing import UnitChain, chain_root, extend_chain, unit_hashes
from pd_cluster.kv.prefix_cache import PrefixCache

TOKENS = [7 * i % 1000 for i in range(200)]


def take(pool: BlockPool, num_blocks: int) -> list[BlockId]:
    block_ids = pool.allocate(num_blocks)
    assert block_ids is not None
    return block_ids


def fill(cache: PrefixCache, pool: BlockPool, hashes: list[UnitHash], units_per_block: int) -> list[BlockId]:
    """Cache all full blocks of a sequence, and let go of them."""
    block_ids = take(pool, len(hashes) // units_per_block)
    for index, block_id in enumerate(block_ids):
        cache.insert(block_id, hashes[index * units_per_block : (index + 1) * units_per_block])
    pool.free(reversed(block_ids))
    return block_ids


def test_hash_covers_the_unit_and_everything_before_it() -> None:
    hashes = unit_hashes(TOKENS)
    assert len(hashes) == 12
    assert len(set(hashes)) == 12
    assert all(len(h) == 16 for h in hashes)
    changed = TOKENS.copy()
    changed[20] += 1
    assert [a == b for a, b in zip(hashes, unit_hashes(changed), strict=True)] == [True] + [False] * 11


def test_hashes_are_the_same_in_every_process_and_version() -> None:
    # routers and workers of different builds meet by these bytes: another value here needs another HASH_VERSION
    assert chain_root("").hex() == "a0f205d5742d8a98cc9b903e6ab21a7d"
    assert unit_hashes(list(range(32)), "tenant")[1].hex() == "b0efb851399fd0c4e0fe1adb28b34ee0"


def test_salt_separates_equal_prompts() -> None:
    assert not set(unit_hashes(TOKENS, "a")) & set(unit_hashes(TOKENS, "b"))
    assert not set(unit_hashes(TOKENS, "a")) & set(unit_hashes(TOKENS))


def test_any_text_is_a_salt_and_any_32_bit_number_a_token() -> None:
    assert len(unit_hashes([2**32 - 1] * 16, "\ud800 🦜")) == 1


@pytest.mark.parametrize("num_tokens", [0, 15, 16, 17, 31, 32, 200])
def test_chain_grown_by_any_steps_equals_the_hashes_of_the_whole(num_tokens: int) -> None:
    chain = UnitChain("s")
    for end in range(0, num_tokens + 1, 7):
        chain.extend(TOKENS, end)
    chain.extend(TOKENS[:num_tokens])
    assert chain.hashes == unit_hashes(TOKENS[:num_tokens], "s")
    assert chain.hashes == extend_chain(chain_root("s"), TOKENS[:num_tokens])


def test_lookup_finds_the_longest_run_of_full_blocks() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, units_per_block=2)
    hashes = unit_hashes(TOKENS[:160])
    block_ids = fill(cache, pool, hashes, 2)
    assert cache.lookup(hashes) == block_ids
    assert cache.lookup(hashes[:7]) == block_ids[:3]
    assert cache.lookup(hashes, max_blocks=2) == block_ids[:2]
    assert cache.lookup(hashes[:1]) == []
    assert cache.lookup([]) == []
    assert cache.lookup(unit_hashes(TOKENS[:160], "other")) == []
    cache.check()


def test_first_block_with_some_content_wins() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, 1)
    hashes = unit_hashes(TOKENS[:16])
    first, second = take(pool, 2)
    assert cache.insert(first, hashes)
    assert not cache.insert(second, hashes)
    assert not cache.insert(first, hashes)
    pool.free([second])
    assert not pool.is_cached(second)
    assert cache.lookup(hashes) == [first]
    cache.check()


def test_eviction_takes_the_tail_first_and_reports_what_goes() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, 2)
    hashes = unit_hashes(TOKENS[:128])
    block_ids = fill(cache, pool, hashes, 2)
    assert cache.take_events() == (hashes, [])
    take(pool, 1)
    assert cache.lookup(hashes) == block_ids[:3]
    assert cache.take_events() == ([], hashes[6:])
    take(pool, 3)
    assert len(cache) == 0
    assert cache.units() == []
    cache.check()


def test_unit_shared_by_two_blocks_goes_with_the_last_of_them() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool, 2)
    one, other = unit_hashes(TOKENS[:32]), unit_hashes([*TOKENS[:16], *TOKENS[100:116]])
    assert one[0] == other[0]
    fill(cache, pool, one, 2)
    fill(cache, pool, other, 2)
    assert cache.take_events() == ([*one, other[1]], [])
    blocks = take(pool, 1)
    assert cache.take_events() == ([], [one[1]])
    take(pool, 1)
    assert cache.take_events() == ([], list(other))
    assert len(blocks) == 1


def test_events_are_net_of_what_came_and_went_in_between() -> None:
    pool = BlockPool(1)
    cache = PrefixCache(pool, 1)
    one, other = unit_hashes(TOKENS[:16]), unit_hashes(TOKENS[16:32])
    fill(cache, pool, one, 1)
    fill(cache, pool, other, 1)
    assert cache.take_events() == (other, [])
    fill(cache, pool, one, 1)
    fill(cache, pool, other, 1)
    assert cache.take_events() == ([], [])


def test_clear_forgets_idle_and_used_blocks_but_leaves_the_latter_to_their_holder() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, 1)
    hashes = unit_hashes(TOKENS[:64])
    block_ids = fill(cache, pool, hashes, 1)
    pool.retain(block_ids[:1])
    cache.clear()
    cache.check()
    pool.check({block_ids[0]: 1})
    assert cache.lookup(hashes) == []
    assert cache.take_events() == ([], [])
    pool.free(block_ids[:1])
    assert pool.num_free == 4
    pool.check({})
