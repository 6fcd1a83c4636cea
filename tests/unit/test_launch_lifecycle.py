"""The life of an engine, decided with a fake clock and no process."""

import itertools
import signal

import pytest
from msgspec import structs

from pd_cluster.config import load_config
from pd_cluster.errors import ConfigError, ErrorInfo, ModelError, Unavailable
from pd_cluster.ids import EngineEpoch, EngineId, Rank
from pd_cluster.launch.lifecycle import (
    FORGIVEN_S,
    GRACE_S,
    MAX_BACKOFF_S,
    NEXT,
    EngineDead,
    EngineFailed,
    EngineLife,
    EngineLost,
    EngineUp,
    Kill,
    Start,
    State,
    Terminate,
    describe_exit,
)
from pd_cluster.launch.roles import engine_shapes, rank_specs
from pd_cluster.launch.spec import LoadedModel, RankReport

ID = EngineId("decode-0")


def life(num_ranks: int = 2, max_restarts: int = 2) -> EngineLife:
    numbers = itertools.count(1)
    return EngineLife(
        ID,
        num_ranks,
        max_restarts=max_restarts,
        start_timeout_s=60.0,
        new_epoch=lambda: EngineEpoch(f"e{next(numbers)}"),
    )


def report(rank: int, error: ErrorInfo | None = None, lead: bool = True) -> RankReport:
    return RankReport(
        rank=Rank(rank), pid=100 + rank, control_address=f"h:{rank}" if lead and not error else None, error=error
    )


def ready(engine: EngineLife, now_s: float = 0.0) -> EngineLife:
    engine.tick(now_s)
    for rank in range(engine.num_ranks):
        engine.reported(report(rank), now_s)
    assert engine.state is State.READY
    return engine


def test_an_engine_is_up_when_all_its_ranks_have_reported() -> None:
    engine = life()
    assert engine.tick(0.0) == [Start(EngineEpoch("e1"))]
    assert engine.reported(report(1), 1.0) == []
    assert engine.missing == [0]
    assert engine.reported(report(0), 2.0) == [EngineUp(ID, EngineEpoch("e1"), ["h:0", "h:1"])]


def test_only_leads_have_addresses() -> None:
    engine = life()
    engine.tick(0.0)
    engine.reported(report(1, lead=False), 0.0)
    assert engine.reported(report(0), 0.0) == [EngineUp(ID, EngineEpoch("e1"), ["h:0"])]


def test_one_dead_rank_takes_the_rest_and_death_is_announced_only_when_all_are_dead() -> None:
    engine = ready(life(num_ranks=3))
    epoch = EngineEpoch("e1")
    lost, kill = engine.exited(Rank(1), "rank 1 died", 5.0)
    assert lost == EngineLost(ID, epoch, ["h:0", "h:1", "h:2"], "rank 1 died")
    assert kill == Kill(epoch)
    assert engine.exited(Rank(0), None, 5.1) == []
    assert engine.exited(Rank(2), "rank 2 lost rank 1\nand its log", 5.2) == [
        EngineDead(ID, epoch, frozenset({Rank(1)}))
    ]
    assert engine.error is not None
    assert engine.error.message.splitlines() == ["rank 1 died", "also: rank 2 lost rank 1"]


def test_ranks_found_dead_together_are_told_apart_from_those_that_die_for_their_sake() -> None:
    engine = ready(life(num_ranks=4))
    engine.exited(Rank(1), "SIGSEGV", 5.0)
    engine.exited(Rank(3), "SIGSEGV", 5.0)
    engine.exited(Rank(2), "lost rank 1", 5.1)
    assert engine.exited(Rank(0), None, 5.2) == [EngineDead(ID, EngineEpoch("e1"), frozenset({Rank(1), Rank(3)}))]


def test_an_engine_restarts_with_a_new_epoch_at_once_then_after_growing_pauses_until_it_is_given_up() -> None:
    engine = ready(life(num_ranks=1, max_restarts=3))
    engine.exited(Rank(0), "first", 10.0)
    assert engine.tick(10.0) == [Start(EngineEpoch("e2"))]
    engine.reported(report(0), 12.0)
    engine.exited(Rank(0), "second", 20.0)
    assert engine.tick(20.9) == []
    assert engine.tick(21.0) == [Start(EngineEpoch("e3"))]
    engine.exited(Rank(0), "third", 22.0)
    assert engine.tick(23.9) == []
    assert engine.tick(24.0) == [Start(EngineEpoch("e4"))]
    dead, failed = engine.exited(Rank(0), "fourth", 25.0)
    assert dead == EngineDead(ID, EngineEpoch("e4"))  # it had not served
    assert failed == EngineFailed(ID, "fourth")
    assert engine.tick(1e6) == []


