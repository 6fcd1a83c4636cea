"""The benchmarks of the engine on models that take no time: what they count, and what they refuse."""

import msgspec
import pytest
import torch
from golden import model

from pd_cluster.bench import engine, roofline
from pd_cluster.errors import ConfigError
from pd_cluster.kernels import native
from pd_cluster.model.config import MlaConfig

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="there is no C compiler")


def test_steps_are_set_against_the_products_of_the_same_run() -> None:
    result = engine.run(model("llama"), context=20, rounds=1, batches=(1, 3), lengths=(40,))
    for name, num_tokens in (("decode_1", 1), ("decode_3", 3), ("prefill_40", 40)):
        step_ms, matmul_ms = result[f"{name}_step_ms"], result[f"{name}_matmul_ms"]
        assert 0 < matmul_ms <= result[f"{name}_matmul_onednn_ms"]
        assert result[f"{name}_ratio"] == pytest.approx(step_ms / matmul_ms)
        assert result[f"{name}_tok_s"] == pytest.approx(1e3 * num_tokens / step_ms)


def test_products_of_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="has experts"):
        engine.run(model("qwen3_moe"))


def test_the_floor_counts_every_byte_that_a_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "READ_BYTES", 1 << 20)
    config = msgspec.structs.replace(roofline.MODEL, vocab_size=1024, hidden_size=64, num_layers=3, moe_layers=(1, 2))
    assert isinstance(config.attention, MlaConfig)
    assert config.moe is not None
    result = roofline.run(batch=2, context=32, rounds=1, config=config)
    attention, moe, hidden = config.attention, config.moe, config.hidden_size
    latent = attention.kv_lora_rank + attention.qk_rope_head_dim
    heads, nope = attention.num_heads, attention.qk_nope_head_dim
    per_layer = hidden * (latent + heads * (nope + attention.qk_rope_head_dim + attention.v_head_dim))
    per_layer += heads * attention.kv_lora_rank * (nope + attention.v_head_dim)
    shared = 3 * hidden * moe.intermediate_size * moe.num_shared_experts
    dense = 3 * hidden * config.intermediate_size
    weights = 2 * (3 * per_layer + 2 * shared + dense + config.vocab_size * hidden) + 2 * 4 * moe.num_experts * hidden
    assert result["other_weights_mb"] == pytest.approx(weights / 1e6)
    assert result["kv_mb"] == pytest.approx(2 * 33 * 3 * latent * 2 / 1e6)
    expert = 2 * 3 * hidden * moe.intermediate_size
    num_experts = result["expert_mb"] * 1e6 / expert  # of two layers, for two tokens
    assert num_experts == pytest.approx(round(num_experts))
    assert 2 * moe.num_experts_per_tok <= num_experts <= 4 * moe.num_experts_per_tok
    num_bytes = 1e6 * (result["other_weights_mb"] + result["kv_mb"] + result["expert_mb"])
    assert result["floor_ms"] == pytest.approx(1e3 * num_bytes / (1e9 * result["bandwidth_gb_s"]))
    assert result["ratio"] == pytest.approx(result["step_ms"] / result["floor_ms"])
    assert torch.get_num_threads() == 1
