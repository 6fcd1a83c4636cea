"""Where a model's tensors come from: by their Hugging Face name, only the part that a rank needs.

Safetensors directories and GGUF files are two sources behind this one contract; a third makes seeded random weights.
"""

from typing import Protocol

import torch
from torch import Tensor


class WeightSource(Protocol):
    identity: str
    """Digest of the config, of every tensor's name, shape and size, and of bytes from their middles: equal checkpoints,
    equal digest.
    """

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: tuple[int, int] | None = None,
        cols: tuple[int, int] | None = None,
    ) -> Tensor:
        """The tensor, of whole shape `shape`, cut to [start, end) `rows` of dim 0 and `cols` of dim 1, as `dtype`.

        Reads only that part from the file; block-quantised weights come dequantised. The result owns its memory.
        Raises ModelError that names the tensor when it is missing or its shape in the file differs from `shape`.
        """
