"""`pd-cluster router` as a process: it waits for workers, and ends when it is told to, however it was started."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ROOT, until

pytestmark = pytest.mark.processes

ARGS = ["--discover", "static:127.0.0.1:9", "--http-port", "0", "--set", "router.grpc=false"]


def status(url: str) -> int:
    from urllib import error, request

    try:
        with request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except error.HTTPError as refused:
        return refused.code


def test_sigterm_ends_a_router_that_a_script_started_in_the_background(tmp_path: Path) -> None:
    """A shell without job control has SIGINT ignored in what it starts with `&`."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "pd_cluster.cli.main", "router"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command, *ARGS, "--socket", str(tmp_path / "door")],
            stdout=file,
            stderr=file,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        until(lambda: process.poll() is not None or "http_listening" in log.read_text())
        found = re.search(r"http_listening .*port=(\d+)", log.read_text())
        assert found, log.read_text()
        base = f"http://127.0.0.1:{found[1]}"
        assert status(f"{base}/livez") == 200
        assert status(f"{base}/readyz") == 503
        started_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        print(f"\nan idle router ended in {time.monotonic() - started_s:.1f} s")
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()
