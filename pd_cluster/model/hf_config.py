"""From a Hugging Face config.json to a `ModelConfig`: six families, two generations of key names, one result.

What a checkpoint asks for and this engine cannot do (another architecture, activation, rope type, quantisation, an
active sliding window) is refused here by name, before a byte of weights is read. Values follow transformers 5: the same
defaults for keys that a config may leave out, while sizes that shape the weights must be stated. No torch.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from pd_cluster.errors import ModelError
from pd_cluster.model.config import Dtype, GqaConfig, MlaConfig, ModelConfig, MoeConfig, RopeConfig

T = TypeVar("T")

DTYPES: dict[str, Dtype] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float": "float32",
}
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
SILU = ("silu", "swish")


class _Keys:
    """Typed access to one config.json; every error names the file and the key."""

    def __init__(self, raw: dict[str, Any], origin: str) -> None:
        self.raw = raw
        self.origin = origin

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.origin}: {message}")

    def get(self, kind: type[T], *names: str, default: Any = None) -> T | None:
        """The first of `names` that is present and not null; `default` otherwise."""
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            try:
                return msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                raise self.error(f"{name} is {value!r}: {error}") from error
        return default  # type: ignore[no-any-return]

    def need(self, kind: type[T], *names: str) -> T:
        value = self.get(kind, *names)
        if value is None:
            raise self.error(f"{' or '.join(names)} is missing")
        return value

    def size(self, *names: str) -> int:
        value = self.need(int, *names)
        if value < 1:
            raise self.error(f"{names[0]} must be at least 1, got {value}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.get(bool, name, default=default))


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
    keys = _Keys(raw, origin)
    architecture = _architecture(keys)
    bos, eos, longest, theta, eps = _DEFAULTS[architecture]
    activation = keys.get(str, "hidden_act", default="silu")
    if activation not in SILU:
        raise keys.error(f"hidden_act {activation!r} is not supported; supported: silu")
    max_position = keys.get(int, "max_position_embeddings", default=longest) or longest
    attention, moe, moe_layers = _FAMILIES[architecture](keys)
    _refuse_sliding_window(keys, architecture, max_position)
    is_mla = isinstance(attention, MlaConfig)
    rope = _rope(keys, attention, max_position, theta, interleaved=is_mla and keys.flag("rope_interleave", True))
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
        softmax_scale=_mla_softmax_scale(attention, rope) if isinstance(attention, MlaConfig) else 0.0,
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


def _architecture(keys: _Keys) -> str:
    named = keys.get(list[str], "architectures") or []
    model_type = keys.get(str, "model_type")
    for name in named or [_BY_MODEL_TYPE.get(model_type or "", model_type or "")]:
        if name in _DEFAULTS:
            return name
    what = f"architecture {', '.join(named)}" if named else f"model_type {model_type!r}"
    raise keys.error(f"{what} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")


# --- attention and experts of each family ---


def _gqa(keys: _Keys, *, head_dim: int | None = None, bias: bool = False, qk_norm: bool = False) -> GqaConfig:
    num_heads = keys.size("num_attention_heads")
    num_kv_heads = keys.get(int, "num_key_value_heads", default=num_heads) or num_heads
    if num_heads % num_kv_heads:
        raise keys.error(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    if head_dim is None:
        head_dim = keys.get(int, "head_dim", default=keys.size("hidden_size") // num_heads)
    assert head_dim is not None
    has_bias = bias and keys.flag("attention_bias")
    return GqaConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=qk_norm,
    )


def _dense_layers_only(keys: _Keys) -> tuple[None, tuple[int, ...]]:
    if keys.flag("mlp_bias"):
        raise keys.error("mlp_bias is not supported")
    return None, ()


def _llama(keys: _Keys) -> tuple[GqaConfig, MoeConfig | None, tuple[int, ...]]:
    return _gqa(keys, bias=True), *_dense_layers_only(keys)


def _qwen3(keys: _Keys) -> tuple[GqaConfig, MoeConfig | None, tuple[int, ...]]:
    head_dim = keys.get(int, "head_dim", default=128)  # not hidden_size / num_heads as elsewhere
    return _gqa(keys, head_dim=head_dim, bias=True, qk_norm=True), *_dense_layers_only(keys)


def _qwen3_moe(keys: _Keys) -> tuple[GqaConfig, MoeConfig | None, tuple[int, ...]]:
    moe = MoeConfig(
        gate="qwen3",
        num_experts=keys.size("num_experts", "num_local_experts"),
        num_experts_per_tok=keys.size("num_experts_per_tok"),
        intermediate_size=keys.size("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob"),
    )
    _check_top_k(keys, moe)
    step = keys.get(int, "decoder_sparse_step", default=1) or 1
    dense = set(keys.get(list[int], "mlp_only_layers") or ())
    layers = tuple(i for i in range(keys.size("num_hidden_layers")) if i not in dense and (i + 1) % step == 0)
    return _gqa(keys, bias=True, qk_norm=True), moe if layers else None, layers


def _mixtral(keys: _Keys) -> tuple[GqaConfig, MoeConfig | None, tuple[int, ...]]:
    moe = MoeConfig(
        gate="mixtral",
        num_experts=keys.size("num_local_experts", "num_experts"),
        num_experts_per_tok=keys.size("num_experts_per_tok"),
        intermediate_size=keys.size("intermediate_size"),
        norm_topk_prob=True,
    )
    _check_top_k(keys, moe)
    return _gqa(keys), moe, tuple(range(keys.size("num_hidden_layers")))


def _mla(keys: _Keys) -> MlaConfig:
    for key in ("attention_bias", "mlp_bias"):
        if keys.flag(key):
            raise keys.error(f"{key} is not supported with latent attention")
    return MlaConfig(
        num_heads=keys.size("num_attention_heads"),
        q_lora_rank=keys.get(int, "q_lora_rank"),
        kv_lora_rank=keys.size("kv_lora_rank"),
        qk_nope_head_dim=keys.size("qk_nope_head_dim"),
        qk_rope_head_dim=keys.size("qk_rope_head_dim"),
        v_head_dim=keys.size("v_head_dim"),
    )


def _deepseek_v3(keys: _Keys) -> tuple[MlaConfig, MoeConfig | None, tuple[int, ...]]:
    _expect(keys, "topk_method", "noaux_tc")
    _expect(keys, "scoring_func", "sigmoid")
    return _mla(keys), *_deepseek_experts(
        keys, "deepseek_v3", grouped=True, norm_topk_prob=keys.flag("norm_topk_prob", True), scaling=2.5
    )


def _deepseek_v2(keys: _Keys) -> tuple[MlaConfig, MoeConfig | None, tuple[int, ...]]:
    _expect(keys, "scoring_func", "softmax")
    method = keys.get(str, "topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise keys.error(f"topk_method {method!r} is not supported; supported: greedy, group_limited_greedy")
    if keys.flag("norm_topk_prob"):
        # the original code normalises here where transformers only scales: no shipped checkpoint asks for it
        raise keys.error("norm_topk_prob is not supported for DeepseekV2ForCausalLM")
    if method == "greedy":
        return _mla(keys), *_deepseek_experts(
            keys, "deepseek_v2_greedy", grouped=False, norm_topk_prob=False, scaling=1.0
        )
    return _mla(keys), *_deepseek_experts(keys, "deepseek_v2_group", grouped=True, norm_topk_prob=False, scaling=1.0)


def _deepseek_experts(
    keys: _Keys,
    gate: Literal["deepseek_v3", "deepseek_v2_greedy", "deepseek_v2_group"],
    *,
    grouped: bool,
    norm_topk_prob: bool,
    scaling: float,
) -> tuple[MoeConfig | None, tuple[int, ...]]:
    num_layers = keys.size("num_hidden_layers")
    first = keys.get(int, "first_k_dense_replace", default=3 if gate == "deepseek_v3" else 0) or 0
    every = keys.get(int, "moe_layer_freq", default=1) or 1
    layers = tuple(i for i in range(first, num_layers) if i % every == 0)
    if not layers or keys.get(int, "n_routed_experts", "num_local_experts") is None:
        return None, ()
    moe = MoeConfig(
        gate=gate,
        num_experts=keys.size("n_routed_experts", "num_local_experts"),
        num_experts_per_tok=keys.size("num_experts_per_tok"),
        intermediate_size=keys.size("moe_intermediate_size"),
        num_shared_experts=keys.get(int, "n_shared_experts", default=0) or 0,
        num_groups=keys.size("n_group") if grouped else 1,
        topk_groups=keys.size("topk_group") if grouped else 1,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=keys.get(float, "routed_scaling_factor", default=scaling) or scaling,
    )
    _check_top_k(keys, moe)
    return moe, layers


def _expect(keys: _Keys, key: str, only: str) -> None:
    value = keys.get(str, key, default=only)
    if value != only:
        raise keys.error(f"{key} {value!r} is not supported here; supported: {only}")


def _check_top_k(keys: _Keys, moe: MoeConfig) -> None:
    if moe.num_experts % moe.num_groups:
        raise keys.error(f"{moe.num_experts} experts do not divide into n_group {moe.num_groups}")
    if moe.topk_groups > moe.num_groups:
        raise keys.error(f"topk_group {moe.topk_groups} exceeds n_group {moe.num_groups}")
    reachable = moe.num_experts // moe.num_groups * moe.topk_groups
    if moe.num_experts_per_tok > reachable:
        raise keys.error(
            f"num_experts_per_tok {moe.num_experts_per_tok} exceeds the {reachable} experts that a token can reach"
        )
    if moe.gate == "deepseek_v3" and moe.num_experts // moe.num_groups < 2:
        raise keys.error(
            f"a group's score needs its two best experts, but n_group {moe.num_groups} leaves one expert a group"
        )


_Family = Callable[[_Keys], tuple[GqaConfig | MlaConfig, MoeConfig | None, tuple[int, ...]]]
_FAMILIES: dict[str, _Family] = {
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "LlamaForCausalLM": _llama,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
}


# --- what all families share ---


def _refuse_sliding_window(keys: _Keys, architecture: str, max_position: int) -> None:
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


def _rope(
    keys: _Keys, attention: GqaConfig | MlaConfig, max_position: int, default_theta: float, *, interleaved: bool
) -> RopeConfig:
    """Old configs hold rope_theta and rope_scaling, transformers 5 writes both as rope_parameters."""
    raw = keys.get(dict[str, Any], "rope_scaling", "rope_parameters") or {}
    nested = {name: value for name, value in raw.items() if isinstance(value, dict)}
    if nested:  # one entry for each type of layer
        if set(nested) != {"full_attention"}:
            raise keys.error(f"rope_parameters by layer type ({', '.join(sorted(nested))}) are not supported")
        raw = nested["full_attention"]
    rope = _Keys(raw, f"{keys.origin}: rope")
    theta = rope.get(float, "rope_theta", default=keys.get(float, "rope_theta", default=default_theta))
    kind = rope.get(str, "rope_type", "type", default="default")
    if kind not in ROPE_KINDS:
        raise keys.error(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    for part in (rope, keys):
        fraction = part.get(float, "partial_rotary_factor", default=1.0)
        if fraction != 1.0:
            raise keys.error(f"partial_rotary_factor {fraction} is not supported: rope must span the head")
    dim = attention.qk_rope_head_dim if isinstance(attention, MlaConfig) else attention.head_dim
    if dim % 2:
        raise keys.error(f"rope needs an even head dimension, got {dim}")
    plain = RopeConfig(theta=theta or default_theta, dim=dim, interleaved=interleaved)
    if kind == "default":
        return plain
    if kind == "linear":
        return msgspec.structs.replace(plain, kind="linear", factor=rope.need(float, "factor"))
    original = (
        keys.get(int, "original_max_position_embeddings")
        or rope.get(int, "original_max_position_embeddings")
        or max_position
    )
    if kind == "llama3":
        return msgspec.structs.replace(
            plain,
            kind="llama3",
            factor=rope.need(float, "factor"),
            low_freq_factor=rope.need(float, "low_freq_factor"),
            high_freq_factor=rope.need(float, "high_freq_factor"),
            original_max_position=original,
        )
    factor = rope.get(float, "factor", default=max_position / original) or 1.0
    mscale, mscale_all_dim = rope.get(float, "mscale"), rope.get(float, "mscale_all_dim")
    attention_factor = rope.get(float, "attention_factor")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    elif attention_factor is None:
        attention_factor = yarn_mscale(factor, 1.0)
    return msgspec.structs.replace(
        plain,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=rope.get(float, "beta_fast") or 32.0,
        beta_slow=rope.get(float, "beta_slow") or 1.0,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        attention_factor=attention_factor,
        truncate=rope.flag("truncate", True),
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 m ln(s) + 1 (YaRN, arXiv 2309.00071, section 3.4); 1 when nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _mla_softmax_scale(attention: MlaConfig, rope: RopeConfig) -> float:
    """d_qk^-0.5, times the square of YaRN's mscale for all dimensions where the config states one."""
    scale = float((attention.qk_nope_head_dim + attention.qk_rope_head_dim) ** -0.5)
    if rope.kind != "default" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def _dtype(keys: _Keys, default: Callable[[], Dtype | None] | None) -> Dtype:
    name = keys.get(str, "dtype", "torch_dtype")
    if name is None or name == "auto":
        return (default() if default else None) or "bfloat16"
    if name.removeprefix("torch.") not in DTYPES:
        raise keys.error(f"dtype {name!r} is not supported; supported: float32, bfloat16, float16")
    return DTYPES[name.removeprefix("torch.")]


def _bos(keys: _Keys, default: int | None) -> int | None:
    return keys.get(int, "bos_token_id") if "bos_token_id" in keys.raw else default


def _eos(keys: _Keys, generation: dict[str, Any], default: int | None) -> tuple[int, ...]:
    """Every id that ends a sequence, from either file: chat models often name theirs only in generation_config.json."""
    ids: list[int] = []
    for source in (
        keys if "eos_token_id" in keys.raw else _Keys({"eos_token_id": default}, ""),
        _Keys(generation, keys.origin),
    ):
        value = source.get(int | list[int], "eos_token_id")  # type: ignore[arg-type]
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def _fp8_block(keys: _Keys) -> tuple[int, int] | None:
    for name in ("quantization_config", "compression_config"):
        raw = keys.get(dict[str, Any], name)
        if not raw:
            continue
        quantisation = _Keys(raw, f"{keys.origin}: {name}")
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
