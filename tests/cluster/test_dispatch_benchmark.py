"""The measurement of dispatchers runs, and one-sided writes are faster than gloo."""

import pytest

from pd_cluster.bench.dispatch import DEMO, Load, measure


@pytest.mark.processes
def test_one_sided_writes_take_less_time_than_gloo_on_one_host() -> None:
    result = measure(Load(num_ranks=2, num_tokens=8, **DEMO), exchanges=20, rounds=3)
    assert result["ranks"] == 2
    assert 0 < result["nixl_us"] < result["gloo_us"]
    assert result["ratio"] == pytest.approx(result["nixl_us"] / result["gloo_us"], abs=0.01)
