"""Every GPU kernel compiles for every target, on a machine without a GPU, and keeps to its registers."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from pd_cluster.bench import gpu
from pd_cluster.kernels.gpu.launch import recording


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_kernels_compile_without_spilling(target: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-m", "pd_cluster.kernels.gpu.aot", "--json", target]
    command += ["--few"] * (target != "sm_90")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(rows) >= (30 if target == "sm_90" else 18)
    assert {row["target"] for row in rows} == {target}
    print(f"{'kernel':32} {'warps':>8} {'registers':>9} {'shared':>7} {'spilled':>7}")
    for row in rows:
        print(f"{row['kernel']:32} {row['num_warps']:8} {row['registers']:9} {row['shared']:7} {row['spilled']:7}")


def test_every_case_of_the_gpu_benchmark_is_a_call_that_its_launcher_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DEVICE", torch.device("meta"))
    names = []
    with recording("cuda") as recorder:
        for case in gpu.cases():
            launched = len(recorder.launches)
            case.call()
            assert len(recorder.launches) > launched, case.name
            assert case.num_bytes or case.num_ops
            names.append(case.name)
    assert len(set(names)) == len(names) >= 30
    compiled = {launch.kernel.__name__ for launch in recorder.launches}
    assert {"_decode", "_combine", "_prefill", "_gate", "_gemm", "_gemm_fp8", "_quantise", "_sum_rows"} <= compiled
