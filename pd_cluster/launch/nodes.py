"""An engine over several nodes without Ray: each node runs a share of its ranks, and they meet at one store.

    node 0: supervisor --NodesLauncher--> its own ranks, as child processes
                 | Wanted, one for each other node         (store keys nodes/N/wanted)
    node N: NodeAgent --> its ranks, as child processes
                 | Seen: which of them ended, and how      (store keys nodes/N/seen)

What a node shall run is a state, not a command, so a message is never lost and an agent that comes back sees at once
what is wanted. Ranks of a node that is silent for a lease count as dead: without the store they have ended themselves.
"""

import contextlib
import signal
import threading
import time
from typing import Literal

import msgspec
from msgspec import Struct, field
from torch.distributed import DistError

from pd_cluster.clock import Clock, SystemClock
from pd_cluster.errors import ConfigError, Unavailable
from pd_cluster.ids import EngineEpoch, Rank
from pd_cluster.launch.launcher import NODE_LOST, Launcher, RankHandle
from pd_cluster.launch.roles import EngineShape
from pd_cluster.launch.spec import LEASE_S, RankSpec
from pd_cluster.launch.store import connect, read, write
from pd_cluster.rpc.addresses import join_address

SILENT_S = LEASE_S + 5.0
"""A node that gave no sign for so long has no rank alive any more: they look at their lease every second."""

LOOK_S = 0.1


State = Literal["run", "terminate", "kill"]


class Life(Struct, frozen=True):
    """Ranks that live and die together, or the end of them: of a whole engine, or of one of its DP ranks."""

    specs: list[RankSpec]
    state: State = "run"


class Wanted(Struct, frozen=True, kw_only=True):
    """What a node shall run, and nothing else. `ready`: the engine serves; `drain`: it shall finish what it has;
    `drained`: every node's workers have.
    """

    lives: dict[EngineEpoch, Life] = field(default_factory=dict)
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
    ended: dict[EngineEpoch, dict[Rank, Ended]] = field(default_factory=dict)  # of the lives that are wanted
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
        """Specs of ranks of this node with what only the node knows. Ranks of one node alone meet on loopback."""
        leads = [rank for rank in self.ranks if rank % self.shape.tensor_parallel == 0]
        return [
            msgspec.structs.replace(
                spec,
                bind_host="127.0.0.1" if self.num_nodes == 1 else self.host,
                control_host=self.host,
                control_port=self.control_port + leads.index(spec.rank) if spec.is_lead else 0,
                ranks_on_host=len(self.ranks),
            )
            for spec in specs
        ]


class RemoteNode:
    """Another node as node 0 sees it. Any thread may look, and change what is wanted."""

    def __init__(self, node: int, clock: Clock) -> None:
        self._clock = clock
        self._changing = threading.Lock()
        self._looking = threading.Lock()
        self.node = node
        self.told_to_drain = False
        self.drained = False
        self._seen: Seen | None = None
        self._changed_s = 0.0
        self._looked_s = float("-inf")
        self._wanted = Wanted()
        self._epoch: EngineEpoch | None = None
        self._runs_at: dict[EngineEpoch, str] = {}  # life -> the agent that was to start it

    def attach(self, host: str, port: int) -> None:
        self._store = connect(host, port)

    def look(self) -> None:
        with self._looking:
            self._look()

    def _look(self) -> None:
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
        """Former lives of the same ranks are over."""
        assert self._seen is not None
        ranks = {spec.rank for spec in specs}
        new = {spec.worker_epoch: Life([s for s in specs if s.worker_epoch == spec.worker_epoch]) for spec in specs}
        with self._changing:
            old = {
                epoch: life
                for epoch, life in self._wanted.lives.items()
                if specs[0].epoch == self._epoch and not any(spec.rank in ranks for spec in life.specs)
            }
            self._runs_at = {epoch: self._runs_at[epoch] for epoch in old} | dict.fromkeys(new, self._seen.agent)
            before = self._wanted if specs[0].epoch == self._epoch else Wanted()
            self._epoch = specs[0].epoch
            self._want(msgspec.structs.replace(before, lives=old | new))

    def _want(self, wanted: Wanted) -> None:
        if wanted != self._wanted:
            self._wanted = wanted
            write(self._store, wanted_key(self.node), encode(wanted))

    def ask(self, epoch: EngineEpoch, state: State) -> None:
        """Change how a life shall be; of one that is over nothing is left."""
        with self._changing:
            life = self._wanted.lives.get(epoch)
            if life is not None:
                lives = self._wanted.lives | {epoch: Life(life.specs, state)}
                self._want(msgspec.structs.replace(self._wanted, lives=lives))

    def announce(self, changes: dict[str, bool]) -> None:
        with self._changing:
            self._want(msgspec.structs.replace(self._wanted, **changes))

    def kill_all(self) -> None:
        for epoch in list(self._wanted.lives):
            self.ask(epoch, "kill")

    def ended(self, epoch: EngineEpoch, rank: Rank) -> Ended | None:
        """How a rank ended; None while it may live."""
        self.look()
        if not self.present:
            return Ended(NODE_LOST, f"node {self.node} is out of reach")
        assert self._seen is not None
        if self._seen.agent != self._runs_at.get(epoch):
            return Ended(-signal.SIGKILL, f"node {self.node} was started again")
        return self._seen.ended.get(epoch, {}).get(rank)


