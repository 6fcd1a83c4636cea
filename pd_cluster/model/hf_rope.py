"""The rotary embedding that a config.json asks for: rope_theta with rope_scaling, or transformers 5's
rope_parameters. No torch."""

import math
from typing import Any

import msgspec

from pd_cluster.model.config import GqaConfig, MlaConfig, RopeConfig
from pd_cluster.model.config_keys import ConfigKeys

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def parse_rope(
    keys: ConfigKeys, attention: GqaConfig | MlaConfig, max_position: int, default_theta: float, *, interleaved: bool
) -> RopeConfig:
    """Old configs hold rope_theta and rope_scaling, transformers 5 writes both as rope_parameters."""
    raw = keys.get(dict[str, Any], "rope_scaling", "rope_parameters") or {}
    nested = {name: value for name, value in raw.items() if isinstance(value, dict)}
    if nested:  # one entry for each type of layer
        if set(nested) != {"full_attention"}:
            raise keys.error(f"rope_parameters by layer type ({', '.join(sorted(nested))}) are not supported")
        raw = nested["full_attention"]
    rope = ConfigKeys(raw, f"{keys.origin}: rope")
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


def mla_softmax_scale(attention: MlaConfig, rope: RopeConfig) -> float:
    """d_qk^-0.5, times the square of YaRN's mscale for all dimensions where the config states one."""
    scale = float((attention.qk_nope_head_dim + attention.qk_rope_head_dim) ** -0.5)
    if rope.kind != "default" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale
