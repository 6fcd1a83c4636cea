"""The life of an elastic engine and its heartbeats, decided with a fake clock and no process."""

import itertools
from collections.abc import Iterable

import pytest
from msgspec import structs

from pd_cluster.errors import ConfigError, EngineError, ModelError, Unavailable
from pd_cluster.ids import EngineEpoch, EngineId, Rank
from pd_cluster.launch.group_life import (
    GroupLife,
    Issue,
    KillMembers,
    Mismatch,
    StartMembers,
    TerminateMembers,
)
from pd_cluster.launch.group_member import DESPAIR_S, MISMATCH_S, Stage
from pd_cluster.launch.heartbeats import (
    FIRST_BEAT_S,
    LATELY_S,
    LOOK_S,
    MAX_SUSPECTED_STILL_S,
    SLOWEST,
    STILL_S,
    SUSPECTED_STILL_GAPS,
    SUSPECTED_STILL_S,
    WAITED_FOR_S,
)
from pd_cluster.launch.lifecycle import (
    BACKOFF_S,
    FORGIVEN_S,
    GRACE_S,
    EngineDead,
    EngineFailed,
    EngineLost,
    EngineUp,
    State,
)
from pd_cluster.launch.spec import LEASE_S, Beat, LoadedModel, RankReport
from pd_cluster.parallel.roster import Roster

ID = EngineId("decode-0")


def E(number: int) -> EngineEpoch:  # noqa: N802
    return EngineEpoch(f"e{number}")


def group(dp: int = 3, tp: int = 1, max_restarts: int = 2) -> GroupLife:
    """Its epoch is e1, and the first lives of its members are e2, e3, ..."""
    numbers = itertools.count(1)
    return GroupLife(
        ID,
        dp,
        tp,
        max_restarts=max_restarts,
        start_timeout_s=60.0,
        leave_timeout_s=40.0,
        new_epoch=lambda: E(next(numbers)),
    )


def report(life: GroupLife, rank: int, failed: bool = False) -> RankReport:
    lead = rank % life.tensor_parallel == 0
    error = EngineError("it broke").info() if failed else None
    return RankReport(rank=Rank(rank), pid=1, control_address=f"h:{rank}" if lead else None, error=error)


def ready(life: GroupLife, now_s: float = 0.0) -> GroupLife:
    life.tick(now_s)
    for rank in life.missing:
        life.reported(report(life, rank), now_s)
    assert life.state is State.READY
    return life


def roster(generation: int, *lives: int | None, leaving: Iterable[int] = (), tp: int = 1) -> Issue:
    named = tuple(None if life is None else E(life) for life in lives)
    return Issue(E(1), Roster(generation=generation, tensor_parallel=tp, lives=named, leaving=frozenset(leaving)))


def test_all_members_start_with_lives_of_their_own_and_are_up_when_all_have_reported() -> None:
    life = group(2, tp=2)
    assert life.tick(0.0) == [roster(0, 2, 3, tp=2), StartMembers(E(1), {0: E(2), 1: E(3)})]
    for rank in (0, 1, 2):
        assert life.reported(report(life, rank), 1.0) == []
    assert life.missing == [3]
    assert life.reported(report(life, 3), 2.0) == [EngineUp(ID, E(2), ["h:0"], 0), EngineUp(ID, E(3), ["h:2"], 1)]
    assert life.addresses == ["h:0", "h:2"]
    assert life.settled


def test_a_dead_member_is_off_the_roster_at_once_and_dead_when_all_its_ranks_are() -> None:
    life = ready(group(2, tp=2))
    assert life.exited(Rank(2), "rank 2 died", 5.0) == [
        roster(1, 2, None, tp=2),
        EngineLost(ID, E(3), ["h:2"], "rank 2 died", False, 1),
        KillMembers(E(1), {1: E(3)}),
    ]
    assert life.exited(Rank(3), None, 5.1) == [EngineDead(ID, E(3), frozenset({Rank(2)}))]
    assert life.tick(5.2) == [StartMembers(E(1), {1: E(4)})]
    assert life.missing == [2, 3]
    assert life.reported(report(life, 2), 6.0) == []
    assert life.reported(report(life, 3), 7.0) == [roster(2, 2, 4, tp=2), EngineUp(ID, E(4), ["h:2"], 1)]


