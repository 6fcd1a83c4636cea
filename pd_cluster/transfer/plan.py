"""Who sends what to whom: routes between the TP ranks of two workers, and the byte ranges of one write.

Everything follows from the two sides' layouts. A route names the runs of heads that one source rank writes into one
target rank; every head of a target rank comes from exactly one source rank that holds it. Copies of a head on several
source ranks (MLA latents, GQA with fewer heads than ranks) share the work; `rotation`, different for each transfer,
keeps one of them from doing all of it.
"""

import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pd_cluster.errors import PeerIncompatible
from pd_cluster.ids import BlockId, TransferId
from pd_cluster.kv.layout import KvLayout
from pd_cluster.request import UNIT_TOKENS
from pd_cluster.transfer.contract import CopyRange

# U units of a write, R head runs of its route

Offsets = npt.NDArray[np.int64]


class HeadRun(Struct, frozen=True, array_like=True):
    """Heads that lie side by side in both layouts; positions count within a unit, not global ids."""

    src_head: int
    dst_head: int
    num_heads: int


class Route(Struct, frozen=True, kw_only=True):
    """What source rank `source` writes to target rank `target` (TP ranks of their workers)."""

    source: int
    target: int
    src_layout: KvLayout
    dst_layout: KvLayout
    runs: tuple[HeadRun, ...]
    head_ids: tuple[int, ...]  # global ids, in the order of `runs`

    @property
    def unit_bytes(self) -> int:
        """Bytes that one unit costs on this route."""
        return len(self.head_ids) * self.dst_layout.head_bytes


class Routes(Struct, frozen=True):
    """All routes of a transfer, ordered by target, then source."""

    routes: tuple[Route, ...]

    def from_source(self, source: int) -> list[Route]:
        return [route for route in self.routes if route.source == source]

    def sources_of(self, target: int) -> list[int]:
        """Source ranks that write to `target`, ascending; the first one brings the commit."""
        return [route.source for route in self.routes if route.target == target]


def rotation(transfer_id: TransferId) -> int:
    """A number that spreads transfers over equal sources; the same wherever it is computed."""
    return zlib.crc32(transfer_id.encode())


