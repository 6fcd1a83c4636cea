"""The measurement of swaps, short: real processes, and experts that really move between them."""

import pytest

from pd_cluster.bench.swaps import Load, run


@pytest.mark.processes
def test_steps_go_on_while_experts_move_between_processes() -> None:
    result = run(Load(num_ranks=2, batch=2, model="demo", num_swaps=2, exchanged=3))
    print(result)
    assert result["swaps"] == 2
    assert result["epochs"] >= 2
    assert result["abandoned"] == 0
    assert result["moved_mb"] > 0
    assert result["steps_outside"] > 10
    assert result["steps_during"] > 0
    assert 0 < result["outside_p50_ms"] <= result["outside_p99_ms"]
