"""One rank's part of a model, read from a weight source by Hugging Face names.

A rank reads only its heads, its run of the intermediate values and of the vocabulary, and the experts of the slots
that it holds.
"""

import ctypes
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pd_cluster.errors import ConfigError
from pd_cluster.ids import Rank
from pd_cluster.kernels.packed import WeightMemory
from pd_cluster.model.batch import MLA_HEADS, KvHeads
from pd_cluster.model.config import GqaConfig, MlaConfig, ModelConfig
from pd_cluster.model.expert_arena import ExpertArena, PackedForm, PlainForm
from pd_cluster.model.expert_store import Experts, ExpertStore
from pd_cluster.model.fused import FusedLayer, FusedTransformer, kernels_for
from pd_cluster.model.fused_moe import FusedExperts
from pd_cluster.model.gate import Gate
from pd_cluster.model.gqa import Gqa, kv_heads, query_heads
from pd_cluster.model.linear import Linear, RowLinear, Vocabulary
from pd_cluster.model.mla import LATENT_NORM_EPS, Mla, mla_heads
from pd_cluster.model.mlp import DenseMlp
from pd_cluster.model.moe import ExpertSlots, Moe, SlotMap
from pd_cluster.model.norm import RmsNorm
from pd_cluster.model.rope import Rope
from pd_cluster.model.tensors import moe_block
from pd_cluster.model.transformer import Layer, Transformer
from pd_cluster.model.weights import WeightSource
from pd_cluster.parallel.dispatch import Arrived, Dispatcher
from pd_cluster.parallel.groups import Groups, share
from pd_cluster.parallel.placement import Placement
from pd_cluster.parallel.slot_table import SlotTable, max_copies, slot_tables

Progress = Callable[[int, int], None]
"""Called with (layers loaded, layers of the model)."""


def load_transformer(
    source: WeightSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    groups: Groups,
    placement: Placement | None = None,
    dispatcher: Dispatcher | None = None,
    device: torch.device | None = None,
    progress: Progress | None = None,
    without_experts: bool = False,
) -> Transformer:
    """Read one rank's part of the model.

    A model with experts needs `placement` and `dispatcher`, whose `ranks` say whose experts are read;
    `without_experts` leaves all slots empty, for a rank that is given its experts later. Raises ConfigError when tensor
    parallelism does not divide the heads or the dense intermediate size, ModelError from the source.
    """
    loader = _Loader(source, config, dtype, groups, device or torch.device("cpu"))
    return loader.transformer(placement, dispatcher, progress, without_experts=without_experts)


