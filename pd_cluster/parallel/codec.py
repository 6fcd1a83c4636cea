"""How a token's hidden state travels to its experts: as it is, or as FP8 with scales.

Dispatchers send rows of bytes. FP8 halves what bfloat16 sends: e4m3 codes of x / scale, with a float32 scale for each
128 values, max |x| (at least 1e-4) / 448, as DeepSeek's FP8 activations have it. Each value comes back within 1/16 of
itself, or within scale / 1024 where that is more (`FP8_ERROR`). Results come home in the model's dtype whatever the
codec.
"""

# R rows, H hidden size, S scales of a row, B bytes of a row

from typing import Literal, Protocol

import torch
from torch import Tensor

CodecName = Literal["auto", "fp8"]

BLOCK = 128
"""Values that share a scale."""

HIGHEST = 448.0
LEAST_AMAX = 1e-4

FP8_ERROR = (1 / 16, 1 / 1024)
"""Of a value itself, and of its block's scale: a decoded float32 value is off by at most the larger."""


class Codec(Protocol):
    is_fp8: bool

    def row_bytes(self, hidden_size: int, dtype: torch.dtype) -> int:
        """B."""

    def encode(self, hidden_RH: Tensor) -> Tensor:
        """uint8 [R, B]."""

    def decode(self, rows_RB: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """[R, H] of `dtype`."""


class Raw:
    """The dtype as it is."""

    is_fp8 = False

    def row_bytes(self, hidden_size: int, dtype: torch.dtype) -> int:
        return hidden_size * dtype.itemsize

    def encode(self, hidden_RH: Tensor) -> Tensor:
        return hidden_RH.contiguous().view(torch.uint8)

    def decode(self, rows_RB: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
        return rows_RB.contiguous().view(dtype)


class Fp8:
    """A row is its scales, then its codes, then zeros up to a multiple of 8 bytes."""

    is_fp8 = True

    def row_bytes(self, hidden_size: int, dtype: torch.dtype) -> int:
        return -(-(num_scales(hidden_size) * 4 + hidden_size) // 8) * 8

    def encode(self, hidden_RH: Tensor) -> Tensor:
        R, H = hidden_RH.shape
        S = num_scales(H)
        rows_RB = hidden_RH.new_zeros((R, self.row_bytes(H, hidden_RH.dtype)), dtype=torch.uint8)
        if not R:
            return rows_RB
        padded_RH = torch.nn.functional.pad(hidden_RH.float(), (0, S * BLOCK - H))
        blocks = padded_RH.view(R, S, BLOCK)
        scale_RS = blocks.abs().amax(dim=2).clamp_min(LEAST_AMAX) / HIGHEST
        codes_RH = (blocks / scale_RS.unsqueeze(2)).to(torch.float8_e4m3fn).view(R, S * BLOCK)[:, :H]
        rows_RB[:, : 4 * S] = scale_RS.view(torch.uint8)
        rows_RB[:, 4 * S : 4 * S + H] = codes_RH.view(torch.uint8)
        return rows_RB

    def decode(self, rows_RB: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
        S = num_scales(hidden_size)
        if not len(rows_RB):
            return rows_RB.new_empty((0, hidden_size), dtype=dtype)
        scale_RS = rows_RB[:, : 4 * S].contiguous().view(torch.float32)
        codes_RH = rows_RB[:, 4 * S : 4 * S + hidden_size].contiguous().view(torch.float8_e4m3fn).float()
        return (codes_RH * scale_RS.repeat_interleave(BLOCK, dim=1)[:, :hidden_size]).to(dtype)


def num_scales(hidden_size: int) -> int:
    return -(-hidden_size // BLOCK)


RAW = Raw()


def codec_of(name: CodecName) -> Codec:
    return Fp8() if name == "fp8" else RAW
