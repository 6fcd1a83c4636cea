"""Rows exchanged between processes by torch.distributed all-to-all: counts first, then rows with their pairs, then
results home.

Works on any backend and with any counts, at three collectives a layer. A rank without tokens takes part with counts
of zero.
"""

# T tokens, K experts per token, H hidden size, C copies sent, R rows received, B bytes of a row,
# P pairs (token, expert), D ranks

import torch
from torch import Tensor

from pd_cluster.parallel.codec import RAW, Codec
from pd_cluster.parallel.dispatch import Arrived
from pd_cluster.parallel.groups import Group, Groups
from pd_cluster.parallel.pack import Packed, add_up, pack, unpack

PAIR_BYTES = 12
"""A pair on the wire: row and slot as int32, weight as float32."""


class CollectiveDispatcher:
    replicated = False

    def __init__(self, groups: Groups, slots_per_rank: int, codec: Codec = RAW) -> None:
        self.ranks = [groups.rank]
        self.slots_per_rank = slots_per_rank
        self.codec = codec
        self.group = groups.engine

    def dispatch(self, layer: int, hidden_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> "CollectiveCombining":
        num_ranks = 1 if self.group is None else self.group.size
        return CollectiveCombining(self, hidden_TH, pack(slots_TK, weights_TK, num_ranks, self.slots_per_rank))


class CollectiveCombining:
    def __init__(self, dispatcher: CollectiveDispatcher, hidden_TH: Tensor, packed: Packed) -> None:
        self._dispatcher = dispatcher
        self._hidden_TH = hidden_TH
        self._packed = packed
        self._received_copies: list[int] = []
        self._output_RH: Tensor | None = None

    def arrived(self) -> list[Arrived]:
        packed, group, codec = self._packed, self._dispatcher.group, self._dispatcher.codec
        hidden_size, dtype = self._hidden_TH.shape[1], self._hidden_TH.dtype
        rows_CB = codec.encode(self._hidden_TH)[packed.token_C]
        if group is None:
            pairs = packed.pair_row_P, packed.pair_slot_P, packed.pair_weight_P
            hidden_CH = codec.decode(rows_CB, hidden_size, dtype)
            return [self._unpack(hidden_CH, *pairs, packed.copy_counts, packed.pair_counts)]
        copies, pair_counts = _exchange_counts(group, packed, rows_CB.device)
        self._received_copies = copies
        row_bytes = rows_CB.shape[1]
        sent = _interleave(rows_CB.view(-1), _pair_bytes(packed), packed.copy_counts, packed.pair_counts, row_bytes)
        received = group.all_to_all_rows(
            sent,
            _message_bytes(packed.copy_counts, packed.pair_counts, row_bytes),
            _message_bytes(copies, pair_counts, row_bytes),
        )
        rows, pair_words = _split(received, copies, pair_counts, row_bytes)
        hidden_RH = codec.decode(rows.view(-1, row_bytes), hidden_size, dtype)
        words_P3 = pair_words.view(torch.int32).view(-1, 3)
        weight_P = words_P3[:, 2].contiguous().view(torch.float32)
        return [self._unpack(hidden_RH, words_P3[:, 0].long(), words_P3[:, 1].long(), weight_P, copies, pair_counts)]

    def _unpack(
        self, hidden: Tensor, row: Tensor, slot: Tensor, weight: Tensor, copies: list[int], pairs: list[int]
    ) -> Arrived:
        dispatcher = self._dispatcher
        return unpack(dispatcher.ranks[0], hidden, row, slot, weight, copies, pairs, dispatcher.slots_per_rank)

    def reply(self, outputs: list[Tensor]) -> None:
        (self._output_RH,) = outputs

    def total(self) -> Tensor:
        output_RH, group = self._output_RH, self._dispatcher.group
        assert output_RH is not None
        if group is not None:
            output_RH = group.all_to_all_rows(output_RH, self._received_copies, self._packed.copy_counts)
        return add_up(self._packed, output_RH)


def _exchange_counts(group: Group, packed: Packed, device: torch.device) -> tuple[list[int], list[int]]:
    """How many copies and pairs every rank sends here."""
    ones = [1] * group.size
    sent_D2 = torch.tensor([packed.copy_counts, packed.pair_counts], dtype=torch.int64).T.contiguous().to(device)
    copies, pairs = group.all_to_all_rows(sent_D2, ones, ones).T.tolist()
    return copies, pairs


def _message_bytes(copy_counts: list[int], pair_counts: list[int], row_bytes: int) -> list[int]:
    return [c * row_bytes + p * PAIR_BYTES for c, p in zip(copy_counts, pair_counts, strict=True)]


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _pair_bytes(packed: Packed) -> Tensor:
    weight_bits_P = packed.pair_weight_P.contiguous().view(torch.int32)
    return _as_bytes(torch.stack([packed.pair_row_P.int(), packed.pair_slot_P.int(), weight_bits_P], dim=1))


def _interleave(rows: Tensor, pairs: Tensor, copies: list[int], pair_counts: list[int], row_bytes: int) -> Tensor:
    """One message per destination: its rows, then its pairs."""
    parts = []
    for row_part, pair_part in zip(
        torch.split(rows, [c * row_bytes for c in copies]),
        torch.split(pairs, [p * PAIR_BYTES for p in pair_counts]),
        strict=True,
    ):
        parts += [row_part, pair_part]
    return torch.cat(parts)


def _split(received: Tensor, copies: list[int], pair_counts: list[int], row_bytes: int) -> tuple[Tensor, Tensor]:
    """The rows and the pairs of all messages, each in rank order."""
    sizes = [size for c, p in zip(copies, pair_counts, strict=True) for size in (c * row_bytes, p * PAIR_BYTES)]
    parts = torch.split(received, sizes)
    return torch.cat(parts[0::2]), torch.cat(parts[1::2])
