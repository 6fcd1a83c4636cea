"""Weight matrices packed for the C kernels, in memory of huge pages.

Decoding reads every weight once a step: with pages of 4 KiB a third of the time goes into address translation.
"""

# N outputs, K inputs, S matrices of one shape

import ctypes
import mmap

import torch
from torch import Tensor

from pd_cluster.kernels import native

CHUNK_BYTES = 64 << 20
ALIGNMENT = 64

PANEL_OUTPUTS = 64
"""The kernels pack so many outputs together; a gated matrix half as many gates with their ups."""


def align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class WeightMemory:
    """Hands out memory, filled with zeros, from large ranges. Nothing is given back before the last tensor is gone."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0

    def take(self, num_values: int) -> Tensor:
        """bfloat16 [num_values]."""
        return self.take_bytes(2 * num_values).view(torch.bfloat16)

    def take_bytes(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], aligned to 64."""
        if self._chunk is None or self._used + num_bytes > len(self._chunk):
            self._chunk = _huge_pages(max(CHUNK_BYTES, num_bytes))
            self._used = 0
        taken = self._chunk[self._used : self._used + num_bytes]
        self._used += align(num_bytes)
        return taken


def _huge_pages(num_bytes: int) -> Tensor:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def packed_bytes(library: ctypes.CDLL, num_outputs: int, num_inputs: int, *, gated: bool = False) -> int:
    return 2 * int(library.packed_size(num_outputs, num_inputs, gated))


def pack_rows(library: ctypes.CDLL, to: Tensor, rows_NK: Tensor, first: int, *, gated: bool = False) -> None:
    """Pack outputs [first, first + N) of a matrix whose packed form begins at `to` (uint8). `first` is a multiple of
    PANEL_OUTPUTS, and so is N but for the last outputs. A gated matrix is given as N / 2 gates and then their ups.
    """
    assert first % PANEL_OUTPUTS == 0
    num_outputs, num_inputs = rows_NK.shape
    rows_NK = rows_NK.contiguous()
    at = packed_bytes(library, first, num_inputs, gated=gated) if first else 0
    assert at + packed_bytes(library, num_outputs, num_inputs, gated=gated) <= len(to)
    library.pack(to.data_ptr() + at, rows_NK.data_ptr(), num_outputs, num_inputs, gated)


class Packed:
    """Matrices [S, N, K] of one shape, or one [N, K]; `bias` for one. `gated`: N is gates, then as many ups, and a
    product is silu(gate) * up.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: WeightMemory,
        weight: Tensor,
        bias_N: Tensor | None = None,
        *,
        gated: bool = False,
    ) -> None:
        weight_SNK = weight if weight.dim() == 3 else weight.unsqueeze(0)
        assert weight.dtype is torch.bfloat16
        num_matrices, self.num_outputs, self.num_inputs = weight_SNK.shape
        assert self.num_inputs % 2 == 0
        self.gated = gated
        self.stride: int = library.packed_size(self.num_outputs, self.num_inputs, gated)
        self.values = memory.take(num_matrices * self.stride)
        self.bias_N = None if bias_N is None else bias_N.float()
        for index, matrix_NK in enumerate(weight_SNK):
            source = matrix_NK.contiguous()
            to = self.values.data_ptr() + 2 * index * self.stride
            library.pack(to, source.data_ptr(), self.num_outputs, self.num_inputs, gated)
        self._library = library

    def struct(self) -> native.Linear:
        """The first matrix as the kernels take it; valid while this object lives."""
        bias = None if self.bias_N is None else self.bias_N.data_ptr()
        return native.Linear(self.values.data_ptr(), bias, self.num_outputs, self.num_inputs, self.gated)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """x W^T + b of the first matrix alone, [T, N] (gated [T, N / 2])."""
        width = self.num_outputs // 2 if self.gated else self.num_outputs
        out = x_TK.new_empty((len(x_TK), width))
        self._library.linear_alone(
            self.struct(),
            x_TK.data_ptr(),
            x_TK.stride(0),
            len(x_TK),
            out.data_ptr(),
            width,
            0,
            torch.get_num_threads(),
        )
        return out
