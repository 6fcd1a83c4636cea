"""Many virtual ranks in one process: each owns its own slots and is the source of its share of the tokens.

Rows are packed, counted, exchanged and unpacked as between processes; only the wire is a permutation. An engine of
320 ranks is thereby a unit test.
"""

# T tokens, K experts per token, H hidden size, R rows in flight, B bytes of a row, D ranks

import torch
from torch import Tensor

from pd_cluster.ids import Rank
from pd_cluster.parallel.codec import RAW, Codec
from pd_cluster.parallel.dispatch import Arrived
from pd_cluster.parallel.groups import share
from pd_cluster.parallel.pack import Packed, add_up, pack, unpack


class LocalDispatcher:
    replicated = False

    def __init__(self, num_ranks: int, slots_per_rank: int, codec: Codec = RAW) -> None:
        self.ranks = [Rank(rank) for rank in range(num_ranks)]
        self.num_ranks = num_ranks
        self.slots_per_rank = slots_per_rank
        self.codec = codec

    def dispatch(self, layer: int, hidden_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> "LocalCombining":
        packed = []
        for rank in self.ranks:
            start, end = share(len(hidden_TH), rank, self.num_ranks)
            packed.append(pack(slots_TK[start:end], weights_TK[start:end], self.num_ranks, self.slots_per_rank))
        return LocalCombining(self, hidden_TH, packed)


class LocalCombining:
    def __init__(self, dispatcher: LocalDispatcher, hidden_TH: Tensor, packed: list[Packed]) -> None:
        self._dispatcher = dispatcher
        self._packed = packed
        shares = [share(len(hidden_TH), rank, dispatcher.num_ranks) for rank in dispatcher.ranks]
        self._like_TH = hidden_TH
        rows_TB = dispatcher.codec.encode(hidden_TH)
        self._sent_RB = torch.cat([rows_TB[a:b][p.token_C] for (a, b), p in zip(shares, packed, strict=True)])
        self._copy_counts = [p.copy_counts for p in packed]
        self._outputs: list[Tensor] = []

    def arrived(self) -> list[Arrived]:
        packed = self._packed
        pair_counts = [p.pair_counts for p in packed]
        rows, copies = exchange(self._copy_counts)
        pairs, counted = exchange(pair_counts)
        received_RB = self._sent_RB[rows.to(self._sent_RB.device)]
        hidden_RH = self._dispatcher.codec.decode(received_RB, self._like_TH.shape[1], self._like_TH.dtype)
        pairs = pairs.to(hidden_RH.device)
        row_P = torch.cat([p.pair_row_P for p in packed])[pairs]
        slot_P = torch.cat([p.pair_slot_P for p in packed])[pairs]
        weight_P = torch.cat([p.pair_weight_P for p in packed])[pairs]
        result = []
        row = pair = 0
        for rank in self._dispatcher.ranks:
            next_row, next_pair = row + sum(copies[rank]), pair + sum(counted[rank])
            result.append(
                unpack(
                    rank,
                    hidden_RH[row:next_row],
                    row_P[pair:next_pair],
                    slot_P[pair:next_pair],
                    weight_P[pair:next_pair],
                    copies[rank],
                    counted[rank],
                    self._dispatcher.slots_per_rank,
                )
            )
            row, pair = next_row, next_pair
        return result

    def reply(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs

    def total(self) -> Tensor:
        backwards = [list(counts) for counts in zip(*self._copy_counts, strict=True)]
        rows, _ = exchange(backwards)
        results_RH = torch.cat(self._outputs)
        returned_RH = results_RH[rows.to(results_RH.device)]
        sums = []
        first = 0
        for packed in self._packed:
            last = first + len(packed.token_C)
            sums.append(add_up(packed, returned_RH[first:last]))
            first = last
        return torch.cat(sums)


def exchange(counts: list[list[int]]) -> tuple[Tensor, list[list[int]]]:
    """An all-to-all as a permutation. `counts[s][d]`: rows that s sends to d, lying by (s, d).

    The order that lays them by (d, s), and the counts by destination.
    """
    counts_SD = torch.tensor(counts)
    starts_SD = (counts_SD.reshape(-1).cumsum(0) - counts_SD.reshape(-1)).view(counts_SD.shape)
    counts_DS, starts_DS = counts_SD.T.reshape(-1), starts_SD.T.reshape(-1)
    ends = counts_DS.cumsum(0)
    within = torch.arange(int(counts_DS.sum())) - (ends - counts_DS).repeat_interleave(counts_DS)
    return starts_DS.repeat_interleave(counts_DS) + within, counts_SD.T.tolist()
