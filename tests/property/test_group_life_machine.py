"""An elastic engine under random deaths, late reports, silence, refusals and changes of size, on a fake clock.

The model knows processes: which were started, and which are dead. It holds the decisions against that.
"""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pd_cluster.errors import EngineError, Unavailable
from pd_cluster.ids import EngineEpoch, EngineId, Rank
from pd_cluster.launch.group_life import (
    GroupAction,
    GroupLife,
    Issue,
    KillMembers,
    StartMembers,
    TerminateMembers,
)
from pd_cluster.launch.group_member import DESPAIR_S, Stage
from pd_cluster.launch.lifecycle import EngineDead, EngineFailed, EngineLost, EngineUp, State
from pd_cluster.launch.spec import Beat, RankReport
from pd_cluster.parallel.roster import Roster

DP = 3
START_S, LEAVE_S, STEP_S = 60.0, 40.0, 0.1
picks = st.integers(0, 11)


class GroupLifeMachine(RuleBasedStateMachine):
    @initialize(
        tensor_parallel=st.integers(1, 2),
        max_restarts=st.integers(0, 4),
        comes_up=st.sampled_from([True, True, True, True, True, False]),
    )
    def begin(self, tensor_parallel: int, max_restarts: int, comes_up: bool) -> None:
        numbers = itertools.count(1)
        self.tp = tensor_parallel
        self.now_s = 0.0
        self.life = GroupLife(
            EngineId("decode-0"),
            DP,
            tensor_parallel,
            max_restarts=max_restarts,
            start_timeout_s=START_S,
            leave_timeout_s=LEAVE_S,
            new_epoch=lambda: EngineEpoch(f"e{next(numbers)}"),
        )
        self.runs: dict[Rank, EngineEpoch] = {}  # processes that live
        self.doomed: set[Rank] = set()  # of them, killed or asked to end
        self.lives: set[EngineEpoch] = set()  # ever started
        self.dead: set[EngineEpoch] = set()  # announced
        self.ups: dict[int, EngineEpoch] = {}  # told to routers, by DP rank
        self.rosters: list[Roster] = []  # of the present epoch
        self.counts: dict[Rank, int] = {}
        self.silent: set[int] = set()  # DP ranks without heartbeats
        self.refuse_starts = False
        if comes_up:
            self.do(self.life.tick(0.0))
            self.all_report()
            assert self.life.state is State.READY

    # ---- doing what was decided

    def do(self, actions: list[GroupAction]) -> None:
        for action in actions:
            match action:
                case Issue():
                    if action.roster.generation == 0:
                        assert not self.runs, "an engine starts while something of its last life runs"
                        self.rosters = []
                    assert action.roster.generation == len(self.rosters), "generations ascend without a gap"
                    self.rosters.append(action.roster)
                case StartMembers():
                    self.start(action.lives)
                case TerminateMembers() | KillMembers():
                    assert action.lives
                    for dp_rank, life in action.lives.items():
                        for rank in self.ranks(dp_rank):
                            if rank in self.runs:
                                assert self.runs[rank] == life
                                self.doomed.add(rank)
                case EngineUp():
                    (address,) = action.addresses
                    dp_rank = int(address) // self.tp
                    assert all(self.runs[rank] == action.epoch for rank in self.ranks(dp_rank))
                    assert dp_rank not in self.ups
                    self.ups[dp_rank] = action.epoch
                case EngineLost():
                    (address,) = action.addresses
                    assert self.ups.pop(int(address) // self.tp) == action.epoch
                case EngineDead():
                    assert action.epoch in self.lives - self.dead, "announced once, and only when started"
                    assert action.epoch not in self.runs.values(), "announced while a process of it may still run"
                    assert action.epoch not in self.ups.values(), "dead before it was lost"
                    self.dead.add(action.epoch)
                case EngineFailed():
                    assert not self.runs

    def start(self, lives: dict[int, EngineEpoch]) -> None:
        for dp_rank, life in lives.items():
            assert life not in self.lives
            assert not any(rank in self.runs for rank in self.ranks(dp_rank)), "two lives of a member at once"
        self.lives |= set(lives.values())
        if self.refuse_starts:
            self.do(self.life.not_started(list(lives), Unavailable("no room"), self.now_s))
            return
        for dp_rank, life in lives.items():
            self.silent.discard(dp_rank)
            for rank in self.ranks(dp_rank):
                self.runs[rank] = life
                self.counts[rank] = 0

    def ranks(self, dp_rank: int) -> list[Rank]:
        return [Rank(dp_rank * self.tp + tp_rank) for tp_rank in range(self.tp)]

    def die(self, rank: Rank, reason: str | None) -> None:
        del self.runs[rank]
        self.doomed.discard(rank)
        self.do(self.life.exited(rank, reason, self.now_s))

    # ---- what may happen

    @rule(steps=st.sampled_from([1, 1, 2, 6, 40, 200]))
    def time_passes(self, steps: int) -> None:
        for _ in range(steps):
            self.now_s += STEP_S
            self.do(self.life.tick(self.now_s))
            self.beat()

    def beat(self) -> None:
        seen = {}
        for rank in self.life.beating:
            if rank // self.tp not in self.silent:
                self.counts[rank] += 1
            suspects = [Rank(dp_rank * self.tp) for dp_rank in self.silent if dp_rank != rank // self.tp]
            seen[rank] = Beat(self.counts[rank], suspects if rank // self.tp not in self.silent else [])
        self.do(self.life.beats(seen, self.now_s))

    @precondition(lambda self: self.life.missing)
    @rule(pick=picks, fails=st.integers(0, 9).map(lambda number: number == 9))
    def a_rank_reports(self, pick: int, fails: bool) -> None:
        rank = self.life.missing[pick % len(self.life.missing)]
        if rank not in self.runs:
            return  # it died before its word was read
        error = EngineError("it cannot").info() if fails else None
        address = str(rank) if rank % self.tp == 0 else None
        self.do(self.life.reported(RankReport(rank=rank, pid=1, control_address=address, error=error), self.now_s))

    @rule()
    def all_report(self) -> None:
        for rank in self.life.missing:
            self.a_rank_reports(self.life.missing.index(rank), False)

    @precondition(lambda self: self.runs)
    @rule(pick=picks)
    def a_rank_dies(self, pick: int) -> None:
        rank = sorted(self.runs)[pick % len(self.runs)]
        self.die(rank, None if rank in self.doomed else f"rank {rank} died")

    @precondition(lambda self: self.doomed)
    @rule()
    def the_doomed_die(self) -> None:
        for rank in sorted(self.doomed):
            self.die(rank, None)

    @rule(dp_rank=st.integers(0, DP - 1))
    def a_member_falls_silent(self, dp_rank: int) -> None:
        self.silent.add(dp_rank)

    @rule(dp_rank=st.integers(0, DP - 1))
    def a_member_is_heard_again(self, dp_rank: int) -> None:
        self.silent.discard(dp_rank)

    @rule(num_members=st.integers(1, DP))
    def resize(self, num_members: int) -> None:
        self.life.resize(num_members)
        self.do(self.life.tick(self.now_s))

    @precondition(lambda self: self.rosters)
    @rule(back=st.integers(0, 2), refused=st.sampled_from([None, "no slots"]))
    def the_group_answers(self, back: int, refused: str | None) -> None:
        generation = self.rosters[-1].generation - back
        leaving = self.rosters[-1].leaving if back == 0 and self.life.state is State.READY else frozenset()
        self.do(self.life.released(generation, refused, self.now_s))
        for dp_rank in leaving:
            assert (self.life.members[dp_rank].stage is Stage.UP) == (refused is not None)

    @rule(pick=st.integers(0, 9))
    def the_group_cannot_go_on(self, pick: int) -> None:
        if pick:
            return  # seldom
        self.do(self.life.ended("experts do not fit", self.now_s))
        assert self.life.state is not State.READY

    @rule(refuse=st.booleans())
    def the_launcher_has_room_or_not(self, refuse: bool) -> None:
        self.refuse_starts = refuse

    @rule(pick=st.integers(0, 19))
    def stop(self, pick: int) -> None:
        if pick:
            return
        self.do(self.life.stop(self.now_s))

    # ---- what must hold

    @invariant()
    def the_roster_is_who_serves(self) -> None:
        if self.life.state is State.READY:
            assert {dp: life for dp, life in enumerate(self.rosters[-1].lives) if life is not None} == self.ups
            assert self.rosters[-1].leaving == self.life.leaving
            assert self.ups.keys() - self.rosters[-1].leaving, "all of them leave"
        else:
            assert not self.ups

    @invariant()
    def what_ended_is_over(self) -> None:
        if self.life.state in (State.BACKOFF, State.FAILED, State.STOPPED):
            assert not self.runs
            assert self.lives == self.dead

    def teardown(self) -> None:
        """Whatever happened: with ranks that answer and a group that lets go, it becomes what it shall be."""
        if not hasattr(self, "life"):
            return
        self.refuse_starts, self.silent = False, set()
        give_up_s = self.now_s + 3 * (START_S + LEAVE_S + DESPAIR_S)
        while not (self.life.settled or self.life.state in (State.FAILED, State.STOPPED)):
            assert self.now_s < give_up_s, [member.stage for member in self.life.members]
            self.now_s += 0.4
            self.the_doomed_die()
            self.all_report()
            self.do(self.life.tick(self.now_s))
            self.beat()
            if self.rosters:
                self.do(self.life.released(self.rosters[-1].generation, None, self.now_s))
            self.the_roster_is_who_serves()
            self.what_ended_is_over()
        self.stop(0) if self.life.state is not State.STOPPED else None
        self.the_doomed_die()
        assert not self.runs
        assert self.lives == self.dead
        assert self.life.state is State.STOPPED


GroupLifeMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestGroupLife = GroupLifeMachine.TestCase
