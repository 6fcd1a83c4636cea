"""The order of things in a placement epoch, one rank and the hub at a time."""

import pytest
from msgspec.structs import replace

from pd_cluster.clock import FakeClock
from pd_cluster.errors import NotSupported, TransferFailed
from pd_cluster.ids import ExpertId, Rank
from pd_cluster.parallel.placement import LayerPlacement, Placement
from pd_cluster.parallel.stages import Load
from pd_cluster.parallel.transition import Abandon, Ballot, Commit, EpochVote, Phase, Transition

RANKS = frozenset({Rank(0), Rank(1)})


def placed(epoch: int, *slots: int | None) -> Placement:
    layer = LayerPlacement(tuple(None if e is None else ExpertId(e) for e in slots))
    return Placement(epoch=epoch, num_ranks=2, num_experts=4, slots_per_rank=3, layers=(layer,))


OLD = placed(0, 0, 1, None, 2, 3, None)
NEW = placed(1, 0, None, 2, None, 3, 1)  # experts 1 and 2 change ranks through the shadow slots


def begin(rank: int = 0, clock: FakeClock | None = None) -> Transition:
    clock = clock or FakeClock()
    return Transition(OLD, NEW, Rank(rank), now_s=clock.now_s(), timeout_s=5.0)


def ready(rank: int = 0) -> Transition:
    transition = begin(rank)
    for load in transition.take_loads():
        transition.loaded(load, is_intact=True)
    assert transition.phase is Phase.READY
    return transition


def test_a_rank_loads_into_its_empty_slot_from_the_rank_that_has_the_expert() -> None:
    assert begin(0).take_loads() == [Load(layer=0, expert=ExpertId(2), slot=2, sources=(3,))]  # type: ignore[arg-type]
    assert begin(1).take_loads() == [Load(layer=0, expert=ExpertId(1), slot=5, sources=(1,))]  # type: ignore[arg-type]


def test_loads_keep_to_the_budget() -> None:
    wide = Placement(
        epoch=0,
        num_ranks=1,
        num_experts=1,
        slots_per_rank=2,
        layers=(LayerPlacement((ExpertId(0), None)),) * 5,
    )
    after = replace(wide, epoch=1, layers=(LayerPlacement((None, ExpertId(0))),) * 5)
    transition = Transition(wide, after, Rank(0), now_s=0.0, timeout_s=1.0, max_loads_in_flight=2)
    first = transition.take_loads()
    assert (len(first), transition.take_loads()) == (2, [])
    transition.loaded(first[0], is_intact=True)
    assert len(transition.take_loads()) == 1


def test_a_damaged_expert_is_loaded_again_from_the_store_and_then_given_up() -> None:
    transition = begin()
    (load,) = transition.take_loads()
    transition.loaded(load, is_intact=False)
    (again,) = transition.take_loads()
    assert (again.slot, again.sources) == (load.slot, ())
    transition.failed(again, TransferFailed("the disk is gone"))
    assert (transition.phase, transition.reason) == (Phase.ABANDONED, "the disk is gone")
    assert transition.placement is OLD
    assert transition.is_settled


def test_steps_before_the_agreed_one_run_the_old_epoch_and_later_ones_the_new() -> None:
    transition = ready()
    assert transition.placement_for(7) is OLD
    transition.decided(Commit(1, 8))
    assert transition.phase is Phase.COMMITTED
    assert transition.placement_for(8) is NEW
    assert transition.phase is Phase.FLIPPED
    assert not transition.may_reuse_slots, "step 7 still reads the old slots"
    transition.ended(7)
    assert transition.may_reuse_slots
    assert transition.placement is NEW


def test_slots_are_not_reused_while_a_step_from_before_the_transition_runs() -> None:
    transition = ready()
    transition.began_before([5])
    transition.decided(Commit(1, 6))
    transition.placement_for(6)
    transition.ended(6)
    assert not transition.is_settled
    transition.ended(5)
    assert transition.is_settled


