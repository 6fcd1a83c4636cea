"""The tensors that a `ModelConfig` implies: their Hugging Face names and shapes, without reading a file. No torch."""

from collections.abc import Iterator

from pd_cluster.model.config import GqaConfig, MlaConfig, ModelConfig, MoeConfig

Shape = tuple[int, ...]

MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every weight that inference reads, in the order of a forward pass."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    moe_layers = set(config.moe_layers)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        match config.attention:
            case GqaConfig() as gqa:
                yield from _gqa(f"{prefix}.self_attn", gqa, hidden)
            case MlaConfig() as mla:
                yield from _mla(f"{prefix}.self_attn", mla, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if layer in moe_layers and config.moe is not None:
            yield from _moe(layer, config.moe, hidden)
        else:
            yield from _mlp(f"{prefix}.mlp", MLP_NAMES, config.intermediate_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def num_parameters(config: ModelConfig) -> int:
    """Parameters that inference holds, all experts included."""
    total = 0
    for _, shape in tensor_shapes(config):
        size = 1
        for extent in shape:
            size *= extent
        total += size
    return total


def _gqa(prefix: str, gqa: GqaConfig, hidden: int) -> Iterator[tuple[str, Shape]]:
    for name, num_heads in (("q_proj", gqa.num_heads), ("k_proj", gqa.num_kv_heads), ("v_proj", gqa.num_kv_heads)):
        yield f"{prefix}.{name}.weight", (num_heads * gqa.head_dim, hidden)
        if gqa.qkv_bias:
            yield f"{prefix}.{name}.bias", (num_heads * gqa.head_dim,)
    yield f"{prefix}.o_proj.weight", (hidden, gqa.num_heads * gqa.head_dim)
    if gqa.o_bias:
        yield f"{prefix}.o_proj.bias", (hidden,)
    if gqa.qk_norm:
        yield f"{prefix}.q_norm.weight", (gqa.head_dim,)
        yield f"{prefix}.k_norm.weight", (gqa.head_dim,)


def _mla(prefix: str, mla: MlaConfig, hidden: int) -> Iterator[tuple[str, Shape]]:
    query = mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        yield f"{prefix}.q_proj.weight", (query, hidden)
    else:
        yield f"{prefix}.q_a_proj.weight", (mla.q_lora_rank, hidden)
        yield f"{prefix}.q_a_layernorm.weight", (mla.q_lora_rank,)
        yield f"{prefix}.q_b_proj.weight", (query, mla.q_lora_rank)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (mla.kv_lora_rank,)
    yield f"{prefix}.kv_b_proj.weight", (mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    yield f"{prefix}.o_proj.weight", (hidden, mla.num_heads * mla.v_head_dim)


def _mlp(prefix: str, names: tuple[str, str, str], inner: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    gate, up, down = names
    yield f"{prefix}.{gate}.weight", (inner, hidden)
    yield f"{prefix}.{up}.weight", (inner, hidden)
    yield f"{prefix}.{down}.weight", (hidden, inner)


def moe_block(moe: MoeConfig, layer: int) -> str:
    """The prefix of the names of a layer's gate and experts."""
    return f"model.layers.{layer}." + ("block_sparse_moe" if moe.gate == "mixtral" else "mlp")


def expert_names(moe: MoeConfig) -> tuple[str, str, str]:
    """An expert's gate, up and down matrix."""
    return ("w1", "w3", "w2") if moe.gate == "mixtral" else MLP_NAMES


def _moe(layer: int, moe: MoeConfig, hidden: int) -> Iterator[tuple[str, Shape]]:
    block = moe_block(moe, layer)
    yield f"{block}.gate.weight", (moe.num_experts, hidden)
    if moe.gate == "deepseek_v3":
        yield f"{block}.gate.e_score_correction_bias", (moe.num_experts,)
    for expert in range(moe.num_experts):
        yield from _mlp(f"{block}.experts.{expert}", expert_names(moe), moe.intermediate_size, hidden)
    if moe.num_shared_experts:
        inner = moe.num_shared_experts * moe.intermediate_size
        yield from _mlp(f"{block}.shared_experts", MLP_NAMES, inner, hidden)
