"""The Ray launcher: every rank is an actor of a Ray cluster, placed by one placement group for each life.

Ray places (`ray_places`), starts and kills, and notices deaths; no token and no KV passes through it. That a rank is
dead is said only when its process is seen dead on its own node: Ray may call an actor dead while its process still
runs. Beside these two modules only `serve.py` imports Ray.
"""

import logging
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from pd_cluster import env
from pd_cluster.errors import ConfigError, PdClusterError, Unavailable
from pd_cluster.ids import EngineEpoch, EngineId
from pd_cluster.launch.launcher import NODE_LOST, RankHandle
from pd_cluster.launch.pids import ProcessIdentity
from pd_cluster.launch.ray_places import Places, gpu_share_of
from pd_cluster.launch.spec import LEASE_S, RankSpec, decode_spec, encode_spec
from pd_cluster.log import configure_logging

RunRank = Callable[[RankSpec, threading.Event], None]

ACTOR_TIMEOUT_S = 60.0
NODE_TIMEOUT_S = 10.0
MARGIN_S = 5.0
"""What a rank that has lost its lease may take to notice and to end."""

KILL_S = 0.5
"""How long a process may live on after its actor's end; a stopped one hears only the kernel."""

RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")  # lines for Ray's own log reader
OBJECT_STORE_BYTES = 80 << 20  # about Ray's least; nothing of ours passes through it


class Home(msgspec.Struct, frozen=True):
    """Where an actor runs."""

    process: ProcessIdentity
    node_id: str
    node_ip: str
    log: str  # file on that node


class RankActor:
    """The process of one rank: `run` serves on one thread until it is stopped, and the rest answers on others."""

    def __init__(self, threads: int) -> None:
        os.environ.update(env.rank_variables(threads, os.environ))  # before torch and UCX are loaded
        self._stop = threading.Event()

    def home(self) -> Home:
        stderr = Path("/proc/self/fd/2")
        log = str(stderr.readlink()) if stderr.exists() else ""
        return Home(ProcessIdentity.own(), ray.get_runtime_context().get_node_id(), get_node_ip_address(), log)

    def run(self, spec: bytes, run_rank: RunRank | None) -> None:
        decoded = decode_spec(spec)
        configure_logging(process=decoded.name)
        try:
            if run_rank is None:
                from pd_cluster.launch import rank

                run_rank = rank.run_rank
            run_rank(decoded, self._stop)
        except Exception:
            traceback.print_exc()  # Ray hands it to the driver only; whoever reads the log wants it there
            raise

    def stop(self) -> None:
        self._stop.set()


class Node:
    """Looks after rank processes on one node: a plain object on the driver's own node, an actor on others."""

    def lives(self, process: ProcessIdentity) -> bool:
        return process.lives()

    def kill(self, process: ProcessIdentity) -> None:
        process.kill()

    def tail(self, log: str, num_lines: int) -> str:
        try:
            lines = Path(log).read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join([line for line in lines if not line.startswith(RAY_MARKS)][-num_lines:])


