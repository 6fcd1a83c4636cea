"""Launchers deal GPUs out over real rank processes. The GPUs are names only: no rank here computes."""

import os
import sys
import threading
import time
from collections.abc import Callable

import pytest
import ray
import torch

from pd_cluster.config import load_config
from pd_cluster.devices import visible_gpus
from pd_cluster.env import RAY_VARIABLES
from pd_cluster.errors import ConfigError
from pd_cluster.ids import EngineEpoch
from pd_cluster.launch import ray_places
from pd_cluster.launch.launcher import RankHandle
from pd_cluster.launch.process import ProcessLauncher
from pd_cluster.launch.ray import RayLauncher
from pd_cluster.launch.roles import engine_shapes, rank_specs
from pd_cluster.launch.spec import RankSpec

pytestmark = pytest.mark.processes
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

RANK = """
import os, time
from pd_cluster.launch.child import read_spec
spec = read_spec()
print(os.environ.get("CUDA_VISIBLE_DEVICES"), spec.ranks_on_gpu, flush=True)
time.sleep(600)
"""


def serve(spec: RankSpec, stop: threading.Event) -> None:
    print(os.environ.get("CUDA_VISIBLE_DEVICES"), spec.ranks_on_gpu, file=sys.stderr, flush=True)
    stop.wait()


def specs(*overrides: str) -> list[RankSpec]:
    config = load_config(overrides=list(overrides))
    shapes = engine_shapes(config)
    num_ranks = sum(shape.num_ranks for shape in shapes)
    return [
        spec
        for shape in shapes
        for spec in rank_specs(shape, EngineEpoch(str(shape.engine_id)), config, ("127.0.0.1", 1), num_ranks)
    ]


def said(handles: list[RankHandle]) -> list[str]:
    deadline_s = time.monotonic() + 60
    while not all(handle.log_tail() for handle in handles):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return [handle.log_tail() for handle in handles]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> "Callable[[str], ProcessLauncher]":
    def make(visible: str) -> ProcessLauncher:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return ProcessLauncher([sys.executable, "-c", RANK], visible_gpus)

    return make


def test_the_process_launcher_shows_each_rank_one_gpu(launcher: Callable[[str], ProcessLauncher]) -> None:
    processes = launcher("4,GPU-5a,6")
    try:
        handles = processes.start(specs("decode.data_parallel=2"))
        assert said(handles) == ["4 1", "GPU-5a 1", "6 1"]
        handles[1].kill()
        handles[1].wait(10)
        (again,) = processes.start([handles[1].spec])  # the rank that replaces it gets what it held
        assert said([again]) == ["GPU-5a 1"]
        with pytest.raises(ConfigError, match="prefill-0 has more ranks on this host than the 3 GPUs here"):
            processes.start(specs("prefill.tensor_parallel=4"))
    finally:
        processes.close()


def test_ranks_on_the_cpu_see_no_gpu_and_pools_may_share_one(launcher: Callable[[str], ProcessLauncher]) -> None:
    processes = launcher("7")
    try:
        assert said(processes.start(specs("prefill.device=cpu"))) == [" 2", "7 2"]
    finally:
        processes.close()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch can use GPUs")
def test_gpus_that_this_torch_cannot_use_are_not_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    processes = ProcessLauncher([sys.executable, "-c", RANK])
    try:
        assert said(processes.start(specs("decode.data_parallel=2"))) == ["3 1"] * 3
    finally:
        processes.close()


def test_ray_gives_each_rank_a_gpu_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("PLACE_TIMEOUT_S", "REPLACE_TIMEOUT_S"):  # a busy machine may take longer
        monkeypatch.setattr(ray_places, name, 60.0)
    for name, value in RAY_VARIABLES.items():
        monkeypatch.setenv(name, value)
    ray.init("local", num_gpus=3, num_cpus=4, include_dashboard=False, log_to_driver=False, namespace="pd-cluster")
    try:
        launcher = RayLauncher("auto", serve)
        try:
            handles = launcher.start(specs("decode.data_parallel=2"))
            assert sorted(said(handles)) == ["0 1", "1 1", "2 1"]
            for handle in handles:
                handle.kill()
            assert [handle.wait(60) for handle in handles] == [-9] * 3
            with pytest.raises(ConfigError, match="4 ranks need a GPU each, for some share an engine"):
                launcher.start(specs("decode.data_parallel=3"))
            on_cpu = launcher.start(specs("decode.data_parallel=3", "decode.device=cpu", "prefill.device=cpu"))
            assert said(on_cpu) == ["None 1"] * 4
        finally:
            launcher.close()
    finally:
        ray.shutdown()
