"""The prefix index against an obvious model: one set of hashes for each worker."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pd_cluster.ids import UnitHash, WorkerId
from pd_cluster.kv.hashing import unit_hashes
from pd_cluster.messages import CacheEvents
from router.prefix_index import PrefixIndex

WORKERS = [WorkerId(f"prefill-{i}/0") for i in range(4)]
CHAINS = [unit_hashes([first] * 16 + list(range(48))) for first in range(3)]
UNITS = [unit for chain in CHAINS for unit in chain]
MAX_UNITS = 8

workers = st.sampled_from(WORKERS)
units = st.lists(st.sampled_from(UNITS), max_size=6)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.cached: dict[WorkerId, list[UnitHash]] = {}

    @rule(worker=workers)
    def add(self, worker: WorkerId) -> None:
        self.index.add_worker(worker, MAX_UNITS)
        self.cached[worker] = []

    @rule(worker=workers)
    def remove(self, worker: WorkerId) -> None:
        self.index.remove_worker(worker)
        self.cached.pop(worker, None)

    @rule(worker=workers, stored=units, removed=units, cleared=st.booleans())
    def change(self, worker: WorkerId, stored: list[UnitHash], removed: list[UnitHash], cleared: bool) -> None:
        self.index.apply(worker, CacheEvents(stored=stored, removed=removed, cleared=cleared))
        if worker not in self.cached:
            return
        held = [] if cleared else [unit for unit in self.cached[worker] if unit not in removed]
        held += [unit for unit in dict.fromkeys(stored) if unit not in held]
        self.cached[worker] = held[-MAX_UNITS:]

    @invariant()
    def every_prompt_matches_as_the_model_says(self) -> None:
        for chain in CHAINS:
            expected = {}
            for worker, held in self.cached.items():
                run = 0
                while run < len(chain) and chain[run] in held:
                    run += 1
                if run:
                    expected[worker] = 16 * run
            assert self.index.match(chain) == expected
            for worker in WORKERS:
                assert self.index.num_matched_tokens(chain, worker) == expected.get(worker, 0)

    @invariant()
    def memory_is_what_is_cached(self) -> None:
        assert self.index.num_hashes == len({unit for held in self.cached.values() for unit in held})


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPrefixIndex = IndexMachine.TestCase
