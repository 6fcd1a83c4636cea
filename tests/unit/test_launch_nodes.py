"""An engine over several nodes: the real store between a launcher and its agents, whose ranks are plain objects."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pd_cluster.config import ClusterConfig, load_config
from pd_cluster.errors import ConfigError, Unavailable
from pd_cluster.ids import EngineEpoch, Rank
from pd_cluster.launch.launcher import NODE_LOST, RankHandle
from pd_cluster.launch.node_agent import NodeAgent
from pd_cluster.launch.nodes import LOOK_S, SILENT_S, NodesLauncher, Place
from pd_cluster.launch.roles import engine_shape, rank_specs
from pd_cluster.launch.spec import RankSpec
from pd_cluster.launch.store import StoreServer

WITHIN_S = 10.0


class ShiftedClock:
    """The system's clock, which a test may put forward: threads wait for real here."""

    def __init__(self) -> None:
        self._shift_s = 0.0

    def now_s(self) -> float:
        return time.monotonic() + self._shift_s

    def advance(self, seconds: float) -> None:
        self._shift_s += seconds


class FakeRank:
    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self.pid = 1000 + spec.rank
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.code = 0 if self.code is None else self.code

    def kill(self) -> None:
        self.code = -9 if self.code is None else self.code

    def wait(self, timeout_s: float) -> int | None:
        return self.code

    def log_tail(self, num_lines: int = 20) -> str:
        return "its last word"


class FakeLauncher:
    host = "127.0.0.1"

    def __init__(self) -> None:
        self.ranks: list[FakeRank] = []
        self.refuse = False
        self.closed = False

    def start(self, specs: list[RankSpec]) -> list[RankHandle]:
        if self.refuse:
            raise Unavailable("no room here")
        started = [FakeRank(spec) for spec in specs]
        self.ranks += started
        return list(started)

    def close(self) -> None:
        self.closed = True


def config(**values: int) -> ClusterConfig:
    return load_config(values={key.replace("__", "."): value for key, value in values.items()})


def place(node: int, num_nodes: int = 2, *, dp: int = 4, tp: int = 1) -> Place:
    shape = engine_shape("decode", 0, config(decode__data_parallel=dp, decode__tensor_parallel=tp))
    return Place.of(shape, node, num_nodes, f"127.0.1.{node + 1}", 7000)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


class Engine:
    """Node 0 with its store, and agents on threads."""

    def __init__(self, num_nodes: int = 2) -> None:
        self.num_nodes = num_nodes
        self.store = StoreServer()
        self.clock = ShiftedClock()
        self.local = FakeLauncher()
        self.launcher = NodesLauncher(place(0, num_nodes), self.local, wait_s=WITHIN_S, clock=self.clock)
        self.agents: list[NodeAgent] = []
        self.launchers: list[FakeLauncher] = []
        self.threads: list[threading.Thread] = []
        self.num_lives = 0

    def join(self, node: int = 1) -> tuple[NodeAgent, FakeLauncher]:
        local = FakeLauncher()
        agent = NodeAgent(place(node, self.num_nodes), local, "127.0.0.1", self.store.port)
        thread = threading.Thread(target=agent.run)
        thread.start()
        self.agents.append(agent)
        self.launchers.append(local)
        self.threads.append(thread)
        return agent, local

    def start(self) -> list[RankHandle]:
        self.num_lives += 1
        epoch = EngineEpoch(f"life-{self.num_lives}")
        address = (self.store.host, self.store.port)
        shape = place(0, self.num_nodes).shape
        return self.launcher.start(rank_specs(shape, epoch, config(decode__data_parallel=4), address, 4))

    def codes(self, handles: list[RankHandle]) -> list[int | None]:
        self.clock.advance(LOOK_S)
        return [handle.poll() for handle in handles]

    def stop(self) -> None:
        for agent in self.agents:
            agent.stop.set()
        for thread in self.threads:
            thread.join(WITHIN_S)
            assert not thread.is_alive()
        self.launcher.close()
        self.store.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.stop()


# ---- who runs what


