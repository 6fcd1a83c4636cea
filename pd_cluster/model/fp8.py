"""FP8 checkpoints keep each weight as e4m3 with one scale per block, `weight_scale_inv`, a factor despite its name.

weight [N, K] e4m3, scale [ceil(N / 128), ceil(K / 128)]: edge blocks are partial.
"""

import torch
from torch import Tensor


def block_range(start: int, end: int, size: int) -> tuple[int, int]:
    """The blocks of `size` that cover [start, end)."""
    return start // size, -(-end // size)


def dequantize_blocks(
    q_NK: Tensor, scale_BC: Tensor, row: int, col: int, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Widen a slice of an FP8 weight whose first element lies at (`row`, `col`) of the whole weight.

    `scale_BC` holds the scales of exactly the blocks that the slice touches. One row of blocks is widened at a time, so
    the float32 intermediate stays small however large the weight.
    """
    num_rows, num_cols = q_NK.shape
    out_NK = torch.empty(num_rows, num_cols, dtype=dtype)
    first_col = col % block[1]
    start = 0
    for scale_C in scale_BC.float():
        end = min(num_rows, start + block[0] - (row + start) % block[0])
        scale_K = scale_C.repeat_interleave(block[1])[first_col : first_col + num_cols]
        out_NK[start:end] = (q_NK[start:end].float() * scale_K).to(dtype)
        start = end
    assert start == num_rows
    return out_NK
