"""Which workers are chosen, and what is said when none can be."""

from collections import Counter

import pytest
from fake_worker import FakeWorker

from pd_cluster.errors import ContextTooLong, Overloaded, PeerIncompatible, Unavailable
from pd_cluster.messages import WorkerLoad
from router.directory import Directory, Health
from router.policy import pick_decode, pick_prefill


def directory(*workers: FakeWorker) -> Directory:
    known = Directory()
    for worker in workers:
        known.welcome(worker.info, worker.epoch)
    return known


def prefill(known: Directory, num_tokens: int = 100, cached=None, remaining_s: float = 60.0, **options) -> str:
    return pick_prefill(known, num_tokens, cached or {}, remaining_s=remaining_s, **options).worker.id


def decode(known: Directory, num_tokens: int = 100, cached=None, source: str = "prefill-0/0", **options) -> str:
    return pick_decode(known, known.get(source), num_tokens, cached or {}, **options).worker.id


P0, P1, D0, D1 = "prefill-0/0", "prefill-1/0", "decode-0/0", "decode-1/0"


@pytest.fixture
def known() -> Directory:
    return directory(FakeWorker("prefill-0"), FakeWorker("prefill-1"), FakeWorker("decode-0"), FakeWorker("decode-1"))


def test_equal_workers_take_turns(known):
    assert Counter(prefill(known, turn=turn) for turn in range(10)) == {P0: 5, P1: 5}
    assert Counter(decode(known, turn=turn) for turn in range(10)) == {D0: 5, D1: 5}


def test_the_shorter_line_wins(known):
    known.get(P0).observe_load(WorkerLoad(num_waiting_tokens=100_000, num_free_blocks=64))
    assert {prefill(known, turn=turn) for turn in range(4)} == {P1}


def test_what_was_sent_since_the_last_heartbeat_counts(known):
    known.get(P0).add_prefill(100_000)
    assert prefill(known) == P1
    known.get(P0).observe_load(WorkerLoad(num_waiting_tokens=0, num_free_blocks=64))  # it is done already
    known.get(P1).add_prefill(100_000)
    assert prefill(known) == P0


def test_a_cached_prefix_wins_over_an_idle_worker_but_not_over_any_line(known):
    for worker in (known.get(P0), known.get(P1)):
        worker.costs.observe_prefill(512, 0, 5.0)  # 10 ms a token: a cached prefix is worth something
    cached = {P1: 400}
    assert {prefill(known, 420, cached, turn=turn) for turn in range(4)} == {P1}
    known.get(P1).add_prefill(200)
    assert prefill(known, 420, cached) == P1
    known.get(P1).add_prefill(5_000)
    assert prefill(known, 420, cached) == P0


def test_a_slow_worker_gets_less(known):
    known.get(P0).costs.observe_prefill(512, 0, 10.0)
    known.get(P1).costs.observe_prefill(512, 0, 1.0)
    assert {prefill(known, turn=turn) for turn in range(4)} == {P1}


def test_a_worker_to_avoid_is_taken_when_there_is_no_other(known):
    assert {prefill(known, avoid={P0}, turn=turn) for turn in range(4)} == {P1}
    assert prefill(known, avoid={P0, P1}) in (P0, P1)


@pytest.mark.parametrize("health", [Health.LOST, Health.DRAINING])
def test_workers_that_are_not_ready_get_nothing(known, health):
    known.get(P0).health = known.get(D1).health = health
    assert {prefill(known, turn=turn) for turn in range(4)} == {P1}
    assert {decode(known, source=P1, turn=turn) for turn in range(4)} == {D0}
    known.get(P1).health = health
    with pytest.raises(Unavailable, match=f"no prefill worker is ready: prefill-0/0 is {health}, prefill-1/0 is"):
        prefill(known)


def test_prefill_is_not_begun_when_nobody_could_decode(known):
    known.get(D0).health = known.get(D1).health = Health.LOST
    with pytest.raises(Unavailable, match="no decode worker is ready"):
        prefill(known)


