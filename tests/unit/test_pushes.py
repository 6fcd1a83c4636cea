from typing import Any

import pytest

from pd_cluster.clock import FakeClock
from pd_cluster.errors import ErrorInfo
from pd_cluster.ids import BlockId, EngineEpoch, EngineId, Rank, RequestId, TransferId, WorkerId
from pd_cluster.kv.layout import KvFingerprint, KvLayout
from pd_cluster.messages import Push
from pd_cluster.transfer.contract import (
    CommitRecord,
    RankEndpoint,
    SourceRecord,
    StoppedRecord,
    WorkerEndpoint,
    Write,
    WriteDone,
    WriteFailed,
)
from prefill_worker.push_group import GroupFailed, GroupPushed, GroupStopped, PushGroup
from prefill_worker.push_outputs import Cancel, Connect, Disconnect, Output, Post, RankFailed, RankPushed, RankStopped
from prefill_worker.pushes import FAREWELL_S, LATE_WRITE_S, Pushes, PushState

T, TARGET, EPOCH = TransferId("t"), WorkerId("decode-0/0"), EngineEpoch("e")
FINGERPRINT = KvFingerprint(
    weights="w", kind="gqa", num_layers=1, num_kv_heads=2, token_values=4, dtype="bfloat16", rope="r"
)
NUM_TOKENS = 150  # ten units, the last with six tokens
BLOCKS = [BlockId(i) for i in range(20)]


def layout(heads: tuple[int, ...], block_size: int = 32) -> KvLayout:
    return KvLayout(kind="gqa", num_layers=1, head_ids=heads, token_values=4, dtype="bfloat16", block_size=block_size)


def endpoint(heads_by_rank: list[tuple[int, ...]], fingerprint: KvFingerprint = FINGERPRINT) -> WorkerEndpoint:
    ranks = [
        RankEndpoint(
            rank=Rank(i),
            agent_name=f"{EPOCH}/{i}",
            agent_metadata=b"",
            base_address=0,
            num_bytes=1 << 20,
            device_id=0,
            layout=layout(heads),
        )
        for i, heads in enumerate(heads_by_rank)
    ]
    return WorkerEndpoint(engine_id=EngineId("decode-0"), epoch=EPOCH, dp_rank=0, fingerprint=fingerprint, ranks=ranks)


def order(num_cached_tokens: int = 0, **changes: Any) -> Push:
    fields: dict[str, Any] = {
        "request_id": RequestId("r"),
        "transfer_id": T,
        "target": TARGET,
        "target_epoch": EPOCH,
        "endpoint": endpoint([(0, 1)]),
        "block_ids": BLOCKS[:5],
        "num_cached_tokens": num_cached_tokens,
        "deadline_s": 10.0,
    }
    return Push(**(fields | changes))


def commit(num_tokens: int = NUM_TOKENS) -> CommitRecord:
    return CommitRecord(
        token_id=7,
        logprob=None,
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
        num_cached_tokens=0,
        seed=1,
        position=num_tokens,
    )


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def pushes(clock: FakeClock) -> Pushes:
    pushes = Pushes(0, [layout((0, 1))], FINGERPRINT, clock, min_write_units=2)
    pushes.open(T, NUM_TOKENS, deadline_s=30.0)
    return pushes


def writes(outputs: list[Output]) -> list[Write]:
    return [output.write for output in outputs if isinstance(output, Post)]


def spans(outputs: list[Output]) -> list[tuple[int, int, bool]]:
    """First unit, number of units and whether it has the commit, of each write."""
    records = [write.record for write in writes(outputs)]
    return [(r.first_unit, r.num_units, r.commit is not None) for r in records if isinstance(r, SourceRecord)]


def done(write: Write) -> WriteDone:
    return WriteDone(write.write_id, write.transfer_id, sum(copy.num_bytes for copy in write.copies), 0.0)


def finish(pushes: Pushes, outputs: list[Output]) -> list[Output]:
    return [output for write in writes(outputs) for output in pushes.event(done(write))]