def test_ranks_seen_dead_together_all_count_as_first() -> None:
    life = ready(group(2, tp=2))
    life.exited(Rank(2), "killed", 5.0)
    assert life.exited(Rank(3), "killed too", 5.0) == [EngineDead(ID, E(3), frozenset({Rank(2), Rank(3)}))]


def test_a_first_start_that_fails_ends_the_whole_engine_for_good() -> None:
    life = group(2)
    life.tick(0.0)
    assert life.reported(report(life, 1, failed=True), 1.0) == [KillMembers(E(1), {0: E(2), 1: E(3)})]
    assert life.exited(Rank(1), "exited", 1.1) == [EngineDead(ID, E(3))]
    assert life.exited(Rank(0), None, 1.2) == [EngineDead(ID, E(2)), EngineFailed(ID, "it broke")]


def test_a_start_that_takes_too_long_ends() -> None:
    life = group(2)
    life.tick(0.0)
    life.reported(report(life, 0), 1.0)
    assert life.tick(59.9) == []
    assert life.tick(60.0) == [KillMembers(E(1), {0: E(2), 1: E(3)})]
    assert life.error is not None
    assert "ranks 1 did not report" in life.error.message
    assert life.tick(60.0 + GRACE_S) == [KillMembers(E(1), {0: E(2), 1: E(3)})]


def test_a_replacement_that_takes_too_long_is_killed_and_tried_again_after_growing_pauses() -> None:
    life, now_s = ready(group(2, max_restarts=3)), 1.0
    life.exited(Rank(1), "died", now_s)
    for pause_s in (0.0, BACKOFF_S, 2 * BACKOFF_S, DESPAIR_S, DESPAIR_S):
        assert life.tick(now_s + pause_s - 0.01) == []
        (start,) = life.tick(now_s := now_s + pause_s)
        assert isinstance(start, StartMembers)
        now_s += 60.0
        assert life.tick(now_s) == [KillMembers(E(1), start.lives)]
        now_s += GRACE_S
        assert life.tick(now_s) == [KillMembers(E(1), start.lives)], "again, until it is dead"
        assert life.exited(Rank(1), None, now_s) == [EngineDead(ID, start.lives[1])]
    assert life.state is State.READY, "the others serve on"
    life.resize(2)
    assert isinstance(life.tick(now_s)[0], StartMembers), "an operator who asks gets another try at once"


def loaded(life: GroupLife, rank: int, weights: str) -> RankReport:
    model = LoadedModel("/models/m", weights, num_experts=12, expert_slots=5)
    return structs.replace(report(life, rank), model=model)


def test_a_member_that_has_loaded_other_weights_does_not_join_and_the_others_go_on() -> None:
    life = group(2, tp=2, max_restarts=100)
    life.tick(0.0)
    for rank in range(4):
        life.reported(loaded(life, rank, "aa"), 0.0)
    assert life.state is State.READY
    now_s = 1.0
    life.exited(Rank(2), "died", now_s)
    life.exited(Rank(3), None, now_s)
    for pause_s in (0.0, MISMATCH_S, MISMATCH_S):
        assert life.tick(now_s + pause_s - 0.01) == []
        (start,) = life.tick(now_s := now_s + pause_s)
        assert isinstance(start, StartMembers)
        assert life.reported(loaded(life, 2, "aa"), now_s) == []
        told, kill = life.reported(loaded(life, 3, "bb"), now_s)
        assert isinstance(told, Mismatch)
        assert told.dp_rank == 1
        assert "/models/m has identity bb there, theirs, from /models/m, is aa" in told.reason
        assert kill == KillMembers(E(1), start.lives)
        for rank in (2, 3):
            life.exited(Rank(rank), None, now_s)
    assert (life.state, life.generation, life.num_up) == (State.READY, 1, 1)
    life.tick(now_s := now_s + MISMATCH_S)
    assert life.reported(loaded(life, 2, "aa"), now_s) == []
    issue, up = life.reported(loaded(life, 3, "aa"), now_s)
    assert isinstance(issue, Issue)
    assert isinstance(up, EngineUp)


def test_an_elastic_engine_does_not_start_from_two_models_and_may_start_anew_from_another() -> None:
    life = group(2)
    life.tick(0.0)
    assert life.reported(loaded(life, 1, "aa"), 0.0) == []
    assert life.reported(loaded(life, 0, "bb"), 0.0) == [KillMembers(E(1), {0: E(2), 1: E(3)})]
    assert isinstance(life.error, ModelError)

    life = group(1)
    for number, weights in enumerate(("aa", "bb")):
        life.tick(float(number))
        life.reported(loaded(life, 0, weights), float(number))
        assert life.state is State.READY
        life.exited(Rank(0), "died", number + 0.5)


