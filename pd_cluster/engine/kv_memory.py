"""The KV memory of one worker as its scheduler spends it: block pool, prefix cache and reservations behind one door.

Starts and reservations leave a small watermark of blocks free, for the growth of what runs; growth itself may use it.
"""

from collections import Counter
from collections.abc import Sequence

from pd_cluster.ids import BlockId, UnitHash
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.prefix_cache import PrefixCache
from pd_cluster.request import UNIT_TOKENS


class KvMemory:
    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        assert block_size > 0, block_size
        assert block_size % UNIT_TOKENS == 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._units_per_block = block_size // UNIT_TOKENS
        self._watermark = max(1, num_blocks // 100)
        self._reserved: Counter[BlockId] = Counter()
        self._pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self._pool, self._units_per_block)

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_reserved(self) -> int:
        return len(self._reserved)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits(self, shared: Sequence[BlockId], num_blocks: int) -> bool:
        """Whether a sequence of `num_blocks` that shares the cached blocks `shared` may begin now."""
        num_idle = sum(not self._pool.is_referenced(block_id) for block_id in shared)
        watermark = min(self._watermark, self.num_blocks - num_blocks)  # a request as large as the pool needs all of it
        return self._pool.num_free - num_idle >= num_blocks - len(shared) + watermark

    def take(self, shared: list[BlockId], num_blocks: int) -> list[BlockId] | None:
        """`shared`, retained, and fresh blocks up to `num_blocks`; None, and no change, when they do not fit."""
        if not self.fits(shared, num_blocks):
            return None
        self._pool.retain(shared)
        fresh = self._pool.allocate(num_blocks - len(shared))
        assert fresh is not None
        return shared + fresh

    def grow(self) -> list[BlockId] | None:
        """One more block for a running sequence, None when there is none."""
        return self._pool.allocate(1)

    def free(self, block_ids: Sequence[BlockId]) -> None:
        """Give up a sequence's blocks; its prefix outlives its tail in the cache."""
        self._pool.free(reversed(block_ids))

    def reserve(self, shared: list[BlockId], num_blocks: int) -> list[BlockId] | None:
        """As `take`; the blocks count as reserved until `unreserve`."""
        block_ids = self.take(shared, num_blocks)
        self._reserved.update(block_ids or ())
        return block_ids

    def keep(self, block_ids: list[BlockId]) -> None:
        """One more holder for blocks in use; they count as reserved until `unreserve`."""
        self._pool.retain(block_ids)
        self._reserved.update(block_ids)

    def unreserve(self, block_ids: Sequence[BlockId]) -> None:
        """These reserved blocks get another holder, or are freed next; their references stay."""
        for block_id in block_ids:
            assert self._reserved[block_id] > 0, f"block {block_id} is not reserved"
            self._reserved[block_id] -= 1
            if not self._reserved[block_id]:
                del self._reserved[block_id]

    def publish(
        self, block_ids: Sequence[BlockId], hashes: Sequence[UnitHash], first_block: int, end_block: int
    ) -> None:
        """Offer a sequence's blocks [first_block, end_block), full of computed KV, to the prefix cache."""
        for index in range(first_block, end_block):
            first = index * self._units_per_block
            self.cache.insert(block_ids[index], hashes[first : first + self._units_per_block])

    def check(self, num_holders: Counter[BlockId]) -> None:
        """Assert that sequences, which hold `num_holders`, and reservations account for every reference."""
        self._pool.check(num_holders + self._reserved)
        self.cache.check()
