"""What a model's KV is: how it lies in a rank's arena, and what another engine must share to exchange it."""

import hashlib

import msgspec

from pd_cluster.kv.layout import KvFingerprint, KvLayout
from pd_cluster.model.config import Dtype, MlaConfig, ModelConfig
from pd_cluster.model.weights import WeightSource


def layout_of(config: ModelConfig, head_ids: tuple[int, ...], dtype: Dtype, block_size: int) -> KvLayout:
    """How the KV of a rank that holds `head_ids` lies. Raises ConfigError unless 16 divides `block_size`."""
    return KvLayout(
        kind="mla" if isinstance(config.attention, MlaConfig) else "gqa",
        num_layers=config.num_layers,
        head_ids=head_ids,
        token_values=token_values(config),
        dtype=dtype,
        block_size=block_size,
    )


def token_values(config: ModelConfig) -> int:
    """Values per token, head and layer."""
    attention = config.attention
    if isinstance(attention, MlaConfig):
        return attention.kv_lora_rank + attention.qk_rope_head_dim
    return 2 * attention.head_dim


def fingerprint_of(config: ModelConfig, layout: KvLayout, source: WeightSource) -> KvFingerprint:
    """What another engine must share to exchange KV with this one; the same on all its ranks."""
    attention = config.attention
    rope = msgspec.json.encode((config.rope, config.softmax_scale))
    return KvFingerprint(
        weights=source.identity,
        kind=layout.kind,
        num_layers=layout.num_layers,
        num_kv_heads=1 if isinstance(attention, MlaConfig) else attention.num_kv_heads,
        token_values=layout.token_values,
        dtype=layout.dtype,
        rope=hashlib.sha256(rope).hexdigest()[:16],
    )
