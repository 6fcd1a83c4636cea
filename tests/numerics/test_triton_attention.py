"""The GPU's attention against one token, one head and one page at a time in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pd_cluster.engine.arena import KvArena
from pd_cluster.kernels import reference
from pd_cluster.kernels.gpu import attention
from pd_cluster.kernels.gpu.attention import Segments, attend_gqa, attend_mla
from pd_cluster.kernels.gpu.launch import INTERPRETED
from pd_cluster.kernels.paged import GqaPages, MlaPages
from pd_cluster.kv.layout import KvLayout

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NUM_UNITS = 40
DECODES = [1, 16, 17, 100]
"""Keys of each, its own included."""
PREFILLS = [(0, 2), (3, 21), (64, 5)]
"""(tokens with KV, new tokens)"""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def pages_of(kind: str, num_heads: int, token_values: int, dtype: torch.dtype) -> Any:
    layout = KvLayout(
        kind=kind,  # type: ignore[arg-type]
        num_layers=2,
        head_ids=tuple(range(num_heads)),
        token_values=token_values,
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
        block_size=16,
    )
    arena = KvArena(layout, NUM_UNITS, DEVICE)
    values = torch.randn(arena.units_UV.shape, generator=torch.Generator().manual_seed(1))
    arena.units_UV.copy_(values)
    return arena.layers[1]


def segments_of(
    decodes: list[int], prefills: list[tuple[int, int]], read: tuple[int, ...]
) -> tuple[Segments, list[tuple[slice, int, list[int]]]]:
    """Segments with units of their own in no order; for each its rows, its prefix and its units."""
    free = np.random.default_rng(0).permutation(NUM_UNITS).tolist()
    rows, units, described = [], [], []
    token = 0
    for prefix, count in [(length - 1 if length else 0, min(length, 1)) for length in decodes] + prefills:
        own = [free.pop() for _ in range(-(-(prefix + count) // 16))]
        rows.append([token, count, prefix, len(units), 0])
        described.append((slice(token, token + count), prefix, own))
        units += own
        token += max(count, 1)
    segments = Segments(
        torch.tensor(rows, dtype=torch.int64).view(-1, 5).to(DEVICE),
        torch.tensor(units, dtype=torch.int64).to(DEVICE),
        torch.tensor(read, dtype=torch.int64).to(DEVICE),
        len(decodes),
        max(decodes, default=0),
        max((count for _, count in prefills), default=0),
    )
    return segments, described


def queries(num_tokens: int, num_heads: int, width: int, dtype: torch.dtype) -> Tensor:
    q = torch.randn(num_tokens, num_heads, width, generator=torch.Generator().manual_seed(2))
    return q.to(dtype).to(DEVICE)


def assert_close(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    error = (result.double().cpu() - expected).abs().max().item() if expected.numel() else 0.0
    assert error < TOLERANCE[result.dtype], error


def check_gqa(q: Tensor, pages: GqaPages, segments: Segments, described: Any) -> None:
    result = attend_gqa(q, pages, segments, 0.3)
    read = segments.read_K.cpu()
    keys, values = pages.keys_UKWD.cpu()[:, read], pages.values_UKWD.cpu()[:, read]
    for rows, prefix, units in described:
        assert_close(result[rows], reference.gqa(q[rows].cpu(), keys, values, units, prefix, 0.3))


@DTYPES
@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 24), (6, 16)])
def test_grouped_queries_decode_and_prefill(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    pages = pages_of("gqa", 2, 2 * head_dim, dtype)
    segments, described = segments_of(DECODES, PREFILLS, (0, 1))
    check_gqa(queries(32, num_heads, head_dim, dtype), pages, segments, described)


def test_a_group_may_read_any_head() -> None:
    pages = pages_of("gqa", 2, 2 * 16, torch.float32)
    segments, described = segments_of([20], [(3, 6)], (1, 0, 1))
    check_gqa(queries(7, 3, 16, torch.float32), pages, segments, described)


@DTYPES
def test_runs_of_keys_are_combined(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "GQA_SPLIT", 64)
    pages = pages_of("gqa", 1, 2 * 16, dtype)
    segments, described = segments_of([1, 64, 65, 200], [], (0,))
    check_gqa(queries(4, 3, 16, dtype), pages, segments, described)


def test_a_sequence_has_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "GQA_SPLIT", 64)
    pages = pages_of("gqa", 1, 2 * 16, torch.bfloat16)
    segments, _ = segments_of([70, 200], [], (0,))
    q = queries(2, 3, 16, torch.bfloat16)
    both = attend_gqa(q, pages, segments, 0.3)
    alone = segments._replace(rows_G5=segments.rows_G5[:1], num_decodes=1, longest_decode=70)
    assert torch.equal(attend_gqa(q[:1], pages, alone, 0.3), both[:1])


@DTYPES
@pytest.mark.parametrize("split", [64, 1024])
def test_latents_decode_and_prefill(split: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MLA_SPLIT", split)
    C, R, N, V, Q = 40, 8, 6, 5, 3
    pages: MlaPages = pages_of("mla", 1, C + R, dtype)
    segments, described = segments_of(DECODES, PREFILLS, (0,))
    generator = torch.Generator().manual_seed(3)
    expand_QNC = torch.randn(Q, N + V, C, generator=generator) * 0.3
    q = torch.randn(32, Q, N + R, generator=generator)
    absorbed = torch.cat([torch.einsum("tqn,qnc->tqc", q[..., :N], expand_QNC[:, :N]), q[..., N:]], dim=2)
    latent = attend_mla(absorbed.to(dtype).to(DEVICE), pages, segments, C, 0.2)
    result = torch.einsum("tqc,qvc->tqv", latent.cpu().float(), expand_QNC[:, N:])
    for rows, prefix, units in described:
        expected = reference.mla(q[rows], pages.latent_UWC.cpu(), units, prefix, expand_QNC, 0.2)
        error = (result[rows].double() - expected).abs().max().item()
        assert error < {torch.float32: 5e-5, torch.bfloat16: 8e-2}[dtype], error


@pytest.mark.parametrize("split", [64, 1024])
def test_padding_in_a_batch_of_decodes_gives_zeros_and_disturbs_none(
    split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "GQA_SPLIT", split)
    pages = pages_of("gqa", 1, 2 * 16, torch.float32)
    segments, described = segments_of([0, 90, 0], [], (0,))
    q = queries(3, 2, 16, torch.float32)
    check_gqa(q, pages, segments, described)
    assert not attend_gqa(q, pages, segments, 0.3)[[0, 2]].any()


def test_stale_values_behind_a_sequence_are_never_seen() -> None:
    pages = pages_of("gqa", 1, 2 * 16, torch.float32)
    segments, described = segments_of([5], [(2, 4)], (0,))
    q = queries(5, 2, 16, torch.float32)
    before = attend_gqa(q, pages, segments, 0.3)
    for rows, prefix, units in described:
        used = prefix + rows.stop - rows.start
        pages.keys_UKWD[units[0], 0, used:] = float("nan")
        pages.values_UKWD[units[0], 0, used:] = float("nan")
    assert torch.equal(attend_gqa(q, pages, segments, 0.3), before)


def test_no_sequences_are_no_work() -> None:
    pages = pages_of("gqa", 1, 2 * 16, torch.float32)
    segments, _ = segments_of([], [], (0,))
    assert attend_gqa(queries(0, 2, 16, torch.float32), pages, segments, 0.3).shape == (0, 2, 16)
