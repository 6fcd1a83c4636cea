"""The paged kernels against one token, one head and one page at a time in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from pd_cluster.engine.arena import KvArena
from pd_cluster.kernels import paged, reference
from pd_cluster.kernels.paged import GqaPages, MlaPages
from pd_cluster.kv.layout import KvLayout
from pd_cluster.model.batch import MLA_HEADS, Batch, KvHeads, Span, build_batch

CPU = torch.device("cpu")
NUM_UNITS = 60
# (tokens with KV, tokens of this step): decodes of several lengths, fresh and continued prefills
WORK = [(0, 1), (15, 1), (16, 1), (200, 1), (0, 2), (0, 16), (3, 70), (64, 33), (100, 5)]


def arena_of(kind: str, num_heads: int, token_values: int) -> KvArena:
    layout = KvLayout(
        kind=kind,  # type: ignore[arg-type]
        num_layers=3,
        head_ids=tuple(range(num_heads)),
        token_values=token_values,
        dtype="float32",
        block_size=16,
    )
    arena = KvArena(layout, NUM_UNITS)
    arena.bytes.view(torch.float32).normal_(generator=torch.Generator().manual_seed(1))
    return arena


def batch_of(heads: KvHeads) -> tuple[Batch, list[Span]]:
    """The work above, each sequence with units of its own in no order; spans in the order of the batch's tokens."""
    units = np.random.default_rng(0).permutation(NUM_UNITS)
    spans, first = [], 0
    for start, count in WORK:
        num_units = -(-(start + count) // 16)
        ids = np.zeros(count, dtype=np.int64)
        spans.append(Span(start, start + count, ids, units[first : first + num_units], True))
        first += num_units
    batch = build_batch(spans, heads, CPU)
    decodes = sorted((span for span in spans if len(span.token_ids) == 1), key=lambda span: span.end)
    return batch, decodes + [span for span in spans if len(span.token_ids) > 1]


def rows_of(spans: list[Span]) -> list[slice]:
    ends = np.cumsum([len(span.token_ids) for span in spans])
    return [slice(int(end) - len(span.token_ids), int(end)) for span, end in zip(spans, ends, strict=True)]


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a.double() - b).abs().max() < 1e-5)


@pytest.mark.parametrize("num_heads", [2, 6])
def test_grouped_query_attention(num_heads: int) -> None:
    arena = arena_of("gqa", 2, 2 * 8)
    pages = arena.layers[1]
    assert isinstance(pages, GqaPages)
    batch, spans = batch_of(KvHeads((0, 1), (0, 1)))
    q, new = torch.randn(batch.num_tokens, num_heads, 8), torch.randn(batch.num_tokens, 4, 8)
    paged.write_gqa(pages, batch.writes, new[:, :2], new[:, 2:])
    for group in batch.decode:
        result = paged.decode_gqa(q[group.start : group.end], pages, group, 2, 0.3)
        for row, span in zip(range(group.start, group.end), spans[group.start :], strict=False):
            plain = reference.gqa(
                q[row : row + 1], pages.keys_UKWD, pages.values_UKWD, span.units.tolist(), span.start, 0.3
            )
            assert close(result[row - group.start], plain[0])
    for segment, span in zip(batch.prefill, spans[-len(batch.prefill) :], strict=True):
        rows = slice(segment.start, segment.end)
        result = paged.prefill_gqa(q[rows], pages, segment, 2, 0.3)
        plain = reference.gqa(q[rows], pages.keys_UKWD, pages.values_UKWD, span.units.tolist(), span.start, 0.3)
        assert close(result, plain)


def test_a_kv_head_may_be_read_by_an_uneven_group() -> None:
    arena = arena_of("gqa", 2, 2 * 8)
    pages = arena.layers[0]
    assert isinstance(pages, GqaPages)
    batch, spans = batch_of(KvHeads((0, 1), (0, 0, 1)))
    q = torch.randn(batch.num_tokens, 3, 8)
    first = batch.prefill[-1]
    result = paged.prefill_gqa(q[first.start : first.end], pages, first, 3, 0.3)
    for query, head in enumerate((0, 0, 1)):
        plain = reference.gqa(
            q[first.start : first.end, query : query + 1],
            pages.keys_UKWD[:, head : head + 1],
            pages.values_UKWD[:, head : head + 1],
            spans[-1].units.tolist(),
            spans[-1].start,
            0.3,
        )
        assert close(result[:, query : query + 1], plain)


def test_latent_attention_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    C, R, N, V, Q = 12, 4, 6, 5, 3
    arena = arena_of("mla", 1, C + R)
    pages = arena.layers[2]
    assert isinstance(pages, MlaPages)
    batch, spans = batch_of(MLA_HEADS)
    expand_QNC = torch.randn(Q, N + V, C) * 0.3
    q = torch.randn(batch.num_tokens, Q, N + R)
    absorbed = torch.cat([torch.einsum("tqn,qnc->tqc", q[..., :N], expand_QNC[:, :N]), q[..., N:]], dim=2)
    paged.write_mla(pages, batch.writes, torch.randn(batch.num_tokens, C + R))
    plain = [
        reference.mla(q[rows], pages.latent_UWC, span.units.tolist(), span.start, expand_QNC, 0.3)
        for rows, span in zip(rows_of(spans), spans, strict=True)
    ]
    expand_values = expand_QNC[:, N:]
    for group in batch.decode:
        latent = paged.decode_mla(absorbed[group.start : group.end], pages, group, C, 0.3)
        result = torch.einsum("tqc,qvc->tqv", latent, expand_values)
        assert close(result, torch.cat(plain[group.start : group.end]))
    for segment, expected in zip(batch.prefill, plain[-len(batch.prefill) :], strict=True):
        rows = slice(segment.start, segment.end)
        latent = paged.prefill_mla_absorbed(absorbed[rows], pages, segment, C, 0.3)
        assert close(torch.einsum("tqc,qvc->tqv", latent, expand_values), expected)
        for num_bytes in (paged.EXPANDED_BYTES, 1):  # all heads at a time, and one
            monkeypatch.setattr(paged, "EXPANDED_BYTES", num_bytes)
            assert close(paged.prefill_mla_expanded(q[rows], pages, segment, expand_QNC, V, 0.3), expected)


@pytest.mark.parametrize("score_bytes", [1, 10_000])
def test_causal_attention_in_any_row_chunks(score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(37, 4, 8), torch.randn(2, 50, 8), torch.randn(2, 50, 6)
    whole = paged.causal(q, k, v, 13, 0.4)
    monkeypatch.setattr(paged, "SCORE_BYTES", score_bytes)
    assert (paged.causal(q, k, v, 13, 0.4) - whole).abs().max() < 1e-5


def test_decode_groups_bound_the_padding() -> None:
    batch, _ = batch_of(MLA_HEADS)
    assert [(group.start, group.end) for group in batch.decode] == [(0, 3), (3, 4)]
    assert [group.hidden_N1S.shape[2] for group in batch.decode] == [32, 208]
    assert (~batch.decode[0].hidden_N1S).sum(-1)[:, 0].tolist() == [1, 16, 17]


def test_units_begun_but_not_completed_are_cleared_and_no_others() -> None:
    batch, spans = batch_of(MLA_HEADS)
    opened = {int(span.units[-1]) for span in spans if span.end % 16 and span.start <= span.end // 16 * 16}
    assert set(batch.open_units.tolist()) == opened
    arena = arena_of("mla", 1, 16)
    before = arena.units_UV.clone()
    arena.clear_units(batch.open_units)
    changed = (arena.units_UV != before).any(1).nonzero()[:, 0].tolist()
    assert set(changed) == opened
