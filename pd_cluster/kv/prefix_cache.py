"""Which full blocks hold which prefixes: a map from the hash of a block's last unit to the block.

The first block with some content wins; a second one stays private to its sequence. Two blocks that differ only in their
later units share the hashes of the earlier ones, so units are counted, and the outside hears of a unit when its first
block comes and its last one goes.
"""

from collections.abc import Sequence

from pd_cluster.ids import BlockId, UnitHash
from pd_cluster.kv.block_pool import BlockPool


class PrefixCache:
    def __init__(self, pool: BlockPool, units_per_block: int) -> None:
        assert units_per_block > 0, units_per_block
        self._pool = pool
        self._units_per_block = units_per_block
        self._block_by_hash: dict[UnitHash, BlockId] = {}
        self._units_by_block: dict[BlockId, tuple[UnitHash, ...]] = {}
        self._num_blocks_by_unit: dict[UnitHash, int] = {}
        self._stored: dict[UnitHash, None] = {}  # net changes since take_events, in order
        self._removed: dict[UnitHash, None] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def lookup(self, hashes: Sequence[UnitHash], max_blocks: int | None = None) -> list[BlockId]:
        """The longest run of cached blocks from the start of a sequence with these unit hashes; retain them before
        anything else.
        """
        num_blocks = len(hashes) // self._units_per_block
        if max_blocks is not None:
            num_blocks = min(num_blocks, max_blocks)
        block_ids: list[BlockId] = []
        for last in range(self._units_per_block - 1, num_blocks * self._units_per_block, self._units_per_block):
            block_id = self._block_by_hash.get(hashes[last])
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def insert(self, block_id: BlockId, units: Sequence[UnitHash]) -> bool:
        """Offer a referenced, fully computed block with the hashes of its units; False when that content is cached
        already.
        """
        assert len(units) == self._units_per_block, (len(units), self._units_per_block)
        if units[-1] in self._block_by_hash:
            return False
        assert block_id not in self._units_by_block, f"block {block_id} already caches something else"
        self._pool.mark_cached(block_id)
        self._block_by_hash[units[-1]] = block_id
        self._units_by_block[block_id] = tuple(units)
        for unit in units:
            num_blocks = self._num_blocks_by_unit.get(unit, 0)
            self._num_blocks_by_unit[unit] = num_blocks + 1
            if not num_blocks:
                if unit in self._removed:
                    del self._removed[unit]
                else:
                    self._stored[unit] = None
        return True

    def clear(self) -> None:
        """Forget everything; blocks in use stay with their sequences."""
        for block_id in list(self._units_by_block):
            self._forget(block_id)
            self._pool.unmark_cached(block_id)

    def units(self) -> list[UnitHash]:
        """All cached units: what someone who has not followed the events needs to know."""
        return list(self._num_blocks_by_unit)

    def take_events(self) -> tuple[list[UnitHash], list[UnitHash]]:
        """Units stored and removed, net, since the last call."""
        stored, removed = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return stored, removed

    def check(self) -> None:
        """Assert that the maps agree with each other."""
        assert len(self._block_by_hash) == len(self._units_by_block)
        counts: dict[UnitHash, int] = {}
        for block_id, units in self._units_by_block.items():
            assert self._block_by_hash[units[-1]] == block_id, f"block {block_id} is not found by its hash"
            for unit in units:
                counts[unit] = counts.get(unit, 0) + 1
        for block in range(self._pool.num_blocks):
            assert self._pool.is_cached(BlockId(block)) == (block in self._units_by_block), (
                f"pool and cache differ on block {block}"
            )
        assert counts == self._num_blocks_by_unit, "units are miscounted"
        assert not self._stored.keys() & self._removed.keys()

    def _forget(self, block_id: BlockId) -> None:
        units = self._units_by_block.pop(block_id)
        del self._block_by_hash[units[-1]]
        for unit in units:
            self._num_blocks_by_unit[unit] -= 1
            if not self._num_blocks_by_unit[unit]:
                del self._num_blocks_by_unit[unit]
                if unit in self._stored:
                    del self._stored[unit]
                else:
                    self._removed[unit] = None
