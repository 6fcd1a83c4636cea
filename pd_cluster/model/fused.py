"""A loaded layer turned into one call of the C kernels for each half: bfloat16 on a CPU.

A fused layer takes the hidden states in place, reads weights that were packed when it was loaded, and computes what
the torch layers beside it do, with fewer roundings. A row's bits depend on its own sequence alone: not on the batch,
nor on how its prompt was cut.
"""

# T tokens, H hidden size, S rows to sample, V vocabulary, Q heads, C kv_lora_rank, R rows of experts

import ctypes
from collections.abc import Sequence
from ctypes import byref
from typing import Any, cast

import torch
from torch import Tensor

from pd_cluster.kernels import native
from pd_cluster.kernels.packed import Packed, WeightMemory
from pd_cluster.kernels.paged import GqaPages, MlaPages
from pd_cluster.model.batch import Batch, KvHeads, Span, build_segments
from pd_cluster.model.config import GqaConfig, MlaConfig, ModelConfig
from pd_cluster.model.expert_arena import ExpertArena, PackedForm
from pd_cluster.model.gate import Gate
from pd_cluster.model.gqa import Gqa
from pd_cluster.model.halves import Stages, finish
from pd_cluster.model.linear import RowLinear, Vocabulary
from pd_cluster.model.mla import Mla, PrefillForm, absorbing_is_cheaper
from pd_cluster.model.mlp import DenseMlp
from pd_cluster.model.moe import Moe, SlotMap, token_mix
from pd_cluster.model.norm import RmsNorm
from pd_cluster.model.rope import Angles, Rope
from pd_cluster.model.sampler import Highest
from pd_cluster.model.transformer import Layer, Transformer
from pd_cluster.parallel.dispatch import Arrived
from pd_cluster.parallel.groups import Group

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


def _norm(norm: RmsNorm | None) -> native.Norm:
    return native.Norm(None, 0.0) if norm is None else native.Norm(norm.weight.data_ptr(), norm.eps)