def test_an_engine_that_served_long_is_forgiven_its_restarts() -> None:
    engine = ready(life(num_ranks=1, max_restarts=1))
    engine.exited(Rank(0), "first", 0.0)
    engine.tick(1.0)
    engine.reported(report(0), 1.0)
    engine.tick(1.0 + FORGIVEN_S)
    assert engine.exited(Rank(0), "second", 2.0 + FORGIVEN_S) == [
        EngineLost(ID, EngineEpoch("e2"), ["h:0"], "second"),
        EngineDead(ID, EngineEpoch("e2"), frozenset({Rank(0)})),
    ]
    assert engine.state is State.BACKOFF


def test_a_first_start_that_fails_is_not_repeated() -> None:
    engine = life()
    engine.tick(0.0)
    assert engine.exited(Rank(0), "boom", 1.0) == [Kill(EngineEpoch("e1"))]
    assert engine.exited(Rank(1), None, 1.1) == [
        EngineDead(ID, EngineEpoch("e1")),
        EngineFailed(ID, "boom"),
    ]


def test_a_configuration_error_keeps_its_class_and_is_never_repeated() -> None:
    engine = ready(life(num_ranks=1))
    engine.exited(Rank(0), "died", 0.0)
    engine.tick(1.0)
    assert engine.reported(report(0, ConfigError("kv.num_blocks is too small").info()), 2.0) == [
        Kill(EngineEpoch("e2"))
    ]
    assert engine.exited(Rank(0), "exited", 3.0)[-1] == EngineFailed(ID, "kv.num_blocks is too small")
    assert isinstance(engine.error, ConfigError)


def test_ranks_that_have_loaded_other_weights_than_each_other_never_serve_together() -> None:
    def loaded(rank: int, weights: str) -> RankReport:
        return structs.replace(report(rank), model=LoadedModel("/models/m", weights))

    engine = life()
    engine.tick(0.0)
    assert engine.reported(loaded(1, "aa"), 1.0) == []
    assert engine.reported(loaded(0, "bb"), 1.0) == [Kill(EngineEpoch("e1"))]
    assert isinstance(engine.error, ModelError)
    assert "rank 0 has loaded other weights" in engine.error.message
    assert "/models/m has identity bb there, theirs, from /models/m, is aa" in engine.error.message

    engine = ready(life(num_ranks=1))
    engine.exited(Rank(0), "died", 0.0)
    engine.tick(1.0)
    (up,) = engine.reported(loaded(0, "bb"), 2.0)
    assert isinstance(up, EngineUp), "an engine that starts anew as a whole may have new weights"


def test_a_start_past_its_deadline_names_the_ranks_that_are_missing() -> None:
    engine = life(num_ranks=3)
    engine.tick(0.0)
    engine.reported(report(1), 1.0)
    assert engine.tick(59.9) == []
    assert engine.tick(60.0) == [Kill(EngineEpoch("e1"))]
    assert engine.error is not None
    assert "ranks 0, 2 did not report" in engine.error.message


def test_an_engine_that_has_served_waits_for_room_as_long_as_it_takes() -> None:
    engine = ready(life(num_ranks=1, max_restarts=1))
    engine.exited(Rank(0), "its node died", 0.0)
    now_s = 0.0
    for number in range(2, 20):
        assert engine.tick(now_s) == [Start(EngineEpoch(f"e{number}"))]
        assert engine.not_started(Unavailable("no room"), now_s) == [EngineDead(ID, EngineEpoch(f"e{number}"))]
        assert engine.tick(now_s + 0.9) == []
        now_s += MAX_BACKOFF_S
    engine.tick(now_s)
    engine.reported(report(0), now_s)
    assert engine.state is State.READY
    assert engine.exited(Rank(0), "died", now_s)[-1] == EngineFailed(ID, "died")


