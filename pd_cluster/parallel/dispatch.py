"""Tokens to experts and back: the contract of every dispatcher.

A dispatcher serves the ranks that live in this process: one for `collective`, all of them for `local`. Rows go to the
ranks that own the chosen slots, one copy of a token for each destination rank, and come back as one partial sum for
each of them.
"""

# T tokens of this process, K experts per token, H hidden size, R received rows

from typing import Protocol

from torch import Tensor

from pd_cluster.ids import Rank


class Arrived:
    """What one rank received: rows, and for each (row, expert) pair the local slot and the weight.

    hidden_RH: rows; pair_row_P, pair_slot_P (int64, local slot), pair_weight_P (float32). Pairs are sorted by slot,
    stably by row; `slot_counts` [slots_per_rank] says how many pairs each slot has. Any of it may be empty.
    """

    __slots__ = ("hidden_RH", "pair_row_P", "pair_slot_P", "pair_weight_P", "rank", "slot_counts")

    def __init__(
        self,
        rank: Rank,
        hidden_RH: Tensor,
        pair_row_P: Tensor,
        pair_slot_P: Tensor,
        pair_weight_P: Tensor,
        slot_counts: list[int],
    ) -> None:
        self.rank = rank
        self.hidden_RH = hidden_RH
        self.pair_row_P = pair_row_P
        self.pair_slot_P = pair_slot_P
        self.pair_weight_P = pair_weight_P
        self.slot_counts = slot_counts


class Combining(Protocol):
    """A dispatch under way: the rows this process's ranks received, then their sums back to the tokens."""

    def arrived(self) -> list[Arrived]:
        """Wait for the rows; one entry for each rank in this process."""

    def reply(self, outputs: list[Tensor]) -> None:
        """Begin to send each rank's [R, H] weighted sums home. Until `total` another exchange may begin."""

    def total(self) -> Tensor:
        """Wait for the sums and add them up: [T, H] in the dtype of the rows."""


def combine(combining: Combining, outputs: list[Tensor]) -> Tensor:
    """`reply`, then `total`."""
    combining.reply(outputs)
    return combining.total()


class Dispatcher(Protocol):
    ranks: list[Rank]  # the ranks whose experts live in this process
    replicated: (
        bool  # rows that arrive are all tokens in order, the same on every rank, and `total` adds the ranks' results
    )

    def dispatch(self, layer: int, hidden_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Combining:
        """Begin sending rows. `slots_TK`: physical slots over all ranks, int64; `weights_TK` float32. T may be 0, and
        every rank of the engine must call this for every MoE layer of every step, in the same order.
        """
