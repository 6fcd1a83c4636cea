"""The KV blocks of one worker: each is free, idle (cached, unreferenced, evictable) or referenced.

    free --allocate--> referenced --free--> free, or idle when it is cached --retain--> referenced
                                                                            --evict--> free

Free blocks are handed out lowest id first, so that a sequence's blocks tend to be runs, which a transfer copies as one
range. Idle blocks are evicted least recently used first.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from pd_cluster.ids import BlockId


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self.on_evict: Callable[[BlockId], None] | None = None  # told of every idle block that is about to be reused
        self._num_refs = [0] * num_blocks
        self._cached = [False] * num_blocks
        self._free = [BlockId(block) for block in range(num_blocks)]  # a heap
        self._idle: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    def is_referenced(self, block_id: BlockId) -> bool:
        return self._num_refs[block_id] > 0

    def is_cached(self, block_id: BlockId) -> bool:
        return self._cached[block_id]

    def allocate(self, num_blocks: int) -> list[BlockId] | None:
        """That many blocks with one reference each, evicting idle ones as needed; None, and no change, when there are
        too few.
        """
        if num_blocks > self.num_free:
            return None
        while len(self._free) < num_blocks:
            block_id, _ = self._idle.popitem(last=False)
            self._cached[block_id] = False
            heapq.heappush(self._free, block_id)
            if self.on_evict is not None:
                self.on_evict(block_id)
        block_ids = [heapq.heappop(self._free) for _ in range(num_blocks)]
        for block_id in block_ids:
            self._num_refs[block_id] = 1
        return block_ids

    def retain(self, block_ids: Iterable[BlockId]) -> None:
        """One more reference to blocks that are referenced or idle."""
        for block_id in block_ids:
            if not self._num_refs[block_id]:
                del self._idle[block_id]
            self._num_refs[block_id] += 1

    def free(self, block_ids: Iterable[BlockId]) -> None:
        """One reference less; the last one makes a cached block idle and another one free.

        Idle blocks queue for eviction in the order given: pass a sequence's last block first, since a prefix is worth
        more than its tail.
        """
        for block_id in block_ids:
            assert self._num_refs[block_id] > 0, f"block {block_id} freed twice"
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id]:
                continue
            if self._cached[block_id]:
                self._idle[block_id] = None
            else:
                heapq.heappush(self._free, block_id)

    def mark_cached(self, block_id: BlockId) -> None:
        """Keep this referenced block's content when its last reference goes."""
        assert self._num_refs[block_id] > 0, f"block {block_id} is not in use"
        self._cached[block_id] = True

    def unmark_cached(self, block_id: BlockId) -> None:
        """Its content is no longer worth keeping; an idle block becomes free. `on_evict` is not called."""
        self._cached[block_id] = False
        if block_id in self._idle:
            del self._idle[block_id]
            heapq.heappush(self._free, block_id)

    def check(self, num_holders: Mapping[BlockId, int]) -> None:
        """Assert that every block is exactly one of free, idle and referenced, the latter by `num_holders[block]`
        holders.
        """
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & idle, f"free and idle: {free & idle}"
        for block in range(self.num_blocks):
            block_id = BlockId(block)
            num_refs = self._num_refs[block_id]
            assert num_refs == num_holders.get(block_id, 0), (
                f"block {block_id}: {num_refs} refs, {num_holders.get(block_id, 0)} holders"
            )
            assert (num_refs == 0) == (block_id in free or block_id in idle), f"block {block_id} is lost"
            assert block_id not in free or not self._cached[block_id], f"block {block_id} is free and cached"
            assert block_id not in idle or self._cached[block_id], f"block {block_id} is idle and not cached"
