"""A model's architecture in one normalised form, read from a Hugging Face config.json or from GGUF metadata.

Families differ in values here, not in code: a dense Llama, Qwen3, Mixtral and DeepSeek share the same transformer.
"""

from typing import Literal

from msgspec import Struct

Dtype = Literal["float32", "bfloat16", "float16"]


class RopeConfig(Struct, frozen=True, kw_only=True):
    """Rotary embedding. `interleaved`: pairs are (2i, 2i + 1) rather than (i, i + dim / 2)."""

    theta: float
    dim: int
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    interleaved: bool = False
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    truncate: bool = True


class GqaConfig(Struct, frozen=True, kw_only=True, tag="gqa"):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # per-head RMSNorm before RoPE (Qwen3)


class MlaConfig(Struct, frozen=True, kw_only=True, tag="mla"):
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class MoeConfig(Struct, frozen=True, kw_only=True):
    """`gate` says how experts are scored and chosen; facts of each family are in model/gate.py."""

    gate: Literal["deepseek_v3", "deepseek_v2_greedy", "deepseek_v2_group", "qwen3", "mixtral"]
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    num_shared_experts: int = 0
    num_groups: int = 1
    topk_groups: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0


class ModelConfig(Struct, frozen=True, kw_only=True):
    architecture: str  # Hugging Face class name
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int  # of dense MLPs
    attention: GqaConfig | MlaConfig
    rope: RopeConfig
    moe: MoeConfig | None
    moe_layers: tuple[int, ...]  # indices of layers with experts
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: Dtype
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    fp8_block: tuple[int, int] | None = None  # weights are e4m3 with one scale per block
    softmax_scale: float = 0.0  # 0: head_dim ** -0.5; MLA with YaRN carries its mscale here

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)