class NodeClient:
    """Reaches the `Node` of one node. When the node is lost, its ranks count as dead once their lease has run out.
    Thread-safe.
    """

    def __init__(self, node_id: str) -> None:
        self._asking = threading.Lock()
        self._asked: dict[ProcessIdentity, tuple[Any, float]] = {}  # answers that are due, and since when
        self._local = Node() if node_id == _own_node_id() else None
        self._actor: Any = None
        self._lost_s: float | None = None
        if self._local is None:
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._actor = ray.remote(Node).options(num_cpus=0, scheduling_strategy=strategy).remote()

    @property
    def is_lost(self) -> bool:
        """Whether it answers no more."""
        return self._lost_s is not None

    def lives(self, process: ProcessIdentity) -> bool:
        """Whether it may live, as far as is known: a node that does not answer keeps nobody waiting."""
        if self._local is not None:
            return self._local.lives(process)
        with self._asking:
            return self._remote_lives(process)

    def _remote_lives(self, process: ProcessIdentity) -> bool:
        if process not in self._asked:
            self._asked[process] = self._actor.lives.remote(process), time.monotonic()
        answer, asked_s = self._asked[process]
        if not ray.wait([answer], timeout=0)[0] and time.monotonic() - asked_s < NODE_TIMEOUT_S:
            return True
        del self._asked[process]
        try:
            lives = bool(ray.get(answer, timeout=0))
        except RayError:
            self._lost_s = self._lost_s or time.monotonic()
            return time.monotonic() - self._lost_s < LEASE_S + MARGIN_S
        self._lost_s = None
        return lives

    def kill(self, process: ProcessIdentity) -> None:
        if self._local is not None:
            self._local.kill(process)
        else:
            self._actor.kill.remote(process)

    def tail(self, log: str, num_lines: int) -> str:
        if self._local is not None:
            return self._local.tail(log, num_lines)
        try:
            return str(ray.get(self._actor.tail.remote(log, num_lines), timeout=NODE_TIMEOUT_S))
        except RayError:
            return ""


class RayHandle:
    """`on_gone` is called, by whoever polls, when the process is seen dead."""

    def __init__(
        self,
        spec: RankSpec,
        actor: Any,
        home: Home,
        node: NodeClient,
        run_rank: RunRank | None,
        on_gone: Callable[[EngineEpoch], None],
    ) -> None:
        self.spec = spec
        self._home = home
        self._actor = actor
        self._node = node
        self._on_gone = on_gone
        self._code: int | None = None  # known when `run` ended; told when the process is gone
        self._ended_s = 0.0
        self._gone = False
        self._running = actor.run.remote(encode_spec(spec), run_rank)

    @property
    def pid(self) -> int | None:
        return self._home.process.pid

    @property
    def node_id(self) -> str:
        return self._home.node_id

    @property
    def is_gone(self) -> bool:
        """As the latest poll found."""
        return self._gone

    def poll(self) -> int | None:
        if self._gone:
            return self._code
        if self._code is None:
            done, _ = ray.wait([self._running], timeout=0)
            if not done:
                return None
            self._ended_s = time.monotonic()  # first: whoever sees the code, on another thread, looks at it
            self._code = self._result()
            ray.kill(self._actor)
        if not self._node.lives(self._home.process):
            self._gone = True
            self._code = NODE_LOST if self._node.is_lost else self._code
            self._on_gone(self.spec.worker_epoch)
            return self._code
        if time.monotonic() - self._ended_s > KILL_S:
            self._node.kill(self._home.process)
        return None

    def _result(self) -> int:
        try:
            ray.get(self._running)
        except RayTaskError:
            return 1
        except RayActorError:
            return -9
        return 0

    def terminate(self) -> None:
        self._actor.stop.remote()

    def kill(self) -> None:
        ray.kill(self._actor)  # `poll` sees to it that the process ends

    def wait(self, timeout_s: float) -> int | None:
        deadline_s = time.monotonic() + timeout_s
        while (code := self.poll()) is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return code

    def log_tail(self, num_lines: int = 20) -> str:
        return self._node.tail(self._home.log, num_lines)


