"""A layer of experts: route every token, send it to the slots that hold its experts, add up what comes back.

Tokens are the same on all tensor-parallel ranks of a DP rank. When rows are exchanged each rank routes and sends only
its share of them (sequence parallel) and the results are gathered; otherwise every rank computes its own experts for
all tokens and the ranks add up. The shared expert, whole on every rank, always works on the rank's share.
"""

# T tokens, K experts per token, H hidden size, I intermediate size, R rows, P pairs (row, slot), E experts,
# S slots of a rank, C copies of an expert

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from pd_cluster.errors import EngineError
from pd_cluster.ids import Rank
from pd_cluster.model.config import MoeConfig
from pd_cluster.model.halves import Stages, finish
from pd_cluster.model.linear import multiply
from pd_cluster.model.mlp import gated
from pd_cluster.parallel.dispatch import Arrived, Dispatcher
from pd_cluster.parallel.groups import Group, share, share_counts
from pd_cluster.parallel.pack import sum_rows
from pd_cluster.parallel.replicas import HASH_BITS
from pd_cluster.parallel.slot_table import SlotTable


class SlotMap:
    """From logical experts to physical slots, at fixed addresses; which of the copies depends on the token and its
    position alone, by `replicas.choose`.
    """

    def __init__(self, table: SlotTable, device: torch.device) -> None:
        self.slots_EC = torch.from_numpy(table.slots_EC.copy()).to(device)
        self.thresholds_EC = torch.from_numpy(table.thresholds_EC.copy()).to(device)
        self.width = table.width

    def set(self, table: SlotTable) -> None:
        """Another placement from now on; between two steps, on the thread that launches them."""
        self.slots_EC.copy_(torch.from_numpy(table.slots_EC))
        self.thresholds_EC.copy_(torch.from_numpy(table.thresholds_EC))
        self.width = table.width

    def __call__(self, experts_TK: Tensor, mix_T: Tensor) -> Tensor:
        """int64 [T, K] slots. `mix_T` is `token_mix` of the tokens."""
        if self.width == 1:
            return self.slots_EC[:, 0][experts_TK]
        mixed = (mix_T.unsqueeze(1) + experts_TK * 0x9E3779B1) & 0x7FFFFFFF
        hashed = (mixed * 0x85EBCA6B & 0x7FFFFFFF) >> (31 - HASH_BITS)
        copies = (hashed.unsqueeze(2) >= self.thresholds_EC[:, : self.width][experts_TK]).sum(2)
        return self.slots_EC[experts_TK, copies]


def token_mix(token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
    """A number per token, int64, that spreads copies over tokens and positions and is the same in any batch."""
    return (token_ids_T * 0x27D4EB2F + positions_T * 0x165667B1) & 0x7FFFFFFF


class ExpertSlots:
    """One rank's experts of one layer: `gate_up_SNH` [S, 2 I, H] and `down_SHI` [S, H, I], each slot contiguous; an
    empty slot is never chosen.
    """

    def __init__(self, gate_up_SNH: Tensor, down_SHI: Tensor) -> None:
        self.gate_up_SNH = gate_up_SNH
        self.down_SHI = down_SHI

    def __call__(self, arrived: Arrived) -> Tensor:
        """[R, H]: every row's weighted sum over its experts here, summed in float32 in slot order."""
        hidden_PH = arrived.hidden_RH.index_select(0, arrived.pair_row_P)
        outputs = []
        first = 0
        for slot, count in enumerate(arrived.slot_counts):
            if count:
                gate_up = multiply(hidden_PH[first : first + count], self.gate_up_SNH[slot])
                outputs.append(multiply(gated(gate_up), self.down_SHI[slot]))
                first += count
        if not outputs:
            return torch.zeros_like(arrived.hidden_RH)
        weighted_PH = torch.cat(outputs) * arrived.pair_weight_P.unsqueeze(1)
        return sum_rows(weighted_PH, arrived.pair_row_P, len(arrived.hidden_RH)).to(arrived.hidden_RH.dtype)


class Router(Protocol):
    """`Gate`, or what computes the same."""

    config: MoeConfig
    weight_EH: Tensor
    bias_E: Tensor | None

    def __call__(self, hidden_TH: Tensor, /) -> tuple[Tensor, Tensor]: ...


class Moe:
    """`experts` holds the slots of every rank in this process; `layer` counts MoE layers."""

    def __init__(
        self,
        layer: int,
        gate: Router,
        choice: SlotMap,
        experts: Mapping[Rank, Callable[[Arrived], Tensor]],
        shared: Callable[[Tensor], Tensor] | None,
        dispatcher: Dispatcher,
        tp: Group | None,
    ) -> None:
        self.layer = layer
        self.gate = gate
        self.choice = choice
        self.experts = experts
        self.shared = shared
        self.dispatcher = dispatcher
        self.tp = tp
        num_experts, device = gate.weight_EH.shape[0], gate.weight_EH.device
        self.load_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        """Tokens routed to each expert; over the ranks of an engine every token is counted once."""

    def __call__(self, x_TH: Tensor, mix_T: Tensor) -> Tensor:
        """[T, H], the same on all tensor-parallel ranks. T may be 0; every rank of the engine must call."""
        return finish(self.stages(x_TH, mix_T))

    def stages(self, x_TH: Tensor, mix_T: Tensor) -> Stages:
        """The same with a pause behind what is sent."""
        if self.tp is None:
            return (yield from self._route(x_TH, mix_T, 0, len(x_TH)))
        start, end = share(len(x_TH), self.tp.rank, self.tp.size)
        if self.dispatcher.replicated:
            return (yield from self._route(x_TH, mix_T, start, end))
        own = x_TH[start:end]
        routed = yield from self._route(own, mix_T[start:end], 0, len(own))
        return self.tp.all_gather_rows(routed, share_counts(len(x_TH), self.tp.size))

    def _route(self, x_TH: Tensor, mix_T: Tensor, start: int, end: int) -> Stages:
        """Rows [start, end) get the shared expert's output here."""
        experts_TK, weights_TK = self.gate(x_TH)
        self._count(experts_TK)
        combining = self.dispatcher.dispatch(self.layer, x_TH, self.choice(experts_TK, mix_T), weights_TK)
        shared = self.shared(x_TH[start:end]) if self.shared is not None and end > start else None
        yield
        outputs = [self.experts[arrived.rank](arrived) for arrived in combining.arrived()]
        if self.dispatcher.replicated and shared is not None:
            outputs[0][start:end] += shared
            shared = None
        combining.reply(outputs)
        yield
        routed = combining.total()
        return routed if shared is None else routed.add_(shared)

    def _count(self, experts_TK: Tensor) -> None:
        if self.dispatcher.replicated and self.tp is not None and self.tp.rank:
            return  # the same tokens are counted by rank 0
        num_experts = len(self.load_E)
        try:
            self.load_E += torch.bincount(experts_TK.reshape(-1), minlength=num_experts)
        except RuntimeError:
            low, high = (int(bound) for bound in experts_TK.aminmax())
            if low >= 0 and high < num_experts:
                raise
            raise EngineError(f"a token chose expert {low if low < 0 else high} of {num_experts}") from None