def test_chunks_are_written_while_prefill_computes_the_next(pushes: Pushes, clock: FakeClock) -> None:
    assert pushes.progress(T, 64, BLOCKS[:2]) == [], "nobody granted blocks yet"
    first = pushes.push(order())
    assert first[0] == Connect(endpoint([(0, 1)]).ranks[0])
    assert spans(first) == [(0, 4, False)]
    assert pushes.progress(T, 64 + 16, BLOCKS[:3]) == [], "one unit is less than a write's worth"
    second = pushes.progress(T, 120, BLOCKS[:4])
    assert spans(second) == [(4, 3, False)], "units that are not complete wait"
    last = pushes.prefilled(T, commit(), BLOCKS[:5])
    assert spans(last) == [(7, 3, True)], "the last unit is partly filled, and the commit is with it"
    assert finish(pushes, first + second) == []
    clock.advance(2.0)
    assert finish(pushes, last) == [RankPushed(T, 10 * layout((0, 1)).unit_bytes, 2.0)]
    assert pushes.state(T) is PushState.PUSHED
    pushes.close(T)
    assert T not in pushes


def test_the_last_unit_waits_for_the_commit(pushes: Pushes) -> None:
    pushes.push(order())
    assert spans(pushes.progress(T, NUM_TOKENS, BLOCKS)) == [(0, 9, False)]
    assert spans(pushes.prefilled(T, commit(), BLOCKS)) == [(9, 1, True)]


def test_a_prefill_that_was_done_before_the_grant_is_pushed_whole(pushes: Pushes) -> None:
    assert pushes.prefilled(T, commit(), BLOCKS) == []
    assert spans(pushes.push(order())) == [(0, 10, True)]


def test_units_that_decode_has_cached_are_not_pushed(pushes: Pushes) -> None:
    pushes.prefilled(T, commit(), BLOCKS)
    outputs = pushes.push(order(num_cached_tokens=128))
    assert spans(outputs) == [(8, 2, True)]
    (write,) = writes(outputs)
    assert isinstance(write.record, SourceRecord)
    assert write.record.total_units == 2


def test_with_everything_cached_only_the_commit_travels(clock: FakeClock) -> None:
    pushes = Pushes(0, [layout((0, 1))], FINGERPRINT, clock)
    pushes.open(T, 64, deadline_s=30.0)
    assert writes(pushes.push(order(num_cached_tokens=64))) == []
    outputs = pushes.prefilled(T, commit(64), BLOCKS)
    (write,) = writes(outputs)
    assert (write.copies, spans(outputs)) == ([], [(4, 0, True)])
    assert writes(pushes.progress(T, 64, BLOCKS)) == [], "once"
    assert finish(pushes, outputs) == [RankPushed(T, 0, 0.0)]


def test_large_chunks_are_cut_and_the_commit_comes_last(clock: FakeClock) -> None:
    pushes = Pushes(0, [layout((0, 1))], FINGERPRINT, clock, max_write_bytes=4 * layout((0, 1)).unit_bytes)
    pushes.open(T, NUM_TOKENS, deadline_s=30.0)
    pushes.prefilled(T, commit(), BLOCKS)
    assert spans(pushes.push(order())) == [(0, 4, False), (4, 4, False), (8, 2, True)]


def test_each_target_rank_gets_the_commit_from_its_first_source(clock: FakeClock) -> None:
    layouts = [layout((0,)), layout((1,))]
    ranks = [Pushes(rank, layouts, FINGERPRINT, clock) for rank in range(2)]
    outputs = []
    for rank in ranks:
        rank.open(T, NUM_TOKENS, deadline_s=30.0)
        rank.prefilled(T, commit(), BLOCKS)
        outputs.append(rank.push(order()))
    assert [spans(o) for o in outputs] == [[(0, 10, True)], [(0, 10, False)]]
    narrow = Pushes(0, [layout((0, 1))], FINGERPRINT, clock)
    narrow.open(T, NUM_TOKENS, deadline_s=30.0)
    narrow.prefilled(T, commit(), BLOCKS)
    both = narrow.push(order(endpoint=endpoint([(0,), (1,)])))
    assert spans(both) == [(0, 10, True), (0, 10, True)]
    assert [write.peer for write in writes(both)] == [f"{EPOCH}/0", f"{EPOCH}/1"]


def test_a_rank_without_heads_to_send_has_pushed_at_once(clock: FakeClock) -> None:
    latent = KvLayout(kind="mla", num_layers=1, head_ids=(0,), token_values=4, dtype="bfloat16", block_size=32)
    ranks = [Pushes(rank, [latent] * 4, FINGERPRINT, clock) for rank in range(4)]
    target = endpoint([(0, 1)])
    target = WorkerEndpoint(
        engine_id=target.engine_id,
        epoch=EPOCH,
        dp_rank=0,
        fingerprint=FINGERPRINT,
        ranks=[
            RankEndpoint(
                rank=Rank(0),
                agent_name="x",
                agent_metadata=b"",
                base_address=0,
                num_bytes=1 << 20,
                device_id=0,
                layout=latent,
            )
        ],
    )
    num_writing = 0
    for rank in ranks:
        rank.open(T, NUM_TOKENS, deadline_s=30.0)
        rank.push(order(endpoint=target))
        outputs = rank.prefilled(T, commit(), BLOCKS)
        num_writing += len(writes(outputs))
        assert writes(outputs) or outputs == [RankPushed(T, 0, 0.0)]
    assert num_writing == 1


