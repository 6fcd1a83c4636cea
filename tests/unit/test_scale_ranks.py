"""`scale --ranks`: from the command and the SDK over gRPC to the supervisor, whose ranks are plain objects."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

import pytest
from fake_worker import FakeWorker
from msgspec import structs
from test_elastic_supervisor import Running, config
from toy_router import toy_model

from pd_cluster import messages as m
from pd_cluster.cli.members_view import members as members_line
from pd_cluster.cli.members_view import runs
from pd_cluster.client import AsyncClient, EngineStatus, Role
from pd_cluster.config import ClusterConfig
from pd_cluster.errors import InvalidRequest
from pd_cluster.launch.cluster import Cluster
from pd_cluster.launch.spec import Release
from pd_cluster.launch.supervisor import Supervisor
from router.directory import Directory
from router.members import members

OVERRIDES = ["decode.tensor_parallel=2", "router.http_port=0", "router.grpc_port=0"]


@contextlib.asynccontextmanager
async def served(made: ClusterConfig, supervisor: Supervisor) -> AsyncIterator[AsyncClient]:
    """The router of a cluster whose supervisor is that one."""
    cluster = Cluster(made, model=toy_model(), http=True)  # type: ignore[arg-type]
    cluster._supervisor = supervisor
    await cluster.router.start()
    try:
        async with AsyncClient(f"127.0.0.1:{cluster.router.grpc_port}") as client:
            yield client
    finally:
        await cluster.router.stop()


async def test_an_engine_shrinks_and_grows_back_by_its_ranks() -> None:
    async with Running(*OVERRIDES) as running, served(config(*OVERRIDES), running.supervisor) as client:
        shrinking = asyncio.create_task(client.scale_ranks("decode", 2))
        await running.until(lambda: running.generation == 1)
        assert running.roster(1).leaving == {1, 2}
        running.launcher.rank(0).store.release(Release(1))
        assert await asyncio.wait_for(shrinking, 20) == ("decode-0", 6)
        assert running.roster(2).members == [0]
        assert await asyncio.wait_for(client.scale_ranks(Role.DECODE, 4, "decode-0"), 20) == ("decode-0", 2)
        assert running.roster(running.generation).members == [0, 1]
        growing = client.scale_ranks("decode", 4)
        assert await asyncio.wait_for(growing, 20) == ("decode-0", 4), "it is so already"


async def test_what_does_not_fit_is_refused_by_name() -> None:
    made = ["decode.instances=2", *OVERRIDES]
    async with Running(*made) as running, served(config(*made), running.supervisor) as client:
        for role, ranks, engine, reason in (
            ("decode", 4, None, "say which decode engine: there are decode-0 and decode-1"),
            ("decode", 4, "decode-7", "there is no decode engine decode-7: there are decode-0 and decode-1"),
            ("decode", 4, "prefill-0", "there is no decode engine prefill-0"),
            ("decode", 3, "decode-1", r"decode-1 has DP ranks of 2 ranks each \(tensor_parallel\): 3 is no multiple"),
            ("decode", 8, "decode-1", "decode-1 was started for 6 ranks: it can have 2 to 6, not 8"),
            ("prefill", 1, None, r"prefill-0 lives and dies as a whole: .*data_parallel above 1"),
            ("colocated", 1, None, "there are none"),
        ):
            with pytest.raises(InvalidRequest, match=reason):
                await client.scale_ranks(role, ranks, engine)
        assert running.generation == 0
        shrinking = asyncio.create_task(client.scale_ranks("decode", 2, "decode-0"))
        await running.until(lambda: running.generation == 1)
        running.launcher.rank(0).store.release(Release(1, "12 experts do not fit in 8 slots of 2 ranks"))
        with pytest.raises(InvalidRequest, match="decode-0 keeps its 3 DP ranks: 12 experts do not fit in 8 slots"):
            await asyncio.wait_for(shrinking, 20)


async def command(address: str, *arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pd_cluster.cli.main", "scale", *arguments, "--address", address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), errors.decode()


async def test_the_command_says_what_changed_or_what_to_say() -> None:
    async with Running(*OVERRIDES) as running, served(config(*OVERRIDES), running.supervisor) as client:
        address = client._connection.addresses[0]
        assert await command(address, "decode", "--ranks", "6") == (0, "decode-0: 6 -> 6 ranks\n", "")
        for arguments, reason in (
            (("decode",), "say how many"),
            (("decode", "2", "--ranks", "4"), "say how many"),
            (("decode", "2", "--engine", "decode-0"), "--engine goes with --ranks"),
            (("decode", "--ranks", "5"), "5 is no multiple"),
        ):
            code, _, errors = await command(address, *arguments)
            assert code in (1, 2)
            assert reason in errors


# ---- what is seen of it


def worker(dp_rank: int, engine: str = "decode-0", data_parallel: int = 4) -> m.WorkerInfo:
    return structs.replace(FakeWorker(engine, dp_rank=dp_rank).info, data_parallel=data_parallel)


def test_members_are_up_leaving_or_away() -> None:
    directory = Directory()
    for dp_rank in range(3):
        directory.welcome(worker(dp_rank), FakeWorker("decode-0", epoch=f"{dp_rank}").epoch)
    directory.welcome(worker(0, "prefill-0", 1), FakeWorker("prefill-0").epoch)
    leaving = directory.get(worker(1).worker_id)
    assert leaving is not None
    leaving.observe_load(m.WorkerLoad(draining=True))
    directory.lose(worker(2).worker_id, "its stream broke")
    (engine,) = members(directory.workers)
    assert (engine.engine_id, engine.up, engine.leaving, engine.away) == ("decode-0", [0], [1], [2, 3])


def test_a_line_tells_of_the_members_of_an_engine() -> None:
    engine = EngineStatus(
        engine_id="decode-0",
        role=Role.DECODE,
        data_parallel=8,
        tensor_parallel=2,
        up=[0, 1, 2, 5],
        leaving=[6],
        away=[3, 4, 7],
    )
    assert members_line(engine).plain == "decode-0: 8 DP ranks x TP2: 0-2, 5 up, 6 leaving, 3-4, 7 away"
    assert runs([]) == ""
