import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.ids import EngineEpoch, TransferId
from pd_cluster.kv.layout import KvLayout
from pd_cluster.transfer.contract import CommitRecord, SourceRecord
from pd_cluster.transfer.fill import Fill, FillState, Intervals

T = TransferId("t")
COMMIT = CommitRecord(
    token_id=1, logprob=None, num_prompt_tokens=1, num_tokens=1, num_cached_tokens=0, seed=0, position=1
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=20))
def test_intervals_are_a_set_of_units(ranges: list[tuple[int, int]]) -> None:
    intervals, units = Intervals(), set[int]()
    for start, length in ranges:
        intervals.add(start, start + length)
        units |= set(range(start, start + length))
        assert intervals.num_units == len(units)
    for start in range(0, 40, 5):
        for end in range(start + 1, 40, 7):
            assert intervals.cover(start, end) == (units == set(range(start, end)))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 12), st.data())
def test_a_fill_is_done_exactly_when_the_last_missing_record_came(
    num_sources: int, cached_units: int, num_units: int, data: st.DataObject
) -> None:
    """Records of all sources, cut anywhere, in any order, any of them repeated."""
    layout = KvLayout(kind="gqa", num_layers=1, head_ids=(0, 1, 2, 3), token_values=1, dtype="bfloat16", block_size=16)
    end = cached_units + num_units
    records = []
    for source in range(num_sources):
        heads = tuple(range(4))[source * 4 // num_sources : (source + 1) * 4 // num_sources]
        cuts = sorted(data.draw(st.sets(st.integers(cached_units, end), max_size=3)) | {cached_units, end})
        spans = list(itertools.pairwise(cuts)) or [(end, end)]
        for first, last in spans:
            records.append(
                SourceRecord(
                    transfer_id=T,
                    epoch=EngineEpoch("e"),
                    source=source,
                    num_sources=num_sources,
                    head_ids=heads,
                    first_unit=first,
                    num_units=last - first,
                    total_units=num_units,
                    num_bytes=(last - first) * len(heads) * layout.head_bytes,
                    commit=COMMIT if source == 0 and last == end else None,
                )
            )
    if num_units == 0:
        records = records[:1]  # with everything cached only the commit is sent
    fill = Fill(T, layout, num_tokens=16 * end, num_cached_tokens=16 * cached_units)
    repeats = data.draw(st.lists(st.sampled_from(records), max_size=4))
    missing = set(range(len(records)))
    for record in data.draw(st.permutations(records + repeats)):
        assert fill.state is FillState.FILLING or not missing
        missing -= {i for i, r in enumerate(records) if r == record}
        fill.add(record)
        assert (fill.state is FillState.FILLED) == (not missing), fill.error
    assert fill.num_bytes == num_units * layout.unit_bytes