@pytest.mark.parametrize(
    ("dp", "tp", "experts", "slots", "least"),
    [(4, 1, 12, 3, 4), (4, 1, 12, 4, 3), (4, 1, 12, 5, 3), (4, 2, 12, 3, 2), (4, 1, 12, 12, 1), (4, 1, 0, 0, 1)],
)
def test_the_least_size_is_what_has_room_for_all_experts(
    dp: int, tp: int, experts: int, slots: int, least: int
) -> None:
    life = group(dp, tp)
    assert life.least_members == 1, "nothing is known yet"
    life.tick(0.0)
    model = LoadedModel("/models/m", "aa", num_experts=experts, expert_slots=slots)
    for rank in range(dp * tp):
        life.reported(structs.replace(report(life, rank), model=model), 0.0)
    assert life.least_members == least
    assert life.does_not_fit(least) is None
    if least > 1:
        assert f"{experts} experts do not fit {(least - 1) * tp} ranks" in (life.does_not_fit(least - 1) or "")


def test_a_member_that_served_long_is_started_again_at_once() -> None:
    life = ready(group(2, max_restarts=1))
    for now_s in (1.0, 2.0 + FORGIVEN_S):
        life.tick(now_s)
        life.exited(Rank(1), "died", now_s)
        assert isinstance(life.tick(now_s)[0], StartMembers)
        life.reported(report(life, 1), now_s)


def test_no_room_for_a_replacement_costs_no_restart() -> None:
    life, now_s = ready(group(2, max_restarts=1)), 10.0
    life.exited(Rank(1), "died", now_s)
    for pause_s in (0.0, BACKOFF_S, 2 * BACKOFF_S, 4 * BACKOFF_S):
        (start,) = life.tick(now_s := now_s + pause_s)
        assert isinstance(start, StartMembers)
        assert life.not_started([1], Unavailable("no room"), now_s) == [EngineDead(ID, start.lives[1])]
    assert life.members[1].num_restarts == 1


def test_an_engine_ends_when_its_last_member_dies_and_starts_anew() -> None:
    life = ready(group(2))
    life.exited(Rank(0), "first", 5.0)
    assert life.exited(Rank(1), "second", 5.0) == [
        EngineLost(ID, E(3), ["h:1"], "second", False, 1),
        EngineDead(ID, E(3), frozenset({Rank(1)})),
    ]
    assert life.state is State.BACKOFF
    again = life.tick(5.1)
    assert again[-1] == StartMembers(E(4), {0: E(5), 1: E(6)})


def test_a_whole_engine_does_not_start_before_all_of_its_last_life_is_dead() -> None:
    life = ready(group(2, tp=2))
    life.exited(Rank(0), "first", 5.0)
    assert life.exited(Rank(2), "second", 5.1)[-1] == KillMembers(E(1), {0: E(2), 1: E(3)})
    assert life.exited(Rank(3), None, 5.2) == [EngineDead(ID, E(3), frozenset({Rank(2)}))]
    assert life.tick(5.3) == []
    assert life.exited(Rank(1), None, 5.4) == [EngineDead(ID, E(2), frozenset({Rank(0)}))]
    assert isinstance(life.tick(5.4)[-1], StartMembers)


def test_survivors_that_cannot_go_on_end_the_engine_and_their_reason_is_kept() -> None:
    life = ready(group(2, max_restarts=0))
    lost = [EngineLost(ID, E(2 + dp), [f"h:{dp}"], "decode-0: raise expert_slots_per_rank", False, dp) for dp in (0, 1)]
    assert life.ended("raise expert_slots_per_rank", 5.0) == [*lost, KillMembers(E(1), {0: E(2), 1: E(3)})]
    life.exited(Rank(0), None, 5.1)
    assert life.exited(Rank(1), None, 5.1)[-1] == EngineFailed(ID, "decode-0: raise expert_slots_per_rank")


def test_an_engine_whose_configuration_is_wrong_is_given_up() -> None:
    life = group(2)
    life.tick(0.0)
    dead = life.not_started([0, 1], ConfigError("no such file"), 0.0)
    assert dead == [EngineDead(ID, E(2)), EngineDead(ID, E(3)), EngineFailed(ID, "no such file")]


