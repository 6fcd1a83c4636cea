"""The small JSON files of a Hugging Face directory: from a `ModelConfig` where there was none, else the ones there
were, changed as little as a conversion asks. No torch.

Keys are those that transformers 4 and 5 and other engines all read: rope_theta beside rope_scaling, torch_dtype.
"""

from typing import Any

from pd_cluster.errors import ModelError
from pd_cluster.model.config import Dtype, GqaConfig, ModelConfig, RopeConfig
from pd_cluster.model.tokenizer import SpecialTokens

_MODEL_TYPES = {"LlamaForCausalLM": "llama", "MixtralForCausalLM": "mixtral"}
_OF_OTHER_WEIGHTS = ("quantization_config", "compression_config", "dtype", "torch_dtype", "auto_map")


def new_config(config: ModelConfig, dtype: Dtype) -> dict[str, Any]:
    """config.json of a Llama or Mixtral. Raises ModelError for what its Hugging Face class cannot express."""
    attention = config.attention
    model_type = _MODEL_TYPES.get(config.architecture)
    if model_type is None or not isinstance(attention, GqaConfig):
        raise ModelError(f"cannot write a config.json for {config.architecture}; known: {', '.join(_MODEL_TYPES)}")
    if attention.qkv_bias != attention.o_bias or (attention.qkv_bias and config.moe):
        raise ModelError(f"{config.architecture} has biases on all four projections of a layer or on none")
    raw: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_all(config.eos_token_ids),
        "torch_dtype": dtype,
    }
    if config.moe is None:
        return raw | {"attention_bias": attention.qkv_bias, "mlp_bias": False}
    return raw | {
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.num_experts_per_tok,
        "intermediate_size": config.moe.intermediate_size,
        "sliding_window": None,
    }


def changed_config(raw: dict[str, Any], dtype: Dtype) -> dict[str, Any]:
    """An existing config.json for the same weights in `dtype`: no quantisation, no code of its own, and no
    multi-token-prediction layers, which are not written."""
    kept = {key: value for key, value in raw.items() if key not in _OF_OTHER_WEIGHTS}
    if "num_nextn_predict_layers" in kept:
        kept["num_nextn_predict_layers"] = 0
    return kept | {"torch_dtype": dtype}


def new_generation_config(config: ModelConfig) -> dict[str, Any]:
    values = {"bos_token_id": config.bos_token_id, "eos_token_id": _one_or_all(config.eos_token_ids)}
    return {key: value for key, value in values.items() if value is not None}


def new_tokenizer_config(special: SpecialTokens, max_length: int) -> dict[str, Any]:
    """For a tokenizer.json that says by itself how text is split and what is put around it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **special.by_name(),
    }


def _one_or_all(ids: tuple[int, ...]) -> int | list[int] | None:
    return list(ids) if len(ids) > 1 else ids[0] if ids else None


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    match rope.kind:
        case "default":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": rope.factor}
        case "llama3":
            return {
                "rope_type": "llama3",
                "factor": rope.factor,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": rope.original_max_position,
            }
        case "yarn":
            return {
                "rope_type": "yarn",
                "factor": rope.factor,
                "original_max_position_embeddings": rope.original_max_position,
                "beta_fast": rope.beta_fast,
                "beta_slow": rope.beta_slow,
                "attention_factor": rope.attention_factor,
            }
