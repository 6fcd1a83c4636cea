"""Opening an agent where UCX fails at first, or for want of files: in processes of their own."""

import shutil
import subprocess
import sys

import pytest

# the interpreter's own way out would close the agents in any order
OPEN_MANY = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
from pd_cluster.errors import TransferFailed
from pd_cluster.nixl_agent import open_agent
agents = []
try:
    for index in range(20):
        agents.append(open_agent(f"agent-{index}"))
except TransferFailed as error:
    print(len(agents), error.message, flush=True)
os._exit(0)
"""

LATE_DEVICE = """
import os, subprocess, threading, time
os.environ["UCX_TLS"] = "tcp,self"
from pd_cluster.nixl_agent import open_agent
threading.Timer(0.2, subprocess.run, [["ip", "link", "set", "lo", "up"]]).start()
agent, _ = open_agent("late")
print(len(agent.get_agent_metadata()), flush=True)
os._exit(0)
"""


def run(script: str, *before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """UCX's own messages come before it."""
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_want_of_files_is_named_with_its_remedy() -> None:
    done = run(OPEN_MANY)
    num_agents, _, message = last_line(done).partition(" ")
    assert int(num_agents) > 1
    assert "files are open, and an agent needs" in message
    assert "ulimit -n" in message


def test_a_network_device_that_is_late_costs_another_try() -> None:
    """The only device of a new network namespace is down at first."""
    isolate = ["unshare", "--user", "--map-root-user", "--net"]
    if not (shutil.which("unshare") and shutil.which("ip")) or run("", *isolate).returncode:
        pytest.skip("needs `unshare` and `ip`, and leave to make a user namespace")
    done = run(LATE_DEVICE, *isolate)
    assert int(last_line(done)) > 0
