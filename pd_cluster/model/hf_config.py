"""From a Hugging Face config.json to a `ModelConfig`: six families, two generations of key names, one result.

What a checkpoint asks for and this engine cannot do (another architecture, activation, rope type, quantisation, an
active sliding window) is refused here by name, before a byte of weights is read. Values follow transformers 5: the same
defaults for keys that a config may leave out, while sizes that shape the weights must be stated. No torch.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pd_cluster.errors import ModelError
from pd_cluster.model.config import Dtype, MlaConfig, ModelConfig
from pd_cluster.model.config_keys import ConfigKeys
from pd_cluster.model.families import FAMILIES
from pd_cluster.model.hf_rope import mla_softmax_scale, parse_rope, yarn_mscale

DTYPES: dict[str, Dtype] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float": "float32",
}
SILU = ("silu", "swish")
__all__ = ["SUPPORTED_ARCHITECTURES", "parse_config", "read_config", "yarn_mscale"]

# What transformers assumes for a key that config.json leaves out: bos, eos, longest context, rope theta, rms_norm_eps.
_DEFAULTS: dict[str, tuple[int | None, int | None, int, float, float]] = {
    "DeepseekV3ForCausalLM": (0, 1, 4096, 10_000.0, 1e-6),
    "DeepseekV2ForCausalLM": (1, 2, 2048, 10_000.0, 1e-6),
    "LlamaForCausalLM": (1, 2, 2048, 10_000.0, 1e-6),
    "Qwen3ForCausalLM": (None, None, 32_768, 10_000.0, 1e-6),
    "Qwen3MoeForCausalLM": (None, None, 32_768, 10_000.0, 1e-6),
    "MixtralForCausalLM": (1, 2, 131_072, 1_000_000.0, 1e-5),
}
_BY_MODEL_TYPE = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
SUPPORTED_ARCHITECTURES = tuple(_DEFAULTS)


def read_config(directory: Path, default_dtype: Callable[[], Dtype | None] | None = None) -> ModelConfig:
    """The model in `directory`, from its config.json and, for end-of-sequence ids, generation_config.json.

    `default_dtype` is asked when the config states none. Raises ModelError that names the file and what is wrong in it.
    """
    path = directory / "config.json"
    generation = directory / "generation_config.json"
    return parse_config(
        _read_json(path),
        _read_json(generation) if generation.is_file() else None,
        origin=str(path),
        default_dtype=default_dtype,
    )


def parse_config(
    raw: dict[str, Any],
    generation: dict[str, Any] | None = None,
    *,
    origin: str = "config.json",
    default_dtype: Callable[[], Dtype | None] | None = None,
) -> ModelConfig:
    """Normalise the contents of config.json (and generation_config.json); see `read_config`."""
    keys = ConfigKeys(raw, origin)
    architecture = _architecture(keys)
    bos, eos, longest, theta, eps = _DEFAULTS[architecture]
    activation = keys.get(str, "hidden_act", default="silu")
    if activation not in SILU:
        raise keys.error(f"hidden_act {activation!r} is not supported; supported: silu")
    max_position = keys.get(int, "max_position_embeddings", default=longest) or longest
    attention, moe, moe_layers = FAMILIES[architecture](keys)
    _refuse_sliding_window(keys, architecture, max_position)
    is_mla = isinstance(attention, MlaConfig)
    rope = parse_rope(keys, attention, max_position, theta, interleaved=is_mla and keys.flag("rope_interleave", True))
    has_dense_mlp = len(moe_layers) < keys.size("num_hidden_layers")
    return ModelConfig(
        architecture=architecture,
        vocab_size=keys.size("vocab_size"),
        hidden_size=keys.size("hidden_size"),
        num_layers=keys.size("num_hidden_layers"),
        intermediate_size=keys.size("intermediate_size")
        if has_dense_mlp
        else keys.get(int, "intermediate_size", default=0) or 0,
        attention=attention,
        rope=rope,
        moe=moe,
        moe_layers=moe_layers,
        rms_norm_eps=keys.get(float, "rms_norm_eps", default=eps) or eps,
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        max_position_embeddings=max_position,
        dtype=_dtype(keys, default_dtype),
        bos_token_id=_bos(keys, bos),
        eos_token_ids=_eos(keys, generation or {}, eos),
        fp8_block=_fp8_block(keys),
        softmax_scale=mla_softmax_scale(attention, rope) if isinstance(attention, MlaConfig) else 0.0,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _architecture(keys: ConfigKeys) -> str:
    named = keys.get(list[str], "architectures") or []
    model_type = keys.get(str, "model_type")
    for name in named or [_BY_MODEL_TYPE.get(model_type or "", model_type or "")]:
        if name in _DEFAULTS:
            return name
    what = f"architecture {', '.join(named)}" if named else f"model_type {model_type!r}"
    raise keys.error(f"{what} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")


def _refuse_sliding_window(keys: ConfigKeys, architecture: str, max_position: int) -> None:
    """A window that some layer applies and that is shorter than the context changes the model's output."""
    if architecture not in ("MixtralForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        return
    window = keys.get(int, "sliding_window", default=None if architecture == "MixtralForCausalLM" else 4096)
    if architecture != "MixtralForCausalLM" and not keys.flag("use_sliding_window"):
        window = None
    if window is None or window >= max_position:
        return
    if architecture == "Qwen3ForCausalLM":
        full_from = keys.get(int, "max_window_layers", default=28) or 0
        num_layers = keys.size("num_hidden_layers")
        types = keys.get(list[str], "layer_types") or [
            "sliding_attention" if i >= full_from else "" for i in range(num_layers)
        ]
        if "sliding_attention" not in types:
            return
    raise keys.error(
        f"sliding_window {window} is not supported: every layer must attend to the whole context of {max_position}"
    )


def _dtype(keys: ConfigKeys, default: Callable[[], Dtype | None] | None) -> Dtype:
    name = keys.get(str, "dtype", "torch_dtype")
    if name is None or name == "auto":
        return (default() if default else None) or "bfloat16"
    if name.removeprefix("torch.") not in DTYPES:
        raise keys.error(f"dtype {name!r} is not supported; supported: float32, bfloat16, float16")
    return DTYPES[name.removeprefix("torch.")]


def _bos(keys: ConfigKeys, default: int | None) -> int | None:
    return keys.get(int, "bos_token_id") if "bos_token_id" in keys.raw else default


def _eos(keys: ConfigKeys, generation: dict[str, Any], default: int | None) -> tuple[int, ...]:
    """Every id that ends a sequence, from either file: chat models often name theirs only in generation_config.json."""
    ids: list[int] = []
    for source in (
        keys if "eos_token_id" in keys.raw else ConfigKeys({"eos_token_id": default}, ""),
        ConfigKeys(generation, keys.origin),
    ):
        value = source.get(int | list[int], "eos_token_id")  # type: ignore[arg-type]
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def _fp8_block(keys: ConfigKeys) -> tuple[int, int] | None:
    for name in ("quantization_config", "compression_config"):
        raw = keys.get(dict[str, Any], name)
        if not raw:
            continue
        quantisation = ConfigKeys(raw, f"{keys.origin}: {name}")
        method = quantisation.get(str, "quant_method", default="unknown")
        if method != "fp8":
            raise keys.error(f"quantisation {method!r} is not supported; supported: fp8 with weight_block_size")
        fmt = quantisation.get(str, "fmt", default="e4m3")
        if fmt not in ("e4m3", "float8_e4m3fn"):
            raise keys.error(f"fp8 format {fmt!r} is not supported; supported: e4m3")
        block = quantisation.get(list[int], "weight_block_size")
        if block is None or len(block) != 2 or min(block) < 1:
            raise keys.error(
                f"fp8 needs weight_block_size [rows, columns], got {block}; one scale per tensor is not supported"
            )
        return block[0], block[1]
    return None
