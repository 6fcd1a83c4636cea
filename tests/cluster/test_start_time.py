"""`bench start`: a real server from its command to its first token, stage by stage, and nothing of it left."""

import os
from pathlib import Path

import pytest

from pd_cluster.bench.start import run
from pd_cluster.errors import Unavailable

pytestmark = pytest.mark.processes


def test_the_stages_of_a_start_add_up_and_its_processes_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_CLUSTER_TEST_MARK", mark := f"start-{os.getpid()}")
    result = run(launchers=("process",), rounds=1)["process"]
    stages = [result[f"{name}_s"] for name in ("command", "engines", "attach", "first_token")]
    print("\n" + ", ".join(f"{name} {seconds:.2f}" for name, seconds in result.items()))
    assert min(stages) > 0
    assert sum(stages) == pytest.approx(result["total_s"])
    assert 0 < result["load_s"] < result["engines_s"]
    assert result["total_s"] < 60  # 8 on a quiet machine
    left = [
        path
        for path in Path("/proc").glob("[0-9]*/environ")
        if path.parent.name != str(os.getpid()) and f"PD_CLUSTER_TEST_MARK={mark}".encode() in _read(path)
    ]
    assert not left


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(Unavailable, match=r"the server did not start: (?s:.*)there is no model at /no/model"):
        run(launchers=("process",), rounds=1, model="/no/model")
