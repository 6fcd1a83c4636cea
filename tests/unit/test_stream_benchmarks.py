"""The arithmetic of what a streamed token costs, and of what the handoff adds to the second one."""

import os
import subprocess
import sys
import threading

import pytest
from processes import state, until

from pd_cluster.bench.second_token import arguments
from pd_cluster.bench.second_token import summary as second_token_summary
from pd_cluster.bench.serve_process import ServeProcess, family, paused
from pd_cluster.bench.streams import cpu_s, event_loop_cpu_s, summary
from pd_cluster.errors import Unavailable


def test_a_ranks_share_is_its_event_loops_alone() -> None:
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            sum(range(1000))

    before_s, loop_before_s = cpu_s(os.getpid()), event_loop_cpu_s(os.getpid())
    thread = threading.Thread(target=spin)
    thread.start()
    until(lambda: cpu_s(os.getpid()) - before_s > 0.3)
    loop_s = event_loop_cpu_s(os.getpid()) - loop_before_s
    done.set()
    thread.join()
    assert 0.0 <= loop_s < 0.2  # this test's own thread only waits


def test_the_workers_share_counts_against_us_and_not_against_the_peer() -> None:
    ours = [{"cpu_us_per_token": cpu, "worker_us_per_token": 10.0, "tok_s": 1.0} for cpu in (20.0, 30.0, 90.0)]
    peer = [{"cpu_us_per_token": cpu, "worker_us_per_token": 0.0, "tok_s": 1.0} for cpu in (100.0, 100.0, 900.0)]
    assert summary(ours, peer)["ratio"] == pytest.approx(0.4)
    assert "ratio" not in summary(ours, None)


def test_the_second_token_is_compared_and_the_gap_before_it_shown() -> None:
    split = [[0.50, 0.60, 0.61], [0.50, 0.56, 0.57], [0.50, 0.80, 0.81]]
    colocated = [[0.50, 0.52, 0.54]] * 3
    result = second_token_summary({"split": split, "colocated": colocated})
    assert result["second_ratio"] == pytest.approx(0.60 / 0.52)
    assert result["split_gap_p50_ms"] == pytest.approx(100)
    assert result["split_gap_p99_ms"] == pytest.approx(300)
    assert result["colocated_gap_p99_ms"] == pytest.approx(20)


def test_prefill_and_decode_get_a_cpu_each_where_there_are_two() -> None:
    split, colocated = arguments("m", 1500, [4, 7, 9])
    assert split[-3:] == ["prefill.cpus=4", "--set", "decode.cpus=7"]
    assert colocated[-3:] == ["--colocated", "--set", "decode.cpus=4"]
    split, colocated = arguments("m", 1500, [0])
    assert not any("cpus" in argument for argument in (*split, *colocated))


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(Unavailable, match="http_prot"), ServeProcess(["demo", "--set", "router.http_prot=1"]):
        pass


def test_a_paused_process_and_its_children_stand_still_and_go_on() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        until(lambda: len(family(process.pid)) == 2)
        with paused([process.pid]):
            until(lambda: [state(pid) for pid in family(process.pid)] == ["T", "T"])
        until(lambda: "T" not in [state(pid) for pid in family(process.pid)])
    finally:
        process.communicate(b"\n", timeout=20)