def test_a_first_start_without_room_is_not_repeated() -> None:
    engine = life(num_ranks=1)
    engine.tick(0.0)
    assert engine.not_started(Unavailable("no room"), 1.0)[-1] == EngineFailed(ID, "no room")


def test_stop_asks_first_and_kills_those_that_do_not_end() -> None:
    engine = ready(life())
    epoch = EngineEpoch("e1")
    assert engine.stop(10.0) == [
        EngineLost(ID, epoch, ["h:0", "h:1"], "the cluster stops", expected=True),
        Terminate(epoch),
    ]
    assert engine.exited(Rank(0), "ended", 10.1) == []
    assert engine.tick(10.0 + GRACE_S - 0.1) == []
    assert engine.tick(10.0 + GRACE_S) == [Kill(epoch)]
    assert engine.exited(Rank(1), None, 16.0) == [EngineDead(ID, epoch)]
    assert engine.state is State.STOPPED


@pytest.mark.parametrize("state", [State.STARTING, State.ENDING, State.BACKOFF, State.FAILED])
def test_stop_from_any_state_ends_in_stopped_and_starts_nothing(state: State) -> None:
    engine = ready(life(num_ranks=1, max_restarts=0 if state is State.FAILED else 2))
    if state is State.ENDING:
        engine = ready(life(num_ranks=2))
    if state is State.STARTING:
        engine = life(num_ranks=1)
        engine.tick(0.0)
    else:
        engine.exited(Rank(0), "died", 0.0)
    assert engine.state is state
    engine.stop(1.0)
    for rank in range(engine.num_ranks):
        engine.exited(Rank(rank), "ended", 2.0)
    assert engine.state is State.STOPPED
    assert engine.tick(1e6) == []


def test_late_reports_of_an_ending_engine_change_nothing() -> None:
    engine = life()
    engine.tick(0.0)
    engine.exited(Rank(0), "died", 1.0)
    assert engine.reported(report(1), 1.1) == []
    assert engine.state is State.ENDING


def test_every_state_can_reach_stopped() -> None:
    reach = {State.STOPPED}
    for _ in State:
        reach |= {state for state, after in NEXT.items() if after & reach}
    assert reach == set(State)


def test_an_exit_is_described_by_its_signal_and_last_words() -> None:
    assert describe_exit("decode-0.1", 3, "") == "decode-0.1 exited with code 3"
    assert describe_exit("decode-0.1", -signal.SIGSEGV, "") == "decode-0.1 was killed by SIGSEGV"
    assert "out of memory" in describe_exit("decode-0.1", -signal.SIGKILL, "")
    assert describe_exit("d.0", 1, "at line 3\nValueError: boom\n") == (
        "d.0 exited with code 1: ValueError: boom\nat line 3\nValueError: boom"
    )


def test_the_role_table_follows_the_configuration() -> None:
    config = load_config(
        overrides=["prefill.instances=2", "prefill.tensor_parallel=2", "decode.data_parallel=3", "decode.threads=2"]
    )
    shapes = engine_shapes(config)
    assert [(s.engine_id, s.role, s.num_ranks, s.threads) for s in shapes] == [
        ("prefill-0", "prefill", 2, 1),
        ("prefill-1", "prefill", 2, 1),
        ("decode-0", "decode", 3, 2),
    ]
    colocated = load_config(overrides=["colocated=true", "decode.data_parallel=3"])
    assert [(s.engine_id, s.role, s.num_ranks) for s in engine_shapes(colocated)] == [("colocated-0", "colocated", 3)]


def test_specs_of_an_engine_differ_only_in_their_rank() -> None:
    config = load_config(overrides=["decode.data_parallel=2", "decode.tensor_parallel=2"])
    specs = rank_specs(engine_shapes(config)[-1], EngineEpoch("e"), config, ("h", 1), ranks_on_host=5)
    assert [(s.rank, s.dp_rank, s.tp_rank, s.is_lead, s.worker_id, s.name) for s in specs] == [
        (0, 0, 0, True, "decode-0/0", "decode-0.0"),
        (1, 0, 1, False, "decode-0/0", "decode-0.1"),
        (2, 1, 0, True, "decode-0/1", "decode-0.2"),
        (3, 1, 1, False, "decode-0/1", "decode-0.3"),
    ]
