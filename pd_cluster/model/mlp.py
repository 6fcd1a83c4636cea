"""The gated feed-forward layer: W_down (silu(W_gate x) * W_up x)."""

# T tokens, H hidden size, I intermediate size of this rank

from torch import Tensor
from torch.nn import functional

from pd_cluster.model.linear import Linear, RowLinear


def gated(gate_up: Tensor) -> Tensor:
    """silu of the first half of the last dimension times the second half."""
    half = gate_up.shape[-1] // 2
    return functional.silu(gate_up[..., :half]).mul_(gate_up[..., half:])


class DenseMlp:
    """`gate_up` gives [T, 2 I]; with tensor parallelism I is this rank's part and `down` sums over ranks."""

    def __init__(self, gate_up: Linear, down: Linear | RowLinear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(x_TH)))
