"""A worker's pod from outside: its place by ordinal, its probes, and what is refused before anything starts."""

import httpx
import pytest
from fake_worker import Cluster, FakeWorker, request
from typer.testing import CliRunner

from pd_cluster import messages as m
from pd_cluster.cli.main import app
from pd_cluster.cli.worker import place_of
from pd_cluster.errors import ConfigError
from pd_cluster.ids import EngineId
from pd_cluster.launch.probes import build_probes
from router.directory import Directory

runner = CliRunner()


@pytest.mark.parametrize(
    ("ordinal", "num_nodes", "expected"),
    [("0", 1, (0, 0)), ("pd-decode-3", 1, (3, 0)), ("pd-decode-5", 2, (2, 1)), ("pd-decode-39", 40, (0, 39))],
)
def test_the_ordinal_says_which_engine_and_which_of_its_pods(
    ordinal: str, num_nodes: int, expected: tuple[int, int]
) -> None:
    assert place_of(ordinal, num_nodes, None, None) == expected


def test_engine_and_node_may_be_named_instead() -> None:
    assert place_of("pod", 4, 2, 3) == (2, 3)
    with pytest.raises(ConfigError, match="ends in one, got 'pod'"):
        place_of("pod", 4, None, 3)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["worker", "--role", "decode", "--host", "10.1.2.3"], "leaves this machine"),
        (["worker", "--role", "decode", "--ordinal", "1", "--num-nodes", "2"], "cannot share evenly"),
        (
            ["worker", "--role", "decode", "--ordinal", "1", "--num-nodes", "2", "--set", "decode.data_parallel=2"],
            "needs --head",
        ),
        (
            [
                "worker",
                "--role",
                "decode",
                "--num-nodes",
                "2",
                "--host",
                "10.1.2.3",
                "--set",
                "decode.data_parallel=2",
                "--set",
                "security.certificate=c",
                "--set",
                "security.root_certificates=r",
            ],
            "the 2 pods of an engine meet at ports without TLS",
        ),
        (["worker", "--role", "decode", "--set", "security.token_file=/nowhere"], "cannot read /nowhere"),
        (["router", "--discover", "static:10.1.2.3"], "an address is HOST:PORT"),
    ],
)
def test_a_mistake_ends_the_command_before_anything_starts(args: list[str], reason: str) -> None:
    result = runner.invoke(app, args)
    assert result.exit_code == 2
    assert reason in result.output
    assert result.output.count("\n") == 1


class Status:
    engine_id = EngineId("decode-0")
    started = False
    trouble: str | None = "decode-0 does not serve"
    draining = False
    num_starts = 0


async def test_probes_say_what_is_the_matter_and_liveness_does_not_care() -> None:
    status, directory = Status(), Directory()
    transport = httpx.ASGITransport(app=build_probes(status, directory))
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as pod:

        async def codes() -> list[int]:
            paths = ("/livez", "/startupz", "/readyz", "/health")
            return [(await pod.get(path)).status_code for path in paths]

        assert await codes() == [200, 503, 503, 503]
        assert (await pod.get("/readyz")).json() == {"status": "not ready", "reason": "decode-0 does not serve"}
        status.started, status.trouble, status.num_starts = True, None, 1
        worker = FakeWorker("decode-0")
        directory.welcome(worker.info, worker.epoch)
        assert await codes() == [200, 200, 200, 200]
        text = (await pod.get("/metrics")).text
        assert 'pd_cluster_node_ready{engine="decode-0"} 1.0' in text
        assert 'pd_cluster_engine_starts_total{engine="decode-0"} 1.0' in text
        assert 'pd_cluster_kv_blocks{role="decode",worker="decode-0/0"} 64.0' in text
        status.trouble, status.draining = "it drains", True
        assert await codes() == [200, 200, 503, 503]
        assert 'pd_cluster_node_draining{engine="decode-0"} 1.0' in (await pod.get("/metrics")).text


async def test_a_new_life_of_an_engine_proves_that_the_last_one_is_dead() -> None:
    """Without a supervisor of the whole cluster nobody else tells routers, and decode would keep blocks for ever."""
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    prefill.stuck_pushes = True
    cluster = Cluster(prefill, decode)
    cluster.pipeline.submit(request(max_tokens=4))
    cluster.settle()
    assert decode.reserved
    cluster.attach(FakeWorker("prefill-0", epoch="2"))
    cluster.settle()
    dead = [message.dead for message in decode.seen if isinstance(message, m.EngineDead)]
    assert dead == [prefill.epoch]
    assert not decode.quarantined
