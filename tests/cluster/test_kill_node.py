"""A Ray node is lost with the ranks on it: their engines start on another node, and streams go on to the right end."""

import asyncio
import contextlib
import os
import signal
import time

import pytest
import ray
from living import LivingCluster, config_of, longest_gap
from ray.cluster_utils import Cluster

from pd_cluster import env
from pd_cluster.ids import EngineId, Rank

pytestmark = pytest.mark.processes

ENGINES = ("prefill-0", "decode-0", "decode-1")
PROMPT = [3 + (i * i + 5 * i) % 500 for i in range(100)]
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 3}


def node_of(cluster: LivingCluster, engine: str) -> str:
    handle = cluster.cluster.supervisor.engines[EngineId(engine)].handles[Rank(0)]
    return str(handle.node_id)  # type: ignore[attr-defined]


async def test_the_node_that_decodes_is_lost_in_mid_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head has no room for ranks; each of two nodes has room for all of them."""
    assert not ray.is_initialized()
    for name, value in env.RAY_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pd_cluster.launch.ray.LEASE_S", 1.0)  # node loss is certain here; a partition takes longer
    monkeypatch.setattr("pd_cluster.launch.ray.MARGIN_S", 0.0)
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    by_id = {node.node_id: node for node in (nodes.add_node(num_cpus=3), nodes.add_node(num_cpus=3))}
    config = config_of(
        "demo",
        decode__instances=2,
        launch__launcher="ray",
        launch__ray_address=nodes.address,
        security__allow_insecure=True,
    )
    times_s: list[float] = []
    lost_s = 0.0

    async def on_token(num_tokens: int) -> None:
        nonlocal lost_s
        times_s.append(time.monotonic())
        if num_tokens >= 32 and not lost_s:
            lost = node_of(cluster, cluster.decode_engine("n"))
            victims = [cluster.pid(name) for name in ENGINES if node_of(cluster, name) == lost]
            lost_s = time.monotonic()
            await asyncio.to_thread(nodes.remove_node, by_id[lost], allow_graceful=False)
            for pid in victims:  # at once, as when the power goes
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    try:
        async with LivingCluster(config) as cluster:
            places = {name: node_of(cluster, name) for name in ENGINES}
            expected = await cluster.greedy(PROMPT, max_tokens=150)
            output = await cluster.greedy(PROMPT, on_token, "n", max_tokens=150)
            assert output.token_ids == expected.token_ids
            assert output.timings.num_retries >= 1
            healed_s = await cluster.until_healthy()
            (survivor,) = {node["NodeID"] for node in ray.nodes() if node["Alive"]} & set(by_id)
            assert {node_of(cluster, name) for name in places} == {survivor}
            num_lost = sum(place != survivor for place in places.values())
            print(
                f"{num_lost} of 3 ranks lost with their node: the stream stood {longest_gap(times_s):.2f} s, "
                f"all workers after {healed_s - lost_s:.2f} s"
            )
            assert (await cluster.greedy(PROMPT, max_tokens=150)).token_ids == expected.token_ids
            await cluster.until_accounted()
    finally:
        ray.shutdown()
        nodes.shutdown()
