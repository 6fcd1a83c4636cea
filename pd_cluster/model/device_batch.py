"""A step's batch on a GPU, and decode steps as CUDA graphs.

A batch's indices travel in one copy. A graph is captured for a number of decodes, a number of units and a length, each
rounded up; a step is copied into its indices, filled up with padding, and replayed. Padding tokens have no keys, write
nowhere and count for no expert.
"""

# T tokens, N decodes, G segments, K key heads, H hidden size

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pd_cluster.kernels.gpu.attention import NewTokens, Segments
from pd_cluster.kernels.gpu.launch import power_of_two
from pd_cluster.kernels.paged import GqaPages, MlaPages, Writes
from pd_cluster.model.batch import Batch

MAX_GRAPH_DECODES = 256
MIN_GRAPH_UNITS = 64
MIN_GRAPH_KEYS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch(Batch):
    """A batch whose tensors are on the device. `work` is what attention reads paged; MLA prefills that expand their
    latents are in `expanded` instead.
    """

    work: Segments
    expanded: list[NewTokens]


def device_batch(cpu: Batch, read_K: Tensor) -> DeviceBatch:
    """`cpu` (from `build_segments`) moved to the device of `read_K` in one copy."""
    device = read_K.device
    segments = cpu.segments
    if segments is None:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        work = Segments(none.view(0, 5), none, read_K, 0, 0, 0)
        return DeviceBatch(0, none, none, Writes(none, none), none, [], [], none, work=work, expanded=[])
    num_decodes, rows_G5 = segments.num_decodes, segments.rows_G5
    paged_G5 = rows_G5[rows_G5[:, 4] == 0]
    expanded = [NewTokens(*row[:4]) for row in rows_G5[rows_G5[:, 4] != 0].tolist()]
    parts = (
        cpu.token_ids_T,
        cpu.positions_T,
        cpu.writes.units_T,
        cpu.writes.offsets_T,
        cpu.open_units,
        cpu.sample_rows,
        paged_G5.reshape(-1),
        segments.units,
    )
    packed = torch.cat(parts)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    moved = torch.split(packed, [len(part) for part in parts])
    token_ids_T, positions_T, units_T, offsets_T, open_units, sample_rows, rows, units = moved
    lengths_G = paged_G5[:, 1] + paged_G5[:, 2]
    longest_decode = int(lengths_G[:num_decodes].max()) if num_decodes else 0
    longest_prefill = int(paged_G5[num_decodes:, 1].max()) if len(paged_G5) > num_decodes else 0
    work = Segments(rows.view(-1, 5), units, read_K, num_decodes, longest_decode, longest_prefill)
    return DeviceBatch(
        cpu.num_tokens,
        token_ids_T,
        positions_T,
        Writes(units_T, offsets_T),
        open_units,
        [],
        [],
        sample_rows,
        work=work,
        expanded=expanded,
    )


class GraphShape(NamedTuple):
    """What a graph is captured for: decodes, units of all of them together, keys of the longest."""

    num_decodes: int
    num_units: int
    longest: int

    @staticmethod
    def of(batch: DeviceBatch) -> "GraphShape":
        """The smallest that `batch`, decodes only, fits in."""
        num_decodes, work = batch.num_tokens, batch.work
        return GraphShape(
            power_of_two(num_decodes) if num_decodes <= 8 else -(-num_decodes // 8) * 8,
            power_of_two(len(work.units), MIN_GRAPH_UNITS),
            power_of_two(work.longest_decode, MIN_GRAPH_KEYS),
        )


def empty_decodes(shape: GraphShape, read_K: Tensor) -> DeviceBatch:
    """A batch of nothing but padding, to be filled by `fill`."""
    N, device = shape.num_decodes, read_K.device
    token_ids_T, positions_T, offsets_T = torch.zeros((3, N), dtype=torch.int64, device=device)
    units_T = torch.full((N,), -1, dtype=torch.int64, device=device)
    rows_G5 = torch.zeros((N, 5), dtype=torch.int64, device=device)
    rows_G5[:, 0] = torch.arange(N, device=device)
    units = torch.zeros(shape.num_units, dtype=torch.int64, device=device)
    none = units[:0]
    work = Segments(rows_G5, units, read_K, N, shape.longest, 0)
    writes = Writes(units_T, offsets_T)
    return DeviceBatch(N, token_ids_T, positions_T, writes, none, [], [], none, work=work, expanded=[])


def fill(padded: DeviceBatch, batch: DeviceBatch) -> None:
    """Make `padded` compute `batch`, which has decodes only and fits in its shape."""
    n = batch.num_tokens
    padded.token_ids_T[:n] = batch.token_ids_T
    padded.positions_T[:n] = batch.positions_T
    padded.writes.units_T[:n] = batch.writes.units_T
    padded.writes.units_T[n:] = -1
    padded.writes.offsets_T[:n] = batch.writes.offsets_T
    padded.work.rows_G5[:n] = batch.work.rows_G5
    padded.work.rows_G5[n:, 1:] = 0
    padded.work.units[: len(batch.work.units)] = batch.work.units


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: DeviceBatch
    hidden_NH: Tensor


class DecodeGraphs:
    """Captures `forward` for each shape of decode step when it first comes, and replays it from then on."""

    def __init__(self, forward: Callable[[DeviceBatch, Sequence[GqaPages | MlaPages]], Tensor]) -> None:
        self._forward = forward
        self._captured: dict[tuple[GraphShape, int], _Captured] = {}
        self._pool: Any = None  # one memory pool for all: graphs never run at once

    def serves(self, batch: DeviceBatch) -> bool:
        return 0 < batch.num_tokens == batch.work.num_decodes <= MAX_GRAPH_DECODES

    def __call__(self, batch: DeviceBatch, pages: Sequence[GqaPages | MlaPages]) -> Tensor:
        """[T, H], valid until the next call."""
        shape, first = GraphShape.of(batch), pages[0]
        key = shape, (first.keys_UKWD if isinstance(first, GqaPages) else first.latent_UWC).data_ptr()
        if key not in self._captured:
            self._captured[key] = self._capture(shape, batch.work.read_K, pages)
        captured = self._captured[key]
        fill(captured.batch, batch)
        captured.graph.replay()
        return captured.hidden_NH[: batch.num_tokens]

    def _capture(self, shape: GraphShape, read_K: Tensor, pages: Sequence[GqaPages | MlaPages]) -> _Captured:
        batch, device = empty_decodes(shape, read_K), read_K.device
        # once outside the graph: kernels are compiled and libraries take their workspaces
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._forward(batch, pages)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden_NH = self._forward(batch, pages)
        self._pool = graph.pool()
        return _Captured(graph, batch, hidden_NH)