def test_no_room_for_an_engine_that_has_served_makes_it_wait() -> None:
    life = ready(group(2, max_restarts=1))
    life.ended("over", 1.0)
    for rank in (0, 1):
        life.exited(Rank(rank), None, 1.0)
    now_s = 1.0
    for pause_s in (0.0, BACKOFF_S, 2 * BACKOFF_S):
        now_s += pause_s
        assert len(life.tick(now_s)) == 2
        life.not_started([0, 1], Unavailable("no room"), now_s)
        assert life.state is State.BACKOFF


# ---- changes of size


def test_a_shrink_marks_members_and_ends_them_once_the_group_can_do_without_them() -> None:
    life = ready(group(4))
    life.resize(2)
    assert life.tick(1.0) == [roster(1, 2, 3, 4, 5, leaving=(2, 3))]
    assert life.released(0, None, 1.5) == [], "that was said of another roster"
    assert life.released(1, None, 2.0) == [
        roster(2, 2, 3, None, None),
        EngineLost(ID, E(4), ["h:2"], "its engine shrinks", True, 2),
        EngineLost(ID, E(5), ["h:3"], "its engine shrinks", True, 3),
        TerminateMembers(E(1), {2: E(4), 3: E(5)}),
    ]
    assert life.exited(Rank(2), "exited", 2.1) == [EngineDead(ID, E(4))]
    assert life.tick(2.0 + GRACE_S) == [KillMembers(E(1), {3: E(5)})]
    life.exited(Rank(3), None, 8.0)
    assert life.tick(8.0) == []
    assert life.settled


def test_a_grown_engine_has_its_members_back_in_new_lives() -> None:
    life = ready(group(3))
    life.resize(1)
    life.tick(1.0)
    life.released(1, None, 1.0)
    for rank in (1, 2):
        life.exited(Rank(rank), "exited", 1.0)
    life.tick(1.0)
    life.resize(3)
    assert life.tick(2.0) == [StartMembers(E(1), {1: E(5), 2: E(6)})]
    assert life.reported(report(life, 2), 3.0) == [roster(3, 2, None, 6), EngineUp(ID, E(6), ["h:2"], 2)]
    assert life.reported(report(life, 1), 4.0) == [roster(4, 2, 5, 6), EngineUp(ID, E(5), ["h:1"], 1)]
    assert life.settled


def test_a_shrink_that_is_refused_is_taken_back_by_name() -> None:
    life = ready(group(3))
    life.resize(1)
    life.tick(1.0)
    assert life.released(1, "12 experts do not fit 8 slots", 2.0) == [roster(2, 2, 3, 4)]
    assert life.tick(2.1) == []
    assert (life.num_wanted, life.refusal) == (3, "12 experts do not fit 8 slots")
    life.resize(2)
    assert life.refusal is None


def test_a_shrink_that_does_not_end_is_taken_back() -> None:
    life = ready(group(3))
    life.resize(1)
    life.tick(1.0)
    assert life.tick(40.9) == []
    assert life.tick(41.0) == [roster(2, 2, 3, 4)]
    assert life.refusal is not None
    assert "did not move in 40 s" in life.refusal


def test_a_shrink_may_be_changed_while_it_goes_on() -> None:
    life = ready(group(4))
    life.resize(1)
    assert life.tick(1.0) == [roster(1, 2, 3, 4, 5, leaving=(1, 2, 3))]
    life.resize(3)
    assert life.tick(2.0) == [roster(2, 2, 3, 4, 5, leaving=(3,))]
    assert life.released(1, None, 2.1) == []


def test_when_those_that_were_to_stay_die_those_that_were_to_leave_stay() -> None:
    life = ready(group(2))
    life.resize(1)
    life.tick(1.0)
    assert life.exited(Rank(0), "died", 2.0)[0] == roster(2, None, 3)
    assert life.tick(2.1) == []
    assert life.settled
    assert life.addresses == ["h:1"]


def test_a_member_that_pauses_or_starts_goes_before_one_that_serves() -> None:
    life = ready(group(2))
    life.exited(Rank(0), "died", 1.0)
    life.tick(1.0)
    life.resize(1)
    assert life.tick(1.1) == [TerminateMembers(E(1), {0: E(4)})]
    assert life.exited(Rank(0), "exited", 1.2) == [EngineDead(ID, E(4))]
    life.tick(1.3)
    assert [member.stage for member in life.members] == [Stage.AWAY, Stage.UP]


