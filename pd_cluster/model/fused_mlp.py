"""The gated feed-forward layer as one call of the C kernels, and how a fused layer joins the hidden states."""

# T tokens, H hidden size

import ctypes
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from pd_cluster.kernels import native
from pd_cluster.kernels.packed import Packed, WeightMemory
from pd_cluster.model.linear import RowLinear
from pd_cluster.model.mlp import DenseMlp
from pd_cluster.model.norm import RmsNorm
from pd_cluster.parallel.groups import Group


def norm_struct(norm: RmsNorm | None) -> native.Norm:
    return native.Norm(None, 0.0) if norm is None else native.Norm(norm.weight.data_ptr(), norm.eps)


class Residual:
    """What a row-cut layer adds to the hidden states: at once, or after the ranks' parts have been summed."""

    def __init__(self, out: Any) -> None:
        self.group: Group | None = out.group if isinstance(out, RowLinear) else None
        self._bias_H: Tensor | None = out.bias_N

    @property
    def fused_bias(self) -> Tensor | None:
        return self._bias_H if self.group is None else None

    def partial(self, x_TH: Tensor) -> Tensor | None:
        return None if self.group is None else torch.empty_like(x_TH)

    def add(self, x_TH: Tensor, partial_TH: Tensor | None) -> None:
        if self.group is not None and partial_TH is not None:
            x_TH += self.group.all_reduce(partial_TH)
            if self._bias_H is not None:
                x_TH += self._bias_H


class FusedMlp:
    """With a norm, `add` adds to the hidden states; without, a call gives [T, H] as `DenseMlp` does."""

    def __init__(self, library: ctypes.CDLL, memory: WeightMemory, norm: RmsNorm | None, plain: DenseMlp) -> None:
        self._kept = norm
        self._residual = Residual(plain.down)
        self.gate_up = Packed(library, memory, plain.gate_up.weight_NH, gated=True)
        self.down = Packed(library, memory, plain.down.weight_NH, self._residual.fused_bias)
        self._call = library.mlp_layer
        self.struct = native.MlpLayer(norm_struct(norm), self.gate_up.struct(), self.down.struct())

    def add(self, x_TH: Tensor) -> None:
        partial_TH = self._residual.partial(x_TH)
        to = None if partial_TH is None else partial_TH.data_ptr()
        self._call(byref(self.struct), len(x_TH), x_TH.data_ptr(), to, torch.get_num_threads())
        self._residual.add(x_TH, partial_TH)

    def __call__(self, x_TH: Tensor) -> Tensor:
        out_TH = torch.empty_like(x_TH)
        self._call(byref(self.struct), len(x_TH), x_TH.data_ptr(), out_TH.data_ptr(), torch.get_num_threads())
        return out_TH
