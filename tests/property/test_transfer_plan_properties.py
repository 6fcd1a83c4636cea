"""A transfer simulated with bytearrays: every byte of the pushed units lands once, and it is the right one."""

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.ids import BlockId
from pd_cluster.kv.layout import KvLayout
from pd_cluster.transfer.plan import copies, routes, units_of, written_ranges


def shard(kind: str, num_kv_heads: int, num_ranks: int, block_size: int) -> list[KvLayout]:
    """The layouts of a worker's TP ranks: heads divided, or replicated when there are fewer heads than ranks."""
    result = []
    for rank in range(num_ranks):
        if kind == "mla":
            heads: tuple[int, ...] = (0,)
        elif num_kv_heads >= num_ranks:
            heads = tuple(range(rank * num_kv_heads // num_ranks, (rank + 1) * num_kv_heads // num_ranks))
        else:
            heads = (rank * num_kv_heads // num_ranks,)
        result.append(
            KvLayout(
                kind="mla" if kind == "mla" else "gqa",
                num_layers=2,
                head_ids=heads,
                token_values=1,
                dtype="bfloat16",
                block_size=block_size,
            )
        )
    return result


@st.composite
def transfers(draw: st.DrawFn) -> tuple[list[KvLayout], list[KvLayout], int, int, random.Random, list[int]]:
    kind = draw(st.sampled_from(["gqa", "mla"]))
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    sides = []
    for _ in range(2):
        num_ranks = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if n <= num_kv_heads or n % num_kv_heads == 0]))
        sides.append(shard(kind, num_kv_heads, num_ranks, 16 * draw(st.integers(1, 5))))
    num_tokens = draw(st.integers(1, 400))
    first_unit = draw(st.integers(0, units_of(num_tokens)))
    cuts = sorted(draw(st.lists(st.integers(first_unit, units_of(num_tokens)), max_size=3)))
    rng = random.Random(draw(st.integers(0, 1000)))
    return sides[0], sides[1], num_tokens, first_unit, rng, [first_unit, *cuts, units_of(num_tokens)]


def some_blocks(layout: KvLayout, num_tokens: int, rng: random.Random) -> list[BlockId]:
    """Blocks in an order that has runs and jumps."""
    needed = layout.num_blocks_for(num_tokens)
    ids = list(range(needed + 3))
    if rng.random() < 0.7:
        rng.shuffle(ids)
    return [BlockId(i) for i in ids[:needed]]


def byte_of(head: int, layer: int, unit: int, index: int) -> int:
    return 1 + (head * 101 + layer * 53 + unit * 7 + index * 3) % 255


@settings(max_examples=150, deadline=None)
@given(transfers(), st.integers(0, 99))
def test_every_byte_is_written_once_from_the_right_place(
    transfer: tuple[list[KvLayout], list[KvLayout], int, int, random.Random, list[int]], rotation: int
) -> None:
    sources, targets, num_tokens, first_unit, rng, cuts = transfer
    source_blocks = some_blocks(sources[0], num_tokens, rng)
    target_blocks = some_blocks(targets[0], num_tokens, rng)
    source_arenas = [arena_of(layout, source_blocks, num_tokens) for layout in sources]
    target_arenas = [bytearray((max(target_blocks) + 1) * layout.block_bytes) for layout in targets]
    writes = [bytearray(len(arena)) for arena in target_arenas]

    for route in routes(sources, targets, rotation).routes:
        for start, end in itertools.pairwise(cuts):
            written = copies(route, source_blocks, target_blocks, start, end - start)
            for copy in written:
                source = source_arenas[route.source][copy.src_offset : copy.src_offset + copy.num_bytes]
                assert len(source) == copy.num_bytes, "within the source's arena"
                span = slice(copy.dst_offset, copy.dst_offset + copy.num_bytes)
                target_arenas[route.target][span] = source
                writes[route.target][span] = bytes(b + 1 for b in writes[route.target][span])
            assert sum(copy.num_bytes for copy in written) == (end - start) * route.unit_bytes
            announced = written_ranges(route.dst_layout, route.head_ids, target_blocks, start, end - start)
            assert sorted(spread(announced)) == sorted(spread((c.dst_offset, c.num_bytes) for c in written))
            in_order = b"".join(
                bytes(source_arenas[route.source][c.src_offset : c.src_offset + c.num_bytes]) for c in written
            )
            announced_bytes = b"".join(bytes(target_arenas[route.target][o : o + n]) for o, n in announced)
            assert in_order == announced_bytes, "both sides run their checksum over the same bytes"

    for layout, arena, count in zip(targets, target_arenas, writes, strict=True):
        expected = arena_of(layout, target_blocks, num_tokens, first_unit)
        assert arena == expected
        assert all(c == (b != 0) for b, c in zip(expected, count, strict=True)), "each byte once, no other touched"


def spread(ranges: object) -> list[int]:
    return [offset + i for offset, num_bytes in ranges for i in range(num_bytes)]  # type: ignore[attr-defined]


def arena_of(layout: KvLayout, blocks: list[BlockId], num_tokens: int, first_unit: int = 0) -> bytearray:
    """An arena in which units [first_unit, end) of a sequence hold bytes that name their place, and the rest zero."""
    arena = bytearray((max(blocks) + 1) * layout.block_bytes)
    for unit in range(first_unit, units_of(num_tokens)):
        block = blocks[unit // layout.units_per_block]
        offset = block * layout.block_bytes + unit % layout.units_per_block * layout.unit_bytes
        for head in layout.head_ids:
            for layer in range(layout.num_layers):
                row = bytes(byte_of(head, layer, unit, i) for i in range(layout.row_bytes))
                arena[offset : offset + layout.row_bytes] = row
                offset += layout.row_bytes
    return arena