def test_one_failed_write_fails_the_transfer_and_the_rest_run_out(pushes: Pushes) -> None:
    outputs = pushes.push(order()) + pushes.progress(T, 64, BLOCKS) + pushes.progress(T, 128, BLOCKS)
    first, second = writes(outputs)
    failed, cancel = pushes.event(WriteFailed(first.write_id, T, "link down", quiet=True))
    assert isinstance(failed, RankFailed)
    assert (failed.error.code, cancel) == ("transfer_failed", Cancel(T))
    assert pushes.progress(T, NUM_TOKENS, BLOCKS) == [], "nothing more is written"
    farewell, stopped = pushes.event(done(second))
    assert stopped == RankStopped(T)
    assert isinstance(farewell, Post)
    assert farewell.write.record == StoppedRecord(transfer_id=T, epoch=EPOCH, source=0, num_sources=1)
    assert T not in pushes


def test_a_write_that_may_still_land_is_not_called_stopped_before_the_network_is_done_with_it(
    pushes: Pushes, clock: FakeClock
) -> None:
    (write,) = writes(pushes.push(order()) + pushes.progress(T, 64, BLOCKS))
    (failed,) = pushes.event(WriteFailed(write.write_id, T, "reset", quiet=False))
    assert isinstance(failed, RankFailed)
    assert pushes.abort(T) == []
    clock.advance(LATE_WRITE_S - 1.0)
    assert pushes.tick() == []
    assert pushes.load().num_unquiet == 1
    assert pushes.load().oldest_s == LATE_WRITE_S - 1.0
    clock.advance(1.0)
    farewell, stopped = pushes.tick()
    assert isinstance(farewell, Post)
    assert stopped == RankStopped(T)
    assert pushes.load().num_pending == 0


def test_of_writes_that_may_still_land_the_last_to_break_counts(pushes: Pushes, clock: FakeClock) -> None:
    first, second = writes(pushes.push(order()) + pushes.progress(T, 32, BLOCKS) + pushes.progress(T, 64, BLOCKS))
    pushes.event(WriteFailed(first.write_id, T, "reset", quiet=False))
    clock.advance(LATE_WRITE_S)
    assert pushes.tick() == [], "another is in flight"
    assert pushes.event(WriteFailed(second.write_id, T, "reset", quiet=False)) == []
    clock.advance(LATE_WRITE_S - 1.0)
    assert pushes.tick() == []
    clock.advance(1.0)
    assert RankStopped(T) in pushes.tick()


def test_the_death_of_the_target_ends_the_wait_for_late_writes(pushes: Pushes) -> None:
    (write,) = writes(pushes.push(order()) + pushes.progress(T, 64, BLOCKS))
    pushes.event(WriteFailed(write.write_id, T, "reset", quiet=False))
    assert pushes.target_dead(EPOCH) == [RankStopped(T), Disconnect(f"{EPOCH}/0")]
    assert pushes.load().num_pending == 0


def test_a_deadline_cancels_what_is_in_flight(pushes: Pushes, clock: FakeClock) -> None:
    (write,) = writes(pushes.push(order()) + pushes.progress(T, 64, BLOCKS))
    clock.advance(9.9)
    assert pushes.tick() == []
    clock.advance(0.1)
    failed, cancel = pushes.tick()
    assert isinstance(failed, RankFailed)
    assert (failed.error.code, cancel) == ("deadline_exceeded", Cancel(T))
    assert pushes.tick() == [], "said once"
    outputs = pushes.event(WriteFailed(write.write_id, T, "cancelled", quiet=True))
    assert outputs[-1] == RankStopped(T)


def test_a_grant_that_never_comes_meets_its_deadline(pushes: Pushes, clock: FakeClock) -> None:
    clock.advance(30.0)
    failed, stopped = pushes.tick()
    assert isinstance(failed, RankFailed)
    assert stopped == RankStopped(T)


