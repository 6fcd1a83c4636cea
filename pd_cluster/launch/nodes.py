"""An engine over several nodes without Ray: each node runs a share of its ranks, and they meet at one store.

    node 0: supervisor --NodesLauncher--> its own ranks, as child processes
                 | Wanted, one for each other node         (store keys nodes/N/wanted)
    node N: NodeAgent --> its ranks, as child processes
                 | Seen: which of them ended, and how      (store keys nodes/N/seen)

What a node shall run is a state, not a command, so a message is never lost and an agent that comes back sees at once
what is wanted. Ranks of a node that is silent for a lease count as dead: without the store they have ended themselves.
"""

import contextlib
import threading
import time
from typing import Literal

import msgspec
from msgspec import Struct, field
from torch.distributed import DistError

from pd_cluster.clock import Clock, SystemClock
from pd_cluster.errors import ConfigError, Unavailable
from pd_cluster.ids import EngineEpoch, Rank
from pd_cluster.launch.launcher import Launcher, RankHandle
from pd_cluster.launch.roles import EngineShape
from pd_cluster.launch.spec import LEASE_S, RankSpec
from pd_cluster.launch.store import connect, read, write
from pd_cluster.rpc.addresses import join_address

LOST_CODE = -9
SILENT_S = LEASE_S + 5.0
"""A node that gave no sign for so long has no rank alive any more: they look at their lease every second."""

LOOK_S = 0.1


class Wanted(Struct, frozen=True, kw_only=True):
    """What a node shall run: the ranks of one life, or the end of them. `ready`: the whole engine serves; `drain`: it
    shall finish what it has; `drained`: every node's workers have.
    """

    epoch: EngineEpoch
    specs: list[RankSpec]
    state: Literal["run", "terminate", "kill"] = "run"
    ready: bool = False
    drain: bool = False
    drained: bool = False


class Ended(Struct, frozen=True):
    code: int
    log_tail: str


class Seen(Struct, frozen=True, kw_only=True):
    """What a node runs. `agent` names one life of the agent: its ranks never outlive it."""

    agent: str
    beat: int
    epoch: EngineEpoch | None = None  # of the ranks that it started last
    ended: dict[Rank, Ended] = field(default_factory=dict)
    drain: bool = False  # the node is told to end: the engine shall finish what it has
    drained: bool = False  # its own workers have


encode = msgspec.msgpack.Encoder().encode
decode_wanted = msgspec.msgpack.Decoder(Wanted).decode
decode_seen = msgspec.msgpack.Decoder(Seen).decode


def wanted_key(node: int) -> str:
    return f"nodes/{node}/wanted"


def seen_key(node: int) -> str:
    return f"nodes/{node}/seen"


class Place(Struct, frozen=True, kw_only=True):
    """One node of an engine: where it listens, and which ranks are its own."""

    shape: EngineShape
    node: int
    num_nodes: int
    host: str  # its address as routers and other nodes reach it
    control_port: int  # of its first lead; the next has the next

    @classmethod
    def of(cls, shape: EngineShape, node: int, num_nodes: int, host: str, control_port: int) -> "Place":
        """Raises ConfigError when the ranks cannot be dealt out evenly."""
        if num_nodes < 1 or not 0 <= node < num_nodes:
            raise ConfigError(f"a node of an engine is between 0 and {num_nodes - 1}, got {node}")
        if shape.num_ranks % num_nodes:
            raise ConfigError(
                f"{shape.engine_id} has {shape.num_ranks} ranks (DP{shape.data_parallel} x TP{shape.tensor_parallel}), "
                f"which {num_nodes} nodes cannot share evenly"
            )
        return cls(shape=shape, node=node, num_nodes=num_nodes, host=host, control_port=control_port)

    @property
    def ranks(self) -> range:
        share = self.shape.num_ranks // self.num_nodes
        return range(self.node * share, (self.node + 1) * share)

    @property
    def lead_addresses(self) -> list[str]:
        """Control addresses of the workers whose leads run here."""
        num_leads = sum(rank % self.shape.tensor_parallel == 0 for rank in self.ranks)
        return [join_address(self.host, self.control_port + index) for index in range(num_leads)]

    def complete(self, specs: list[RankSpec]) -> list[RankSpec]:
        """The specs of this node's ranks with what only the node knows. Ranks of one node alone meet on loopback."""
        leads = [spec.rank for spec in specs if spec.is_lead]
        return [
            msgspec.structs.replace(
                spec,
                bind_host="127.0.0.1" if self.num_nodes == 1 else self.host,
                control_host=self.host,
                control_port=self.control_port + leads.index(spec.rank) if spec.is_lead else 0,
                ranks_on_host=len(specs),
            )
            for spec in specs
        ]