def test_a_rank_that_is_late_votes_no_and_one_that_is_ready_waits_for_the_hub() -> None:
    clock = FakeClock()
    late, done = begin(0, clock), ready(1)
    assert late.vote(clock.now_s()) is None
    assert done.vote(clock.now_s()) == EpochVote(rank=Rank(1), epoch=1, digest=NEW.digest())
    (load,) = late.take_loads()
    clock.advance(5.0)
    vote = late.vote(clock.now_s())
    assert vote is not None
    assert vote.reason == "1 experts were not loaded in time on rank 0"
    assert not late.is_settled, "its load may still write the shadow slot"
    late.loaded(load, is_intact=True)
    assert late.is_settled
    assert done.vote(clock.now_s()) is None
    assert done.phase is Phase.READY
    done.decided(Abandon(1, "rank 0 was late"))
    assert (done.phase, done.placement) == (Phase.ABANDONED, OLD)


def test_the_hub_commits_at_the_step_of_its_next_go_once_all_are_ready() -> None:
    ballot = Ballot(NEW, RANKS, now_s=0.0, timeout_s=5.0)
    votes = [ready(rank).vote(0.0) for rank in (0, 1)]
    assert votes[0] is not None
    assert votes[1] is not None
    ballot.cast(votes[0])
    assert ballot.decide(3, 1.0) is None
    ballot.cast(replace(votes[1], epoch=9))  # an old vote
    assert ballot.decide(4, 2.0) is None
    ballot.cast(votes[1])
    assert ballot.decide(5, 3.0) == Commit(1, 5)
    assert ballot.decide(6, 9.0) is None


@pytest.mark.parametrize(
    ("votes", "now_s", "reason"),
    [
        ([EpochVote(rank=Rank(0), epoch=1, digest=NEW.digest())], 5.0, "ranks 1 were not ready in time"),
        ([EpochVote(rank=Rank(1), epoch=1, digest=b"other")], 0.0, "rank 1 planned another placement for epoch 1"),
        ([EpochVote(rank=Rank(1), epoch=1, digest=NEW.digest(), reason="no disk")], 0.0, "rank 1: no disk"),
    ],
)
def test_the_hub_abandons_for_silence_another_plan_or_a_no(votes: list[EpochVote], now_s: float, reason: str) -> None:
    ballot = Ballot(NEW, RANKS, now_s=0.0, timeout_s=5.0)
    for vote in votes:
        ballot.cast(vote)
    assert ballot.decide(2, now_s) == Abandon(1, reason)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (placed(1, 0, 2, None, 1, 3, None), "puts expert 2 of MoE layer 0 into slot 1 of rank 0, where expert 1 is"),
        (placed(3, 0, 1, None, 2, 3, None), "placement epoch 3 cannot follow epoch 0"),
        (replace(NEW, num_ranks=3, slots_per_rank=2), "cannot change num_ranks from 2 to 3"),
        (replace(NEW, layers=NEW.layers * 2), "a placement of 2 MoE layers for a model of 1"),
    ],
)
def test_a_stage_that_does_not_fit_is_refused_by_name(new: Placement, reason: str) -> None:
    with pytest.raises(NotSupported, match=reason):
        Transition(OLD, new, Rank(0), now_s=0.0, timeout_s=1.0)


def test_a_stage_may_not_leave_an_expert_on_dead_ranks_only() -> None:
    with pytest.raises(NotSupported, match="expert 1 of MoE layer 0 on no live rank"):
        Transition(OLD, NEW, Rank(0), now_s=0.0, timeout_s=1.0, live=frozenset({Rank(0)}))


def test_nothing_to_load_is_ready_at_once() -> None:
    only_other = placed(1, 0, 1, None, 2, 3, 0)
    assert Transition(OLD, only_other, Rank(0), now_s=0.0, timeout_s=1.0).phase is Phase.READY
