"""Seeded random weights of the right shapes, so that a config.json alone can be benchmarked.

Every value is a function of (seed, tensor name, row): ranks that read different slices of one tensor, in any order,
hold the same tensor. Scales keep activations near one through the layers and make gates and logits decisive, as
trained weights do.
"""

import hashlib
import math

import msgspec
import torch
from torch import Tensor

from pd_cluster.errors import ModelError
from pd_cluster.model.config import ModelConfig
from pd_cluster.model.tensors import tensor_shapes

Range = tuple[int, int]
ROWS_PER_SEED = 64


class RandomSource:
    """A `WeightSource` that makes up what it is asked for."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self._shapes = dict(tensor_shapes(config))
        self._tied = config.tie_word_embeddings
        self._seed = seed
        text = b"random" + seed.to_bytes(8, "little", signed=True) + msgspec.json.encode(config)
        self.identity = hashlib.blake2b(text, digest_size=16).hexdigest()

    def has(self, name: str) -> bool:
        return name in self._shapes

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: Range | None = None,
        cols: Range | None = None,
    ) -> Tensor:
        """See `WeightSource.read`."""
        expected = self._shapes.get(name)
        if expected is None:
            raise ModelError(f"config.json implies no tensor {name}")
        if expected != shape:
            raise ModelError(f"tensor {name} has shape {list(expected)} by config.json, not {list(shape)}")
        first, last = rows or (0, shape[0])
        start, end = cols or (0, shape[1] if len(shape) > 1 else 1)
        width = math.prod(shape[1:])
        out_NK = torch.empty(last - first, end - start, dtype=dtype)
        scale, shift = self._scale(name, shape)
        for block in range(first // ROWS_PER_SEED, -(-last // ROWS_PER_SEED)):
            base = block * ROWS_PER_SEED
            values_RK = torch.randn(ROWS_PER_SEED, width, generator=self._generator(name, block))
            low, high = max(first, base), min(last, base + ROWS_PER_SEED)
            out_NK[low - first : high - first] = values_RK[low - base : high - base, start:end] * scale + shift
        return out_NK if len(shape) > 1 else out_NK[:, 0].clone()

    def _generator(self, name: str, block: int) -> torch.Generator:
        key = hashlib.blake2b(f"{self._seed}/{name}/{block}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)

    def _scale(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Standard deviation and mean of the values."""
        if "norm" in name:
            return 0.2, 1.0
        if len(shape) == 1:
            return 0.1, 0.0
        if name == "model.embed_tokens.weight":
            return (0.2 if self._tied else 1.0), 0.0
        if name == "lm_head.weight":
            return 2.5 / math.sqrt(shape[1]), 0.0
        if name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight")):
            return 2.0 / math.sqrt(shape[1]), 0.0
        return 1.2 / math.sqrt(shape[1]), 0.0
