"""Grouped-query attention, its heads cut over tensor-parallel ranks.

A rank owns a run of query heads and holds every KV head that they read, so a KV head whose queries span ranks is held
by each of them.
"""

# T tokens, Q query heads and K KV heads of this rank, D head dim

import torch
from torch import Tensor

from pd_cluster.errors import ConfigError
from pd_cluster.kernels.paged import GqaPages, decode_gqa, prefill_gqa, write_gqa
from pd_cluster.model.batch import Batch, KvHeads
from pd_cluster.model.config import GqaConfig
from pd_cluster.model.linear import Linear, RowLinear
from pd_cluster.model.norm import RmsNorm
from pd_cluster.model.rope import Angles, Rope


def query_heads(config: GqaConfig, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """[start, end) of a rank's query heads. Raises ConfigError when they do not divide."""
    if config.num_heads % tp_size:
        raise ConfigError(f"tensor_parallel must divide the model's {config.num_heads} attention heads, got {tp_size}")
    part = config.num_heads // tp_size
    return tp_rank * part, (tp_rank + 1) * part


def kv_heads(config: GqaConfig, tp_rank: int, tp_size: int) -> KvHeads:
    """The KV heads that a rank holds, and which of them its query heads read, in the order of the kernels' groups."""
    start, end = query_heads(config, tp_rank, tp_size)
    per_kv_head = config.num_heads // config.num_kv_heads
    read = [head // per_kv_head for head in range(start, end)]
    held = sorted(set(read))
    evenly = [head for head in held for _ in range(len(read) // len(held))]
    # uneven groups are computed as if every query had a KV head of its own
    groups = range(len(held)) if evenly == read else [held.index(head) for head in read]
    return KvHeads(tuple(held), tuple(groups))


class Gqa:
    """One layer. `qkv` gives [q heads | k heads | v heads]; `qk_norm` normalises q and k heads before the rotation."""

    def __init__(
        self,
        config: GqaConfig,
        heads: KvHeads,
        num_heads: int,
        qkv: Linear,
        out: Linear | RowLinear,
        qk_norm: RmsNorm | None,
        rope: Rope,
        scale: float,
    ) -> None:
        self.head_dim = config.head_dim
        self.num_heads = num_heads
        self.num_kv_heads = len(heads.held)
        self.num_groups = len(heads.read)
        self.qkv = qkv
        self.out = out
        self.qk_norm = qk_norm
        self.rope = rope
        self.scale = scale

    def __call__(self, x_TH: Tensor, batch: Batch, angles: Angles, pages: GqaPages) -> Tensor:
        """[T, H], summed over tensor-parallel ranks. Writes the new tokens' keys and values first."""
        num_rotated = self.num_heads + self.num_kv_heads
        qkv = self.qkv(x_TH).view(len(x_TH), -1, self.head_dim)
        qk = qkv[:, :num_rotated]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = self.rope.rotate(qk, angles)
        q_TQD = qk[:, : self.num_heads]
        write_gqa(pages, batch.writes, qk[:, self.num_heads :], qkv[:, num_rotated:])
        parts = [
            decode_gqa(q_TQD[group.start : group.end], pages, group, self.num_groups, self.scale)
            for group in batch.decode
        ]
        parts += [
            prefill_gqa(q_TQD[segment.start : segment.end], pages, segment, self.num_groups, self.scale)
            for segment in batch.prefill
        ]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.out(attended.reshape(len(x_TH), -1))
