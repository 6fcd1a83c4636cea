"""The GPU's kernels over single rows against plain torch: norms, rotary with cache write, copies of units."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pd_cluster.engine.arena import KvArena
from pd_cluster.kernels.gpu import norm, rotary, units
from pd_cluster.kernels.gpu.launch import INTERPRETED
from pd_cluster.kernels.paged import GqaPages, MlaPages, Writes, write_gqa, write_mla
from pd_cluster.kv.layout import KvLayout
from pd_cluster.model.config import RopeConfig
from pd_cluster.model.norm import RmsNorm
from pd_cluster.model.rope import Rope

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def random(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def assert_close(result: Tensor, expected: Tensor) -> None:
    """Two roundings of the dtype apart at most."""
    assert result.shape == expected.shape
    assert result.dtype is expected.dtype
    epsilon = 4 * torch.finfo(result.dtype).eps
    torch.testing.assert_close(result, expected, rtol=epsilon, atol=epsilon)


def arena_of(kind: str, num_heads: int, token_values: int, dtype: torch.dtype) -> KvArena:
    layout = KvLayout(
        kind=kind,  # type: ignore[arg-type]
        num_layers=3,
        head_ids=tuple(range(num_heads)),
        token_values=token_values,
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
        block_size=16,
    )
    return KvArena(layout, 6, DEVICE)


def writes_of(num_tokens: int, *, padding: int = 0) -> Writes:
    """Every token elsewhere in the arena; the last `padding` nowhere."""
    token = torch.arange(num_tokens)
    to = (token * 37 + 5) % 96
    unit = (to // 16).masked_fill(token >= num_tokens - padding, -1)
    return Writes(unit.to(DEVICE), (to % 16).to(DEVICE))


@DTYPES
@pytest.mark.parametrize("size", [1, 96, 130])
def test_a_norm_equals_the_models(size: int, dtype: torch.dtype) -> None:
    x, weight = random(5, size + 3, dtype=dtype)[:, 2:-1], random(size, dtype=dtype, seed=2)
    result = norm.rms_norm(x, weight, 1e-5)
    assert_close(result, RmsNorm(weight, 1e-5)(x))
    assert_close(result, norm.rms_norm_reference(x, weight, 1e-5))


@DTYPES
def test_addition_and_norm_are_one(dtype: torch.dtype) -> None:
    x, add, weight = (random(4, 130, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    summed, normed = norm.add_rms_norm(x, add, weight[0], 1e-6)
    expected = norm.add_rms_norm_reference(x, add, weight[0], 1e-6)
    assert_close(summed, expected[0])
    assert_close(normed, expected[1])


def test_a_norm_of_no_rows_is_no_work() -> None:
    x = random(0, 8, dtype=torch.float32)
    assert norm.rms_norm(x, random(8, dtype=torch.float32), 1e-6).shape == (0, 8)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "rotary_dim"), [(3, 1, 10, 10), (8, 4, 16, 8)])
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "qk_norm"])
def test_queries_are_rotated_and_keys_written(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    norms: bool,
    interleaved: bool,
    dtype: torch.dtype,
) -> None:
    rope = Rope(RopeConfig(theta=1e4, dim=rotary_dim, interleaved=interleaved), DEVICE)
    angles = rope.angles(torch.tensor([0, 7, 300, 12], device=DEVICE))
    qkv = random(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    rotated_heads = num_heads + num_kv_heads
    weight = random(rotated_heads, head_dim, dtype=dtype, seed=2) if norms else None
    arenas = [arena_of("gqa", num_kv_heads, 2 * head_dim, dtype) for _ in range(2)]
    pages, expected_pages = (arena.layers[1] for arena in arenas)
    assert isinstance(pages, GqaPages)
    assert isinstance(expected_pages, GqaPages)
    q = rotary.rotate_and_write(qkv, num_heads, weight, 1e-6, angles, rotary_dim, interleaved, pages, writes_of(4))
    qk = qkv[:, :rotated_heads] if weight is None else RmsNorm(weight, 1e-6)(qkv[:, :rotated_heads])
    expected = rope.rotate(qk, angles)
    write_gqa(expected_pages, writes_of(4), expected[:, num_heads:], qkv[:, rotated_heads:])
    assert_close(q, expected[:, :num_heads])
    assert_close(q, rotary.rotate_reference(qk, angles, rotary_dim, interleaved)[:, :num_heads])
    assert_close(arenas[0].units_UV, arenas[1].units_UV)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_latents_are_normalised_rotated_and_written(interleaved: bool, dtype: torch.dtype) -> None:
    C, R = 12, 6
    rope = Rope(RopeConfig(theta=1e4, dim=R, interleaved=interleaved), DEVICE)
    angles = rope.angles(torch.tensor([3, 0, 90], device=DEVICE))
    compressed, weight = random(3, 5 + C + R, dtype=dtype), random(C, dtype=dtype, seed=2)
    arenas = [arena_of("mla", 1, C + R, dtype) for _ in range(2)]
    pages, expected_pages = (arena.layers[2] for arena in arenas)
    assert isinstance(pages, MlaPages)
    assert isinstance(expected_pages, MlaPages)
    rotary.write_latents(compressed[:, 5:], weight, 1e-6, angles, interleaved, pages, writes_of(3))
    normed = RmsNorm(weight, 1e-6)(compressed[:, 5 : 5 + C])
    rotated = rope.rotate(compressed[:, 5 + C :].unsqueeze(1), angles).squeeze(1)
    write_mla(expected_pages, writes_of(3), torch.cat([normed, rotated], dim=1))
    assert_close(arenas[0].units_UV, arenas[1].units_UV)


@DTYPES
def test_queries_are_rotated_inside_wider_heads(dtype: torch.dtype) -> None:
    rope = Rope(RopeConfig(theta=1e4, dim=6, interleaved=True), DEVICE)
    angles = rope.angles(torch.tensor([3, 11], device=DEVICE))
    q, out = random(2, 9, 10, dtype=dtype), torch.zeros(2, 9, 20, dtype=dtype, device=DEVICE)
    rotary.rotate_queries(q[..., 4:], out[..., 14:], angles, True)
    assert_close(out[..., 14:].contiguous(), rope.rotate(q[..., 4:], angles))
    assert not out[..., :14].any()


def test_padding_tokens_write_nothing() -> None:
    rope = Rope(RopeConfig(theta=1e4, dim=8), DEVICE)
    angles = rope.angles(torch.arange(3, device=DEVICE))
    for padding, written in ((3, 0), (1, 2)):
        arena = arena_of("gqa", 1, 16, torch.float32)
        pages: Any = arena.layers[0]
        qkv = random(3, 4, 8, dtype=torch.float32)
        rotary.rotate_and_write(qkv, 2, None, 0.0, angles, 8, False, pages, writes_of(3, padding=padding))
        assert pages.values_UKWD.any(-1).sum() == written
        assert pages.keys_UKWD.any(-1).sum() == written
        arena = arena_of("mla", 1, 16, torch.float32)
        latents: Any = arena.layers[0]
        x, weight = random(3, 16, dtype=torch.float32), random(8, dtype=torch.float32)
        rotary.write_latents(x, weight, 1e-6, angles, False, latents, writes_of(3, padding=padding))
        assert arena.units_UV.any(1).sum() <= written
        assert latents.latent_UWC.any(-1).sum() == written


@DTYPES
def test_units_go_to_a_buffer_and_back(dtype: torch.dtype) -> None:
    arena = arena_of("gqa", 2, 2 * 24, dtype)
    arena.units_UV.copy_(random(*arena.units_UV.shape, dtype=dtype))
    chosen = torch.tensor([4, 0, -1, 3], device=DEVICE)
    dense = units.gather_units(arena.units_UV, chosen)
    assert torch.equal(dense, units.gather_units_reference(arena.units_UV, chosen))
    assert not dense[2].any()
    elsewhere = torch.tensor([1, -1, 2, 5], device=DEVICE)
    expected = arena.units_UV.clone()
    units.scatter_units_reference(expected, elsewhere, dense)
    units.scatter_units(arena.units_UV, elsewhere, dense)
    assert torch.equal(arena.units_UV, expected)
    assert units.gather_units(arena.units_UV, chosen[:0]).shape == (0, expected.shape[1])
