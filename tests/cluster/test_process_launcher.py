"""Real child processes: they get their spec, their logs can be read, and none outlives its parent."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_cluster.config import load_config
from pd_cluster.errors import Unavailable
from pd_cluster.ids import EngineEpoch, EngineId, Rank
from pd_cluster.launch.process import ProcessLauncher
from pd_cluster.launch.spec import RankReport, RankSpec
from pd_cluster.launch.store import RankStore, StoreServer

pytestmark = pytest.mark.processes

RANK = """
import sys, os, time
from pd_cluster.launch.child import read_spec
spec = read_spec()
print("I am", spec.name, "with", os.environ["OMP_NUM_THREADS"], "threads", flush=True)
"""


def spec(rank: int = 0, port: int = 1, threads: int = 1) -> RankSpec:
    return RankSpec(
        role="decode",
        engine_id=EngineId("decode-0"),
        epoch=EngineEpoch("e"),
        rank=Rank(rank),
        data_parallel=2,
        tensor_parallel=1,
        config=load_config(values={"router.api_key": "s3cr3t-key"}),
        store_host="127.0.0.1",
        store_port=port,
        threads=threads,
    )


def launcher(body: str) -> ProcessLauncher:
    return ProcessLauncher([sys.executable, "-c", RANK + textwrap.dedent(body)])


@pytest.fixture
def closing() -> Iterator[list[ProcessLauncher]]:
    launchers: list[ProcessLauncher] = []
    yield launchers
    for each in launchers:
        each.close()


def gone(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # dead; whoever inherited it has not looked yet
            return True
        time.sleep(0.02)
    return False


def test_each_rank_gets_its_own_spec_threads_and_log(closing: list[ProcessLauncher]) -> None:
    closing.append(launcher(""))
    first, second = closing[0].start([spec(0), spec(1, threads=3)])
    assert first.wait(20) == 0
    assert second.wait(20) == 0
    assert first.log_tail() == "I am decode-0.0 with 1 threads"
    assert second.log_tail() == "I am decode-0.1 with 3 threads"


def test_no_secret_stands_in_command_line_or_environment(closing: list[ProcessLauncher]) -> None:
    closing.append(launcher("time.sleep(60)"))
    (handle,) = closing[0].start([spec()])
    for name in ("cmdline", "environ"):
        assert b"s3cr3t-key" not in Path(f"/proc/{handle.pid}/{name}").read_bytes()


def test_exit_code_and_last_words_of_a_failed_rank_are_kept(closing: list[ProcessLauncher]) -> None:
    closing.append(launcher("print('out of luck', file=sys.stderr); sys.exit(7)"))
    (handle,) = closing[0].start([spec()])
    assert handle.wait(20) == 7
    assert handle.poll() == 7
    assert handle.log_tail(1) == "out of luck"
    closing[0].close()
    assert closing[0].logs.exists(), "logs of a failed rank are what its user needs"


def test_ranks_that_were_replaced_keep_no_file_open(closing: list[ProcessLauncher]) -> None:
    made = launcher("")
    closing.append(made)

    def run_one() -> int:
        (rank,) = made.start([spec()])
        assert rank.wait(30.0) == 0
        return len(os.listdir("/proc/self/fd"))

    first = run_one()
    assert {run_one() for _ in range(3)} == {first}


def test_close_kills_what_ignores_terminate(closing: list[ProcessLauncher]) -> None:
    body = "import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    closing.append(launcher(body))
    (handle,) = closing[0].start([spec()])
    deadline = time.monotonic() + 20
    while "ready" not in handle.log_tail() and time.monotonic() < deadline:
        time.sleep(0.02)
    handle.terminate()
    assert handle.wait(0.3) is None
    closing[0].close()
    assert handle.poll() == -signal.SIGKILL
    assert not closing[0].logs.exists()


def test_a_missing_program_is_one_clear_error_and_leaves_nothing() -> None:
    broken = ProcessLauncher(["/nonexistent/python"])
    with pytest.raises(Unavailable, match=r"cannot start decode-0\.0"):
        broken.start([spec()])
    broken.close()


@pytest.mark.parametrize("body", ["time.sleep(60)", "import ctypes; ctypes.PyDLL(None).sleep(60)"])
def test_ranks_die_with_their_parent_even_while_they_hold_the_interpreter(body: str) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
            import sys, time
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from test_process_launcher import launcher, spec
            handles = launcher({body!r}).start([spec(0), spec(1)])
            while not all(h.log_tail() for h in handles):
                time.sleep(0.02)
            print(*[h.pid for h in handles], flush=True)
            time.sleep(60)
            """),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert all(gone(pid) for pid in pids)


def test_a_rank_reports_through_the_store(closing: list[ProcessLauncher]) -> None:
    server = StoreServer()
    closing.append(
        launcher("""
        from pd_cluster.launch.store import RankStore
        from pd_cluster.launch.spec import RankReport
        store = RankStore(spec.store_host, spec.store_port, spec.epoch, spec.rank)
        store.progress("weights", 3, 4)
        store.report(RankReport(rank=spec.rank, pid=os.getpid(), control_address="127.0.0.1:9", num_blocks=5))
        """)
    )
    (handle,) = closing[0].start([spec(1, port=server.port)])
    assert handle.wait(30) == 0, handle.log_tail()
    assert server.report(EngineEpoch("e"), Rank(0)) is None
    assert server.report(EngineEpoch("e"), Rank(1)) == RankReport(
        rank=Rank(1), pid=handle.pid or 0, control_address="127.0.0.1:9", num_blocks=5
    )
    progress = server.progress(EngineEpoch("e"), Rank(1))
    assert progress is not None
    assert (progress.stage, progress.done, progress.total) == ("weights", 3, 4)
    server.close()


def test_a_lease_that_stands_still_or_a_store_that_is_gone_ends_a_rank() -> None:
    server = StoreServer()
    store = RankStore(server.host, server.port, EngineEpoch("e"), Rank(0))
    server.beat()
    assert store.lease_held(now_s=100.0)
    assert store.lease_held(now_s=110.0)
    server.beat()
    assert store.lease_held(now_s=120.0)
    assert not store.lease_held(now_s=140.0)
    server.beat()
    assert store.lease_held(now_s=141.0)
    server.close()
    assert not store.lease_held(now_s=142.0)


def test_a_life_that_is_given_up_holds_no_lease_and_its_successor_does() -> None:
    server = StoreServer()
    given_up, successor = (RankStore(server.host, server.port, EngineEpoch(name), Rank(0)) for name in ("e1", "e2"))
    server.beat()
    assert given_up.lease_held(now_s=100.0)
    server.revoke(EngineEpoch("e1"))
    server.beat()
    assert not given_up.lease_held(now_s=101.0)
    assert successor.lease_held(now_s=101.0)
    server.close()