def test_an_empty_directory_says_so():
    with pytest.raises(Unavailable, match="no prefill worker is known"):
        prefill(directory())


def test_a_decode_worker_with_room_wins_over_a_full_one(known):
    known.get(D0).observe_load(WorkerLoad(num_free_blocks=2))
    known.get(D1).observe_load(WorkerLoad(num_free_blocks=60, num_running=6, num_context_tokens=3_000))
    assert {decode(known, 100, turn=turn) for turn in range(4)} == {D1}


def test_reservations_on_their_way_count_as_taken(known):
    for _ in range(9):
        known.get(D0).add_decode(100)  # 7 blocks each of 64
    known.get(D1).observe_load(WorkerLoad(num_free_blocks=40, num_running=7, num_context_tokens=3_000))
    assert {decode(known, 100, turn=turn) for turn in range(4)} == {D1}


def test_of_full_workers_the_one_with_fewer_sequences_is_waited_for(known):
    known.get(D0).observe_load(WorkerLoad(num_free_blocks=0, num_running=8, num_context_tokens=900))
    known.get(D1).observe_load(WorkerLoad(num_free_blocks=0, num_running=2, num_context_tokens=900))
    assert {decode(known, 100, turn=turn) for turn in range(4)} == {D1}


def test_a_turn_of_a_chat_goes_back_to_the_decode_worker_that_has_it(known):
    assert {decode(known, 400, {D1: 384}, turn=turn) for turn in range(4)} == {D1}


def test_pairs_with_different_kv_are_never_chosen():
    known = directory(
        FakeWorker("prefill-0", weights="a"),
        FakeWorker("prefill-1", weights="b"),
        FakeWorker("decode-0", weights="b"),
        FakeWorker("decode-1", weights="c"),
    )
    assert {prefill(known, turn=turn) for turn in range(4)} == {P1}
    assert {decode(known, source=P1, turn=turn) for turn in range(4)} == {D0}
    with pytest.raises(PeerIncompatible, match="weights 'a' against 'b'"):
        decode(known, source=P0)
    assert known.ready


def test_a_marked_pair_is_forgotten_with_the_life_of_either(known):
    first, target = known.get(P0), known.get(D0)
    known.mark_incompatible(first.epoch, target.epoch, "said so")
    assert decode(known, turn=0) == decode(known, turn=1) == D1
    reborn = FakeWorker("prefill-0", epoch="2")
    known.welcome(reborn.info, reborn.epoch)
    assert {decode(known, turn=turn) for turn in range(2)} == {D0, D1}


def test_what_fits_nowhere_is_refused_with_the_limit():
    known = directory(FakeWorker("prefill-0", max_model_len=4_096), FakeWorker("decode-0", num_blocks=8))
    assert decode(known, 127) == D0
    with pytest.raises(ContextTooLong, match="at most 127"):
        decode(known, 128)


def test_a_deadline_that_would_be_missed_is_refused_only_on_evidence(known):
    for worker in (known.get(P0), known.get(P1)):
        worker.add_prefill(10_000_000)
    assert prefill(known, remaining_s=0.001) in (P0, P1)
    known.get(P0).costs.observe_prefill(512, 0, 1.0)
    with pytest.raises(Overloaded, match="retry later"):
        prefill(known, remaining_s=0.5)


def test_a_colocated_worker_needs_no_partner():
    known = directory(FakeWorker("engine-0", can_prefill=True, can_decode=True))
    choice = pick_prefill(known, 10, {}, remaining_s=60.0)
    assert choice.worker.id == "engine-0/0"
    assert known.ready


def test_a_restarted_worker_keeps_what_is_known_of_its_speed(known):
    known.get(P0).costs.observe_prefill(512, 0, 10.0)
    reborn = FakeWorker("prefill-0", epoch="2")
    worker = known.welcome(reborn.info, reborn.epoch)
    assert worker.costs.prefill_s(512) == pytest.approx(10.0)
    assert worker.num_waiting_tokens == 0
