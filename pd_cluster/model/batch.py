"""One step's tensors, built by numpy: its tokens, where their KV goes, which pages attention reads.

Decode tokens come first, sorted by length and cut into groups so that padding a group to its longest sequence at most
about doubles it; then the prefill segments.
"""

# T tokens, N sequences of a decode group, P pages (units) of its longest, K KV heads of the kernels, S keys

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pd_cluster.kernels.paged import DecodeGroup, PrefillSegment, Writes
from pd_cluster.request import UNIT_TOKENS

Int64 = NDArray[np.int64]


class KvHeads(NamedTuple):
    """`held`: global KV heads of this rank's arena, in order. `read`: local heads that the kernels read, one for each
    group of queries.
    """

    held: tuple[int, ...]
    read: tuple[int, ...]


MLA_HEADS = KvHeads((0,), (0,))


class Span(NamedTuple):
    """What one sequence computes: its tokens [start, end), of which `token_ids` are the ids, and the units of its KV
    up to `end`.
    """

    start: int
    end: int
    token_ids: Int64
    units: Int64
    sample: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """`sample_rows` are the last tokens of the spans that sample, in the order of the spans."""

    num_tokens: int
    token_ids_T: Tensor
    positions_T: Tensor
    writes: Writes
    open_units: Tensor  # begun but not completed in this step: cleared first, so that nothing stale is ever read
    decode: list[DecodeGroup]
    prefill: list[PrefillSegment]
    sample_rows: Tensor

    @staticmethod
    def empty(device: torch.device) -> "Batch":
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return Batch(0, none, none, Writes(none, none), none, [], [], none)


def build_batch(spans: Seq[Span], heads: KvHeads, device: torch.device) -> Batch:
    """The batch of a step's spans; `spans` may be empty."""
    if not spans:
        return Batch.empty(device)
    decode = sorted((i for i, span in enumerate(spans) if span.end - span.start == 1), key=lambda i: spans[i].end)
    prefill = [i for i, span in enumerate(spans) if span.end - span.start > 1]
    order = [*decode, *prefill]
    lengths = np.array([spans[i].end - spans[i].start for i in order])
    first_rows = np.cumsum(lengths) - lengths
    positions_T = np.concatenate([np.arange(spans[i].start, spans[i].end) for i in order])
    units_T = np.concatenate([spans[i].units[np.arange(spans[i].start, spans[i].end) // UNIT_TOKENS] for i in order])
    open_units = [
        int(span.units[span.end // UNIT_TOKENS])
        for span in spans
        if span.end % UNIT_TOKENS and span.start <= span.end // UNIT_TOKENS * UNIT_TOKENS
    ]
    row_of = dict(zip(order, first_rows.tolist(), strict=True))
    sample_rows = [row_of[i] + span.end - span.start - 1 for i, span in enumerate(spans) if span.sample]

    def tensor(values: Int64 | list[int]) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device, non_blocking=True)

    return Batch(
        num_tokens=len(positions_T),
        token_ids_T=tensor(np.concatenate([spans[i].token_ids for i in order])),
        positions_T=tensor(positions_T),
        writes=Writes(tensor(units_T), tensor(positions_T % UNIT_TOKENS)),
        open_units=tensor(open_units),
        decode=_decode_groups([spans[i] for i in decode], heads, device),
        prefill=[
            PrefillSegment(
                row_of[i], row_of[i] + span.end - span.start, span.start, tensor(_page_rows(_units(span)[None], heads))
            )
            for i, span in ((i, spans[i]) for i in prefill)
        ],
        sample_rows=tensor(sample_rows),
    )


def _units(span: Span) -> Int64:
    return span.units[: -(-span.end // UNIT_TOKENS)]


def _page_rows(units_NP: Int64, heads: KvHeads) -> Int64:
    """[N * K * P]: rows of the pages, heads inside sequences."""
    rows_NKP = units_NP[:, None, :] * len(heads.held) + np.array(heads.read)[None, :, None]
    rows: Int64 = rows_NKP.reshape(-1)
    return rows


def _decode_groups(spans: list[Span], heads: KvHeads, device: torch.device) -> list[DecodeGroup]:
    """Groups of `spans`, which are sorted by length."""
    groups = []
    start = 0
    num_pages = [-(-span.end // UNIT_TOKENS) for span in spans]
    while start < len(spans):
        longest = 2 * num_pages[start] + 2
        end = start + 1
        while end < len(spans) and num_pages[end] <= longest:
            end += 1
        members = spans[start:end]
        units_NP = np.empty((len(members), num_pages[end - 1]), dtype=np.int64)
        for row, span, count in zip(units_NP, members, num_pages[start:end], strict=True):
            row[:count] = span.units[:count]
            row[count:] = span.units[count - 1]
        ends_N = np.array([span.end for span in members])
        hidden_NS = np.arange(units_NP.shape[1] * UNIT_TOKENS)[None] >= ends_N[:, None]
        groups.append(
            DecodeGroup(
                start,
                end,
                torch.from_numpy(_page_rows(units_NP, heads)).to(device, non_blocking=True),
                torch.from_numpy(hidden_NS).unsqueeze(1).to(device, non_blocking=True),
            )
        )
        start = end
    return groups