class RayLauncher:
    """Without an address a Ray cluster of this host's own is started, and ended by `close`; a process that belongs to
    one already uses that. `spare_cpus` of the cluster are left to others.
    """

    def __init__(self, address: str | None = None, run_rank: RunRank | None = None, *, spare_cpus: float = 0.0) -> None:
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        if address.startswith("ray://"):
            raise ConfigError(
                f"launch.ray_address {address} is a Ray client address: run this on a node of the Ray cluster and use "
                "`auto`, or HOST:PORT of its head"
            )
        self._run_rank = run_rank
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            _init(address)
        # on a cluster of this node alone nothing needs to leave the machine
        self._alone = [node["NodeID"] for node in ray.nodes() if node["Alive"]] == [_own_node_id()]
        self.host = "127.0.0.1" if self._alone else get_node_ip_address()
        self._places = Places(spare_cpus)
        self._handles: list[RayHandle] = []
        self._nodes: dict[str, NodeClient] = {}

    @property
    def loopback_node(self) -> str | None:
        """The node on whose loopback ranks listen; None when any node reaches them."""
        return _own_node_id() if self._alone else None

    def start(self, specs: list[RankSpec]) -> list[RankHandle]:
        self._forget_dead()
        lives: dict[EngineEpoch, list[RankSpec]] = {}
        for spec in specs:
            lives.setdefault(spec.worker_epoch, []).append(spec)
        actors: list[Any] = []
        try:
            gpu_shares = {spec.name: gpu_share_of(spec, specs) for spec in specs}
            groups = self._places.take(lives, self._leads())
            for spec in specs:
                group, index = groups[spec.worker_epoch], lives[spec.worker_epoch].index(spec)
                strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
                room = group.bundle_specs[index]
                options = {"name": f"{spec.name}-{spec.worker_epoch}", "max_concurrency": 4}
                options |= {"num_cpus": room["CPU"], "num_gpus": room.get("GPU", 0)}
                actor = ray.remote(RankActor).options(scheduling_strategy=strategy, max_restarts=0, **options)
                actors.append(actor.remote(spec.threads))
            homes: list[Home] = ray.get([actor.home.remote() for actor in actors], timeout=ACTOR_TIMEOUT_S)
            if self._alone and any(home.node_id != _own_node_id() for home in homes):
                raise ConfigError(
                    "the Ray cluster has grown by nodes that cannot reach this one's loopback: start again"
                )
        except (RayError, PdClusterError) as error:
            for actor in actors:
                ray.kill(actor)
            self._places.give_back(lives)
            if isinstance(error, PdClusterError):
                raise
            raise Unavailable(f"Ray could not start ranks: {error}") from error
        per_node = Counter(home.node_id for home in homes) + Counter(handle.node_id for handle in self._handles)
        started = []
        for spec, actor, home in zip(specs, actors, homes, strict=True):
            gpu = gpu_shares[spec.name]
            if home.node_id not in self._nodes:
                self._nodes[home.node_id] = NodeClient(home.node_id)
            node = self._nodes[home.node_id]
            host = self.host if self._alone else home.node_ip
            placed = msgspec.structs.replace(
                spec, bind_host=host, ranks_on_host=per_node[home.node_id], ranks_on_gpu=round(1 / gpu) if gpu else 1
            )
            started.append(RayHandle(placed, actor, home, node, self._run_rank, self._seen_gone))
        self._handles += started
        return list(started)

    def _leads(self) -> list[tuple[EngineId, str]]:
        """Where DP ranks run, by engine."""
        return [(handle.spec.engine_id, handle.node_id) for handle in self._handles if handle.spec.is_lead]

    def _forget_dead(self) -> None:
        self._handles = [handle for handle in self._handles if handle.poll() is None]

    def _seen_gone(self, life: EngineEpoch) -> None:
        """A rank of that life is: with the last one its place is others' to take."""
        if all(handle.is_gone for handle in self._handles if handle.spec.worker_epoch == life):
            self._places.give_back([life])

    def close(self) -> None:
        for handle in self._handles:
            if handle.poll() is None:
                handle.kill()
        for handle in self._handles:
            handle.wait(NODE_TIMEOUT_S)
        self._forget_dead()
        self._places.close()
        self._nodes.clear()
        if self._owns_ray:
            ray.shutdown()


def _own_node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _init(address: str) -> None:
    for name, value in env.RAY_VARIABLES.items():
        os.environ.setdefault(name, value)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "pd-cluster"}
    try:
        if address == "local":
            ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
        else:
            ray.init(address, **quiet)
    except (RuntimeError, OSError, ValueError, RayError) as error:
        place = "a local Ray cluster did not start" if address == "local" else f"no Ray cluster answers at {address}"
        reason = str(error).strip().splitlines()[0]
        raise Unavailable(f"{place}: {reason}; `--launcher process` needs no Ray") from error
