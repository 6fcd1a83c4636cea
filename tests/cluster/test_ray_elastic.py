"""An elastic decode engine on two Ray nodes: its DP ranks lie on both, come and go, and are lost with one."""

import asyncio
import time
from collections import Counter

import pytest
import ray
from living import LivingCluster, longest_gap
from losing import MAX_WAIT_S, Streams, elastic, ids_of
from processes import is_alive
from ray.cluster_utils import Cluster

from pd_cluster import env
from pd_cluster.ids import EngineEpoch, EngineId
from pd_cluster.launch.ray import RayHandle
from pd_cluster.launch.ray_places import spread

pytestmark = pytest.mark.processes

HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 6}
NODE_CPUS = 5
"""Room for all ranks on either node."""


def handles(cluster: LivingCluster) -> dict[str, RayHandle]:
    """Of all ranks that live, by name."""
    found = {}
    for engine in cluster.cluster.supervisor.engines.values():
        for handle in engine.handles.values():
            assert isinstance(handle, RayHandle)
            found[handle.spec.name] = handle
    return found


def nodes_of(cluster: LivingCluster) -> dict[str, str]:
    """DP rank of the decode engine -> node, as routers name the one and Ray the other."""
    return {
        handle.spec.worker_id: handle.node_id for handle in handles(cluster).values() if handle.spec.role == "decode"
    }


async def until_free(num_cpus: float) -> None:
    """Wait until so many CPUs of the Ray cluster are nobody's."""
    async with asyncio.timeout(20):
        while ray.available_resources().get("CPU", 0.0) != num_cpus:  # noqa: ASYNC110 (of Ray)
            await asyncio.sleep(0.05)


async def test_an_engine_spreads_over_nodes_shrinks_grows_and_goes_on_without_a_lost_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not ray.is_initialized()
    for name, value in env.RAY_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("losing.NUM_STREAMS", 4)
    monkeypatch.setattr("pd_cluster.launch.ray.LEASE_S", 1.0)  # node loss is certain here; a partition takes longer
    monkeypatch.setattr("pd_cluster.launch.ray.MARGIN_S", 0.0)
    head = {"num_cpus": NODE_CPUS, "include_dashboard": False, "_system_config": HEALTH}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        other = nodes.add_node(num_cpus=NODE_CPUS)
        config = elastic(
            decode__data_parallel=3,
            decode__expert_slots_per_rank=32,  # any one carries on
            launch__launcher="ray",
            launch__ray_address=nodes.address,
            security__allow_insecure=True,
        )
        async with LivingCluster(config) as cluster:
            assert sorted(Counter(nodes_of(cluster).values()).values()) == [1, 2]
            expected = ids_of(await Streams(cluster).ended())

            streams = Streams(cluster)
            await streams.begun()
            began_s = time.monotonic()
            assert await cluster.cluster.scale_ranks("decode", 2) == ("decode-0", 3)
            shrunk_s = time.monotonic() - began_s
            await until_free(2 * NODE_CPUS - 3)
            assert await cluster.cluster.scale_ranks("decode", 3) == ("decode-0", 2)
            grown_s = time.monotonic() - began_s - shrunk_s
            outputs = await streams.ended()
            assert ids_of(outputs) == expected
            assert {output.timings.num_retries for output in outputs} == {0}
            assert sorted(Counter(nodes_of(cluster).values()).values()) == [1, 2]
            await until_free(2 * NODE_CPUS - 4)

            streams = Streams(cluster)
            await streams.begun()
            where = streams.where()
            lost = {worker for worker, node in nodes_of(cluster).items() if node == other.node_id}
            pids = {name: handle.pid for name, handle in handles(cluster).items() if handle.node_id == other.node_id}
            lost_s = time.monotonic()
            await asyncio.to_thread(nodes.remove_node, other, allow_graceful=False)
            outputs = await streams.ended()
            assert ids_of(outputs) == expected
            waits_s: dict[bool, list[float]] = {False: [], True: []}
            for at_worker, times, output in zip(where, streams._times_s, outputs, strict=True):
                assert (output.timings.num_retries > 0) == (at_worker in lost), (at_worker, output.timings)
                waits_s[at_worker in lost].append(longest_gap([lost_s, *(at for at in times if at > lost_s)]))
            assert max(waits_s[False], default=0.0) < MAX_WAIT_S
            healed_s = await cluster.until_healthy() - lost_s
            assert set(nodes_of(cluster).values()) == {ray.get_runtime_context().get_node_id()}
            assert not any(is_alive(pid) for pid in pids.values() if pid is not None)
            assert cluster.deaths("decode-0") == 1 + len(lost), "of the one that left and those that were lost"
            assert ids_of(await Streams(cluster).ended()) == expected
            pids = {name: handle.pid for name, handle in handles(cluster).items()}
            print(
                f"\nfrom 3 DP ranks to 2 in {shrunk_s:.2f} s, back in {grown_s:.2f} s; a node lost with {len(lost)} of "
                f"them: the other streams stood {max(waits_s[False], default=0.0):.2f} s, those that moved "
                f"{max(waits_s[True], default=0.0):.2f} s, all workers after {healed_s:.2f} s"
            )
        assert not any(is_alive(pid) for pid in pids.values() if pid is not None)
    finally:
        ray.shutdown()
        nodes.shutdown()


def test_dp_ranks_go_where_the_fewest_of_their_engine_are_and_where_they_fit() -> None:
    nodes = {"a": {"CPU": 8.0, "GPU": 4.0}, "b": {"CPU": 8.0, "GPU": 4.0}, "head": {"CPU": 0.0}}
    wanted = {EngineEpoch(f"e{index}"): {"CPU": 1.0, "GPU": 2.0} for index in range(4)}
    engine, another = EngineId("decode-0"), EngineId("decode-1")
    assert list(spread(wanted, dict.fromkeys(wanted, engine), nodes, {}).values()) == ["a", "b", "a", "b"]
    there = {(engine, "a"): 2, (another, "b"): 9}
    assert list(spread(wanted, dict.fromkeys(wanted, engine), nodes, there).values()) == ["b", "b", "a", "b"]
    assert spread({EngineEpoch("large"): {"CPU": 1.0, "GPU": 8.0}}, {EngineEpoch("large"): engine}, nodes, {}) == {}
