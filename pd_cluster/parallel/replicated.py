"""The plain form of expert parallelism: every rank sees all tokens, computes its own experts, and the ranks add up.

Right when tokens are already on every rank (one DP rank, tensor-parallel or alone), and the reference for the
dispatchers that exchange rows.
"""

# T tokens, K experts per token, H hidden size, P pairs (token, expert)

import torch
from torch import Tensor

from pd_cluster.ids import Rank
from pd_cluster.parallel.dispatch import Arrived
from pd_cluster.parallel.groups import Groups


class ReplicatedDispatcher:
    """Needs the same tokens, slots and weights on every rank of the engine, so data_parallel must be 1."""

    replicated = True

    def __init__(self, groups: Groups, slots_per_rank: int) -> None:
        assert groups.dp_size == 1, "tokens of other DP ranks are not here"
        self.ranks = [groups.rank]
        self._group = groups.tp
        self._slots_per_rank = slots_per_rank

    def dispatch(self, layer: int, hidden_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> "ReplicatedCombining":
        first_slot = self.ranks[0] * self._slots_per_rank
        slots_P = slots_TK.reshape(-1) - first_slot
        if self._group is None:
            pairs = torch.argsort(slots_P, stable=True)
        else:
            mine = ((slots_P >= 0) & (slots_P < self._slots_per_rank)).nonzero().squeeze(1)
            pairs = mine[torch.argsort(slots_P[mine], stable=True)]
        pair_slot_P = slots_P[pairs]
        slot_counts = torch.bincount(pair_slot_P, minlength=self._slots_per_rank).tolist()
        row_P = pairs.div(slots_TK.shape[1], rounding_mode="floor")
        weight_P = weights_TK.reshape(-1)[pairs]
        arrived = Arrived(self.ranks[0], hidden_TH, row_P, pair_slot_P, weight_P, slot_counts)
        return ReplicatedCombining(arrived, self)

    def add_ranks(self, partial_TH: Tensor) -> Tensor:
        return partial_TH if self._group is None else self._group.all_reduce(partial_TH)


class ReplicatedCombining:
    def __init__(self, arrived: Arrived, dispatcher: ReplicatedDispatcher) -> None:
        self._arrived = arrived
        self._dispatcher = dispatcher
        self._outputs: list[Tensor] = []

    def arrived(self) -> list[Arrived]:
        return [self._arrived]

    def reply(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs

    def total(self) -> Tensor:
        return self._dispatcher.add_ranks(self._outputs[0])


def single_rank(num_slots: int) -> ReplicatedDispatcher:
    """The dispatcher of an engine of one rank."""
    return ReplicatedDispatcher(Groups(rank=Rank(0)), num_slots)
