"""A model with much KV and little else: 32 KiB a token, random weights, milliseconds a step.

Transfers of it do not fit into socket buffers, so that they can be caught half-way.
"""

import json
from pathlib import Path

NUM_LAYERS, NUM_HEADS, HEAD_DIM, VOCAB = 4, 8, 128, 512
TOKEN_BYTES = NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM * 4


def write_config(directory: Path) -> Path:
    """Load it with `model.load=random`."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