def test_aborting_before_the_push_order_stops_at_once_and_refuses_the_order(pushes: Pushes) -> None:
    assert pushes.abort(T) == [RankStopped(T)]
    assert pushes.push(order()) == [RankStopped(T)]
    assert pushes.abort(T) == [RankStopped(T)], "unknown transfers are fine"


def test_aborting_a_pushed_transfer_tells_the_target(pushes: Pushes) -> None:
    pushes.prefilled(T, commit(), BLOCKS)
    finish(pushes, pushes.push(order()))
    farewell, stopped = pushes.abort(T)
    assert stopped == RankStopped(T)
    assert isinstance(farewell, Post)


def test_a_farewell_that_cannot_be_sent_is_given_up(pushes: Pushes, clock: FakeClock) -> None:
    pushes.push(order())
    outputs = pushes.abort(T)
    assert len(writes(outputs)) == 1
    clock.advance(FAREWELL_S)
    assert pushes.tick() == [Cancel(T)]
    assert pushes.tick() == []
    assert pushes.event(WriteFailed(writes(outputs)[0].write_id, T, "cancelled", quiet=True)) == []


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"endpoint": None}, "transfer_failed", "never told its endpoint"),
        ({"endpoint": endpoint([(0,)], fingerprint=KvFingerprint(
            weights="other", kind="gqa", num_layers=1, num_kv_heads=2, token_values=4, dtype="bfloat16", rope="r"
        ))}, "peer_incompatible", "weights 'w' against 'other'"),
        ({"endpoint": endpoint([(0, 5)])}, "peer_incompatible", "KV head 5"),
        ({"num_cached_tokens": 8}, "transfer_failed", "8 cached tokens"),
        ({"block_ids": BLOCKS[:4]}, "transfer_failed", "4 target blocks"),
        ({"block_ids": [*BLOCKS[:4], 1 << 40]}, "transfer_failed", "the order names others"),
        ({"block_ids": [*BLOCKS[:4], -1]}, "transfer_failed", "the order names others"),
        ({"endpoint": endpoint([])}, "transfer_failed", "has 0 blocks"),
    ],
)  # fmt: skip
def test_an_order_that_cannot_be_followed_fails_with_its_reason(
    pushes: Pushes, changes: dict[str, Any], code: str, words: str
) -> None:
    failed, stopped = pushes.push(order(**changes))
    assert isinstance(failed, RankFailed)
    assert failed.error.code == code
    assert words in failed.error.message
    assert stopped == RankStopped(T)


def test_an_endpoint_is_remembered_until_its_engine_dies(pushes: Pushes) -> None:
    pushes.push(order())
    other = TransferId("other")
    pushes.open(other, NUM_TOKENS, 30.0)
    assert isinstance(pushes.push(order(transfer_id=other, endpoint=None))[0], Connect)
    outputs = pushes.target_dead(EPOCH)
    assert [type(output) for output in outputs] == [RankFailed, RankStopped, RankFailed, RankStopped, Disconnect]
    pushes.open(other, NUM_TOKENS, 30.0)
    assert isinstance(pushes.push(order(transfer_id=other, endpoint=None))[0], RankFailed)


def test_checksums_run_over_the_source_ranges(clock: FakeClock) -> None:
    pushes = Pushes(0, [layout((0, 1))], FINGERPRINT, clock, checksum=lambda ranges: sum(r.num_bytes for r in ranges))
    pushes.open(T, NUM_TOKENS, 30.0)
    pushes.prefilled(T, commit(), BLOCKS)
    (write,) = writes(pushes.push(order()))
    assert isinstance(write.record, SourceRecord)
    assert write.record.checksum == write.record.num_bytes


def test_a_worker_has_pushed_when_all_its_ranks_have() -> None:
    group = PushGroup(2)
    assert group.report(0, RankPushed(T, 10, 1.0)) is None
    assert group.report(0, RankPushed(T, 10, 1.0)) is None
    assert group.report(1, RankPushed(T, 20, 3.0)) == GroupPushed(30, 3.0)


def test_a_worker_fails_at_its_first_rank_and_stops_at_its_last() -> None:
    group, error = PushGroup(2), ErrorInfo(code="transfer_failed", message="no")
    assert group.report(0, RankPushed(T, 10, 1.0)) is None
    assert group.report(1, RankFailed(T, error)) == GroupFailed(error)
    assert group.report(1, RankStopped(T)) is None
    assert group.report(0, RankFailed(T, error)) is None
    assert group.report(1, RankStopped(T)) is None
    assert group.report(0, RankStopped(T)) == GroupStopped()