class _Loader:
    """Reads tensors by their Hugging Face names, cut for one rank."""

    def __init__(
        self, source: WeightSource, config: ModelConfig, dtype: torch.dtype, groups: Groups, device: torch.device
    ) -> None:
        self.source = source
        self.config = config
        self.dtype = dtype
        self.groups = groups
        self.device = device
        self.rope = Rope(config.rope, device)
        if config.intermediate_size % groups.tp_size and len(config.moe_layers) < config.num_layers:
            raise ConfigError(
                f"tensor_parallel must divide the model's intermediate size {config.intermediate_size}, "
                f"got {groups.tp_size}"
            )

    def read(self, name: str, shape: tuple[int, ...], **cut: tuple[int, int] | None) -> Tensor:
        return self.source.read(name, shape, self.dtype, **cut).to(self.device)

    def transformer(
        self,
        placement: Placement | None,
        dispatcher: Dispatcher | None,
        progress: Progress | None,
        *,
        without_experts: bool,
    ) -> Transformer:
        config = self.config
        vocabulary = self.vocabulary()
        heads = kv_heads_of(config, self.groups.tp_rank, self.groups.tp_size)
        library = kernels_for(config, self.dtype, self.device, self.groups.tp_size)
        memory = WeightMemory()
        experts: Experts | None = None
        tables: list[SlotTable] = []
        if config.moe_layers:
            assert placement is not None, "a model with experts needs a placement"
            assert dispatcher is not None, "a model with experts needs a dispatcher"
            experts = self.experts(library, memory, placement, dispatcher)
            tables = slot_tables(placement, max_copies(placement))
        layers: list[Layer | FusedLayer] = []
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}."
            if index in config.moe_layers:
                assert placement is not None
                assert dispatcher is not None
                assert experts is not None
                moe_layer = config.moe_layers.index(index)
                if not without_experts:
                    for rank, arena in experts.arenas.items():
                        experts.store.load_layer(arena, moe_layer, placement, rank)
                slots = {rank: self.slots(library, arena, moe_layer) for rank, arena in experts.arenas.items()}
                mlp: DenseMlp | Moe = self.moe(moe_layer, tables[moe_layer], slots, dispatcher)
            else:
                mlp = self.dense_mlp(f"{prefix}mlp.", config.intermediate_size, cut=True)
            attention = self.mla(prefix) if isinstance(config.attention, MlaConfig) else self.gqa(prefix)
            layer = Layer(
                self.norm(f"{prefix}input_layernorm.weight"),
                attention,
                self.norm(f"{prefix}post_attention_layernorm.weight"),
                mlp,
            )
            layers.append(layer if library is None else FusedLayer(library, memory, layer, heads))
            if progress is not None:
                progress(index + 1, config.num_layers)
        norm = self.norm("model.norm.weight")
        if library is not None:
            model: Transformer = FusedTransformer(library, memory, config, heads, vocabulary, layers, norm, self.rope)
        else:
            model = Transformer(config, heads, vocabulary, layers, norm, self.rope)
        if self.device.type == "cuda":
            from pd_cluster.model.device import DeviceTransformer

            model = DeviceTransformer(model)
        model.experts = experts
        return model

    def norm(self, name: str, size: int | None = None, eps: float | None = None) -> RmsNorm:
        weight = self.read(name, (size or self.config.hidden_size,))
        return RmsNorm(weight, self.config.rms_norm_eps if eps is None else eps)

    def vocabulary(self) -> Vocabulary:
        config, groups = self.config, self.groups
        shape = (config.vocab_size, config.hidden_size)
        rows = share(config.vocab_size, groups.tp_rank, groups.tp_size)
        embedding = self.read("model.embed_tokens.weight", shape, rows=rows)
        head = embedding if config.tie_word_embeddings else self.read("lm_head.weight", shape, rows=rows)
        return Vocabulary(embedding, head, config.vocab_size, groups.tp)

    def dense_mlp(self, prefix: str, size: int, cut: bool) -> DenseMlp:
        """W_down (silu(W_gate x) * W_up x); `cut` over the tensor-parallel ranks, or whole."""
        hidden, groups = self.config.hidden_size, self.groups
        run = share(size, groups.tp_rank, groups.tp_size) if cut else (0, size)
        gate = self.read(f"{prefix}gate_proj.weight", (size, hidden), rows=run)
        up = self.read(f"{prefix}up_proj.weight", (size, hidden), rows=run)
        down = self.read(f"{prefix}down_proj.weight", (hidden, size), cols=run)
        return DenseMlp(Linear(torch.cat([gate, up])), RowLinear(down, None, groups.tp if cut else None))

    def gqa(self, prefix: str) -> Gqa:
        config, attention, groups = self.config, self.config.attention, self.groups
        assert isinstance(attention, GqaConfig)
        prefix += "self_attn."
        head_dim, hidden = attention.head_dim, config.hidden_size
        heads = kv_heads(attention, groups.tp_rank, groups.tp_size)
        first, last = query_heads(attention, groups.tp_rank, groups.tp_size)
        q_run = first * head_dim, last * head_dim
        kv_run = heads.held[0] * head_dim, (heads.held[-1] + 1) * head_dim
        parts = (
            ("q_proj", attention.num_heads * head_dim, q_run),
            ("k_proj", attention.num_kv_heads * head_dim, kv_run),
            ("v_proj", attention.num_kv_heads * head_dim, kv_run),
        )
        weight = torch.cat([self.read(f"{prefix}{n}.weight", (size, hidden), rows=run) for n, size, run in parts])
        bias = None
        if attention.qkv_bias:
            bias = torch.cat([self.read(f"{prefix}{n}.bias", (size,), rows=run) for n, size, run in parts])
        qk_norm = None
        if attention.qk_norm:
            q_weight = self.read(f"{prefix}q_norm.weight", (head_dim,)).expand(last - first, -1)
            k_weight = self.read(f"{prefix}k_norm.weight", (head_dim,)).expand(len(heads.held), -1)
            qk_norm = RmsNorm(torch.cat([q_weight, k_weight]), config.rms_norm_eps)
        out = RowLinear(
            self.read(f"{prefix}o_proj.weight", (hidden, attention.num_heads * head_dim), cols=q_run),
            self.read(f"{prefix}o_proj.bias", (hidden,)) if attention.o_bias else None,
            groups.tp,
        )
        scale = config.softmax_scale or head_dim**-0.5
        return Gqa(attention, heads, last - first, Linear(weight, bias), out, qk_norm, self.rope, scale)

    def mla(self, prefix: str) -> Mla:
        config, attention, groups = self.config, self.config.attention, self.groups
        assert isinstance(attention, MlaConfig)
        prefix += "self_attn."
        hidden, num_heads = config.hidden_size, attention.num_heads
        first, last = mla_heads(attention, groups.tp_rank, groups.tp_size)
        q_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        kv_dim = attention.qk_nope_head_dim + attention.v_head_dim
        latent_dim = attention.kv_lora_rank + attention.qk_rope_head_dim
        compress = self.read(f"{prefix}kv_a_proj_with_mqa.weight", (latent_dim, hidden))
        q_rows, q_norm = (first * q_dim, last * q_dim), None
        if attention.q_lora_rank is None:
            q_b = self.read(f"{prefix}q_proj.weight", (num_heads * q_dim, hidden), rows=q_rows)
        else:
            q_a = self.read(f"{prefix}q_a_proj.weight", (attention.q_lora_rank, hidden))
            compress = torch.cat([q_a, compress])
            q_norm = self.norm(f"{prefix}q_a_layernorm.weight", attention.q_lora_rank, LATENT_NORM_EPS)
            q_b = self.read(f"{prefix}q_b_proj.weight", (num_heads * q_dim, attention.q_lora_rank), rows=q_rows)
        expand = self.read(
            f"{prefix}kv_b_proj.weight",
            (num_heads * kv_dim, attention.kv_lora_rank),
            rows=(first * kv_dim, last * kv_dim),
        )
        out = self.read(
            f"{prefix}o_proj.weight",
            (hidden, num_heads * attention.v_head_dim),
            cols=(first * attention.v_head_dim, last * attention.v_head_dim),
        )
        return Mla(
            attention,
            Linear(compress),
            q_norm,
            Linear(q_b),
            self.norm(f"{prefix}kv_a_layernorm.weight", attention.kv_lora_rank, LATENT_NORM_EPS),
            expand.view(last - first, kv_dim, attention.kv_lora_rank),
            RowLinear(out, None, groups.tp),
            self.rope,
            config.softmax_scale or q_dim**-0.5,
        )

    def moe(
        self,
        moe_layer: int,
        table: SlotTable,
        slots: Mapping[Rank, Callable[[Arrived], Tensor]],
        dispatcher: Dispatcher,
    ) -> Moe:
        config, moe = self.config, self.config.moe
        assert moe is not None
        block = moe_block(moe, config.moe_layers[moe_layer])
        # the router stays in float32: a rounded score chooses other experts
        weight = self.source.read(f"{block}.gate.weight", (moe.num_experts, config.hidden_size), torch.float32)
        bias = None
        if moe.gate == "deepseek_v3":
            bias = self.source.read(f"{block}.gate.e_score_correction_bias", (moe.num_experts,), torch.float32)
        shared = None
        if moe.num_shared_experts:
            size = moe.num_shared_experts * moe.intermediate_size
            shared = self.dense_mlp(f"{block}.shared_experts.", size, cut=False)
        return Moe(
            moe_layer,
            Gate(moe, weight.to(self.device), None if bias is None else bias.to(self.device)),
            SlotMap(table, self.device),
            slots,
            shared,
            dispatcher,
            self.groups.tp,
        )

    def experts(
        self, library: ctypes.CDLL | None, memory: WeightMemory, placement: Placement, dispatcher: Dispatcher
    ) -> Experts:
        """Room for the experts of every rank in this process; empty."""
        config, moe = self.config, self.config.moe
        assert moe is not None

        def take(num_bytes: int) -> Tensor:
            if self.device.type == "cpu":
                return memory.take_bytes(num_bytes)
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

        form: PackedForm | PlainForm
        if library is not None:
            form = PackedForm(library, config.hidden_size, moe.intermediate_size)
        else:
            form = PlainForm(config.hidden_size, moe.intermediate_size, self.dtype)
        arenas = {
            rank: ExpertArena(form, config.num_moe_layers, placement.slots_per_rank, take) for rank in dispatcher.ranks
        }
        return Experts(ExpertStore(self.source, config, self.dtype, form), arenas)

    def slots(self, library: ctypes.CDLL | None, arena: ExpertArena, layer: int) -> Callable[[Arrived], Tensor]:
        form = arena.form
        if isinstance(form, PackedForm):
            assert library is not None
            return FusedExperts(library, form, arena, layer)
        assert isinstance(form, PlainForm)
        return ExpertSlots(form.gate_up(arena.layer(layer)), form.down(arena.layer(layer)))


def kv_heads_of(config: ModelConfig, tp_rank: int, tp_size: int) -> KvHeads:
    """Which KV heads a rank's arena holds. Raises ConfigError when the heads cannot be cut so."""
    if isinstance(config.attention, MlaConfig):
        mla_heads(config.attention, tp_rank, tp_size)
        return MLA_HEADS
    return kv_heads(config.attention, tp_rank, tp_size)