class RemoteNode:
    """Another node as node 0 sees it. The launcher's thread looks; any thread may change what is wanted."""

    def __init__(self, node: int, clock: Clock) -> None:
        self._clock = clock
        self._changing = threading.Lock()
        self.node = node
        self.told_to_drain = False
        self.drained = False
        self._seen: Seen | None = None
        self._changed_s = 0.0
        self._looked_s = float("-inf")
        self._wanted: Wanted | None = None
        self._runs_at = ""  # the agent that was to start the present life

    def attach(self, host: str, port: int) -> None:
        self._store = connect(host, port)

    def look(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        data = read(self._store, seen_key(self.node))
        seen = None if data is None else decode_seen(data)
        if seen != self._seen:
            self._seen, self._changed_s = seen, now_s
        self.told_to_drain = seen is not None and seen.drain and self.present
        self.drained = seen is not None and (seen.drained or not self.present)

    @property
    def present(self) -> bool:
        return self._seen is not None and self._clock.now_s() - self._changed_s < SILENT_S

    def start(self, specs: list[RankSpec]) -> None:
        assert self._seen is not None
        self._runs_at = self._seen.agent
        with self._changing:
            self._want(Wanted(epoch=specs[0].epoch, specs=specs))

    def _want(self, wanted: Wanted) -> None:
        if wanted != self._wanted:
            self._wanted = wanted
            write(self._store, wanted_key(self.node), encode(wanted))

    def change(self, epoch: EngineEpoch, **changes: object) -> None:
        """Change what is wanted of the present life; of another one nothing is left."""
        with self._changing:
            if self._wanted is not None and self._wanted.epoch == epoch:
                self._want(msgspec.structs.replace(self._wanted, **changes))

    def ended(self, epoch: EngineEpoch, rank: Rank) -> Ended | None:
        """How a rank ended; None while it may live."""
        self.look()
        if not self.present:
            return Ended(LOST_CODE, f"node {self.node} is out of reach")
        assert self._seen is not None
        if self._seen.agent != self._runs_at:
            return Ended(LOST_CODE, f"node {self.node} was started again")
        return self._seen.ended.get(rank) if self._seen.epoch == epoch else None


class RemoteHandle:
    """A rank on another node. The ranks of one life on one node are ended together."""

    def __init__(self, spec: RankSpec, node: RemoteNode) -> None:
        self.spec = spec
        self._node = node
        self._ended: Ended | None = None

    @property
    def pid(self) -> int | None:
        return None

    def poll(self) -> int | None:
        self._ended = self._ended or self._node.ended(self.spec.epoch, self.spec.rank)
        return None if self._ended is None else self._ended.code

    def terminate(self) -> None:
        self._node.change(self.spec.epoch, state="terminate")

    def kill(self) -> None:
        self._node.change(self.spec.epoch, state="kill")

    def wait(self, timeout_s: float) -> int | None:
        deadline_s = time.monotonic() + timeout_s
        while (code := self.poll()) is None and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        return code

    def log_tail(self, num_lines: int = 20) -> str:
        return "" if self._ended is None else "\n".join(self._ended.log_tail.splitlines()[-num_lines:])


class NodesLauncher:
    """The launcher of node 0; `local` starts its own ranks. Waits up to `wait_s` for the other nodes at each start."""

    def __init__(self, place: Place, local: Launcher, *, wait_s: float, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._place = place
        self._local = local
        self._wait_s = wait_s
        self._nodes = [RemoteNode(node, self._clock) for node in range(1, place.num_nodes)]
        self._attached = False
        self._abandoned = threading.Event()
        self._epoch: EngineEpoch | None = None

    @property
    def host(self) -> str:
        return self._place.host if self._nodes else self._local.host

    @property
    def told_to_drain(self) -> bool:
        """Whether another node was told to end. Any thread may ask."""
        return any(node.told_to_drain for node in self._nodes)

    @property
    def others_drained(self) -> bool:
        """Whether every other node's workers have finished what they had. Any thread may ask."""
        return all(node.drained for node in self._nodes)

    def start(self, specs: list[RankSpec]) -> list[RankHandle]:
        if self._nodes and not self._attached:
            for node in self._nodes:
                node.attach(specs[0].store_host, specs[0].store_port)
            self._attached = True
        self._await_nodes()
        share = len(specs) // self._place.num_nodes
        for node in self._nodes:
            node.start(specs[node.node * share : (node.node + 1) * share])
        self._epoch = specs[0].epoch
        try:
            handles = self._local.start(self._place.complete(specs[:share]))
        except Unavailable:
            for node in self._nodes:
                node.change(self._epoch, state="kill")
            raise
        return handles + [RemoteHandle(spec, self._nodes[spec.rank // share - 1]) for spec in specs[share:]]

    def announce(self, **changes: bool) -> None:
        """Tell the other nodes that the engine is `ready`, or shall `drain`. Any thread may say so."""
        if self._epoch is not None:
            for node in self._nodes:
                node.change(self._epoch, **changes)

    def abandon(self) -> None:
        """Wait for other nodes no longer. Any thread may say so."""
        self._abandoned.set()

    def close(self) -> None:
        if self._epoch is not None:
            for node in self._nodes:
                with contextlib.suppress(DistError):  # without a store their ranks end by themselves
                    node.change(self._epoch, state="kill")
        self._local.close()

    def _await_nodes(self) -> None:
        deadline_s = self._clock.now_s() + self._wait_s
        while missing := [node.node for node in self._nodes if not self._is_present(node)]:
            if self._abandoned.wait(LOOK_S):
                raise Unavailable("stopped while it waited for the other nodes")
            if self._clock.now_s() > deadline_s:
                names = ", ".join(map(str, missing))
                raise Unavailable(f"{self._place.shape.engine_id}: nodes {names} did not come in {self._wait_s:g} s")

    @staticmethod
    def _is_present(node: RemoteNode) -> bool:
        node.look()
        return node.present and not node.told_to_drain
