"""The shapes that kernels are compiled for ahead of time: launchers called with tensors that have no memory.

DeepSeek-V3's attention (latent 512, rope 64; 128 heads on one rank, 16 on each of eight) and experts, Llama-3-8B's
grouped queries and a dense Llama's head; an H200 and its like run the same launches.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pd_cluster.kernels.gpu import attention, fp8, gate, grouped_gemm, norm, permute, rotary, units
from pd_cluster.kernels.paged import GqaPages, MlaPages, Writes

UNITS, LAYERS = 1000, 32
BF16, FP32 = torch.bfloat16, torch.float32


def _meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int64(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int64)


def _gqa_pages(num_kv_heads: int, D: int, dtype: torch.dtype) -> GqaPages:
    rows = _meta(UNITS * num_kv_heads, LAYERS, 2, 16 * D, dtype=dtype)[:, 3]
    keys, values = rows[:, 0], rows[:, 1]
    shape = (UNITS, num_kv_heads, 16, D)
    return GqaPages(keys.view(shape), values.view(shape), keys, values)


def _mla_pages() -> MlaPages:
    rows = _meta(UNITS, LAYERS, 16 * 576)[:, 3]
    return MlaPages(rows.view(UNITS, 16, 576), rows)


def _segments(num_decodes: int, num_prefills: int, num_kv_heads: int) -> attention.Segments:
    rows_G5 = _int64(num_decodes + num_prefills, 5)
    return attention.Segments(rows_G5, _int64(5000), _int64(num_kv_heads), num_decodes, 8192, 2048)


def _gqa(num_heads: int, num_kv_heads: int, D: int, *, decode: bool, dtype: torch.dtype = BF16) -> None:
    segments = _segments(32, 0, num_kv_heads) if decode else _segments(0, 4, num_kv_heads)
    attention.attend_gqa(_meta(32, num_heads, D, dtype=dtype), _gqa_pages(num_kv_heads, D, dtype), segments, 0.1)


def _mla(num_heads: int, *, decode: bool) -> None:
    segments = _segments(32, 0, 1) if decode else _segments(0, 4, 1)
    attention.attend_mla(_meta(32, num_heads, 576), _mla_pages(), segments, 512, 0.1)


def _mla_expanded() -> None:
    new = attention.NewTokens(0, 2048, 4096, 0)
    expand = _meta(128, 256, 512)
    attention.attend_mla_expanded(_meta(2048, 128, 192), _mla_pages(), new, _int64(5000), expand, 128, 0.1)


def _angles(R: int) -> tuple[Tensor, Tensor]:
    return _meta(32, 1, R // 2, dtype=FP32), _meta(32, 1, R // 2, dtype=FP32)


def _rotate(*, norms: bool) -> None:
    weight = _meta(40, 128) if norms else None
    writes = Writes(_int64(32), _int64(32))
    rotary.rotate_and_write(
        _meta(32, 48, 128), 32, weight, 1e-6, _angles(128), 128, False, _gqa_pages(8, 128, BF16), writes
    )


def _latents() -> None:
    writes = Writes(_int64(32), _int64(32))
    rotary.write_latents(_meta(32, 2112)[:, 1536:], _meta(512), 1e-6, _angles(64), True, _mla_pages(), writes)


def _gate(rule: gate.GateRule, num_experts: int) -> None:
    slots = gate.Slots(_int64(num_experts, 2), _int64(num_experts))
    logits, bias = _meta(32, num_experts, dtype=FP32), _meta(num_experts, dtype=FP32)
    gate.gate(logits, bias if rule.sigmoid else None, _int64(32), slots, rule, _int64(num_experts))


def _int32(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int32)


def _gemm(num_rows: int, *, indexed: bool, dtype: torch.dtype = BF16) -> None:
    rows = _int32(num_rows) if indexed else None
    x, weight = _meta(num_rows, 7168, dtype=dtype), _meta(16, 4096, 7168, dtype=dtype)
    grouped_gemm.grouped_gemm(x, weight, _int32(16), num_rows, rows, 8 if indexed else 1)


def _gemm_fp8(num_rows: int) -> None:
    e4m3 = torch.float8_e4m3fn
    x, weight = _meta(num_rows, 7168, dtype=e4m3), _meta(16, 4096, 7168, dtype=e4m3)
    factors, blocks = _meta(num_rows, 56, dtype=FP32), _meta(16, 32, 56, dtype=FP32)
    grouped_gemm.grouped_gemm_fp8(x, factors, weight, blocks, _int32(16), num_rows, _int32(num_rows), 8)


SHAPES: dict[str, Callable[[], object]] = {
    "gqa 32/8x128": lambda: _gqa(32, 8, 128, decode=True),
    "gqa 32/8x128 new": lambda: _gqa(32, 8, 128, decode=False),
    "mla 128x576": lambda: _mla(128, decode=True),
    "mla 128x576 new": lambda: _mla(128, decode=False),
    "mla 128x192 expanded": _mla_expanded,
    "7168 add": lambda: norm.add_rms_norm(_meta(32, 7168), _meta(32, 7168), _meta(7168), 1e-6),
    "gqa 48x128": lambda: _rotate(norms=False),
    "mla 128x64": lambda: rotary.rotate_queries(
        _meta(32, 128, 192)[..., 128:], _meta(32, 128, 576)[..., 512:], _angles(64), True
    ),
    "mla 576": _latents,
    "gather": lambda: units.gather_units(_meta(UNITS, 61 * 16 * 576), _int64(32)),
    "scatter": lambda: units.scatter_units(_meta(UNITS, 61 * 16 * 576), _int64(32), _meta(32, 61 * 16 * 576)),
    "8 of 256 in 4 of 8": lambda: _gate(gate.GateRule(8, True, 8, 4, 2, True, 2.5), 256),
    "16 slots": lambda: permute.order_by_slot(_int64(32, 8), 16),
    "permute": lambda: permute.permute(_meta(32, 7168), _int32(256), 8),
    "unpermute": lambda: permute.unpermute(_meta(256, 7168), _int32(256), _meta(32, 8, dtype=FP32)),
    "arrived": lambda: permute.add_pairs(_meta(256, 7168), _int64(256), _meta(256, dtype=FP32), 32),
    "bf16 128 rows": lambda: _gemm(4096, indexed=False),
    "fp8 128 rows": lambda: _gemm_fp8(4096),
    "fp8": lambda: fp8.quantise(_meta(32, 7168)),
    "silu fp8": lambda: fp8.silu_mul_quantise(_meta(32, 4096)),
    "2048": lambda: fp8.silu_mul(_meta(32, 4096)),
}
"""A launcher's call by its name: every kernel, in its largest form."""

FURTHER: dict[str, Callable[[], object]] = {
    "gqa 8/4x256": lambda: _gqa(8, 4, 256, decode=True),
    "gqa 8/4x256 new": lambda: _gqa(8, 4, 256, decode=False),
    "gqa 32/8x128 fp32": lambda: _gqa(32, 8, 128, decode=True, dtype=FP32),
    "gqa 32/8x128 fp32 new": lambda: _gqa(32, 8, 128, decode=False, dtype=FP32),
    "mla 16x576": lambda: _mla(16, decode=True),
    "7168": lambda: norm.rms_norm(_meta(32, 7168), _meta(7168), 1e-6),
    "gqa 48x128 qk norm": lambda: _rotate(norms=True),
    "6 of 160 in 3 of 8": lambda: _gate(gate.GateRule(6, False, 8, 3, 1, False, 16.0), 160),
    "8 of 128": lambda: _gate(gate.GateRule(8, normalises=True), 128),
    "bf16 16 rows": lambda: _gemm(256, indexed=True),
    "fp32": lambda: _gemm(256, indexed=True, dtype=FP32),
    "fp8 16 rows": lambda: _gemm_fp8(256),
}
"""Kernels again, in float32, for other families, or for few rows."""
