"""Matrix multiplications and the vocabulary, cut over tensor-parallel ranks.

A column-cut layer gives each rank its own outputs (heads, intermediate values) and needs no communication; the row-cut
layer behind it multiplies them and sums over the ranks. The vocabulary is cut in parts of ceil(V / ranks), so it
need not divide.
"""

# T tokens, H hidden size, N outputs, V vocabulary, S rows to sample

import torch
from torch import Tensor
from torch.nn import functional

from pd_cluster.parallel.groups import Group, share

MIN_EXACT_ROWS = 4


def multiply(x_TH: Tensor, weight_NH: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x W^T + b, [T, N]. In float32, the dtype of exact comparisons, a row's bits do not depend on the rows beside it:
    BLAS takes another path for fewer than MIN_EXACT_ROWS, so those are filled up.
    """
    num_rows = len(x_TH)
    if x_TH.dtype is not torch.float32 or not 0 < num_rows < MIN_EXACT_ROWS:
        return functional.linear(x_TH, weight_NH, bias_N)
    filled = torch.cat([x_TH, x_TH.new_zeros((MIN_EXACT_ROWS - num_rows, x_TH.shape[1]))])
    return functional.linear(filled, weight_NH, bias_N)[:num_rows]


class Linear:
    """x W^T + b, whole on this rank or its own columns of a cut layer. `weight_NH` is [outputs, inputs]."""

    def __init__(self, weight_NH: Tensor, bias_N: Tensor | None = None) -> None:
        self.weight_NH = weight_NH
        self.bias_N = bias_N

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight_NH, self.bias_N)


class RowLinear:
    """x W^T summed over the ranks, each of which holds a run of the inputs; the bias is added once, after the sum."""

    def __init__(self, weight_NH: Tensor, bias_N: Tensor | None, group: Group | None) -> None:
        self.weight_NH = weight_NH
        self.bias_N = bias_N
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        if self.group is None:
            return multiply(x, self.weight_NH, self.bias_N)
        y = self.group.all_reduce(multiply(x, self.weight_NH))
        return y if self.bias_N is None else y + self.bias_N


class Vocabulary:
    """Token embeddings and output logits over this rank's run of the vocabulary; tied models share one tensor."""

    def __init__(self, embedding_VH: Tensor, head_VH: Tensor, vocab_size: int, group: Group | None) -> None:
        self.embedding_VH = embedding_VH
        self.head_VH = head_VH
        self.vocab_size = vocab_size
        self.group = group
        self.start, self.end = share(vocab_size, group.rank, group.size) if group else (0, vocab_size)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """[T, H]; a rank looks up the tokens it holds, the others are zeros until the sum."""
        if self.group is None:
            return functional.embedding(token_ids_T, self.embedding_VH)
        if self.start == self.end:
            x = self.embedding_VH.new_zeros((len(token_ids_T), self.embedding_VH.shape[1]))
            return self.group.all_reduce(x)
        elsewhere_T = (token_ids_T < self.start) | (token_ids_T >= self.end)
        local_T = (token_ids_T - self.start).masked_fill(elsewhere_T, 0)
        x = functional.embedding(local_T, self.embedding_VH).masked_fill_(elsewhere_T.unsqueeze(-1), 0)
        return self.group.all_reduce(x)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """float32 [S, V], the same on every rank."""
        return self.gather(multiply(hidden_SH, self.head_VH).float())

    def gather(self, logits: Tensor) -> Tensor:
        """float32 [S, V] from each rank's own columns."""
        if self.group is None:
            return logits
        part = -(-self.vocab_size // self.group.size)
        if logits.shape[1] < part:
            logits = torch.cat([logits, logits.new_zeros((len(logits), part - logits.shape[1]))], dim=1)
        return self.group.all_gather_columns(logits)[:, : self.vocab_size]
