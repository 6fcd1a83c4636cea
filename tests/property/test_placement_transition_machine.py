"""Ranks with memory that can be read and written at the wrong time go from stage to stage under traffic.

Every rank's slots hold what was really loaded; a load tears its slot while it is under way and may arrive damaged or
fail; steps are launched ahead, end late and look at the slots when they begin and when they end.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pd_cluster.clock import FakeClock
from pd_cluster.errors import NotSupported, TransferFailed
from pd_cluster.ids import Rank
from pd_cluster.parallel.balance import plan
from pd_cluster.parallel.placement import Placement
from pd_cluster.parallel.stages import Load, stages
from pd_cluster.parallel.transition import Abandon, Ballot, Commit, Decision, Phase, Transition

TORN = -1
TIMEOUT_S = 10.0
NUM_LAYERS, NUM_EXPERTS = 2, 6


class Engine(RuleBasedStateMachine):
    @initialize(num_ranks=st.integers(2, 4), shadows=st.integers(1, 2), seed=st.integers(0, 1000))
    def start(self, num_ranks: int, shadows: int, seed: int) -> None:
        self.clock = FakeClock()
        self.rng = np.random.default_rng(seed)
        self.num_ranks = num_ranks
        self.slots_per_rank = -(-(NUM_EXPERTS + 2) // num_ranks) + shadows
        self.placement = self.planned()
        self.memory = [[-2 if e is None else int(e) for e in layer.slots] for layer in self.placement.layers]
        self.epoch_of_step: dict[int, int] = {}
        self.running: list[list[tuple[int, Placement]]] = [[] for _ in range(num_ranks)]
        self.next_step = [0] * num_ranks  # per rank; the hub has said Go up to `gone`
        self.gone = 0
        self.decisions: dict[int, Decision] = {}
        self.stages: list[Placement] = []
        self.transitions: list[Transition] = []
        self.ballot: Ballot | None = None
        self.loading: list[tuple[int, Load]] = []
        self.begin_a_stage()

    def planned(self) -> Placement:
        loads = self.rng.lognormal(0, 1, (NUM_LAYERS, NUM_EXPERTS))
        return plan(loads, self.num_ranks, redundant=2, slots_per_rank=self.slots_per_rank)

    @precondition(lambda self: not self.transitions)
    @rule()
    def begin_a_stage(self) -> None:
        if not self.stages:
            try:
                self.stages = stages(self.placement, self.planned(), max_loads_per_rank=2)
            except NotSupported:
                return
        if not self.stages:
            return
        new = self.stages.pop(0)
        if new.epoch != self.placement.epoch + 1:  # the one before was abandoned
            self.stages = []
            return
        self.ballot = Ballot(
            new,
            frozenset(Rank(r) for r in range(self.num_ranks)),
            now_s=self.clock.now_s(),
            timeout_s=TIMEOUT_S,
        )
        for r in range(self.num_ranks):
            t = Transition(self.placement, new, Rank(r), now_s=self.clock.now_s(), timeout_s=TIMEOUT_S)
            t.began_before(step for step, _ in self.running[r])
            self.transitions.append(t)

    @precondition(lambda self: bool(self.transitions))
    @rule(rank=st.integers(0, 3))
    def load(self, rank: int) -> None:
        rank %= self.num_ranks
        for load in self.transitions[rank].take_loads():
            assert self.placement.owner(load.slot) == rank
            self.memory[load.layer][load.slot] = TORN
            self.loading.append((rank, load))

    @precondition(lambda self: bool(self.loading))
    @rule(which=st.integers(0, 9))
    def finish_a_load(self, which: int) -> None:
        self.end_load(which, "good")

    @precondition(lambda self: bool(self.transitions))
    @rule(rank=st.integers(0, 3), outcome=st.sampled_from(["damaged", "failed"]))
    def spoil_a_load(self, rank: int, outcome: str) -> None:
        rank %= self.num_ranks
        self.load(rank)
        for index, (loader, _) in enumerate(self.loading):
            if loader == rank:
                self.end_load(index, outcome)
                return

    @precondition(lambda self: bool(self.transitions))
    @rule()
    def everything_loads_and_all_vote(self) -> None:
        for rank in range(self.num_ranks):
            self.load(rank)
            while any(r == rank for r, _ in self.loading):
                self.end_load([r for r, _ in self.loading].index(rank), "good")
                self.load(rank)
            self.vote(rank)

    def end_load(self, which: int, outcome: str) -> None:
        rank, load = self.loading.pop(which % len(self.loading))
        if load.sources:
            assert self.memory[load.layer][load.sources[0]] == load.expert, "read from a slot that is not whole"
        if outcome == "failed":
            self.transitions[rank].failed(load, TransferFailed("the peer hung up"))
            return
        if outcome == "good":
            self.memory[load.layer][load.slot] = int(load.expert)
        self.transitions[rank].loaded(load, is_intact=outcome == "good")

    @precondition(lambda self: bool(self.transitions))
    @rule(rank=st.integers(0, 3))
    def vote(self, rank: int) -> None:
        cast = self.transitions[rank % self.num_ranks].vote(self.clock.now_s())
        if cast is not None:
            assert self.ballot is not None
            self.ballot.cast(cast)

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.1, 0.1, TIMEOUT_S]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for transition in self.transitions:
            transition.expire(self.clock.now_s())

    @precondition(lambda self: self.gone - min(self.next_step) < 2)
    @rule()
    def hub_says_go(self) -> None:
        decision = self.ballot.decide(self.gone, self.clock.now_s()) if self.ballot is not None else None
        if decision is not None:
            self.decisions[self.gone] = decision
        self.gone += 1

    @rule(rank=st.integers(0, 3))
    def launch(self, rank: int) -> None:
        rank %= self.num_ranks
        step = self.next_step[rank]
        if step == self.gone:
            return
        self.next_step[rank] += 1
        if not self.transitions:
            used = self.placement
        else:
            if step in self.decisions:
                self.transitions[rank].decided(self.decisions[step])
            used = self.transitions[rank].placement_for(step)
        assert self.epoch_of_step.setdefault(step, used.epoch) == used.epoch, "two epochs in one step"
        self.running[rank].append((step, used))
        self.check(rank, used)

    @rule(rank=st.integers(0, 3))
    def end_step(self, rank: int) -> None:
        rank %= self.num_ranks
        if self.running[rank]:
            step, used = self.running[rank].pop(0)
            self.check(rank, used)
            if self.transitions:
                self.transitions[rank].ended(step)

    @rule(straggler=st.integers(0, 3), ends_late=st.booleans())
    def a_step_of_all(self, straggler: int, ends_late: bool) -> None:
        """The usual course; one rank may launch or end its step later."""
        if self.gone - min(self.next_step) < 2:
            self.hub_says_go()
        for rank in range(self.num_ranks):
            if rank != straggler or ends_late:
                self.launch(rank)
            if rank != straggler:
                self.end_step(rank)

    def check(self, rank: int, used: Placement) -> None:
        """What a step on `rank` would compute with."""
        for layer in range(NUM_LAYERS):
            first = rank * self.slots_per_rank
            for slot, expert in enumerate(used.rank_slots(layer, Rank(rank)), first):
                assert expert is None or self.memory[layer][slot] == expert, "a step computes with a missing expert"

    @precondition(lambda self: bool(self.transitions) and all(t.is_settled for t in self.transitions))
    @rule()
    def finish(self) -> None:
        after = {t.placement.epoch for t in self.transitions}
        assert len(after) == 1, "ranks went different ways"
        assert self.ballot is not None
        assert not self.loading
        if isinstance(self.ballot.decision, Commit):
            assert all(t.phase is Phase.RETIRED for t in self.transitions)
        elif isinstance(self.ballot.decision, Abandon):
            assert after == {self.placement.epoch}
        else:  # the ranks gave up and the hub has not heard: it cannot commit any more
            assert all(t.phase is Phase.ABANDONED for t in self.transitions)
        self.placement = self.transitions[0].placement
        self.transitions, self.ballot, self.decisions = [], None, {}
        self.begin_a_stage()

    @invariant()
    def running_steps_have_their_experts(self) -> None:
        for rank, steps in enumerate(getattr(self, "running", [])):
            for _, used in steps:
                self.check(rank, used)


Engine.TestCase.settings = settings(max_examples=150, stateful_step_count=80, deadline=None)
test_no_step_misses_an_expert_or_mixes_epochs = Engine.TestCase
