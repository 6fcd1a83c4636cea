from typing import Any

from pd_cluster.errors import ChecksumMismatch, TransferFailed
from pd_cluster.ids import EngineEpoch, TransferId
from pd_cluster.kv.layout import KvLayout
from pd_cluster.transfer.contract import CommitRecord, SourceRecord, StoppedRecord
from pd_cluster.transfer.fill import Fill, Fills, FillState

LAYOUT = KvLayout(kind="gqa", num_layers=2, head_ids=(0, 1), token_values=8, dtype="bfloat16", block_size=32)
T, EPOCH = TransferId("t"), EngineEpoch("e")
COMMIT = CommitRecord(
    token_id=7, logprob=None, num_prompt_tokens=60, num_tokens=60, num_cached_tokens=0, seed=1, position=60
)


def new_fill(**changes: Any) -> Fill:
    """A fill of units 1-4: 60 tokens, the first 16 cached."""
    return Fill(T, LAYOUT, **({"num_tokens": 60, "num_cached_tokens": 16} | changes))


def record(
    source: int,
    first: int,
    num: int,
    commit: CommitRecord | None = None,
    heads: tuple[int, ...] = (0, 1),
    **changes: Any,
) -> SourceRecord:
    fields: dict[str, Any] = {
        "transfer_id": T,
        "epoch": EPOCH,
        "source": source,
        "num_sources": 1,
        "head_ids": heads,
        "first_unit": first,
        "num_units": num,
        "total_units": 3,
        "num_bytes": num * len(heads) * LAYOUT.head_bytes,
        "commit": commit,
    }
    return SourceRecord(**(fields | changes))


def stopped(source: int, num_sources: int) -> StoppedRecord:
    return StoppedRecord(transfer_id=T, epoch=EPOCH, source=source, num_sources=num_sources)


def test_a_fill_is_done_when_all_units_and_the_commit_are_there() -> None:
    fill = new_fill()
    assert not fill.add(record(0, 1, 2))
    assert not fill.add(record(0, 1, 2)), "a repeat changes nothing"
    assert fill.add(record(0, 3, 1, COMMIT))
    assert (fill.state, fill.commit) == (FillState.FILLED, COMMIT)
    assert fill.num_bytes == 3 * LAYOUT.unit_bytes


def test_records_may_come_in_any_order() -> None:
    fill = new_fill()
    fill.add(record(0, 3, 1, COMMIT))
    assert fill.state is FillState.FILLING
    assert fill.num_missing_units == 2
    fill.add(record(0, 1, 2))
    assert fill.state is FillState.FILLED


def test_every_source_must_cover_all_units() -> None:
    fill = new_fill()
    fill.add(record(0, 1, 3, COMMIT, heads=(0,), num_sources=2))
    assert fill.state is FillState.FILLING
    fill.add(record(1, 1, 2, heads=(1,), num_sources=2))
    assert fill.state is FillState.FILLING
    fill.add(record(1, 3, 1, heads=(1,), num_sources=2))
    assert fill.state is FillState.FILLED


def test_all_units_without_the_commit_are_not_enough() -> None:
    fill = new_fill()
    fill.add(record(0, 1, 3))
    assert fill.state is FillState.FILLING
    fill.add(record(0, 4, 0, COMMIT))
    assert fill.state is FillState.FILLED


def test_a_transfer_with_everything_cached_needs_only_the_commit() -> None:
    fill = new_fill(num_tokens=32, num_cached_tokens=32)
    assert fill.add(record(0, 2, 0, COMMIT, total_units=0, num_sources=2))
    assert fill.state is FillState.FILLED


def test_records_that_contradict_the_reservation_fail_it() -> None:
    for bad, words in [
        (record(0, 1, 1, total_units=9), "sends 9 units, reserved are 3"),
        (record(0, 0, 1), "wrote units 0-1, reserved are 1-4"),
        (record(0, 3, 2), "wrote units 3-5"),
        (record(0, 1, 1, heads=(5,)), "this rank has"),
        (record(0, 1, 1, num_bytes=1), "wrote 1 bytes"),
    ]:
        fill = new_fill()
        assert fill.add(bad)
        assert fill.state is FillState.FAILED
        assert isinstance(fill.error, TransferFailed)
        assert words in fill.error.message


def test_a_source_that_changes_its_story_fails_the_fill() -> None:
    for second in (record(0, 2, 1, heads=(1,)), record(0, 2, 1, num_sources=2)):
        fill = new_fill()
        fill.add(record(0, 1, 1, heads=(0,)) if second.num_sources == 1 else record(0, 1, 1))
        fill.add(second)
        assert fill.state is FillState.FAILED


def test_a_wrong_checksum_fails_the_fill() -> None:
    fill = new_fill(verify=lambda r: r.checksum == 1)
    fill.add(record(0, 1, 1, checksum=1))
    assert fill.state is FillState.FILLING
    fill.add(record(0, 2, 1, checksum=2))
    assert isinstance(fill.error, ChecksumMismatch)
    fill.add(record(0, 1, 3, COMMIT, checksum=1))
    assert fill.state is FillState.FAILED, "nothing revives it"


def test_a_target_knows_when_all_its_sources_stopped() -> None:
    fill = new_fill()
    fill.add(record(0, 1, 1, heads=(0,), num_sources=2))
    assert not fill.add(stopped(0, 2))
    assert not fill.add(stopped(0, 2))
    assert fill.add(stopped(1, 2))
    assert fill.is_stopped
    assert fill.state is FillState.FILLING


def test_records_of_another_epoch_are_dropped() -> None:
    fills = Fills(EPOCH)
    fills.open(new_fill())
    assert fills.add(record(0, 1, 3, COMMIT, epoch=EngineEpoch("old"))) is None
    assert fills.num_ignored == 1
    assert fills.add(record(0, 1, 3, COMMIT)) is fills.get(T)


def test_records_that_overtake_their_reservation_are_replayed() -> None:
    fills = Fills(EPOCH, max_early=2)
    fills.add(record(0, 1, 2))
    fills.add(record(0, 3, 1, COMMIT))
    fill = new_fill()
    assert fills.open(fill)
    assert fill.state is FillState.FILLED


def test_records_of_unknown_transfers_are_bounded() -> None:
    fills = Fills(EPOCH, max_early=2)
    for _ in range(5):
        fills.add(record(0, 1, 1))
    assert fills.num_ignored == 3
    fills.open(new_fill())
    fills.close(T)
    fills.close(T)
    assert len(fills) == 0
