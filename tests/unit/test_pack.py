"""Packing by destination and unpacking by slot, against a loop over every token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pd_cluster.ids import Rank
from pd_cluster.parallel.dispatch import combine
from pd_cluster.parallel.local import LocalDispatcher, exchange
from pd_cluster.parallel.pack import add_up, pack, sum_rows, unpack


def chosen(num_tokens: int, num_slots: int, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    slots = [torch.randperm(num_slots, generator=generator)[:k] for _ in range(num_tokens)]
    slots_TK = torch.stack(slots) if slots else torch.zeros((0, k), dtype=torch.int64)
    hidden_TH = torch.randn(num_tokens, 6, generator=generator)
    return hidden_TH, slots_TK, torch.rand(num_tokens, k, generator=generator)


def plainly(hidden_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Slot s multiplies by s + 1."""
    out = torch.zeros_like(hidden_TH)
    for t in range(len(hidden_TH)):
        for slot, weight in zip(slots_TK[t].tolist(), weights_TK[t].tolist(), strict=True):
            out[t] += hidden_TH[t] * (slot + 1) * weight
    return out


def through(dispatcher: LocalDispatcher, hidden: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    combining = dispatcher.dispatch(0, hidden, slots, weights)
    outputs = []
    for arrived in combining.arrived():
        assert len(arrived.slot_counts) == dispatcher.slots_per_rank
        assert sum(arrived.slot_counts) == len(arrived.pair_row_P)
        slot_P = arrived.pair_slot_P
        keys = slot_P * (len(arrived.hidden_RH) + 1) + arrived.pair_row_P
        assert torch.equal(keys, keys.sort().values)  # by slot, then by row
        factor_P = (arrived.rank * dispatcher.slots_per_rank + slot_P + 1) * arrived.pair_weight_P
        values = arrived.hidden_RH[arrived.pair_row_P] * factor_P[:, None]
        outputs.append(sum_rows(values, arrived.pair_row_P, len(arrived.hidden_RH)))
    return combine(combining, outputs)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.integers(1, 7), st.integers(1, 4), st.integers(1, 5), st.integers(0, 1000))
def test_every_token_meets_exactly_its_experts(
    num_tokens: int, num_ranks: int, slots_per_rank: int, k: int, seed: int
) -> None:
    k = min(k, num_ranks * slots_per_rank)
    hidden, slots, weights = chosen(num_tokens, num_ranks * slots_per_rank, k, seed)
    result = through(LocalDispatcher(num_ranks, slots_per_rank), hidden, slots, weights)
    assert result.shape == hidden.shape
    assert torch.allclose(result, plainly(hidden, slots, weights), atol=1e-4)


def test_all_tokens_may_choose_one_expert() -> None:
    hidden, _, weights = chosen(50, 8, 1, 0)
    slots = torch.full((50, 1), 5)
    assert torch.allclose(through(LocalDispatcher(4, 2), hidden, slots, weights), plainly(hidden, slots, weights))


def test_a_token_travels_once_to_each_rank() -> None:
    slots = torch.tensor([[0, 1, 2], [3, 1, 0]])  # two slots a rank
    packed = pack(slots, torch.ones(2, 3), num_ranks=3, slots_per_rank=2)
    assert packed.copy_counts == [2, 2, 0]
    assert packed.pair_counts == [4, 2, 0]
    assert packed.token_C.tolist() == [0, 1, 0, 1]
    assert packed.pair_row_P.tolist() == [0, 0, 1, 1, 0, 1]
    assert packed.pair_slot_P.tolist() == [0, 1, 1, 0, 0, 1]


def test_packing_is_the_same_every_time() -> None:
    _, slots, weights = chosen(200, 32, 4, 1)
    first, second = (pack(slots, weights, 8, 4) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_unpacking_nothing_gives_empty_slots() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    arrived = unpack(Rank(1), torch.zeros(0, 6), none, none, torch.zeros(0), [0, 0], [0, 0], slots_per_rank=3)
    assert arrived.slot_counts == [0, 0, 0]
    packed = pack(torch.zeros((0, 2), dtype=torch.int64), torch.zeros(0, 2), 2, 3)
    assert add_up(packed, torch.zeros(0, 6)).shape == (0, 6)


@pytest.mark.parametrize("seed", range(3))
def test_an_exchange_there_and_back_returns_every_row(seed: int) -> None:
    counts = torch.randint(0, 4, (5, 5), generator=torch.Generator().manual_seed(seed))
    there, by_destination = exchange(counts.tolist())
    assert by_destination == counts.T.tolist()
    back, by_source = exchange(by_destination)
    assert by_source == counts.tolist()
    rows = torch.arange(int(counts.sum()))
    assert torch.equal(rows[there][back], rows)
    assert there[: int(counts[0, 0])].tolist() == list(range(int(counts[0, 0])))


def test_sums_are_in_float32_and_in_order() -> None:
    values = torch.tensor([[1.0], [2.0**-9]], dtype=torch.bfloat16).repeat(8, 1)
    assert sum_rows(values, torch.zeros(16, dtype=torch.int64), 2)[:, 0].tolist() == [8 + 8 * 2.0**-9, 0.0]
