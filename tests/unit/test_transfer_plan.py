import time

import pytest

from pd_cluster.errors import PeerIncompatible
from pd_cluster.ids import BlockId
from pd_cluster.kv.layout import KvLayout
from pd_cluster.transfer.contract import CopyRange
from pd_cluster.transfer.plan import copies, routes, units_of, written_ranges


def gqa(heads: tuple[int, ...], block_size: int = 32, **changes: object) -> KvLayout:
    fields = {"kind": "gqa", "num_layers": 2, "token_values": 8, "dtype": "bfloat16"} | changes
    return KvLayout(head_ids=heads, block_size=block_size, **fields)  # type: ignore[arg-type]


def mla(block_size: int = 32) -> KvLayout:
    return KvLayout(kind="mla", num_layers=2, head_ids=(0,), token_values=8, dtype="bfloat16", block_size=block_size)


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(i) for i in ids]


def pairs(source_layouts: list[KvLayout], target_layouts: list[KvLayout], rotation: int = 0) -> list[tuple[int, int]]:
    return [(r.source, r.target) for r in routes(source_layouts, target_layouts, rotation).routes]


def test_equal_ranks_send_straight_across() -> None:
    layouts = [gqa((0, 1)), gqa((2, 3))]
    assert pairs(layouts, layouts) == [(0, 0), (1, 1)]


def test_wide_prefill_gathers_its_heads_into_narrow_decode() -> None:
    result = routes([gqa((h,)) for h in range(4)], [gqa((0, 1)), gqa((2, 3))])
    assert [(r.source, r.target, r.head_ids) for r in result.routes] == [
        (0, 0, (0,)),
        (1, 0, (1,)),
        (2, 1, (2,)),
        (3, 1, (3,)),
    ]
    assert result.sources_of(1) == [2, 3]


def test_narrow_prefill_scatters_runs_of_heads_into_wide_decode() -> None:
    result = routes([gqa((0, 1, 2, 3))], [gqa((0, 1)), gqa((2, 3))])
    assert [(r.target, r.runs[0].src_head, r.runs[0].dst_head, r.runs[0].num_heads) for r in result.routes] == [
        (0, 0, 0, 2),
        (1, 2, 0, 2),
    ]
    assert [r.target for r in result.from_source(0)] == [0, 1]


def test_replicated_heads_are_sent_by_all_their_holders_in_turn() -> None:
    replicated = [gqa((0,)), gqa((0,)), gqa((1,)), gqa((1,))]
    assert pairs(replicated, replicated) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    one_target = routes([gqa((0, 1, 2, 3)), gqa((0, 1, 2, 3))], [gqa((0, 1, 2, 3))])
    assert [r.head_ids for r in one_target.routes] == [(0, 1), (2, 3)]


def test_latents_travel_once_to_each_target_and_rotation_spreads_transfers() -> None:
    sources = [mla()] * 4
    assert pairs(sources, [mla()] * 2) == [(0, 0), (1, 1)]
    assert {pairs(sources, [mla()], rotation)[0][0] for rotation in range(4)} == {0, 1, 2, 3}


def test_a_head_that_no_source_holds_is_named() -> None:
    with pytest.raises(PeerIncompatible, match="KV head 2 of target rank 0"):
        routes([gqa((0, 1))], [gqa((0, 1, 2))])


@pytest.mark.parametrize("changes", [{"num_layers": 3}, {"token_values": 16}, {"dtype": "float16"}])
def test_layouts_with_other_rows_are_incompatible(changes: dict[str, object]) -> None:
    with pytest.raises(PeerIncompatible, match=next(iter(changes))):
        routes([gqa((0,))], [gqa((0,), **changes)])
    with pytest.raises(PeerIncompatible, match="kind"):
        routes([gqa((0,))], [mla()])


def test_runs_of_blocks_become_one_range() -> None:
    layout = mla()
    route = routes([layout], [layout]).routes[0]
    found = copies(route, blocks(5, 6, 7, 1), blocks(2, 3, 4, 9), 0, 8)
    assert found == [
        CopyRange(5 * layout.block_bytes, 2 * layout.block_bytes, 3 * layout.block_bytes),
        CopyRange(layout.block_bytes, 9 * layout.block_bytes, layout.block_bytes),
    ]
    assert copies(route, blocks(5), blocks(2), 1, 0) == []


def test_units_are_counted_from_the_first_token_with_unequal_blocks() -> None:
    src, dst = mla(block_size=16), mla(block_size=64)
    route = routes([src], [dst]).routes[0]
    # unit 5 is source block 5 and the second unit of the target's second block
    found = copies(route, blocks(10, 11, 12, 13, 14, 15), blocks(7, 3), 5, 1)
    assert found == [CopyRange(15 * src.block_bytes, 3 * dst.block_bytes + dst.unit_bytes, dst.unit_bytes)]


def test_one_head_of_several_is_a_range_for_each_unit() -> None:
    src, dst = gqa((0, 1)), gqa((1,))
    route = routes([src], [dst]).routes[0]
    head = src.head_bytes
    assert copies(route, blocks(0), blocks(0), 0, 2) == [CopyRange(head, 0, head), CopyRange(3 * head, head, head)]


def test_written_ranges_follow_the_order_of_the_record() -> None:
    layout = gqa((4, 5, 6))
    head = layout.head_bytes
    assert written_ranges(layout, (6, 4), blocks(1), 1, 1) == [
        (layout.block_bytes + layout.unit_bytes + 2 * head, head),
        (layout.block_bytes + layout.unit_bytes, head),
    ]


def test_a_partly_filled_unit_counts_whole() -> None:
    assert [units_of(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_hundred_thousand_tokens_plan_in_milliseconds() -> None:
    src = gqa(tuple(range(8)), block_size=16, num_layers=80, token_values=256)
    dst = gqa((2, 3), block_size=64, num_layers=80, token_values=256)
    route = routes([src], [dst]).routes[0]
    source_blocks = blocks(*range(0, 12500, 2))
    target_blocks = blocks(*range(1563, 0, -1))
    best = min(_seconds(lambda: copies(route, source_blocks, target_blocks, 0, 6250)) for _ in range(5))
    assert best < 0.05, best  # 3 ms on an idle core


def _seconds(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start