def test_an_engine_that_starts_anew_shrinks_again_to_what_it_was() -> None:
    life = ready(group(2))
    life.resize(1)
    life.tick(1.0)
    life.released(1, None, 1.0)
    life.exited(Rank(1), "exited", 1.0)
    life.exited(Rank(0), "died", 2.0)
    ready(life, 2.0)
    (issue,) = life.tick(2.1)
    assert isinstance(issue, Issue)
    assert issue.roster.leaving == {1}


def test_stop_asks_every_rank_and_kills_those_that_take_too_long() -> None:
    life = ready(group(2))
    life.exited(Rank(1), "died", 1.0)
    assert life.stop(1.0) == [
        EngineLost(ID, E(2), ["h:0"], "the cluster stops", True, 0),
        TerminateMembers(E(1), {0: E(2)}),
    ]
    assert life.tick(1.0 + GRACE_S) == [KillMembers(E(1), {0: E(2)})]
    assert life.exited(Rank(0), None, 7.0) == [EngineDead(ID, E(2))]
    assert life.state is State.STOPPED


# ---- heartbeats


class Beating:
    """A group whose ranks beat every `every_s`, but those in `silent`; `suspects` are said by rank."""

    def __init__(self, dp: int = 3, tp: int = 1, every_s: float = 0.1) -> None:
        self.every_s = every_s
        self.life = ready(group(dp, tp))
        self.now_s, self.num_ticks = 0.0, 0
        self.counts: dict[Rank, int] = {}
        self.silent: set[int] = set()
        self.suspects: dict[int, list[Rank]] = {}
        self.awaited: dict[int, list[Rank]] = {}

    def until_lost(self, within_s: float) -> tuple[float, str] | None:
        """When the first member was lost, and why."""
        start_s = self.now_s
        while self.now_s - start_s < within_s:
            self.num_ticks += 1
            self.now_s = self.num_ticks / 10
            if self.num_ticks % round(10 * self.every_s) == 0:
                beats = {rank for rank in self.life.beating if rank not in self.silent}
                self.counts |= {rank: self.counts.get(rank, -1) + (rank in beats) for rank in self.life.beating}
            seen = {
                rank: Beat(self.counts.get(rank, -1), self.suspects.get(rank, []), self.awaited.get(rank, []))
                for rank in self.life.beating
            }
            for action in self.life.beats(seen, self.now_s):
                if isinstance(action, EngineLost):
                    return self.now_s - start_s, action.reason
        return None

    def nobody_looks(self, seconds: float) -> None:
        """While the ranks beat on."""
        self.num_ticks += round(10 * seconds)
        self.counts |= {rank: count + round(seconds / self.every_s) for rank, count in self.counts.items()}


def test_a_heartbeat_that_stands_still_is_a_death() -> None:
    beating = Beating(3, tp=2)
    assert beating.until_lost(1.0) is None
    beating.silent = {3}
    lost = beating.until_lost(10.0)
    assert lost is not None
    assert STILL_S - 0.11 <= lost[0] <= STILL_S + 0.11
    assert "rank 3 gave no heartbeat" in lost[1]
    assert beating.life.members[1].stage is Stage.ENDING


@pytest.mark.parametrize("what", ["suspects", "awaited"])
def test_one_that_a_peer_waits_for_is_dead_sooner(what: str) -> None:
    beating = Beating()
    beating.until_lost(1.0)
    beating.silent = {1}
    setattr(beating, what, {0: [Rank(1)]})
    lost = beating.until_lost(10.0)
    assert lost is not None
    assert SUSPECTED_STILL_S - 0.11 <= lost[0] <= SUSPECTED_STILL_S + 0.11
    beating.life.exited(Rank(1), None, beating.now_s)
    assert beating.life.members[1].first_dead == {1}, "it did not die for another's sake"


def test_a_hub_that_beats_may_keep_the_next_step_waiting() -> None:
    """While experts are brought back, for one."""
    beating = Beating()
    beating.until_lost(1.0)
    beating.awaited = {1: [Rank(0)], 2: [Rank(0)]}
    assert beating.until_lost(3 * WAITED_FOR_S) is None


