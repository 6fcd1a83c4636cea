"""What one token of a model costs, for the cost model, from its architecture."""

from pd_cluster.costs.roofline import ModelWork
from pd_cluster.model.config import MlaConfig, ModelConfig

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def model_work(config: ModelConfig) -> ModelWork:
    """Parameters that every token meets, parameters of one expert, and attention per pair of tokens.

    `kv_token_bytes` stays at its default: workers say how large their blocks are.
    """
    hidden = config.hidden_size
    attention = config.attention
    if isinstance(attention, MlaConfig):
        query_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        query = attention.num_heads * query_dim
        query_params = (hidden + query) * attention.q_lora_rank if attention.q_lora_rank is not None else hidden * query
        latent = hidden * (attention.kv_lora_rank + attention.qk_rope_head_dim)
        unfold = attention.kv_lora_rank * attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        attention_params = query_params + latent + unfold + attention.num_heads * attention.v_head_dim * hidden
        pair_flops = 2 * attention.num_heads * (query_dim + attention.v_head_dim)
    else:
        heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        attention_params = 2 * hidden * dim * (heads + kv_heads)
        pair_flops = 4 * heads * dim
    moe = config.moe
    num_dense_mlps = config.num_layers - config.num_moe_layers
    dense = config.num_layers * attention_params + num_dense_mlps * 3 * hidden * config.intermediate_size
    dense += config.vocab_size * hidden  # the output projection; an embedding is only looked up
    expert = 0
    if moe is not None:
        one = 3 * hidden * moe.intermediate_size
        expert = config.num_moe_layers * one
        dense += config.num_moe_layers * (moe.num_shared_experts * one + hidden * moe.num_experts)
    return ModelWork(
        dense_params=float(dense),
        expert_params=float(expert),
        num_experts=moe.num_experts if moe is not None else 0,
        num_experts_per_tok=moe.num_experts_per_tok if moe is not None else 0,
        bytes_per_param=1.0 if config.fp8_block is not None else BYTES[config.dtype],
        attention_flops=float(config.num_layers * pair_flops),
    )