def routes(source_layouts: Sequence[KvLayout], target_layouts: Sequence[KvLayout], rotation: int = 0) -> Routes:
    """Routes from a worker's TP ranks to another's, in rank order.

    Raises PeerIncompatible when rows differ or no source holds a head that a target wants.
    """
    for target, dst in enumerate(target_layouts):
        for source, src in enumerate(source_layouts):
            _check_rows(source, src, target, dst)
    num_sources = len(source_layouts)
    holders = {
        head: tuple(s for s in range(num_sources) if head in source_layouts[s].head_ids)
        for dst in target_layouts
        for head in dst.head_ids
    }
    num_wanting = Counter(head for dst in target_layouts for head in dst.head_ids)
    load = [0] * num_sources
    result: list[Route] = []
    for target, dst in enumerate(target_layouts):
        chosen: dict[int, list[int]] = {}  # source -> global head ids, in the target's order
        for heads in _groups(dst.head_ids, holders):
            candidates = holders[heads[0]]
            if not candidates:
                raise PeerIncompatible(
                    f"KV head {heads[0]} of target rank {target} is on none of {num_sources} source ranks"
                )
            num_parts = min(len(heads), -(-len(candidates) // num_wanting[heads[0]]))
            for part in range(num_parts):
                piece = heads[part * len(heads) // num_parts : (part + 1) * len(heads) // num_parts]
                source = min(candidates, key=lambda s: (load[s], (s - rotation) % num_sources))
                load[source] += len(piece)
                chosen.setdefault(source, []).extend(piece)
        for source in sorted(chosen):
            result.append(_route(source, source_layouts[source], target, dst, chosen[source]))
    return Routes(tuple(result))


def _check_rows(source: int, src: KvLayout, target: int, dst: KvLayout) -> None:
    for name in ("kind", "num_layers", "token_values", "dtype"):
        ours, theirs = getattr(src, name), getattr(dst, name)
        if ours != theirs:
            raise PeerIncompatible(
                f"KV layouts differ in {name}: {ours} on source rank {source}, {theirs} on target rank {target}"
            )


def _groups(head_ids: Sequence[int], holders: dict[int, tuple[int, ...]]) -> list[list[int]]:
    """Neighbouring heads with the same holders."""
    groups: list[list[int]] = []
    for head in head_ids:
        if groups and holders[groups[-1][-1]] == holders[head]:
            groups[-1].append(head)
        else:
            groups.append([head])
    return groups


def _route(source: int, src: KvLayout, target: int, dst: KvLayout, heads: list[int]) -> Route:
    runs: list[HeadRun] = []
    for head in heads:
        src_head, dst_head = src.head_ids.index(head), dst.head_ids.index(head)
        last = runs[-1] if runs else None
        if last and (src_head, dst_head) == (last.src_head + last.num_heads, last.dst_head + last.num_heads):
            runs[-1] = HeadRun(last.src_head, last.dst_head, last.num_heads + 1)
        else:
            runs.append(HeadRun(src_head, dst_head, 1))
    return Route(source=source, target=target, src_layout=src, dst_layout=dst, runs=tuple(runs), head_ids=tuple(heads))


def units_of(num_tokens: int) -> int:
    """Units that hold `num_tokens` tokens; the last one may be partly filled and travels whole."""
    return -(-num_tokens // UNIT_TOKENS)


def copies(
    route: Route, source_blocks: Sequence[BlockId], target_blocks: Sequence[BlockId], first_unit: int, num_units: int
) -> list[CopyRange]:
    """Byte ranges of units [first_unit, first_unit + num_units), neighbours merged; ordered by unit, then by run.

    Blocks are those of the whole sequence, from its first token; units count from there too.
    """
    if num_units == 0:
        return []
    src = _offsets(route.src_layout, [run.src_head for run in route.runs], source_blocks, first_unit, num_units)
    dst = _offsets(route.dst_layout, [run.dst_head for run in route.runs], target_blocks, first_unit, num_units)
    run_bytes = np.array([run.num_heads for run in route.runs], np.int64) * route.dst_layout.head_bytes
    num_bytes = np.tile(run_bytes, num_units)
    src, dst = src.ravel(), dst.ravel()
    adjacent = (src[:-1] + num_bytes[:-1] == src[1:]) & (dst[:-1] + num_bytes[:-1] == dst[1:])
    starts = np.flatnonzero(np.concatenate(([True], ~adjacent)))
    lengths = np.add.reduceat(num_bytes, starts)
    return [CopyRange(*row) for row in zip(src[starts].tolist(), dst[starts].tolist(), lengths.tolist(), strict=True)]


def written_ranges(
    layout: KvLayout, head_ids: Sequence[int], blocks: Sequence[BlockId], first_unit: int, num_units: int
) -> list[tuple[int, int]]:
    """(offset, num_bytes) in the target's arena of what a SourceRecord announces, in the order its checksum runs over
    them.
    """
    if num_units == 0:
        return []
    positions = [layout.head_ids.index(head) for head in head_ids]
    offsets = _offsets(layout, positions, blocks, first_unit, num_units)
    return [(offset, layout.head_bytes) for offset in offsets.ravel().tolist()]


def _offsets(
    layout: KvLayout, heads: Sequence[int], blocks: Sequence[BlockId], first_unit: int, num_units: int
) -> Offsets:
    units = np.arange(first_unit, first_unit + num_units, dtype=np.int64)
    first_block = first_unit // layout.units_per_block
    end_block = -(-(first_unit + num_units) // layout.units_per_block)
    assert end_block <= len(blocks), (first_unit, num_units, len(blocks))
    used = np.array(blocks[first_block:end_block], np.int64)
    block_offsets = used[units // layout.units_per_block - first_block] * layout.block_bytes
    unit_offsets = block_offsets + units % layout.units_per_block * layout.unit_bytes
    offsets: Offsets = unit_offsets[:, None] + np.array(heads, np.int64)[None, :] * layout.head_bytes
    return offsets
