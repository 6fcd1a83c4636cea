"""A loaded layer turned into one call of the C kernels for each half: bfloat16 on a CPU.

A fused layer takes the hidden states in place, reads weights that were packed when it was loaded, and computes what
the torch layers beside it do, with fewer roundings. A row's bits depend on its own sequence alone: not on the batch,
nor on how its prompt was cut.
"""

# T tokens, H hidden size, S rows to sample, V vocabulary, Q heads, C kv_lora_rank

import ctypes
from collections.abc import Sequence
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from pd_cluster.kernels import native
from pd_cluster.kernels.packed import Packed, WeightMemory
from pd_cluster.kernels.paged import GqaPages, MlaPages
from pd_cluster.model.batch import Batch, KvHeads, Span, build_segments
from pd_cluster.model.config import GqaConfig, MlaConfig, ModelConfig
from pd_cluster.model.fused_mlp import FusedMlp, Residual, norm_struct
from pd_cluster.model.fused_moe import FusedMoe
from pd_cluster.model.gqa import Gqa
from pd_cluster.model.halves import Stages
from pd_cluster.model.linear import Vocabulary
from pd_cluster.model.mla import Mla, PrefillForm, absorbing_is_cheaper
from pd_cluster.model.moe import Moe, token_mix
from pd_cluster.model.norm import RmsNorm
from pd_cluster.model.rope import Angles, Rope
from pd_cluster.model.sampler import Highest
from pd_cluster.model.transformer import Layer, Transformer

MAX_ROPE_DIM = 1024