def test_where_all_beat_late_more_patience_is_right_until_they_beat_in_time_again() -> None:
    beating = Beating(every_s=0.8)
    beating.until_lost(5.0)
    beating.silent, beating.suspects = {1}, {0: [Rank(1)], 2: [Rank(1)]}
    lost = beating.until_lost(10.0)
    assert lost is not None
    assert SUSPECTED_STILL_GAPS * 0.7 - 0.8 < lost[0] < STILL_S, "the last beat may have been almost 0.8 s ago"
    beating = Beating(every_s=0.8)
    beating.until_lost(5.0)
    beating.every_s = 0.1
    beating.until_lost(2 * LATELY_S)
    beating.silent, beating.suspects = {1}, {0: [Rank(1)]}
    lost = beating.until_lost(10.0)
    assert lost is not None
    assert lost[0] < SUSPECTED_STILL_S + 0.11


def test_a_member_that_beats_slowly_is_not_waited_for_much_longer_than_its_beats_take() -> None:
    beating = Beating(every_s=5.7)
    assert beating.until_lost(30.0) is None
    beating.suspects = {0: [Rank(1)], 2: [Rank(1)]}
    assert beating.until_lost(7.0) is None
    beating.silent = {1}
    lost = beating.until_lost(30.0)
    assert lost is not None
    assert lost[0] <= SLOWEST * 5.7 + 0.2
    assert "gave no heartbeat" in lost[1]


def test_no_member_is_waited_for_longer_than_streams_may_stand_still() -> None:
    beating = Beating(every_s=11.0)
    assert beating.until_lost(60.0) is None, "nobody waits"
    beating.silent, beating.suspects = {1}, {0: [Rank(1)]}
    lost = beating.until_lost(30.0)
    assert lost is not None
    assert lost[0] <= MAX_SUSPECTED_STILL_S + 0.2


def test_time_in_which_nobody_looked_is_neither_patience_nor_silence() -> None:
    beating = Beating()
    beating.until_lost(1.0)
    beating.suspects = {0: [Rank(1)], 2: [Rank(1)]}
    beating.nobody_looks(5.7)
    assert beating.until_lost(1.0) is None
    beating.silent = {1}
    lost = beating.until_lost(10.0)
    assert lost is not None
    assert lost[0] <= SUSPECTED_STILL_GAPS * LOOK_S + 0.11


def test_a_late_look_that_finds_no_new_beats_kills_nobody() -> None:
    beating = Beating()
    beating.until_lost(1.0)
    beating.suspects = {0: [Rank(1)], 1: [Rank(0)], 2: [Rank(1)]}
    beating.num_ticks += 57
    assert beating.until_lost(0.1) is None, "they may be on the way"
    beating.nobody_looks(1.0)
    assert beating.until_lost(1.0) is None


def test_the_word_of_a_rank_that_is_silent_itself_counts_for_nothing() -> None:
    beating = Beating()
    beating.suspects = {1: [Rank(2)]}
    beating.until_lost(0.5)
    beating.silent = {1, 2}
    lost = beating.until_lost(10.0)
    assert lost is not None
    assert lost[0] > STILL_S - 0.11


def test_silence_of_all_is_not_a_death_before_the_lease_is_over() -> None:
    beating = Beating()
    beating.until_lost(1.0)
    beating.silent = {0, 1, 2}
    assert beating.until_lost(LEASE_S - 1.0) is None
    beating.silent = set()
    assert beating.until_lost(2 * LEASE_S) is None
    beating.silent = {0, 1, 2}
    assert beating.until_lost(LEASE_S + 1.0) is not None
    assert beating.life.state is State.ENDING


def test_a_rank_that_never_beats_is_lost_after_a_while() -> None:
    beating = Beating()
    beating.silent = {2}
    lost = beating.until_lost(FIRST_BEAT_S + 5.0)
    assert lost is not None
    assert abs(lost[0] - FIRST_BEAT_S) < 0.2


def test_a_member_that_beats_and_is_waited_for_all_the_time_is_lost() -> None:
    beating = Beating()
    beating.suspects = {0: [Rank(2)], 1: [Rank(2)], 2: [Rank(0)]}
    lost = beating.until_lost(WAITED_FOR_S + 5.0)
    assert lost is not None
    assert abs(lost[0] - WAITED_FOR_S) < 0.2
    assert "DP ranks 0, 1 waited for DP rank 2" in lost[1]
    beating.suspects = {}
    assert beating.until_lost(2 * WAITED_FOR_S) is None


def test_waiting_now_and_then_is_no_death() -> None:
    beating = Beating()
    for _ in range(5):
        beating.suspects = {0: [Rank(2)]}
        assert beating.until_lost(WAITED_FOR_S / 2) is None
        beating.suspects = {}
        assert beating.until_lost(0.3) is None
