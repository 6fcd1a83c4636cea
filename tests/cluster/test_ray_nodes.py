"""A Ray cluster of several nodes: groups are packed or spread, a lost node takes only its ranks, a new one is used."""

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup
from test_ray_launcher import serve, specs, until

from pd_cluster import env
from pd_cluster.errors import Unavailable
from pd_cluster.launch.launcher import NODE_LOST
from pd_cluster.launch.ray import RayLauncher

pytestmark = pytest.mark.processes


def test_a_decode_group_spreads_over_nodes_and_a_lost_node_takes_only_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not ray.is_initialized()
    for name, value in env.RAY_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pd_cluster.launch.ray.LEASE_S", 1.0)
    monkeypatch.setattr("pd_cluster.launch.ray.MARGIN_S", 0.0)
    health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 6}
    head = {"num_cpus": 3, "include_dashboard": False, "_system_config": health}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(num_cpus=3)
    try:
        launcher = RayLauncher(cluster.address, serve)
        handles = launcher.start(specs("decode", 2) + specs("prefill", 2, epoch="f"))
        until(lambda: all(handle.log_tail() for handle in handles))
        spread, packed = handles[:2], handles[2:]
        assert len({handle.node_id for handle in spread}) == 2
        assert len({handle.node_id for handle in packed}) == 1
        on_other = [handle for handle in handles if handle.node_id == other.node_id]
        cluster.remove_node(other, allow_graceful=False)
        for handle in on_other:
            assert handle.wait(60) == NODE_LOST
        assert all(handle.poll() is None for handle in handles if handle not in on_other)
        monkeypatch.setattr(launcher._places, "_cpu_share", lambda _: 1.0)
        with pytest.raises(Unavailable, match="found no place for 3 ranks"):
            launcher.start(specs("decode", 3, epoch="g"))
        cluster.add_node(num_cpus=6)  # what was asked for stays in line, and a cluster that grows has it
        until(lambda: all(ray.util.placement_group_table(group)["state"] == "CREATED" for group in waiting(launcher)))
        handles += launcher.start(specs("decode", 3, epoch="h"))
        assert not waiting(launcher)
        launcher.close()
        assert all(handle.poll() is not None for handle in handles)
    finally:
        ray.shutdown()
        cluster.shutdown()


def waiting(launcher: RayLauncher) -> list[PlacementGroup]:
    return launcher._places.in_line
