"""Collectives between threads of this process, over gloo on a store of their own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.errors import ConfigError, EngineError
from pd_cluster.ids import Rank
from pd_cluster.parallel.groups import Group, Groups, share, share_counts

T = TypeVar("T")


def on_ranks(dp: int, tp: int, function: Callable[[Groups], T], name: str = "groups") -> list[T]:
    store = dist.HashStore()

    def run(rank: int) -> T:
        groups = Groups.connect(store, rank=Rank(rank), tensor_parallel=tp, data_parallel=dp, timeout_s=20, name=name)
        return function(groups)

    with ThreadPoolExecutor(dp * tp) as pool:
        return list(pool.map(run, range(dp * tp)))


def engine_of(groups: Groups) -> Group:
    assert groups.engine is not None
    return groups.engine


def test_tensor_parallel_groups_are_apart() -> None:
    def run(groups: Groups) -> tuple[float, float]:
        assert groups.tp is not None
        x = torch.full((3,), float(groups.rank))
        return groups.tp.all_reduce(x.clone())[0].item(), engine_of(groups).all_reduce(x)[0].item()

    assert on_ranks(2, 2, run) == [(1.0, 6.0), (1.0, 6.0), (5.0, 6.0), (5.0, 6.0)]
    assert not dist.is_initialized()  # never the default group


def test_one_dp_rank_has_one_group_and_one_rank_has_none() -> None:
    assert all(on_ranks(1, 2, lambda groups: groups.tp is groups.engine))
    assert on_ranks(1, 1, lambda groups: (groups.tp, groups.engine)) == [(None, None)]
    assert on_ranks(2, 1, lambda groups: groups.tp) == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_uneven_and_empty_exchanges_deliver_in_rank_order(dtype: torch.dtype) -> None:
    def run(groups: Groups) -> list[int]:
        group = engine_of(groups)
        send = [(groups.rank + r) % 3 for r in range(3)]
        receive = [(r + groups.rank) % 3 for r in range(3)]
        x = torch.full((sum(send), 2), groups.rank + 1).to(dtype)
        rows = group.all_to_all_rows(x, send, receive)
        nothing = group.all_to_all_rows(x[:0], [0] * 3, [0] * 3)
        assert nothing.shape == (0, 2)
        return [int(row[0]) for row in rows]

    assert on_ranks(3, 1, run) == [[2, 3, 3], [1, 2, 2], [1, 1, 3]]


def test_rows_and_columns_are_gathered_in_rank_order() -> None:
    def run(groups: Groups) -> tuple[list[float], list[list[float]], list[float]]:
        group = engine_of(groups)
        counts = [2, 0, 1]
        rows = group.all_gather_rows(torch.full((counts[groups.rank], 1), float(groups.rank)), counts)
        columns = group.all_gather_columns(torch.tensor([[10.0 * groups.rank], [10.0 * groups.rank + 1]]))
        nothing = group.all_gather_rows(torch.zeros(0, 1), [0, 0, 0])
        assert group.minimum(7 - groups.rank) == 5
        return rows[:, 0].tolist(), columns.tolist(), nothing[:, 0].tolist()

    expected = ([0.0, 0.0, 2.0], [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0]], [])
    assert on_ranks(3, 1, run) == [expected] * 3


def test_a_reduction_is_bitwise_equal_on_all_ranks() -> None:
    def run(groups: Groups) -> torch.Tensor:
        x = torch.randn(1000, generator=torch.Generator().manual_seed(groups.rank))
        return engine_of(groups).all_reduce(x)

    results = on_ranks(1, 4, run)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_rank_that_stays_away_fails_the_others_in_time() -> None:
    store = dist.HashStore()
    with pytest.raises(EngineError, match="could not meet the other 1 ranks"):
        Groups.connect(store, rank=Rank(0), tensor_parallel=2, data_parallel=1, timeout_s=0.3)


def test_a_rank_outside_the_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank must be between 0 and 3, got 4"):
        Groups.connect(dist.HashStore(), rank=Rank(4), tensor_parallel=2, data_parallel=2)


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_cover_all_items_once(num_items: int, size: int) -> None:
    bounds = [share(num_items, rank, size) for rank in range(size)]
    assert [start for start, _ in bounds][1:] == [end for _, end in bounds][:-1]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_items
    assert sum(share_counts(num_items, size)) == num_items