class _Residual:
    """What a row-cut layer adds to the hidden states: at once, or after the ranks' parts have been summed."""

    def __init__(self, out: Any) -> None:
        self.group: Group | None = out.group if isinstance(out, RowLinear) else None
        self._bias_H: Tensor | None = out.bias_N

    @property
    def fused_bias(self) -> Tensor | None:
        return self._bias_H if self.group is None else None

    def partial(self, x_TH: Tensor) -> Tensor | None:
        return None if self.group is None else torch.empty_like(x_TH)

    def add(self, x_TH: Tensor, partial_TH: Tensor | None) -> None:
        if self.group is not None and partial_TH is not None:
            x_TH += self.group.all_reduce(partial_TH)
            if self._bias_H is not None:
                x_TH += self._bias_H


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
        self._residual = _Residual(plain.out)
        self.qkv = Packed(library, memory, plain.qkv.weight_NH, plain.qkv.bias_N)
        self.out = Packed(library, memory, plain.out.weight_NH, self._residual.fused_bias)
        self._pages = _Pages()
        self._call = library.gqa_layer
        self._layer = native.GqaLayer(
            norm=_norm(norm),
            qk_norm=_norm(plain.qk_norm),
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
        self._residual = _Residual(plain.out)
        self.compress = Packed(library, memory, plain.compress.weight_NH)
        self.q_b = Packed(library, memory, plain.q_b.weight_NH)
        self.out = Packed(library, memory, plain.out.weight_NH, self._residual.fused_bias)
        self.absorb = Packed(library, memory, keys_QNC.transpose(1, 2))
        self.expand_keys = Packed(library, memory, keys_QNC)
        self.expand_values = Packed(library, memory, values_QVC)
        self._pages = _Pages()
        self._call = library.mla_layer
        self._layer = native.MlaLayer(
            norm=_norm(norm),
            q_norm=_norm(plain.q_norm),
            kv_norm=_norm(plain.kv_norm),
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


class FusedMlp:
    """With a norm, `add` adds to the hidden states; without, a call gives [T, H] as `DenseMlp` does."""

    def __init__(self, library: ctypes.CDLL, memory: WeightMemory, norm: RmsNorm | None, plain: DenseMlp) -> None:
        self._kept = norm
        self._residual = _Residual(plain.down)
        self.gate_up = Packed(library, memory, plain.gate_up.weight_NH, gated=True)
        self.down = Packed(library, memory, plain.down.weight_NH, self._residual.fused_bias)
        self._call = library.mlp_layer
        self.struct = native.MlpLayer(_norm(norm), self.gate_up.struct(), self.down.struct())

    def add(self, x_TH: Tensor) -> None:
        partial_TH = self._residual.partial(x_TH)
        to = None if partial_TH is None else partial_TH.data_ptr()
        self._call(byref(self.struct), len(x_TH), x_TH.data_ptr(), to, torch.get_num_threads())
        self._residual.add(x_TH, partial_TH)

    def __call__(self, x_TH: Tensor) -> Tensor:
        out_TH = torch.empty_like(x_TH)
        self._call(byref(self.struct), len(x_TH), x_TH.data_ptr(), out_TH.data_ptr(), torch.get_num_threads())
        return out_TH


class FusedGate:
    """Called as `Gate` is; of equal scores the lower expert is chosen."""

    def __init__(self, library: ctypes.CDLL, plain: Gate) -> None:
        self.config = config = plain.config
        self.weight_EH, self.bias_E = plain.weight_EH.contiguous(), plain.bias_E
        self._num_chosen = config.num_experts_per_tok
        self._call = library.gate_layer
        is_deepseek, is_v3 = config.gate.startswith("deepseek"), config.gate == "deepseek_v3"
        self.struct = native.Gate(
            weight=self.weight_EH.data_ptr(),
            bias=None if self.bias_E is None else self.bias_E.data_ptr(),
            num_experts=config.num_experts,
            hidden=self.weight_EH.shape[1],
            num_chosen=self._num_chosen,
            num_groups=config.num_groups,
            topk_groups=config.topk_groups,
            sigmoid=is_v3,
            best_of_group={"deepseek_v3": 2, "deepseek_v2_group": 1}.get(config.gate, 0),
            normalise=config.gate == "mixtral" or (config.norm_topk_prob and config.gate in ("deepseek_v3", "qwen3")),
            factor=config.routed_scaling_factor if is_deepseek else 1.0,
        )

    def __call__(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The experts (int64 [T, K], the best first) and their weights (float32 [T, K])."""
        hidden_TH = hidden_TH.contiguous()
        experts_TK = torch.empty((len(hidden_TH), self._num_chosen), dtype=torch.int64)
        weights_TK = torch.empty((len(hidden_TH), self._num_chosen))
        self._call(
            byref(self.struct),
            hidden_TH.data_ptr(),
            len(hidden_TH),
            experts_TK.data_ptr(),
            weights_TK.data_ptr(),
            torch.get_num_threads(),
        )
        return experts_TK, weights_TK


class FusedExperts:
    """Called as `ExpertSlots` is: one layer of an arena of packed experts."""

    def __init__(self, library: ctypes.CDLL, form: PackedForm, arena: ExpertArena, layer: int) -> None:
        self.num_slots = arena.num_slots
        self.slot_bytes = form.num_bytes
        self._arena = arena  # whose memory the kernels read
        self._counts = ctypes.c_int64 * self.num_slots
        self._call = library.experts_layer
        first, stride = arena.base_address + arena.offset(layer, 0), arena.stride // 2
        self.struct = native.ExpertsLayer(
            native.Linear(first, None, 2 * form.size, form.hidden, True),
            native.Linear(first + form.down_at, None, form.hidden, form.size, False),
            stride,
            stride,
        )

    def __call__(self, arrived: Arrived) -> Tensor:
        """[R, H]: every row's weighted sum over its experts here, summed in float32 in slot order."""
        hidden_RH = arrived.hidden_RH.contiguous()
        out_RH = torch.empty_like(hidden_RH)
        self._call(
            byref(self.struct),
            self.num_slots,
            byref(self._counts(*arrived.slot_counts)),
            arrived.pair_row_P.data_ptr(),
            arrived.pair_weight_P.data_ptr(),
            hidden_RH.data_ptr(),
            len(hidden_RH),
            out_RH.data_ptr(),
            torch.get_num_threads(),
        )
        return out_RH


class FusedSlotMap(SlotMap):
    """Takes over the addresses of `plain`, which is not used any more, and chooses what it does."""

    def __init__(self, library: ctypes.CDLL, plain: SlotMap) -> None:
        self.slots_EC, self.thresholds_EC, self.width = plain.slots_EC, plain.thresholds_EC, plain.width
        self._call = library.slots_by_hash
        self._call.restype = None
        self._call.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 2]
        self._call.argtypes += [*[ctypes.c_int64] * 2, ctypes.c_void_p]

    def __call__(self, experts_TK: Tensor, mix_T: Tensor) -> Tensor:
        """int64 [T, K] slots."""
        experts_TK, mix_T, slots_TK = experts_TK.contiguous(), mix_T.contiguous(), torch.empty_like(experts_TK)
        self._call(
            experts_TK.data_ptr(),
            mix_T.data_ptr(),
            *experts_TK.shape,
            self.slots_EC.data_ptr(),
            self.thresholds_EC.data_ptr(),
            self.slots_EC.shape[1],
            self.width,
            slots_TK.data_ptr(),
        )
        return slots_TK


class FusedMoe:
    """A layer of experts and the norm before it, added to the hidden states: one call where every expert lives on this
    rank alone and can have but one slot, else the steps of `Moe` with fused parts.
    """

    def __init__(self, library: ctypes.CDLL, memory: WeightMemory, norm: RmsNorm, moe: Moe) -> None:
        gate = FusedGate(library, cast(Gate, moe.gate))
        shared = FusedMlp(library, memory, None, moe.shared) if isinstance(moe.shared, DenseMlp) else None
        moe.gate, moe.shared = gate, shared
        moe.choice = FusedSlotMap(library, moe.choice)
        self.moe = moe
        self._kept_norm = norm
        self._norm = _norm(norm)
        self._library = library
        self._struct: native.MoeLayer | None = None
        if moe.dispatcher.replicated and moe.tp is None and moe.choice.slots_EC.shape[1] == 1:
            (experts,) = moe.experts.values()
            assert isinstance(experts, FusedExperts)
            self._struct = native.MoeLayer(
                norm=self._norm,
                gate=gate.struct,
                experts=experts.struct,
                shared=native.MlpLayer() if shared is None else shared.struct,
                num_slots=experts.num_slots,
                slot_of_expert=moe.choice.slots_EC.data_ptr(),
                load=moe.load_E.data_ptr(),
            )

    def stages(self, x_TH: Tensor, mix_T: Tensor) -> Stages:
        """Adds to `x_TH` and returns it."""
        T, H = x_TH.shape
        threads = torch.get_num_threads()
        if self._struct is not None:
            self._library.moe_layer(byref(self._struct), T, x_TH.data_ptr(), threads)
            return x_TH
        normed_TH = torch.empty_like(x_TH)
        self._library.norm_layer(byref(self._norm), x_TH.data_ptr(), H, T, normed_TH.data_ptr(), threads)
        x_TH += yield from self.moe.stages(normed_TH, mix_T)
        return x_TH


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

    def __call__(self, x_TH: Tensor, step: native.Step | None, mix_T: Tensor, pages: GqaPages | MlaPages) -> None:
        finish(self.stages(x_TH, step, mix_T, pages))

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
        self._head_norm = _norm(norm)
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
