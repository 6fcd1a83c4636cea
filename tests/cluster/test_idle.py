"""A cluster with nothing to do sleeps: what it still costs is heartbeats, leases and looks at its processes."""

import json
import os
import re
import time
import urllib.request
from pathlib import Path

import pytest
from harness import CHECKPOINTS
from processes import running, until

MAX_SHARE = 0.05
SETTLE_S, MEASURE_S = 2.0, 10.0
NUM_TRIES = 3
"""Beside other work every wake-up costs more, for it finds cold caches."""


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process that are alive."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


@pytest.mark.processes
def test_an_idle_cluster_uses_less_than_a_twentieth_of_a_core() -> None:
    """Router, supervisor, one prefill rank and two decode ranks, all together, after a request has come and gone."""
    settings = ["kv.block_size=16", "kv.num_blocks=64", "router.http_port=0", "router.grpc_port=0"]
    flags = [part for setting in settings for part in ("--set", setting)]
    with running("serve", str(CHECKPOINTS / "deepseek_v3_yarn"), "--decode-dp", "2", *flags) as command:
        until(lambda: "is served at" in command.stderr or command.process.poll() is not None)
        url = re.search(r"is served at (http://\S+)", command.stderr)
        assert url, command.stderr
        body = {"model": "deepseek_v3_yarn", "prompt": list(range(3, 43)), "max_tokens": 20}
        urllib.request.urlopen(f"{url[1]}/completions", json.dumps(body).encode(), timeout=20).close()
        time.sleep(SETTLE_S)  # threads that only started things are gone, and pauses have grown
        pids = {"router": command.process.pid} | {f"rank of pid {pid}": pid for pid in command.ranks()}
        for _ in range(NUM_TRIES):
            before, started_s = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
            time.sleep(MEASURE_S)
            elapsed_s = time.monotonic() - started_s
            shares = {name: (cpu_s(pid) - before[name]) / elapsed_s for name, pid in pids.items()}
            print(", ".join(f"{name} {100 * share:.2f} %" for name, share in shares.items()), "of a core")
            print(f"idle cluster: {100 * sum(shares.values()):.2f} % of a core, load {os.getloadavg()[0]:.1f}")
            if sum(shares.values()) < MAX_SHARE:
                break
    assert len(shares) == 4
    assert 0 < sum(shares.values()) < MAX_SHARE
