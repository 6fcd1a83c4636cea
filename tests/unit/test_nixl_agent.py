"""Opening an agent where UCX fails at first, or for want of files: in processes of their own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pd_cluster.nixl_agent import lasting_devices

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


ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
{out} 00000000 010200C0 0003 0 0 0 00000000 0 0 0
veth1 0A0A0A0A 00000000 0001 0 0 0 00FFFFFF 0 0 0
"""
ZEROS = "0" * 32
ROUTES_6 = f"""{ZEROS} 00 {ZEROS} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003 net6
{ZEROS} 00 {ZEROS} 00 {ZEROS} ffffffff 00000001 00000000 00200200 lo
"""


def host_with(tmp_path: Path, **devices: tuple[int, int, str]) -> Path:
    """A tree like `/sys/class/net`, of devices' index, index of their other end, and type; down without an index."""
    for name, (index, link, kind) in devices.items():
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "ifindex").write_text(f"{index}\n")
        (tmp_path / "net" / name / "iflink").write_text(f"{link}\n")
        (tmp_path / "net" / name / "flags").write_text("0x1003\n" if index else "0x1002\n")
        (tmp_path / "net" / name / "uevent").write_text(f"{kind}INTERFACE={name}\nIFINDEX={index}\n")
    return tmp_path / "net"


def test_links_to_containers_are_left_out_unless_they_lead_out(tmp_path: Path) -> None:
    devices = host_with(
        tmp_path,
        lo=(1, 1, ""),
        eth0=(2, 2, ""),
        vlan7=(3, 2, "DEVTYPE=vlan\n"),
        tunnel=(4, 0, ""),
        idle=(0, 0, ""),
        veth1=(9, 2, ""),
        veth2=(11, 10, ""),
    )
    (devices / "gone").mkdir()
    routes, routes_6 = tmp_path / "route", tmp_path / "ipv6_route"
    routes.write_text(ROUTES.format(out="eth0"))
    assert lasting_devices(devices, routes, routes_6) == ["eth0", "lo", "tunnel", "vlan7"]
    routes.write_text(ROUTES.format(out="veth2"))  # in a container
    assert lasting_devices(devices, routes, routes_6) == ["eth0", "lo", "tunnel", "veth2", "vlan7"]


def test_a_host_with_no_way_out_keeps_all_devices(tmp_path: Path) -> None:
    devices = host_with(tmp_path, lo=(1, 1, ""), veth1=(2, 9, ""), net6=(3, 8, ""))
    routes, routes_6 = tmp_path / "route", tmp_path / "ipv6_route"
    assert lasting_devices(devices, routes, routes_6) == []
    routes_6.write_text(ROUTES_6.replace("net6", "lo"))
    assert lasting_devices(devices, routes, routes_6) == []
    routes_6.write_text(ROUTES_6)
    assert lasting_devices(devices, routes, routes_6) == ["lo", "net6"]


IN_SIGHT = """
import os
from pd_cluster.nixl_agent import open_agent
open_agent("default")
print(os.environ["UCX_NET_DEVICES"], flush=True)
os._exit(0)
"""


def test_agents_see_the_lasting_devices_of_this_host() -> None:
    if not (devices := lasting_devices()):
        pytest.skip("this host has no default route")
    done = run(IN_SIGHT)
    assert last_line(done).split(",") == devices
    assert "not available" not in done.stderr + done.stdout
