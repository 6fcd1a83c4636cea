"""Attention and experts of each supported family, from its config.json keys. No torch."""

from collections.abc import Callable
from typing import Literal

from pd_cluster.model.config import GqaConfig, MlaConfig, MoeConfig
from pd_cluster.model.config_keys import ConfigKeys

Parts = tuple[GqaConfig | MlaConfig, MoeConfig | None, tuple[int, ...]]  # attention, experts, layers with experts


def _gqa(keys: ConfigKeys, *, head_dim: int | None = None, bias: bool = False, qk_norm: bool = False) -> GqaConfig:
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


def _dense_layers_only(keys: ConfigKeys) -> tuple[None, tuple[int, ...]]:
    if keys.flag("mlp_bias"):
        raise keys.error("mlp_bias is not supported")
    return None, ()


def _llama(keys: ConfigKeys) -> Parts:
    return _gqa(keys, bias=True), *_dense_layers_only(keys)


def _qwen3(keys: ConfigKeys) -> Parts:
    head_dim = keys.get(int, "head_dim", default=128)  # not hidden_size / num_heads as elsewhere
    return _gqa(keys, head_dim=head_dim, bias=True, qk_norm=True), *_dense_layers_only(keys)


def _qwen3_moe(keys: ConfigKeys) -> Parts:
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


def _mixtral(keys: ConfigKeys) -> Parts:
    moe = MoeConfig(
        gate="mixtral",
        num_experts=keys.size("num_local_experts", "num_experts"),
        num_experts_per_tok=keys.size("num_experts_per_tok"),
        intermediate_size=keys.size("intermediate_size"),
        norm_topk_prob=True,
    )
    _check_top_k(keys, moe)
    return _gqa(keys), moe, tuple(range(keys.size("num_hidden_layers")))


def _mla(keys: ConfigKeys) -> MlaConfig:
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


def _deepseek_v3(keys: ConfigKeys) -> Parts:
    _expect(keys, "topk_method", "noaux_tc")
    _expect(keys, "scoring_func", "sigmoid")
    return _mla(keys), *_deepseek_experts(
        keys, "deepseek_v3", grouped=True, norm_topk_prob=keys.flag("norm_topk_prob", True), scaling=2.5
    )


def _deepseek_v2(keys: ConfigKeys) -> Parts:
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
    keys: ConfigKeys,
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


def _expect(keys: ConfigKeys, key: str, only: str) -> None:
    value = keys.get(str, key, default=only)
    if value != only:
        raise keys.error(f"{key} {value!r} is not supported here; supported: {only}")


def _check_top_k(keys: ConfigKeys, moe: MoeConfig) -> None:
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


FAMILIES: dict[str, Callable[[ConfigKeys], Parts]] = {
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "LlamaForCausalLM": _llama,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
}
