"""The network to one member of an elastic group is cut in silence: the others go on, and it comes back when mended.

The member lives in a network namespace; all ranks exchange tokens and KV over TCP.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from living import LivingCluster
from losing import MAX_WAIT_S, WHY_NOT, Streams, elastic, ids_of, until_joined
from msgspec import structs
from namespaces import DROP, ip, unavailable

from pd_cluster.ids import Rank
from pd_cluster.launch.process import ProcessHandle, ProcessLauncher
from pd_cluster.launch.spec import RankSpec

REASON = WHY_NOT or unavailable()
pytestmark = [pytest.mark.processes, pytest.mark.skipif(REASON is not None, reason=REASON or "")]

VICTIM = Rank(2)


class Island:
    """A namespace that one link joins to the rest of the machine."""

    def __init__(self) -> None:
        self.name = f"pdi{os.getpid()}"
        self.links = f"pdi{os.getpid()}", f"pdj{os.getpid()}"  # here, there
        network = f"10.{150 + os.getpid() // 250 % 50}.{os.getpid() % 250}"
        self.addresses = f"{network}.1", f"{network}.2"

    def __enter__(self) -> "Island":
        (here, there), (address, far_address) = self.links, self.addresses
        try:
            ip("netns", "add", self.name)
            ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", self.name)
            ip("addr", "add", f"{address}/24", "dev", here)
            ip("link", "set", here, "up")
            ip("-n", self.name, "addr", "add", f"{far_address}/24", "dev", there)
            ip("-n", self.name, "link", "set", there, "up")
            ip("-n", self.name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["ip", "link", "del", self.links[0]], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)

    def cut(self) -> None:
        """Lose every packet both ways; the link stays up."""
        here, there = self.links
        subprocess.run(["tc", "qdisc", "add", "dev", here, *DROP], check=True, capture_output=True)
        command = ["ip", "netns", "exec", self.name, "tc", "qdisc", "add", "dev", there, *DROP]
        subprocess.run(command, check=True, capture_output=True)

    def mend(self) -> None:
        here, there = self.links
        subprocess.run(["tc", "qdisc", "del", "dev", here, "root"], check=True, capture_output=True)
        command = ["ip", "netns", "exec", self.name, "tc", "qdisc", "del", "dev", there, "root"]
        subprocess.run(command, check=True, capture_output=True)


class IslandLauncher(ProcessLauncher):
    """One decode rank on the island, the rest here."""

    def __init__(self, island: Island) -> None:
        super().__init__()
        self._island = island
        self._rank_command = self._command

    @property
    def host(self) -> str:
        return "0.0.0.0"

    def _start(self, spec: RankSpec, gpu: str | None, variables: dict[str, str]) -> ProcessHandle:
        far = spec.role == "decode" and spec.rank == VICTIM
        enter = ["ip", "netns", "exec", self._island.name] if far else []
        self._command = [*enter, *self._rank_command]
        here, own = self._island.addresses[0], self._island.addresses[far]
        placed = structs.replace(spec, store_host=here, bind_host=own)
        return super()._start(placed, gpu, variables | {"UCX_NET_DEVICES": self._island.links[far]})


@pytest.fixture
def island(monkeypatch: pytest.MonkeyPatch) -> Iterator[Island]:
    with Island() as island:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
        monkeypatch.setattr("pd_cluster.launch.lifecycle.BACKOFF_S", 0.1)
        monkeypatch.setattr("pd_cluster.launch.cluster.create_launcher", lambda _: IslandLauncher(island))
        yield island


async def test_a_member_that_is_cut_off_costs_the_others_a_moment_and_comes_back(island: Island) -> None:
    options: dict[str, Any] = {"security__allow_insecure": True, "launch__start_timeout_s": 60.0}
    async with LivingCluster(elastic(**options)) as cluster:
        expected = await Streams(cluster).ended()
        streams = Streams(cluster)
        await streams.begun()
        where = streams.where()
        island.cut()
        cut_s = time.monotonic()
        outputs = await streams.ended()
        assert ids_of(outputs) == ids_of(expected)
        stayed, moved = streams.waits_s(f"decode-0/{VICTIM}", where, cut_s, outputs)
        print(f"\ncut off: the others stood still for {max(stayed):.2f} s at most; {len(moved)} streams moved")
        assert max(stayed) < MAX_WAIT_S
        island.mend()
        await cluster.until_healthy(120)
        await until_joined(cluster, int(VICTIM))
        assert ids_of(await Streams(cluster).ended()) == ids_of(expected)
