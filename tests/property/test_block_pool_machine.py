"""Block pool and prefix cache under random sequences that share prefixes: no block lost, none with wrong content."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from pd_cluster.ids import BlockId, UnitHash
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.hashing import unit_hashes
from pd_cluster.kv.prefix_cache import PrefixCache


class Held:
    """A sequence that uses blocks, some of whose full blocks are computed."""

    def __init__(self, hashes: list[UnitHash], block_ids: list[BlockId], num_computed: int) -> None:
        self.hashes = hashes
        self.block_ids = block_ids
        self.num_computed = num_computed  # blocks


class PoolMachine(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize(num_blocks=st.integers(1, 12), units_per_block=st.integers(1, 3))
    def begin(self, num_blocks: int, units_per_block: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.units_per_block = units_per_block
        self.cache = PrefixCache(self.pool, units_per_block)
        self.content: dict[BlockId, UnitHash] = {}  # what was last computed into a block
        self.sequences: list[Held] = []
        self.known: set[UnitHash] = set()  # by someone who follows the events

    @rule(target=held, units=st.lists(st.integers(0, 1), max_size=8), salt=st.sampled_from(["", "s"]))
    def start(self, units: list[int], salt: str):  # type: ignore[no-untyped-def]
        hashes = unit_hashes([token for token in units for _ in range(16)], salt)
        num_blocks = -(-len(hashes) // self.units_per_block)
        shared = self.cache.lookup(hashes)
        for index, block_id in enumerate(shared):
            assert self.content[block_id] == hashes[(index + 1) * self.units_per_block - 1]
        self.pool.retain(shared)
        num_free = self.pool.num_free
        fresh = self.pool.allocate(num_blocks - len(shared))
        if fresh is None:
            assert num_free < num_blocks - len(shared)
            assert self.pool.num_free == num_free
            self.pool.free(reversed(shared))
            return multiple()
        assert self.pool.num_free == num_free - len(fresh)
        for block_id in fresh:
            self.content.pop(block_id, None)
        seq = Held(hashes, shared + fresh, len(shared))
        self.sequences.append(seq)
        return seq

    @rule(seq=held)
    def compute(self, seq: Held) -> None:
        if seq.num_computed >= len(seq.hashes) // self.units_per_block:
            return
        block_id = seq.block_ids[seq.num_computed]
        first = seq.num_computed * self.units_per_block
        units = seq.hashes[first : first + self.units_per_block]
        self.content[block_id] = units[-1]
        known = bool(self.cache.lookup(seq.hashes)[seq.num_computed :])
        stored = self.cache.insert(block_id, units)
        assert not (stored and known)
        seq.num_computed += 1

    @rule(seq=consumes(held))
    def end(self, seq: Held) -> None:
        self.sequences.remove(seq)
        self.pool.free(reversed(seq.block_ids))

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert len(self.cache) == 0

    @rule()
    def follow_events(self) -> None:
        stored, removed = self.cache.take_events()
        assert set(removed) <= self.known
        assert not set(stored) & self.known
        self.known = self.known - set(removed) | set(stored)
        assert self.known == set(self.cache.units())

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        holders: Counter[BlockId] = Counter()
        for seq in self.sequences:
            holders.update(seq.block_ids)
        self.pool.check(holders)
        self.cache.check()

    def teardown(self) -> None:
        for seq in self.sequences:
            self.pool.free(reversed(seq.block_ids))
        self.cache.clear()
        self.pool.check({})
        assert self.pool.num_free == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