def test_ranks_are_dealt_out_evenly_and_leads_listen_side_by_side() -> None:
    first, second = place(0, dp=4, tp=2), place(1, dp=4, tp=2)
    assert (list(first.ranks), list(second.ranks)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert second.lead_addresses == ["127.0.1.2:7000", "127.0.1.2:7001"]
    shape = second.shape
    specs = rank_specs(shape, EngineEpoch("e"), ClusterConfig(), ("127.0.0.1", 1), 8)[4:]
    done = second.complete(specs)
    assert [spec.control_port for spec in done] == [7000, 0, 7001, 0]
    assert {spec.control_host for spec in done} == {spec.bind_host for spec in done} == {"127.0.1.2"}
    assert {spec.ranks_on_host for spec in done} == {4}


def test_ranks_of_a_node_alone_meet_on_loopback() -> None:
    alone = place(0, 1)
    (first, *_) = alone.complete(rank_specs(alone.shape, EngineEpoch("e"), ClusterConfig(), ("127.0.0.1", 1), 4))
    assert (first.bind_host, first.control_host) == ("127.0.0.1", "127.0.1.1")


def test_a_worker_over_two_nodes_has_one_control_port() -> None:
    assert place(0, 2, dp=1, tp=4).lead_addresses == ["127.0.1.1:7000"]
    assert place(1, 2, dp=1, tp=4).lead_addresses == []


def test_an_engine_that_nodes_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 ranks .* which 3 nodes cannot share evenly"):
        place(0, 3)
    with pytest.raises(ConfigError, match="between 0 and 1, got 2"):
        place(2, 2)


# ---- the launcher and its agents


def test_every_node_starts_its_share(engine: Engine) -> None:
    agent, remote = engine.join()
    handles = engine.start()
    assert [handle.spec.rank for handle in handles] == [0, 1, 2, 3]
    assert [rank.spec.rank for rank in engine.local.ranks] == [0, 1]
    until(lambda: len(remote.ranks) == 2)
    assert [rank.spec.rank for rank in remote.ranks] == [2, 3]
    assert remote.ranks[0].spec.control_host == "127.0.1.2"
    assert engine.codes(handles) == [None] * 4
    assert agent.num_starts == 1


def test_the_end_of_a_rank_elsewhere_is_seen_with_its_last_word(engine: Engine) -> None:
    _, remote = engine.join()
    handles = engine.start()
    until(lambda: len(remote.ranks) == 2)
    remote.ranks[1].code = 1
    until(lambda: engine.codes(handles) == [None, None, None, 1])
    assert handles[3].log_tail() == "its last word"


def test_what_is_killed_or_asked_to_end_ends_everywhere(engine: Engine) -> None:
    _, remote = engine.join()
    handles = engine.start()
    until(lambda: len(remote.ranks) == 2)
    handles[2].terminate()
    until(lambda: engine.codes(handles)[2:] == [0, 0])
    again = engine.start()
    until(lambda: len(remote.ranks) == 4)
    for handle in again:
        handle.kill()
    until(lambda: engine.codes(again) == [-9] * 4)
    assert engine.codes(handles)[2:] == [0, 0], "a former life keeps its end"


def test_a_node_that_could_not_start_its_ranks_says_why(engine: Engine) -> None:
    _, remote = engine.join()
    remote.refuse = True
    handles = engine.start()
    until(lambda: engine.codes(handles)[2:] == [1, 1])
    assert handles[2].log_tail() == "no room here"


def test_ranks_of_a_silent_node_count_as_dead_only_when_their_lease_is_over(engine: Engine) -> None:
    agent, remote = engine.join()
    handles = engine.start()
    until(lambda: len(remote.ranks) == 2)
    until(lambda: engine.codes(handles) == [None] * 4)
    agent._tell = lambda _store: None  # type: ignore[method-assign]  # its words are lost from now on
    time.sleep(0.3)
    engine.codes(handles)
    engine.clock.advance(SILENT_S - 5)
    assert engine.codes(handles) == [None] * 4
    engine.clock.advance(5)
    assert engine.codes(handles) == [None, None, NODE_LOST, NODE_LOST]
    assert "out of reach" in handles[3].log_tail()


def test_ranks_of_an_agent_that_was_started_anew_are_dead(engine: Engine) -> None:
    agent, remote = engine.join()
    handles = engine.start()
    until(lambda: len(remote.ranks) == 2)
    agent.stop.set()
    engine.threads[0].join(WITHIN_S)
    assert {rank.code for rank in remote.ranks} == {-9}
    until(lambda: engine.codes(handles)[2:] == [-9, -9])
    _, again = engine.join()
    until(lambda: engine.codes(engine.start()) == [None] * 4 and len(again.ranks) == 2)


def test_a_start_waits_for_nodes_and_names_those_that_do_not_come() -> None:
    engine = Engine(num_nodes=4)
    try:
        engine.join(1)
        engine.join(3)
        threading.Timer(0.5, engine.clock.advance, [WITHIN_S + 1]).start()
        with pytest.raises(Unavailable, match=r"decode-0: nodes 2 did not come"):
            engine.start()
    finally:
        engine.stop()


def test_a_start_that_waits_can_be_abandoned(engine: Engine) -> None:
    threading.Timer(0.2, engine.launcher.abandon).start()
    with pytest.raises(Unavailable, match="stopped while it waited"):
        engine.start()


def test_a_store_that_is_gone_kills_the_ranks_and_a_new_one_is_found() -> None:
    engine = Engine()
    agent, remote = engine.join()
    engine.start()
    until(lambda: len(remote.ranks) == 2)
    port = engine.store.port
    engine.store.close()
    until(lambda: {rank.code for rank in remote.ranks} == {-9})
    assert not agent.ready
    engine.launcher = NodesLauncher(place(0), engine.local, wait_s=WITHIN_S, clock=engine.clock)
    until(lambda: _is_free(port))
    engine.store = StoreServer(port=port)
    try:
        engine.start()
        until(lambda: len(remote.ranks) == 4)
    finally:
        engine.stop()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_nodes_hear_that_the_engine_serves_and_drain_together(engine: Engine) -> None:
    agent, remote = engine.join()
    handles = engine.start()
    until(lambda: len(remote.ranks) == 2)
    assert not agent.ready
    engine.launcher.announce(ready=True)
    until(lambda: agent.ready)
    assert not engine.launcher.told_to_drain

    agent.told_to_drain.set()

    def told() -> bool:
        engine.codes(handles)
        return engine.launcher.told_to_drain

    until(told)
    assert not engine.launcher.others_drained
    engine.launcher.announce(drain=True)
    until(lambda: agent.draining)
    agent.drained.set()

    def drained() -> bool:
        engine.codes(handles)
        return engine.launcher.others_drained

    until(drained)
    engine.launcher.announce(drained=True)
    until(lambda: agent.all_drained)


def test_engines_of_any_number_have_the_shape_of_their_role() -> None:
    shape = engine_shape("prefill", 12, config(prefill__tensor_parallel=4))
    assert (shape.engine_id, shape.num_ranks) == ("prefill-12", 4)
    assert [Rank(rank) for rank in Place.of(shape, 1, 2, "h", 1).ranks] == [2, 3]


# ---- DP ranks that live and die one by one


def lives(**named: str) -> dict[int, EngineEpoch]:
    return {int(key[1:]): EngineEpoch(life) for key, life in named.items()}


def start_members(engine: Engine, epoch: str = "e", **named: str) -> list[RankHandle]:
    shape = place(0, engine.num_nodes).shape
    address = (engine.store.host, engine.store.port)
    made = rank_specs(shape, EngineEpoch(epoch), config(decode__data_parallel=4), address, 4, lives(**named))
    return engine.launcher.start(made)


def test_a_member_on_another_node_ends_and_starts_alone(engine: Engine) -> None:
    _, remote = engine.join()
    handles = start_members(engine, d0="a", d1="b", d2="c", d3="d")
    until(lambda: len(remote.ranks) == 2)
    engine.launcher.announce(ready=True)
    handles[3].kill()
    until(lambda: engine.codes(handles) == [None, None, None, -9])
    (again,) = start_members(engine, d3="f")
    until(lambda: len(remote.ranks) == 3)
    assert [(rank.spec.rank, rank.spec.worker_epoch, rank.code) for rank in remote.ranks] == [
        (2, "c", None),
        (3, "d", -9),
        (3, "f", None),
    ]
    assert remote.ranks[2].spec.control_port == 7001, "where the one before it listened"
    assert remote.ranks[2].spec.ranks_on_host == 2
    assert engine.codes([*handles, again]) == [None, None, None, -9, None]
    assert engine.agents[0].ready
    again.terminate()
    until(lambda: engine.codes([again]) == [0])
    assert engine.codes(handles[:3]) == [None] * 3
    assert len(engine.local.ranks) == 2


def test_a_member_on_this_node_starts_without_the_others(engine: Engine) -> None:
    _, remote = engine.join()
    start_members(engine, d0="a", d1="b", d2="c", d3="d")
    until(lambda: len(remote.ranks) == 2)
    (again,) = start_members(engine, d1="g")
    assert [rank.spec.worker_epoch for rank in engine.local.ranks] == ["a", "b", "g"]
    assert engine.local.ranks[-1].spec.control_port == 7001
    assert engine.codes([again]) == [None]


def test_a_member_does_not_wait_for_a_node_that_is_away(engine: Engine) -> None:
    agent, remote = engine.join()
    handles = start_members(engine, d0="a", d1="b", d2="c", d3="d")
    until(lambda: len(remote.ranks) == 2)
    agent.stop.set()
    engine.threads[0].join(WITHIN_S)
    assert engine.codes(handles)[2:] == [-9, -9]
    engine.clock.advance(SILENT_S)
    began_s = time.monotonic()
    with pytest.raises(Unavailable, match="nodes 1 did not come"):
        start_members(engine, d3="f")
    assert time.monotonic() - began_s < 1.0
    start_members(engine, d0="g")


def test_a_new_life_of_the_whole_engine_replaces_all_members(engine: Engine) -> None:
    _, remote = engine.join()
    start_members(engine, d0="a", d1="b", d2="c", d3="d")
    until(lambda: len(remote.ranks) == 2)
    engine.launcher.announce(ready=True)
    handles = start_members(engine, "e2", d0="h", d1="i", d2="j", d3="k")
    until(lambda: len(remote.ranks) == 4)
    assert [rank.code for rank in remote.ranks] == [-9, -9, None, None]
    assert engine.codes(handles) == [None] * 4
    until(lambda: not engine.agents[0].ready)
