"""One step's tensors, built by numpy: its tokens, where their KV goes, which pages attention reads.

Decode tokens come first, then the prefill segments. The torch kernels want decodes sorted by length and cut into
groups, so that padding a group to its longest sequence at most about doubles it; the C kernels (`segments`) take any
order and read each sequence's units as they are.
"""

# T tokens, N sequences of a decode group, P pages (units) of its longest, K KV heads of the kernels, S keys,
# G segments

from collections.abc import Callable
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


class Segments(NamedTuple):
    """A batch as the C kernels read it. `rows_G5` int64: first token, number of tokens, tokens before them, first of
    its `units`, whether MLA expands its latents; those of one token, `num_decodes`, come first.
    """

    num_decodes: int
    rows_G5: Tensor
    units: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """`sample_rows` are the last tokens of the spans that sample, in the order of the spans. Attention is told what to
    read by `decode` and `prefill`, or by `segments`.
    """

    num_tokens: int
    token_ids_T: Tensor
    positions_T: Tensor
    writes: Writes
    open_units: Tensor  # begun but not completed in this step: cleared first, so that nothing stale is ever read
    decode: list[DecodeGroup]
    prefill: list[PrefillSegment]
    sample_rows: Tensor
    segments: Segments | None = None

    @staticmethod
    def empty(device: torch.device) -> "Batch":
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return Batch(0, none, none, Writes(none, none), none, [], [], none)


def build_segments(spans: Seq[Span], expands: Callable[[int], bool] | None = None) -> Batch:
    """The batch of a step's spans for the C kernels; `spans` may be empty. `expands` says whether MLA expands the
    latents of a segment of so many tokens.
    """
    if not spans:
        return Batch.empty(torch.device("cpu"))
    decode = [i for i, span in enumerate(spans) if span.end - span.start == 1]
    order = decode if len(decode) == len(spans) else [*decode, *(i for i in range(len(spans)) if i not in set(decode))]
    ordered = spans if order == list(range(len(spans))) else [spans[i] for i in order]
    starts_G, ends_G = np.array([(span.start, span.end) for span in ordered], dtype=np.int64).T
    counts_G = ends_G - starts_G
    firsts_G = np.cumsum(counts_G) - counts_G
    used = [span.units[: (span.end - 1) // UNIT_TOKENS + 1] for span in ordered]
    num_units_G = (ends_G - 1) // UNIT_TOKENS + 1
    first_units_G = np.cumsum(num_units_G) - num_units_G
    units = np.concatenate(used)
    num_tokens = int(counts_G.sum())
    within_T = np.arange(num_tokens) - np.repeat(firsts_G, counts_G)
    positions_T = np.repeat(starts_G, counts_G) + within_T
    token_units_T = units[np.repeat(first_units_G, counts_G) + positions_T // UNIT_TOKENS]
    is_open_G = (ends_G % UNIT_TOKENS != 0) & (starts_G <= ends_G // UNIT_TOKENS * UNIT_TOKENS)
    expanded = [0 if expands is None or count == 1 else int(expands(count)) for count in counts_G.tolist()]
    last_row_of = dict(zip(order, (firsts_G + counts_G - 1).tolist(), strict=True))
    rows_G5 = np.stack([firsts_G, counts_G, starts_G, first_units_G, np.array(expanded, dtype=np.int64)], axis=1)
    return Batch(
        num_tokens=num_tokens,
        token_ids_T=torch.from_numpy(np.concatenate([span.token_ids for span in ordered])),
        positions_T=torch.from_numpy(positions_T),
        writes=Writes(torch.from_numpy(token_units_T), torch.from_numpy(positions_T % UNIT_TOKENS)),
        open_units=torch.from_numpy(units[(first_units_G + num_units_G - 1)[is_open_G]]),
        decode=[],
        prefill=[],
        sample_rows=torch.tensor([last_row_of[i] for i, span in enumerate(spans) if span.sample], dtype=torch.int64),
        segments=Segments(len(decode), torch.from_numpy(rows_G5), torch.from_numpy(units)),
    )


def build_batch(spans: Seq[Span], heads: KvHeads, device: torch.device) -> Batch:
    """The batch of a step's spans for the torch kernels; `spans` may be empty."""
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
