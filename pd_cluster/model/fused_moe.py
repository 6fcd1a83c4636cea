"""A layer of experts in the C kernels: gate, choice of slots and experts, in one call where they all live here."""

# T tokens, H hidden size, K chosen experts, R rows of experts

import ctypes
from ctypes import byref
from typing import cast

import torch
from torch import Tensor

from pd_cluster.kernels import native
from pd_cluster.kernels.packed import WeightMemory
from pd_cluster.model.expert_arena import ExpertArena, PackedForm
from pd_cluster.model.fused_mlp import FusedMlp, norm_struct
from pd_cluster.model.gate import Gate
from pd_cluster.model.halves import Stages
from pd_cluster.model.mlp import DenseMlp
from pd_cluster.model.moe import Moe, SlotMap
from pd_cluster.model.norm import RmsNorm
from pd_cluster.parallel.dispatch import Arrived


class FusedGate:
    """Called as `Gate` is; of equal scores the lower expert is chosen."""

    def __init__(self, library: ctypes.CDLL, plain: Gate) -> None:
        self.config = config = plain.config
        self.weight_EH, self.bias_E = plain.weight_EH.contiguous(), plain.bias_E
        self._num_chosen = config.num_experts_per_tok
        self._call = library.gate_layer
        is_deepseek, is_v3 = config.gate.startswith("deepseek"), config.gate == "deepseek_v3"
        self.struct = native.Gate(
            weight=self.weight_EH.data_ptr(),
            bias=None if self.bias_E is None else self.bias_E.data_ptr(),
            num_experts=config.num_experts,
            hidden=self.weight_EH.shape[1],
            num_chosen=self._num_chosen,
            num_groups=config.num_groups,
            topk_groups=config.topk_groups,
            sigmoid=is_v3,
            best_of_group={"deepseek_v3": 2, "deepseek_v2_group": 1}.get(config.gate, 0),
            normalise=config.gate == "mixtral" or (config.norm_topk_prob and config.gate in ("deepseek_v3", "qwen3")),
            factor=config.routed_scaling_factor if is_deepseek else 1.0,
        )

    def __call__(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The experts (int64 [T, K], the best first) and their weights (float32 [T, K])."""
        hidden_TH = hidden_TH.contiguous()
        experts_TK = torch.empty((len(hidden_TH), self._num_chosen), dtype=torch.int64)
        weights_TK = torch.empty((len(hidden_TH), self._num_chosen))
        self._call(
            byref(self.struct),
            hidden_TH.data_ptr(),
            len(hidden_TH),
            experts_TK.data_ptr(),
            weights_TK.data_ptr(),
            torch.get_num_threads(),
        )
        return experts_TK, weights_TK


class FusedExperts:
    """Called as `ExpertSlots` is: one layer of an arena of packed experts."""

    def __init__(self, library: ctypes.CDLL, form: PackedForm, arena: ExpertArena, layer: int) -> None:
        self.num_slots = arena.num_slots
        self.slot_bytes = form.num_bytes
        self._arena = arena  # whose memory the kernels read
        self._counts = ctypes.c_int64 * self.num_slots
        self._call = library.experts_layer
        first = arena.base_address + arena.offset(layer, 0)
        self.struct = native.ExpertsLayer(
            native.Linear(first, None, 2 * form.size, form.hidden, True),
            native.Linear(first + form.down_at, None, form.hidden, form.size, False),
            arena.stride // 2,
        )

    def __call__(self, arrived: Arrived) -> Tensor:
        """[R, H]: every row's weighted sum over its experts here, summed in float32 in slot order."""
        hidden_RH = arrived.hidden_RH.contiguous()
        out_RH = torch.empty_like(hidden_RH)
        self._call(
            byref(self.struct),
            self.num_slots,
            byref(self._counts(*arrived.slot_counts)),
            arrived.pair_row_P.data_ptr(),
            arrived.pair_weight_P.data_ptr(),
            hidden_RH.data_ptr(),
            len(hidden_RH),
            out_RH.data_ptr(),
            torch.get_num_threads(),
        )
        return out_RH


class FusedSlotMap(SlotMap):
    """Takes over the addresses of `plain`, which is not used any more, and chooses what it does."""

    def __init__(self, library: ctypes.CDLL, plain: SlotMap) -> None:
        self.slots_EC, self.thresholds_EC, self.width = plain.slots_EC, plain.thresholds_EC, plain.width
        self._call = library.slots_by_hash

    def __call__(self, experts_TK: Tensor, mix_T: Tensor) -> Tensor:
        """int64 [T, K] slots."""
        experts_TK, mix_T, slots_TK = experts_TK.contiguous(), mix_T.contiguous(), torch.empty_like(experts_TK)
        self._call(
            experts_TK.data_ptr(),
            mix_T.data_ptr(),
            *experts_TK.shape,
            self.slots_EC.data_ptr(),
            self.thresholds_EC.data_ptr(),
            self.slots_EC.shape[1],
            self.width,
            slots_TK.data_ptr(),
        )
        return slots_TK


class FusedMoe:
    """A layer of experts and the norm before it, added to the hidden states: one call where every expert lives on this
    rank alone and can have but one slot, else the steps of `Moe` with fused parts.
    """

    def __init__(self, library: ctypes.CDLL, memory: WeightMemory, norm: RmsNorm, moe: Moe) -> None:
        gate = FusedGate(library, cast(Gate, moe.gate))
        shared = FusedMlp(library, memory, None, moe.shared) if isinstance(moe.shared, DenseMlp) else None
        moe.gate, moe.shared = gate, shared
        moe.choice = FusedSlotMap(library, moe.choice)
        self.moe = moe
        self._kept_norm = norm
        self._norm = norm_struct(norm)
        self._library = library
        self._struct: native.MoeLayer | None = None
        if moe.dispatcher.replicated and moe.tp is None and moe.choice.slots_EC.shape[1] == 1:
            (experts,) = moe.experts.values()
            assert isinstance(experts, FusedExperts)
            self._struct = native.MoeLayer(
                norm=self._norm,
                gate=gate.struct,
                experts=experts.struct,
                shared=native.MlpLayer() if shared is None else shared.struct,
                num_slots=experts.num_slots,
                slot_of_expert=moe.choice.slots_EC.data_ptr(),
                load=moe.load_E.data_ptr(),
            )

    def stages(self, x_TH: Tensor, mix_T: Tensor) -> Stages:
        """Adds to `x_TH` and returns it."""
        T, H = x_TH.shape
        threads = torch.get_num_threads()
        if self._struct is not None:
            self._library.moe_layer(byref(self._struct), T, x_TH.data_ptr(), threads)
            return x_TH
        normed_TH = torch.empty_like(x_TH)
        self._library.norm_layer(byref(self._norm), x_TH.data_ptr(), H, T, normed_TH.data_ptr(), threads)
        x_TH += yield from self.moe.stages(normed_TH, mix_T)
        return x_TH