class RemoteHandle:
    """A rank on another node. The ranks of one life there are ended together."""

    def __init__(self, spec: RankSpec, node: RemoteNode) -> None:
        self.spec = spec
        self._node = node
        self._ended: Ended | None = None

    @property
    def pid(self) -> int | None:
        return None

    def poll(self) -> int | None:
        self._ended = self._ended or self._node.ended(self.spec.worker_epoch, self.spec.rank)
        return None if self._ended is None else self._ended.code

    def terminate(self) -> None:
        self._node.ask(self.spec.worker_epoch, "terminate")

    def kill(self) -> None:
        self._node.ask(self.spec.worker_epoch, "kill")

    def wait(self, timeout_s: float) -> int | None:
        deadline_s = time.monotonic() + timeout_s
        while (code := self.poll()) is None and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        return code

    def log_tail(self, num_lines: int = 20) -> str:
        return "" if self._ended is None else "\n".join(self._ended.log_tail.splitlines()[-num_lines:])


class NodesLauncher:
    """The launcher of node 0; `local` starts its own ranks. Waits up to `wait_s` for the other nodes whenever the whole
    engine starts; a DP rank on its own starts only where its nodes are there.
    """

    def __init__(self, place: Place, local: Launcher, *, wait_s: float, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._place = place
        self._local = local
        self._wait_s = wait_s
        self._nodes = [RemoteNode(node, self._clock) for node in range(1, place.num_nodes)]
        self._attached = False
        self._abandoned = threading.Event()
        self._started = False

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
        share = self._place.shape.num_ranks // self._place.num_nodes
        of_node: dict[int, list[RankSpec]] = {}
        for spec in specs:
            of_node.setdefault(spec.rank // share, []).append(spec)
        remote = {node: of_node[node.node] for node in self._nodes if node.node in of_node}
        self._await_nodes(list(remote), self._wait_s if len(specs) == self._place.shape.num_ranks else 0.0)
        for node, node_specs in remote.items():
            node.start(node_specs)
        self._started = True
        try:
            local = self._local.start(self._place.complete(of_node[0])) if 0 in of_node else []
        except Unavailable:
            for node, node_specs in remote.items():
                for spec in node_specs:
                    node.ask(spec.worker_epoch, "kill")
            raise
        return local + [RemoteHandle(spec, node) for node, node_specs in remote.items() for spec in node_specs]

    def announce(self, **changes: bool) -> None:
        """Tell the other nodes that the engine is `ready`, or shall `drain`. Any thread may say so."""
        if self._started:
            for node in self._nodes:
                node.announce(changes)

    def abandon(self) -> None:
        """Wait for other nodes no longer. Any thread may say so."""
        self._abandoned.set()

    def close(self) -> None:
        for node in self._nodes:
            with contextlib.suppress(DistError):  # without a store their ranks end by themselves
                node.kill_all()
        self._local.close()

    def _await_nodes(self, nodes: list[RemoteNode], wait_s: float) -> None:
        deadline_s = self._clock.now_s() + wait_s
        while missing := [node.node for node in nodes if not self._is_present(node)]:
            if self._clock.now_s() >= deadline_s:
                names = ", ".join(map(str, missing))
                raise Unavailable(f"{self._place.shape.engine_id}: nodes {names} did not come in {wait_s:g} s")
            if self._abandoned.wait(LOOK_S):
                raise Unavailable("stopped while it waited for the other nodes")

    @staticmethod
    def _is_present(node: RemoteNode) -> bool:
        node.look()
        return node.present and not node.told_to_drain
