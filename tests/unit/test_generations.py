from pd_cluster.engine.generations import (
    FORM_S,
    ROSTER_S,
    AllMet,
    Begin,
    Fail,
    Formed,
    Generations,
    Halt,
    Hello,
    Meet,
    Phase,
)
from pd_cluster.ids import EngineEpoch
from pd_cluster.parallel.roster import Roster

A, B, C = map(EngineEpoch, "abc")


def roster(generation: int, *lives: EngineEpoch | None, leaving: frozenset[int] = frozenset()) -> Roster:
    return Roster(generation=generation, tensor_parallel=1, lives=lives, leaving=leaving)


def hello(generation: int, dp_rank: int, life: EngineEpoch, next_step: int = 0) -> Hello:
    return Hello(generation=generation, dp_rank=dp_rank, life=life, next_step=next_step, standing=b"")


def formed(generation: int, step: int, *lives: EngineEpoch | None) -> Formed:
    return Formed(generation=generation, step=step, lives=lives)


def running(dp_rank: int) -> Generations:
    """One of two leads, in generation 0."""
    lead = Generations(dp_rank, (A, B)[dp_rank])
    assert lead.issued(roster(0, A, B), 0.0) == [Halt()]
    assert lead.at_rest(0, b"") == [Meet(0, hello(0, dp_rank, (A, B)[dp_rank]))]
    assert lead.formed(formed(0, 0, A, B)) == [Begin(formed(0, 0, A, B))]
    lead.begun()
    assert not lead.is_over
    return lead


def test_the_hub_waits_for_the_right_life_of_every_member_and_takes_the_greatest_step() -> None:
    hub = running(0)
    assert hub.issued(roster(1, A, C), 1.0) == [Halt()]
    assert hub.hello(hello(1, 1, C, 0)) == []
    assert hub.at_rest(7, b"") == [Meet(0, hello(1, 0, A, 7))]
    assert hub.hello(hello(1, 0, A, 7)) == [AllMet(1, 7, (A, C), [hello(1, 0, A, 7), hello(1, 1, C, 0)])]


def test_a_hello_of_another_life_or_generation_does_not_count() -> None:
    hub = running(0)
    hub.issued(roster(1, A, C), 1.0)
    hub.at_rest(7, b"")
    hub.hello(hello(1, 0, A, 7))
    assert hub.hello(hello(1, 1, B, 9)) == []
    assert hub.hello(hello(0, 1, C, 9)) == []


def test_a_hello_may_come_before_the_roster_it_is_for() -> None:
    hub = running(0)
    assert hub.hello(hello(1, 1, C)) == []
    hub.issued(roster(1, A, C), 1.0)
    hub.at_rest(3, b"")
    assert [type(action) for action in hub.hello(hello(1, 0, A, 3))] == [AllMet]


def test_a_roster_that_only_tells_some_to_leave_interrupts_nothing() -> None:
    lead = running(1)
    assert lead.issued(roster(1, A, B, leaving=frozenset({1})), 1.0) == []
    assert lead.phase is Phase.RUNNING
    assert lead.generation == 0


def test_what_was_formed_for_an_older_roster_means_nothing() -> None:
    lead = running(1)
    lead.issued(roster(1, A, B, C), 1.0)
    lead.at_rest(5, b"")
    lead.issued(roster(2, None, B, C), 1.1)
    assert lead.formed(formed(1, 5, A, B, C)) == []
    assert lead.at_rest(5, b"") == [Meet(1, hello(2, 1, B, 5))]


def test_a_generation_that_ends_while_it_begins_is_begun_to_the_end_and_never_run() -> None:
    lead = running(1)
    lead.issued(roster(1, A, B, C), 1.0)
    lead.at_rest(5, b"")
    lead.formed(formed(1, 5, A, B, C))
    assert lead.issued(roster(2, A, B, None), 1.1) == [Halt()]
    lead.begun()
    assert lead.phase is Phase.HALTING


def test_a_member_that_is_not_in_the_roster_ends() -> None:
    (fail,) = running(1).issued(roster(1, A, None), 1.0)
    assert isinstance(fail, Fail)
    (fail,) = running(1).issued(roster(1, A, C), 1.0)
    assert isinstance(fail, Fail)


def test_a_newcomer_passes_over_the_rosters_before_it() -> None:
    lead = Generations(1, C)
    assert lead.issued(roster(0, A, B), 0.0) == []
    assert lead.issued(roster(1, A, None), 0.0) == []
    assert lead.tick(1000.0) == []
    assert lead.issued(roster(2, A, C), 1000.0) == [Halt()]


def test_a_lead_that_lost_its_hub_gives_up_before_the_hub_does() -> None:
    hub, lead = running(0), running(1)
    for side in (hub, lead):
        side.lost("a peer", 10.0)
        side.lost("another", 12.0)  # waits no longer for that
    assert lead.tick(10.0 + ROSTER_S - 0.1) == []
    assert isinstance(lead.tick(10.0 + ROSTER_S)[0], Fail)
    assert hub.tick(10.0 + ROSTER_S) == []
    assert isinstance(hub.tick(10.0 + 2 * ROSTER_S)[0], Fail)


def test_a_roster_in_time_ends_the_wait() -> None:
    lead = running(1)
    lead.lost("the hub", 10.0)
    lead.issued(roster(1, None, B), 11.0)
    lead.at_rest(1, b"")
    lead.formed(formed(1, 1, None, B))
    lead.begun()
    assert lead.tick(1000.0) == []


def test_a_generation_that_never_forms_is_given_up_by_name() -> None:
    lead = running(1)
    lead.issued(roster(1, A, B, C), 10.0)
    lead.at_rest(1, b"")
    assert lead.tick(10.0 + FORM_S - 0.1) == []
    (fail,) = lead.tick(10.0 + FORM_S)
    assert isinstance(fail, Fail)
    assert "generation 1" in fail.reason