def kernels_for(config: ModelConfig, dtype: torch.dtype, device: torch.device, tp_size: int) -> ctypes.CDLL | None:
    """The C kernels when they can run this model; None when torch has to."""
    if dtype is not torch.bfloat16 or device.type != "cpu" or config.rope.dim > MAX_ROPE_DIM:
        return None
    attention = config.attention
    sizes = [config.hidden_size]
    if len(config.moe_layers) < config.num_layers:
        sizes.append(config.intermediate_size // tp_size)
    if config.moe is not None:
        sizes += [config.moe.intermediate_size]
    if isinstance(attention, MlaConfig):
        sizes += [attention.kv_lora_rank, attention.qk_nope_head_dim, attention.qk_rope_head_dim]
        sizes += [attention.q_lora_rank or 0, attention.num_heads // tp_size * attention.v_head_dim]
    elif isinstance(attention, GqaConfig):
        sizes.append(attention.head_dim)
    # two inputs are multiplied at a time
    return None if any(size % 2 for size in sizes) else native.library()


class _Pages:
    """Addresses of a layer's pages, taken once for each arena."""

    def __init__(self) -> None:
        self._of: GqaPages | MlaPages | None = None
        self.struct = native.Pages()

    def __call__(self, pages: GqaPages | MlaPages) -> native.Pages:
        if pages is not self._of:
            view = pages.keys_UKWD if isinstance(pages, GqaPages) else pages.latent_UWC
            head_stride = view.stride(1) if isinstance(pages, GqaPages) else 0
            self.struct = native.Pages(view.data_ptr(), view.stride(0), head_stride)
            self._of = pages
        return self.struct


class FusedGqa:
    def __init__(self, library: ctypes.CDLL, memory: WeightMemory, norm: RmsNorm, plain: Gqa, heads: KvHeads) -> None:
        self._kept = (norm, plain.qk_norm, torch.tensor(heads.read, dtype=torch.int64))
        self._residual = Residual(plain.out)
        self.qkv = Packed(library, memory, plain.qkv.weight_NH, plain.qkv.bias_N)
        self.out = Packed(library, memory, plain.out.weight_NH, self._residual.fused_bias)
        self._pages = _Pages()
        self._call = library.gqa_layer
        self._layer = native.GqaLayer(
            norm=norm_struct(norm),
            qk_norm=norm_struct(plain.qk_norm),
            qkv=self.qkv.struct(),
            out=self.out.struct(),
            num_heads=plain.num_heads,
            num_kv_heads=plain.num_kv_heads,
            num_groups=plain.num_groups,
            head_dim=plain.head_dim,
            read=self._kept[2].data_ptr(),
            rope_dim=plain.rope.dim,
            interleaved=plain.rope.interleaved,
            scale=plain.scale,
        )

    def __call__(self, x_TH: Tensor, step: native.Step, pages: GqaPages | MlaPages) -> None:
        partial_TH = self._residual.partial(x_TH)
        to = None if partial_TH is None else partial_TH.data_ptr()
        self._call(byref(self._layer), byref(step), byref(self._pages(pages)), x_TH.data_ptr(), to)
        self._residual.add(x_TH, partial_TH)


class FusedMla:
    def __init__(self, library: ctypes.CDLL, memory: WeightMemory, norm: RmsNorm, plain: Mla) -> None:
        self._config = config = plain.config
        self.prefill_form: PrefillForm = "cheaper"
        nope = config.qk_nope_head_dim
        keys_QNC, values_QVC = plain.expand_QNC[:, :nope], plain.expand_QNC[:, nope:]
        self._kept = (norm, plain.q_norm, plain.kv_norm)
        self._residual = Residual(plain.out)
        self.compress = Packed(library, memory, plain.compress.weight_NH)
        self.q_b = Packed(library, memory, plain.q_b.weight_NH)
        self.out = Packed(library, memory, plain.out.weight_NH, self._residual.fused_bias)
        self.absorb = Packed(library, memory, keys_QNC.transpose(1, 2))
        self.expand_keys = Packed(library, memory, keys_QNC)
        self.expand_values = Packed(library, memory, values_QVC)
        self._pages = _Pages()
        self._call = library.mla_layer
        self._layer = native.MlaLayer(
            norm=norm_struct(norm),
            q_norm=norm_struct(plain.q_norm),
            kv_norm=norm_struct(plain.kv_norm),
            compress=self.compress.struct(),
            q_b=self.q_b.struct(),
            out=self.out.struct(),
            absorb=self.absorb.struct(),
            expand_keys=self.expand_keys.struct(),
            expand_values=self.expand_values.struct(),
            absorb_stride=self.absorb.stride,
            expand_keys_stride=self.expand_keys.stride,
            expand_values_stride=self.expand_values.stride,
            num_heads=plain.num_heads,
            q_lora_rank=config.q_lora_rank or 0,
            kv_lora_rank=config.kv_lora_rank,
            nope_dim=nope,
            rope_dim=config.qk_rope_head_dim,
            value_dim=config.v_head_dim,
            interleaved=plain.rope.interleaved,
            scale=plain.scale,
        )

    def expands(self, num_tokens: int) -> bool:
        """Whether a segment's latents are expanded to keys and values."""
        return self.prefill_form == "expanded" or (
            self.prefill_form == "cheaper" and not absorbing_is_cheaper(self._config, num_tokens)
        )

    def __call__(self, x_TH: Tensor, step: native.Step, pages: GqaPages | MlaPages) -> None:
        partial_TH = self._residual.partial(x_TH)
        to = None if partial_TH is None else partial_TH.data_ptr()
        self._call(byref(self._layer), byref(step), byref(self._pages(pages)), x_TH.data_ptr(), to)
        self._residual.add(x_TH, partial_TH)


class FusedLayer:
    """Attention, then a dense MLP or experts, in place."""

    def __init__(self, library: ctypes.CDLL, memory: WeightMemory, plain: Layer, heads: KvHeads) -> None:
        attention, norm, mlp = plain.attention, plain.attention_norm, plain.mlp
        self.attention: FusedGqa | FusedMla
        if isinstance(attention, Mla):
            self.attention = FusedMla(library, memory, norm, attention)
        else:
            self.attention = FusedGqa(library, memory, norm, attention, heads)
        self.fused_mlp: FusedMlp | FusedMoe
        if isinstance(mlp, Moe):
            self.fused_mlp = FusedMoe(library, memory, plain.mlp_norm, mlp)
        else:
            self.fused_mlp = FusedMlp(library, memory, plain.mlp_norm, mlp)

    @property
    def mlp(self) -> FusedMlp | Moe:
        return self.fused_mlp.moe if isinstance(self.fused_mlp, FusedMoe) else self.fused_mlp

    def stages(self, x_TH: Tensor, step: native.Step | None, mix_T: Tensor, pages: GqaPages | MlaPages) -> Stages:
        """Changes `x_TH` and returns it."""
        if step is not None:
            self.attention(x_TH, step, pages)
        if isinstance(self.fused_mlp, FusedMoe):
            return (yield from self.fused_mlp.stages(x_TH, mix_T))
        if step is not None:
            self.fused_mlp.add(x_TH)
        return x_TH


class FusedTransformer(Transformer):
    """A transformer of fused layers. Its hidden states are changed in place, layer by layer."""

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: WeightMemory,
        config: ModelConfig,
        heads: KvHeads,
        vocabulary: Vocabulary,
        layers: Sequence[Any],
        norm: RmsNorm,
        rope: Rope,
    ) -> None:
        super().__init__(config, heads, vocabulary, layers, norm, rope)
        self.head = Packed(library, memory, vocabulary.head_VH) if len(vocabulary.head_VH) else None
        if vocabulary.head_VH is not vocabulary.embedding_VH:
            vocabulary.head_VH = vocabulary.head_VH.new_empty((0, config.hidden_size))  # the packed one serves
        self._head_norm = norm_struct(norm)
        self._library = library

    @property
    def highest(self) -> Highest:
        return self._highest_of_rows

    def _highest_of_rows(self, logits_SV: Tensor) -> tuple[Tensor, Tensor]:
        num_rows, num_columns = logits_SV.shape
        assert logits_SV.stride(1) == 1
        values_S, columns_S = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        self._library.highest_of_rows(
            logits_SV.data_ptr(),
            logits_SV.stride(0),
            num_rows,
            num_columns,
            columns_S.data_ptr(),
            values_S.data_ptr(),
            torch.get_num_threads(),
        )
        return values_S, columns_S

    def batch(self, spans: Sequence[Span], device: torch.device) -> Batch:
        first = self.layers[0].attention
        return build_segments(spans, first.expands if isinstance(first, FusedMla) else None)

    def stages(self, batch: Batch, pages: Sequence[GqaPages | MlaPages]) -> Stages:
        """See `Transformer`."""
        x_TH = self.vocabulary.embed(batch.token_ids_T)
        mix_T = token_mix(batch.token_ids_T, batch.positions_T)
        step = None
        if batch.num_tokens:
            angles = self.rope.angles(batch.positions_T)
            step = _step(batch, angles)
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            yield from layer.stages(x_TH, step, mix_T, layer_pages)
        return x_TH

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """See `Transformer`; never rounded to bfloat16."""
        num_rows = len(hidden_SH)
        if self.head is None:
            return self.vocabulary.gather(hidden_SH.new_empty((num_rows, 0), dtype=torch.float32))
        logits_SV = torch.empty((num_rows, self.head.num_outputs), dtype=torch.float32)
        threads = torch.get_num_threads()
        self._library.head_layer(
            byref(self._head_norm),
            byref(self.head.struct()),
            hidden_SH.contiguous().data_ptr(),
            num_rows,
            logits_SV.data_ptr(),
            threads,
        )
        return self.vocabulary.gather(logits_SV)


def _step(batch: Batch, angles: Angles) -> native.Step:
    """What the kernels read of a batch; valid while both live."""
    segments = batch.segments
    assert segments is not None, "the batch was built for the torch kernels"
    return native.Step(
        batch.num_tokens,
        len(segments.rows_G5),
        segments.num_decodes,
        torch.get_num_threads(),
        segments.rows_G5.data_ptr(),
        segments.units.data_ptr(),
        batch.writes.units_T.data_ptr(),
        batch.writes.offsets_T.data_ptr(),
        angles.cos.data_ptr(),
        angles.sin.data_ptr(),
    )
