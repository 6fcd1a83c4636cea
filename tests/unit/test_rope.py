"""Rotary embedding: positions only differ, frequencies of every kind, YaRN's numbers for DeepSeek-V3."""

import math

import pytest
import torch

from pd_cluster.model.config import MlaConfig, RopeConfig
from pd_cluster.model.hf_config import parse_config
from pd_cluster.model.rope import Rope, amplitude, inverse_frequencies

CPU = torch.device("cpu")
V3_YARN = RopeConfig(
    theta=10_000.0,
    dim=64,
    kind="yarn",
    interleaved=True,
    factor=40.0,
    original_max_position=4096,
    mscale=1.0,
    mscale_all_dim=1.0,
)


def rotated_products(rope: Rope, queries: list[int], keys: list[int], dim: int) -> torch.Tensor:
    """q . k after rotation, for one query and one key vector put at pairs of positions."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, dim, generator=generator)
    q = rope.rotate(q.expand(len(queries), 1, dim), rope.angles(torch.tensor(queries)))
    k = rope.rotate(k.expand(len(keys), 1, dim), rope.angles(torch.tensor(keys)))
    return (q * k).sum(-1)[:, 0]


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_alone(interleaved: bool) -> None:
    rope = Rope(RopeConfig(theta=10_000.0, dim=32, interleaved=interleaved), CPU)
    products = rotated_products(rope, [0, 7, 100, 1000], [5, 12, 105, 1005], 32)
    assert torch.allclose(products, products[:1].expand(4), atol=1e-3)
    assert not torch.allclose(products[:1], rotated_products(rope, [0], [6], 32), atol=1e-2)


def test_interleaved_pairs_are_neighbours() -> None:
    x = torch.zeros(1, 1, 8)
    x[..., 3] = 1.0  # the second of pair 1
    rope = Rope(RopeConfig(theta=10_000.0, dim=8, interleaved=True), CPU)
    y = rope.rotate(x, rope.angles(torch.tensor([2])))[0, 0]
    angle = 2 * 10_000.0 ** (-2 / 8)
    expected = torch.zeros(8)
    expected[1], expected[5] = -math.sin(angle), math.cos(angle)  # halves: first members, then second members
    assert torch.allclose(y, expected, atol=1e-6)


def test_the_rest_of_a_partly_rotated_head_is_kept() -> None:
    rope = Rope(RopeConfig(theta=10_000.0, dim=8), CPU)
    x = torch.randn(3, 2, 12)
    y = rope.rotate(x, rope.angles(torch.tensor([0, 5, 9])))
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert torch.allclose(y[0], x[0])
    assert not torch.allclose(y[1, :, :8], x[1, :, :8])


def test_linear_scaling_divides_positions() -> None:
    plain = inverse_frequencies(RopeConfig(theta=10_000.0, dim=16))
    assert torch.allclose(inverse_frequencies(RopeConfig(theta=10_000.0, dim=16, kind="linear", factor=4.0)), plain / 4)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    config = RopeConfig(
        theta=500_000.0,
        dim=128,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    plain = inverse_frequencies(RopeConfig(theta=500_000.0, dim=128))
    ratio = plain / inverse_frequencies(config)
    wavelength = 2 * math.pi / plain
    assert torch.allclose(ratio[wavelength < 8192 / 4], torch.tensor(1.0))
    assert torch.allclose(ratio[wavelength > 8192], torch.tensor(8.0))
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(between)
    assert ((between > 1) & (between < 8)).all()
    assert (ratio.diff() >= -1e-4).all()


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain = inverse_frequencies(RopeConfig(theta=10_000.0, dim=64))
    ratio = plain / inverse_frequencies(V3_YARN)
    # 32 turns within 4096 positions end at pair 10.5, one turn at pair 22.5 (equation 17 of the paper)
    assert torch.allclose(ratio[:11], torch.ones(11))
    assert torch.allclose(ratio[23:], torch.full((9,), 40.0), rtol=1e-4)
    assert ((ratio[11:23] > 1) & (ratio[11:23] < 40)).all()


def test_yarn_temperature_is_in_the_angles_or_in_the_softmax_scale() -> None:
    assert amplitude(V3_YARN) == 1.0  # both mscales equal: it goes into the softmax scale
    plain = RopeConfig(theta=1e4, dim=64, kind="yarn", factor=4.0, original_max_position=32)
    assert amplitude(plain) == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert amplitude(RopeConfig(theta=1e4, dim=64, kind="yarn", factor=4.0, attention_factor=1.5)) == 1.5
    angles = Rope(plain, CPU).angles(torch.tensor([0]))
    assert torch.allclose(angles.cos, torch.full_like(angles.cos, amplitude(plain)))


def test_deepseek_v3_softmax_scale_is_the_published_one() -> None:
    config = parse_config(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 1,
            "num_attention_heads": 128,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 3,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "max_position_embeddings": 163840,
        }
    )
    assert isinstance(config.attention, MlaConfig)
    assert config.softmax_scale == pytest.approx(0.13523, abs=5e-6)
    assert config.rope.interleaved
