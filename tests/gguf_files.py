"""GGUF files written the way llama.cpp writes them, from the checkpoints of the tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

from pd_cluster.model.config import GqaConfig, ModelConfig
from pd_cluster.model.hf_config import read_config
from pd_cluster.model.tokenizer import byte_alphabet

CHECKPOINTS = Path(__file__).parent / "checkpoints"
Edit = Callable[[gguf.GGUFWriter], None]
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}


def permuted(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """llama.cpp's order of a head's rows: (half, i) becomes (i, half)."""
    rows = weight.shape[0]
    split = weight.reshape(num_heads, 2, rows // num_heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write_tokenizer(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    """A byte-level vocabulary with a few merges, special tokens first."""
    specials = ["<|end|>", "<|user|>", "<tool>"]
    tokens = [*specials, *byte_alphabet()]
    merges = ["Ġ t", "h e", "Ġt he", "t he", "1 2", "l l", "he ll", "hell o"]
    tokens += [merge.replace(" ", "") for merge in merges]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 4] + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")


def write(
    path: Path,
    name: str,
    types: dict[str, Q] | None = None,
    edit: Edit | None = None,
    stacked: bool = True,
    freqs: bool = False,
) -> Path:
    """The checkpoint `name` as a GGUF file; `types` by the end of a tensor's name, F32 otherwise."""
    config, tensors = read_config(CHECKPOINTS / name), load_file(CHECKPOINTS / name / "model.safetensors")
    attention = config.attention
    assert isinstance(attention, GqaConfig)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_rope_dimension_count(config.rope.dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.moe:
        writer.add_expert_count(config.moe.num_experts)
        writer.add_expert_used_count(config.moe.num_experts_per_tok)
        tensors = stack_experts(tensors, config, stacked)
    write_tokenizer(writer)
    if freqs:
        writer.add_tensor("rope_freqs.weight", rope_divisors(config))
    heads = {"q_proj.weight": attention.num_heads, "k_proj.weight": attention.num_kv_heads}
    for key, tensor in tensors.items():
        num_heads = next((count for end, count in heads.items() if key.endswith(end)), None)
        chosen = next((qtype for end, qtype in (types or {}).items() if key.endswith(end)), Q.F32)
        data = quantize(np.ascontiguousarray(permuted(tensor, num_heads) if num_heads else tensor), chosen)
        writer.add_tensor(gguf_name(key), data, raw_dtype=chosen)
    if edit:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stack_experts(tensors: dict[str, Any], config: ModelConfig, stacked: bool) -> dict[str, Any]:
    assert config.moe is not None
    rest = {key: value for key, value in tensors.items() if ".experts." not in key}
    for layer in config.moe_layers:
        for part, name in (("w1", "ffn_gate"), ("w2", "ffn_down"), ("w3", "ffn_up")):
            prefix = f"model.layers.{layer}.block_sparse_moe.experts"
            experts = [tensors[f"{prefix}.{i}.{part}.weight"] for i in range(config.moe.num_experts)]
            if stacked:
                rest[f"blk.{layer}.{name}_exps.weight"] = np.stack(experts)
            else:
                rest |= {f"blk.{layer}.{name}.{i}.weight": expert for i, expert in enumerate(experts)}
    return rest


def gguf_name(key: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if key in top:
        return f"{top[key]}.weight"
    if not key.startswith("model.layers."):
        return key
    layer, rest = key.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def rope_divisors(config: ModelConfig) -> NDArray[np.float32]:
    """Llama 3's scaling as llama.cpp stores it: what each frequency is divided by."""
    rope = config.rope
    low, high = rope.original_max_position / rope.low_freq_factor, rope.original_max_position / rope.high_freq_factor
    divisors = []
    for i in range(rope.dim // 2):
        wavelength = 2 * np.pi * rope.theta ** (2 * i / rope.dim)
        smooth = (rope.original_max_position / wavelength - 1) / (rope.high_freq_factor - rope.low_freq_factor)
        middle = 1 / ((1 - smooth) / rope.factor + smooth)
        divisors.append(1.0 if wavelength < high else rope.factor if wavelength > low else middle)
    return np.array(divisors, np.float32)


def edited(key: str, value: Any) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        fields = writer.kv_data[0]
        fields.pop(key, None)
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)

    return edit
