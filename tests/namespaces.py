"""Two network namespaces with a prefill rank in one and a decode rank in the other, on one machine, as root.

    this process --control-- prefill
          |                     | data (NIXL over TCP)
          +-----control------ decode

Either kind of link can be cut and mended; nobody is told.
"""

import os
import subprocess
import sys
from types import TracebackType
from typing import Self

from msgspec import structs

from pd_cluster.launch.process import ProcessHandle, ProcessLauncher
from pd_cluster.launch.spec import RankSpec

NETWORK = f"10.{200 + os.getpid() // 64 % 50}"  # several runs on one machine stay apart
FIRST = 4 * (os.getpid() % 64)
CONTROL = {"prefill": f"{NETWORK}.{FIRST + 1}", "decode": f"{NETWORK}.{FIRST + 2}"}
DATA = {"prefill": f"{NETWORK}.{FIRST + 3}.1", "decode": f"{NETWORK}.{FIRST + 3}.2"}
DROP = ("root", "tbf", "rate", "8bit", "burst", "1", "limit", "1")


def unavailable() -> str | None:
    """Why there can be no namespaces here; None when there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    name = f"pdprobe{os.getpid()}"
    drop = ["tc", "qdisc", "add", "dev", "lo", *DROP]
    try:
        for command in (["ip", "netns", "add", name], ["ip", "netns", "exec", name, *drop]):
            probe = subprocess.run(command, capture_output=True, text=True, check=False)
            if probe.returncode:
                return f"`{' '.join(command)}` fails here: {probe.stderr.strip()}"
    except FileNotFoundError:
        return "network namespaces need the commands `ip` and `tc` (iproute2)"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


def ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(args)}: {done.stderr.strip()}"


class Namespaces:
    """`with Namespaces() as net`; links of their own go with the namespaces."""

    def __init__(self) -> None:
        self.names = {role: f"pd{role[0]}{os.getpid()}" for role in CONTROL}

    def __enter__(self) -> Self:
        try:
            for name in self.names.values():
                ip("netns", "add", name)
            prefill, decode = self.names["prefill"], self.names["decode"]
            ip("link", "add", "data", "netns", prefill, "type", "veth", "peer", "name", "data", "netns", decode)
            for role, name in self.names.items():
                ip("link", "add", self._host_link(role), "type", "veth", "peer", "name", "control", "netns", name)
                ip("addr", "add", f"{CONTROL[role]}.1/24", "dev", self._host_link(role))
                ip("link", "set", self._host_link(role), "up")
                for link, address in (("control", f"{CONTROL[role]}.2/24"), ("data", f"{DATA[role]}/24")):
                    ip("-n", name, "addr", "add", address, "dev", link)
                    ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _host_link(self, role: str) -> str:
        return f"pd{role[0]}{os.getpid()}"

    def _remove(self) -> None:
        for role, name in self.names.items():
            # a namespace goes in its own time, and a link that is left with it disturbs the next test's UCX
            subprocess.run(["ip", "link", "del", self._host_link(role)], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def cut_data(self) -> None:
        self._drop("prefill", "data")
        self._drop("decode", "data")

    def mend_data(self) -> None:
        self._pass("prefill", "data")
        self._pass("decode", "data")

    def isolate_decode(self) -> None:
        self._drop("decode", "data")
        self._drop("decode", "control")

    def rejoin_decode(self) -> None:
        self._pass("decode", "data")
        self._pass("decode", "control")

    def _drop(self, role: str, link: str) -> None:
        """Lose every packet that leaves by a link, as a broken switch would: the link itself stays up."""
        self._tc(role, "add", "dev", link, *DROP)

    def _pass(self, role: str, link: str) -> None:
        self._tc(role, "del", "dev", link, "root")

    def _tc(self, role: str, *args: str) -> None:
        command = ["ip", "netns", "exec", self.names[role], "tc", "qdisc", *args]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


class NamespaceLauncher(ProcessLauncher):
    """Starts the ranks of each role in the namespace of that role."""

    def __init__(self, net: Namespaces) -> None:
        super().__init__()
        self._net = net
        self._rank_command = self._command

    @property
    def host(self) -> str:
        return "0.0.0.0"

    def _start(self, spec: RankSpec, gpu: str | None, variables: dict[str, str]) -> ProcessHandle:
        control = CONTROL[spec.role]
        placed = structs.replace(spec, store_host=f"{control}.1", bind_host=f"{control}.2")
        self._command = ["ip", "netns", "exec", self._net.names[spec.role], *self._rank_command]
        return super()._start(placed, gpu, variables)
