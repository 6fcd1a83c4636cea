from collections.abc import Sequence

import pytest

from decode_worker.reservations import Filled, Freed, Grant, Notice, Refused, Reservations, ReservationState
from pd_cluster.clock import FakeClock
from pd_cluster.errors import ChecksumMismatch, ContextTooLong
from pd_cluster.ids import BlockId, EngineEpoch, RequestId, TransferId
from pd_cluster.request import Request, SamplingParams

BLOCK_SIZE, LEASE_S = 32, 10.0
SOURCE = EngineEpoch("prefill-life")


class Blocks:
    """A free list; the first `num_cached_blocks` of every request are shared."""

    def __init__(self, num_blocks: int) -> None:
        self.free = [BlockId(i) for i in range(num_blocks)]
        self.num_cached_blocks = 0

    def take(self, request: Request) -> tuple[list[BlockId], int] | None:
        needed = -(-len(request.token_ids) // BLOCK_SIZE)
        if needed > len(self.free):
            return None
        taken, self.free = self.free[:needed], self.free[needed:]
        return taken, self.num_cached_blocks * BLOCK_SIZE

    def give_back(self, blocks: Sequence[BlockId]) -> None:
        assert not set(blocks) & set(self.free)
        self.free += blocks


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def blocks() -> Blocks:
    return Blocks(10)


@pytest.fixture
def reservations(blocks: Blocks, clock: FakeClock) -> Reservations:
    return Reservations(2, BLOCK_SIZE, LEASE_S, blocks.take, blocks.give_back, clock)


def t(name: str) -> TransferId:
    return TransferId(name)


def reserve(reservations: Reservations, name: str, num_blocks: int, epoch: EngineEpoch = SOURCE) -> list[Notice]:
    request = Request(
        id=RequestId(f"r-{name}"),
        token_ids=[1] * (num_blocks * BLOCK_SIZE),
        num_prompt_tokens=num_blocks * BLOCK_SIZE,
        sampling=SamplingParams(),
    )
    return reservations.reserve(t(name), request, epoch, deadline_s=5.0)


def kinds(notices: list[Notice]) -> list[tuple[str, str]]:
    return [(type(notice).__name__, notice.transfer_id) for notice in notices]


def test_a_reservation_is_granted_filled_and_adopted(reservations: Reservations, blocks: Blocks) -> None:
    (grant,) = reserve(reservations, "a", 3)
    assert isinstance(grant, Grant)
    assert (grant.block_ids, grant.num_cached_tokens, grant.lease_s) == ([0, 1, 2], 0, LEASE_S)
    assert reservations.rank_filled(t("a"), 0) == []
    assert reservations.rank_filled(t("a"), 0) == [], "the same rank twice is not two ranks"
    assert reservations.rank_filled(t("a"), 1) == [Filled(t("a"))]
    adopted = reservations.adopt(t("a"))
    assert adopted is not None
    assert adopted.block_ids == [0, 1, 2]
    assert len(blocks.free) == 7, "the sequence has them now"
    assert len(reservations) == 0


def test_requests_wait_in_line_first_come_first_served(reservations: Reservations, blocks: Blocks) -> None:
    reserve(reservations, "a", 8)
    assert reserve(reservations, "big", 6) == []
    assert reserve(reservations, "small", 1) == [], "it would fit, but stands behind"
    assert reservations.load().num_pending == 2
    assert kinds(reservations.source_stopped(t("a"))) == [
        ("Refused", "a"),
        ("Freed", "a"),
        ("Grant", "big"),
        ("Grant", "small"),
    ]
    reservations.adopt(t("big"))
    assert reserve(reservations, "big", 6) == [], "a repeat changes nothing"


def test_the_line_moves_when_blocks_come_free_elsewhere(reservations: Reservations, blocks: Blocks) -> None:
    held = blocks.take(Request(id=RequestId("x"), token_ids=[1] * 320, num_prompt_tokens=1, sampling=SamplingParams()))
    assert held is not None
    assert reserve(reservations, "a", 1) == []
    blocks.give_back(held[0])
    assert kinds(reservations.grant()) == [("Grant", "a")]


def test_waiting_past_the_deadline_is_refused_as_overload(reservations: Reservations, clock: FakeClock) -> None:
    reserve(reservations, "a", 10)
    reserve(reservations, "b", 1)
    reservations.extend([t("a"), t("b")], 100.0)
    clock.advance(5.0)
    refused, freed = reservations.tick()
    assert isinstance(refused, Refused)
    assert refused.error.code == "overloaded"
    assert freed == Freed(t("b"))
    assert len(reservations) == 1


def test_a_transfer_that_completes_after_its_end_needs_no_other_proof(
    reservations: Reservations, blocks: Blocks
) -> None:
    """Its router died after the source was done: nobody is left to relay that."""
    reserve(reservations, "a", 4)
    assert reservations.rank_filled(t("a"), 1) == []
    assert reservations.abort(t("a")) == []
    assert len(blocks.free) == 6
    assert reservations.rank_filled(t("a"), 0) == [Freed(t("a"))]
    assert len(blocks.free) == 10


def test_of_a_quarantined_transfer_some_ranks_may_be_filled_and_the_others_stopped(
    reservations: Reservations, blocks: Blocks
) -> None:
    reserve(reservations, "a", 4)
    assert reservations.abort(t("a")) == []
    assert reservations.rank_filled(t("a"), 1) == []
    assert reservations.rank_stopped(t("a"), 1) == []
    assert reservations.rank_stopped(t("a"), 0) == [Freed(t("a"))]
    assert len(blocks.free) == 10


def test_expired_reservation_returns_its_blocks_only_when_its_writer_stopped(
    reservations: Reservations, blocks: Blocks, clock: FakeClock
) -> None:
    reserve(reservations, "a", 4)
    clock.advance(LEASE_S - 1)
    reservations.extend([t("a"), t("unknown")], LEASE_S)
    clock.advance(LEASE_S - 1)
    assert reservations.tick() == []
    clock.advance(1.0)
    assert kinds(reservations.tick()) == [("Refused", "a")]
    assert len(blocks.free) == 6
    clock.advance(1000.0)
    assert reservations.tick() == [], "time proves nothing"
    assert reservations.rank_filled(t("a"), 0) == []
    assert reservations.num_late == 1
    load = reservations.load()
    assert (load.num_reserved_blocks, load.num_quarantined_blocks, load.oldest_s) == (0, 4, 1000.0 + 2 * LEASE_S - 1)
    assert reservations.rank_stopped(t("a"), 0) == []
    assert reservations.rank_stopped(t("a"), 1) == [Freed(t("a"))]
    assert len(blocks.free) == 10


@pytest.mark.parametrize("proof", ["router", "records", "death"])
def test_an_aborted_grant_is_quarantined_until_there_is_proof(
    reservations: Reservations, blocks: Blocks, proof: str
) -> None:
    reserve(reservations, "a", 4)
    assert reservations.abort(t("a")) == []
    assert reservations.abort(t("a")) == []
    quarantined = reservations.get(t("a"))
    assert quarantined is not None
    assert quarantined.state is ReservationState.QUARANTINED
    if proof == "router":
        freed = reservations.source_stopped(t("a"))
    elif proof == "records":
        freed = reservations.rank_stopped(t("a"), 1) + reservations.rank_stopped(t("a"), 0)
    else:
        assert reservations.engine_dead(EngineEpoch("another")) == []
        freed = reservations.engine_dead(SOURCE)
    assert freed == [Freed(t("a"))]
    assert len(blocks.free) == 10
    assert reservations.source_stopped(t("a")) == []


def test_shared_cached_blocks_leave_quarantine_at_once(reservations: Reservations, blocks: Blocks) -> None:
    blocks.num_cached_blocks = 2
    reserve(reservations, "a", 5)
    reserve(reservations, "b", 7)
    assert kinds(reservations.abort(t("a"))) == [("Grant", "b")], "nobody writes them, and b fits now"
    assert reservations.load().num_quarantined_blocks == 3


def test_a_grant_with_nothing_to_write_is_freed_at_once(reservations: Reservations, blocks: Blocks) -> None:
    blocks.num_cached_blocks = 2
    reserve(reservations, "a", 2)
    assert reservations.abort(t("a")) == [Freed(t("a"))]
    assert len(blocks.free) == 10


def test_a_filled_reservation_is_freed_at_once_because_all_its_writes_have_landed(
    reservations: Reservations, blocks: Blocks, clock: FakeClock
) -> None:
    for name in ("a", "b"):
        reserve(reservations, name, 2)
        reservations.rank_filled(t(name), 0)
        reservations.rank_filled(t(name), 1)
    assert reservations.abort(t("a")) == [Freed(t("a"))]
    assert reservations.source_stopped(t("b")) == []
    assert reservations.engine_dead(SOURCE) == [], "what is here is here"
    clock.advance(LEASE_S)
    assert kinds(reservations.tick()) == [("Refused", "b"), ("Freed", "b")]
    assert reservations.adopt(t("b")) is None
    assert len(blocks.free) == 10


def test_a_corrupt_fill_is_refused_and_quarantined(reservations: Reservations) -> None:
    reserve(reservations, "a", 2)
    (refused,) = reservations.rank_failed(t("a"), ChecksumMismatch("units 0-3"))
    assert isinstance(refused, Refused)
    assert (refused.error.code, refused.request_id) == ("checksum_mismatch", "r-a")
    assert reservations.load().num_quarantined_blocks == 2


def test_a_dead_engine_frees_all_its_reservations_and_gets_no_new_one(
    reservations: Reservations, blocks: Blocks
) -> None:
    for name, num_blocks in (("a", 8), ("b", 4), ("c", 4)):
        reserve(reservations, name, num_blocks)
    reserve(reservations, "other", 1, EngineEpoch("alive"))
    assert kinds(reservations.engine_dead(SOURCE)) == [
        ("Refused", "a"),
        ("Freed", "a"),
        ("Grant", "other"),
        ("Refused", "b"),
        ("Freed", "b"),
        ("Refused", "c"),
        ("Freed", "c"),
    ]
    assert kinds(reserve(reservations, "late", 1)) == [("Refused", "late"), ("Freed", "late")]
    assert len(blocks.free) == 9


def test_aborting_in_line_leaves_it(reservations: Reservations, blocks: Blocks) -> None:
    reserve(reservations, "a", 8)
    reserve(reservations, "big", 6)
    reserve(reservations, "small", 2)
    assert kinds(reservations.abort(t("big"))) == [("Freed", "big"), ("Grant", "small")]
    assert reservations.abort(t("unknown")) == []


def test_a_request_that_can_never_have_its_blocks_is_refused_and_the_line_goes_on(
    reservations: Reservations, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(reservations, "a", 8)
    for name in ("huge", "vast"):
        reserve(reservations, name, 40)
    reserve(reservations, "b", 1)
    take = blocks.take

    def take_or_raise(request: Request) -> tuple[list[BlockId], int] | None:
        if len(request.token_ids) > 10 * BLOCK_SIZE:
            raise ContextTooLong("40 blocks, and there are 10")
        return take(request)

    monkeypatch.setattr(reservations, "_take", take_or_raise)
    notices = reservations.abort(t("a")) + reservations.source_stopped(t("a"))
    assert kinds(notices) == [
        ("Refused", "huge"),
        ("Freed", "huge"),
        ("Refused", "vast"),
        ("Freed", "vast"),
        ("Grant", "b"),
        ("Freed", "a"),
    ]
    assert isinstance(notices[0], Refused)
    assert notices[0].error.code == "context_length_exceeded"
