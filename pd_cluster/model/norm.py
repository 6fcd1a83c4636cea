"""RMSNorm: divide by the root of the mean square, in float32, then scale by a learned weight."""

# H hidden size (or head dim)

import torch
from torch import Tensor
from torch.nn import functional


class RmsNorm:
    """Normalises the last dimension. `weight` is [H], or [heads, H] when each head has its own."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._shape = (weight.shape[-1],)

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.dim() == 1 else None
        if x.dtype is not torch.float32:
            y = functional.rms_norm(x.float(), self._shape, None, self.eps).to(x.dtype)
            return y * self.weight
        y = functional.rms_norm(x, self._shape, weight, self.eps)
        return y if weight is not None else y * self.weight
