"""A decoder-only transformer over paged KV, as one tensor-parallel rank sees it.

Families differ in what `ModelConfig` says, not in code.
"""

# T tokens, H hidden size, S rows to sample, V vocabulary

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pd_cluster.kernels.paged import GqaPages, MlaPages
from pd_cluster.model.batch import Batch, KvHeads, Span, build_batch
from pd_cluster.model.config import ModelConfig
from pd_cluster.model.expert_store import Experts
from pd_cluster.model.gqa import Gqa
from pd_cluster.model.halves import Stages, finish
from pd_cluster.model.linear import Vocabulary
from pd_cluster.model.mla import Mla
from pd_cluster.model.mlp import DenseMlp
from pd_cluster.model.moe import Moe, token_mix
from pd_cluster.model.norm import RmsNorm
from pd_cluster.model.rope import Angles, Rope
from pd_cluster.model.sampler import Highest, highest_of_rows


class Layer:
    """Attention, then a dense MLP or experts, each behind a norm and added to what came in."""

    def __init__(self, attention_norm: RmsNorm, attention: Gqa | Mla, mlp_norm: RmsNorm, mlp: DenseMlp | Moe) -> None:
        self.attention_norm = attention_norm
        self.attention: Any = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def stages(
        self, x_TH: Tensor, batch: Batch, angles: Angles | None, mix_T: Tensor, pages: GqaPages | MlaPages
    ) -> Stages:
        if angles is not None:
            x_TH = x_TH + self.attention(self.attention_norm(x_TH), batch, angles, pages)
        normed = self.mlp_norm(x_TH)
        if isinstance(self.mlp, Moe):
            return x_TH + (yield from self.mlp.stages(normed, mix_T))
        return x_TH + self.mlp(normed)


class Transformer:
    def __init__(
        self,
        config: ModelConfig,
        heads: KvHeads,
        vocabulary: Vocabulary,
        layers: Sequence[Any],
        norm: RmsNorm,
        rope: Rope,
    ) -> None:
        self.config = config
        self.heads = heads
        self.vocabulary = vocabulary
        self.layers = layers
        self.norm = norm
        self.rope = rope
        self.experts: Experts | None = None
        """Where this process's experts are and come from; None for a model without."""

    def batch(self, spans: Sequence[Span], device: torch.device) -> Batch:
        """A step's batch as this model's kernels want it."""
        return build_batch(spans, self.heads, device)

    @property
    def highest(self) -> Highest:
        """What finds the highest logits of rows."""
        return highest_of_rows

    @property
    def moe_layers(self) -> list[Moe]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Moe)]

    def __call__(self, batch: Batch, pages: Sequence[GqaPages | MlaPages]) -> Tensor:
        """The last layer's output [T, H] before the final norm; writes the tokens' KV into `pages`, one for each layer.

        An empty batch goes through the expert layers only, which all ranks of an engine enter together.
        """
        return finish(self.stages(batch, pages))

    def stages(self, batch: Batch, pages: Sequence[GqaPages | MlaPages]) -> Stages:
        """The same with a pause behind whatever the expert layers send."""
        x_TH = self.vocabulary.embed(batch.token_ids_T)
        mix_T = token_mix(batch.token_ids_T, batch.positions_T)
        angles = self.rope.angles(batch.positions_T) if batch.num_tokens else None
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            if batch.num_tokens or isinstance(layer.mlp, Moe):
                x_TH = yield from layer.stages(x_TH, batch, angles, mix_T, layer_pages)
        return x_TH

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """float32 [S, V] of chosen rows of the output, the same on all tensor-parallel ranks."""
        return self.vocabulary.logits(self.norm(hidden_SH))
