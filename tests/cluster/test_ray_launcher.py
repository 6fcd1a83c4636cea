"""Ranks as actors of a real Ray cluster: placed, watched and ended."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import ray
from processes import until

from pd_cluster.config import load_config
from pd_cluster.errors import ConfigError, Unavailable
from pd_cluster.ids import EngineEpoch
from pd_cluster.launch.pids import ProcessIdentity
from pd_cluster.launch.ray import RayHandle, RayLauncher
from pd_cluster.launch.roles import engine_shapes, rank_specs
from pd_cluster.launch.spec import RankSpec

pytestmark = pytest.mark.processes
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def serve(spec: RankSpec, stop: threading.Event) -> None:
    print(
        f"{spec.name} of {spec.ranks_on_host} at {spec.bind_host}, {os.environ['OMP_NUM_THREADS']}",
        file=sys.stderr,
        flush=True,
    )
    if spec.config.model.path == "broken":
        raise RuntimeError("no such model")
    stop.wait()


def specs(role: str, num_ranks: int, threads: int = 1, epoch: str = "e", path: str = "demo") -> list[RankSpec]:
    section = {"prefill": "prefill.tensor_parallel", "decode": "decode.data_parallel"}[role]
    config = load_config(overrides=[f"{section}={num_ranks}", f"{role}.threads={threads}", f"model.path={path}"])
    (shape,) = [s for s in engine_shapes(config) if s.role == role]
    return rank_specs(shape, EngineEpoch(epoch), config, ("127.0.0.1", 1), ranks_on_host=num_ranks)


@pytest.fixture(scope="module")
def launcher() -> Iterator[RayLauncher]:
    launcher = RayLauncher("local", serve)
    yield launcher
    launcher.close()
    assert not ray.is_initialized()


def test_ranks_of_several_engines_run_on_a_host_with_fewer_cores_than_threads(launcher: RayLauncher) -> None:
    handles = launcher.start(specs("prefill", 2, threads=64) + specs("decode", 3, epoch="f"))
    until(lambda: all(handle.log_tail() for handle in handles))
    assert [handle.log_tail() for handle in handles] == [
        "prefill-0.0 of 5 at 127.0.0.1, 64",
        "prefill-0.1 of 5 at 127.0.0.1, 64",
        "decode-0.0 of 5 at 127.0.0.1, 1",
        "decode-0.1 of 5 at 127.0.0.1, 1",
        "decode-0.2 of 5 at 127.0.0.1, 1",
    ]
    assert len({handle.pid for handle in handles}) == 5
    assert [handle.poll() for handle in handles] == [None] * 5
    handles[0].terminate()
    assert handles[0].wait(20) == 0
    assert handles[1].pid is not None
    os.kill(handles[1].pid, signal.SIGKILL)
    assert handles[1].wait(20) == -9
    handles[2].kill()
    assert handles[2].wait(20) == -9
    assert handles[3].poll() is None


def test_an_error_of_a_rank_is_its_exit_code_and_stands_in_its_log(launcher: RayLauncher) -> None:
    (handle,) = launcher.start(specs("prefill", 1, epoch="g", path="broken"))
    assert handle.wait(30) == 1
    assert "no such model" in handle.log_tail()


def test_a_stopped_process_is_not_called_dead_until_it_is(launcher: RayLauncher) -> None:
    (handle,) = launcher.start(specs("prefill", 1, epoch="h"))
    assert isinstance(handle, RayHandle)
    process = handle._home.process
    os.kill(process.pid, signal.SIGSTOP)
    ray.kill(handle._actor)
    time.sleep(0.3)
    assert handle.poll() is None or not process.lives()
    handle.kill()
    assert handle.wait(20) is not None
    assert not process.lives()


def test_placement_groups_of_dead_engines_are_given_back(launcher: RayLauncher) -> None:
    for index in range(3):
        (handle,) = launcher.start(specs("decode", 1, epoch=f"i{index}"))
        handle.kill()
        assert handle.wait(20) is not None
        assert f"i{index}" not in launcher._places.taken, "at once, and not when another starts"


def test_what_asked_for_too_much_asks_for_less_and_leaves_the_line_when_nobody_wants_it(
    launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    (serving,) = launcher.start(specs("prefill", 1, epoch="s"))

    def ask_for_too_much() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(launcher._places, "_cpu_share", lambda _: 1000.0)
            with pytest.raises(Unavailable, match="found no place for 1 ranks"):
                launcher.start(specs("decode", 1, epoch="j"))

    ask_for_too_much()
    assert len(launcher._places.in_line) == 1
    (handle,) = launcher.start(specs("decode", 1, epoch="k"))
    assert not launcher._places.in_line
    monkeypatch.setattr("pd_cluster.launch.ray_places.PATIENCE_S", 0.1)
    ask_for_too_much()
    until(lambda: not launcher._places.in_line)
    for each in (serving, handle):
        each.kill()
        assert each.wait(20) is not None


def test_dp_ranks_that_live_on_their_own_are_placed_and_replaced_on_their_own(launcher: RayLauncher) -> None:
    config = load_config(
        overrides=["decode.data_parallel=2", "decode.tensor_parallel=2", "decode.dispatcher=nixl", "model.path=demo"]
    )
    (shape,) = [s for s in engine_shapes(config) if s.role == "decode"]

    def start(**lives: str) -> list[RayHandle]:
        named = {int(key[1:]): EngineEpoch(life) for key, life in lives.items()}
        made = rank_specs(shape, EngineEpoch("whole"), config, ("127.0.0.1", 1), 4, named)
        return [handle for handle in launcher.start(made) if isinstance(handle, RayHandle)]

    handles = start(d0="one", d1="two")
    assert {"one", "two"} <= launcher._places.taken
    for handle in handles[2:]:
        handle.kill()
    assert [handle.wait(20) for handle in handles[2:]] == [-9, -9]
    (third, fourth) = start(d1="three")
    assert (third.spec.rank, fourth.spec.rank, third.spec.worker_epoch) == (2, 3, "three")
    assert "two" not in launcher._places.taken
    assert [handle.poll() for handle in (*handles[:2], third, fourth)] == [None] * 4
    for handle in (*handles[:2], third, fourth):
        handle.kill()
        handle.wait(20)


def test_a_client_address_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="run this on a node of the Ray cluster"):
        RayLauncher("ray://somewhere:10001")


def test_an_identity_is_not_fooled_by_a_reused_pid() -> None:
    own = ProcessIdentity.own()
    assert own.lives()
    assert own.started is not None
    assert not ProcessIdentity(own.pid, own.started - 1).lives()
