"""Configs of six families against transformers' reading of the same files, and refusals by their text."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from pd_cluster.errors import ModelError
from pd_cluster.model.config import GqaConfig, MlaConfig
from pd_cluster.model.hf_config import parse_config, read_config

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
NAMES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json"))


def raw(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CHECKPOINTS / name / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize("name", NAMES)
def test_config_agrees_with_transformers(name: str) -> None:
    ours, theirs = read_config(CHECKPOINTS / name), AutoConfig.from_pretrained(CHECKPOINTS / name)
    assert ours.architecture == theirs.architectures[0]
    for key in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, key) == getattr(theirs, key)
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.kind == theirs.rope_parameters["rope_type"]
    assert ours.rope.factor == theirs.rope_parameters.get("factor", 1.0)
    assert ours.eos_token_ids == (1,)
    assert ours.dtype == str(theirs.dtype).removeprefix("torch.")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "deepseek_v3_fp8"])
def test_attention_scale_rope_and_moe_layers_agree_with_the_built_model(name: str) -> None:
    config = AutoConfig.from_pretrained(CHECKPOINTS / name)
    model = AutoModelForCausalLM.from_config(config)
    ours = read_config(CHECKPOINTS / name)
    scale = ours.softmax_scale
    if isinstance(ours.attention, GqaConfig):
        assert scale == 0.0
        scale = ours.attention.head_dim**-0.5
    assert model.model.layers[0].self_attn.scaling == pytest.approx(scale, rel=1e-12)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(ours.rope.attention_factor or 1.0, rel=1e-12)
    assert len(model.model.rotary_emb.inv_freq) * 2 == ours.rope.dim
    experts = tuple(i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts"))
    assert ours.moe_layers == experts
    if ours.moe:
        assert ours.moe.num_experts_per_tok == config.num_experts_per_tok


def test_transformers_5_keys_mean_the_same_as_the_old_ones(tmp_path: Path) -> None:
    for name in NAMES:
        if name == "deepseek_v3_fp8":
            continue
        AutoConfig.from_pretrained(CHECKPOINTS / name).save_pretrained(tmp_path / name)
        saved = json.loads((tmp_path / name / "config.json").read_text())
        assert "rope_parameters" in saved
        assert "dtype" in saved
        assert read_config(tmp_path / name) == read_config(CHECKPOINTS / name)


def test_deepseek_v3_reads_mla_groups_and_yarn() -> None:
    config = parse_config(raw("deepseek_v3_yarn"))
    mla = MlaConfig(
        num_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
    )
    assert config.attention == mla
    assert config.rope.interleaved
    assert config.moe is not None
    assert (config.moe.num_groups, config.moe.topk_groups, config.moe.routed_scaling_factor) == (4, 2, 2.5)


def test_published_deepseek_v3_has_the_known_softmax_scale() -> None:
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    config = parse_config(
        raw(
            "deepseek_v3_yarn",
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            max_position_embeddings=163_840,
            rope_scaling=yarn | {"mscale": 1.0, "mscale_all_dim": 1.0},
        )
    )
    assert config.softmax_scale == pytest.approx(0.13523, abs=1e-5)
    assert config.rope.attention_factor == 1.0


def test_yarn_without_mscale_scales_cos_and_sin() -> None:
    config = parse_config(raw("qwen3_moe_mixed_tied"))
    assert config.rope.attention_factor == pytest.approx(1.1386294361)
    assert config.moe_layers == (0, 2)


def test_yarn_without_a_factor_takes_it_from_the_context() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 32}
    assert parse_config(raw("qwen3_tied", rope_scaling=scaling)).rope.factor == 4.0


def test_sparse_step_and_moe_layer_freq_choose_layers() -> None:
    assert parse_config(raw("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2)).moe_layers == (1, 3, 5)
    deepseek = parse_config(raw("deepseek_v3_yarn", num_hidden_layers=6, moe_layer_freq=2))
    assert deepseek.moe_layers == (2, 4)


def test_eos_ids_are_the_union_of_both_files() -> None:
    config = parse_config(raw("llama", eos_token_id=[5, 6]), {"eos_token_id": [6, 7]})
    assert config.eos_token_ids == (5, 6, 7)
    assert parse_config(raw("qwen3_tied", eos_token_id=...), {"eos_token_id": 3}).eos_token_ids == (3,)
    assert parse_config(raw("llama", eos_token_id=...)).eos_token_ids == (2,)


def test_missing_dtype_is_asked_for() -> None:
    assert parse_config(raw("llama", torch_dtype=...), default_dtype=lambda: "float16").dtype == "float16"
    assert parse_config(raw("llama", torch_dtype=...)).dtype == "bfloat16"


def test_model_type_stands_in_for_missing_architectures() -> None:
    assert parse_config(raw("mixtral", architectures=...)).architecture == "MixtralForCausalLM"


def test_attention_bias_of_llama_is_read() -> None:
    attention = parse_config(raw("llama", attention_bias=True)).attention
    assert isinstance(attention, GqaConfig)
    assert attention.qkv_bias
    assert attention.o_bias


def test_inactive_sliding_windows_are_accepted() -> None:
    parse_config(raw("qwen3_tied", sliding_window=16, use_sliding_window=False))
    parse_config(raw("mixtral", sliding_window=128))


def test_fp8_blocks_are_read() -> None:
    assert parse_config(raw("deepseek_v3_fp8")).fp8_block == (128, 128)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
REFUSALS = [
    ("llama", {"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported: Deep"),
    ("llama", {"architectures": ..., "model_type": "bert"}, "model_type 'bert' is not supported; supported"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type 'dynamic' is not supported; supported: d"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope: low_freq_factor is missing"),
    ("llama", {"mlp_bias": True}, "mlp_bias is not supported"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ("llama", {"hidden_size": ...}, "hidden_size is missing"),
    ("llama", {"hidden_size": "64"}, "hidden_size is '64'"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
    ("llama", {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ("llama", {"torch_dtype": "int8"}, "dtype 'int8' is not supported"),
    (
        "llama",
        {"quantization_config": {"quant_method": "gptq"}},
        "quantisation 'gptq' is not supported; supported: fp8",
    ),
    ("llama", {"quantization_config": FP8 | {"weight_block_size": None}}, "fp8 needs weight_block_size"),
    ("llama", {"quantization_config": FP8 | {"fmt": "e5m2"}}, "fp8 format 'e5m2' is not supported"),
    ("mixtral", {"sliding_window": 64}, "sliding_window 64 is not supported"),
    ("qwen3_moe", {"sliding_window": 64, "use_sliding_window": True}, "sliding_window 64 is not supported"),
    ("qwen3_tied", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, "sliding_window 64"),
    ("deepseek_v3_yarn", {"attention_bias": True}, "attention_bias is not supported with latent attention"),
    ("deepseek_v3_yarn", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported here; supported: noaux_tc"),
    ("deepseek_v3_yarn", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported here"),
    ("deepseek_v3_yarn", {"n_group": 3}, "16 experts do not divide into n_group 3"),
    ("deepseek_v3_yarn", {"topk_group": 5}, "topk_group 5 exceeds n_group 4"),
    ("deepseek_v3_yarn", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8 experts"),
    ("deepseek_v3_yarn", {"n_group": 16, "topk_group": 8}, "leaves one expert a group"),
    ("deepseek_v2_group", {"topk_method": "random"}, "topk_method 'random' is not supported"),
    ("deepseek_v2_group", {"norm_topk_prob": True}, "norm_topk_prob is not supported for DeepseekV2ForCausalLM"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSALS)
def test_what_is_not_supported_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(raw(name, **changes))


def test_an_unreadable_config_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        read_config(tmp_path)


def test_a_router_reads_config_tokenizer_and_template_without_torch() -> None:
    code = (
        "import sys; from pd_cluster.model.source import open_model; m = open_model('demo'); "
        "m.tokenizer.encode('Once'); m.chat_template.render([{'role': 'user', 'content': 'Once'}]); m.eos_token_ids; "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
