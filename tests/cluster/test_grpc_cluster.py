"""The gRPC API and the SDK over a real cluster: workers in this process, routers that can be killed in their own."""

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from harness import CHECKPOINTS, LocalCluster, config_of
from processes import Command, free_port, is_alive, running

from pd_cluster.client import AsyncClient, Client, Completion, FinishReason, Health, Role
from pd_cluster.engine.torch_engine import TorchEngine
from pd_cluster.errors import InvalidRequest, PdClusterError, Unavailable
from pd_cluster.launch.cluster import Cluster

MODEL = CHECKPOINTS / "llama"
PROMPTS = [
    (prompt["ids"], prompt["greedy_ids"]) for prompt in json.loads((MODEL / "reference.json").read_text())["prompts"]
]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


class RouterProcess:
    """`pd-cluster router` in front of the workers of a LocalCluster."""

    def __init__(self, cluster: LocalCluster, command: Command, port: int) -> None:
        self._cluster = cluster
        self.command = command
        self.address = f"127.0.0.1:{port}"

    def kill(self) -> None:
        self.command.signal(signal.SIGKILL)
        self.command.process.wait()

    async def until_ready(self) -> None:
        async with AsyncClient(self.address) as client, asyncio.timeout(60):
            while not await is_ready(client, self._cluster):
                assert self.command.process.poll() is None, self.command.stderr
                await asyncio.sleep(0.1)


async def is_ready(client: AsyncClient, cluster: LocalCluster) -> bool:
    try:
        return len((await client.status()).workers) == len(cluster.leads())
    except Unavailable:
        return False


@asynccontextmanager
async def router_process(cluster: LocalCluster, port: int | None = None) -> AsyncIterator[RouterProcess]:
    port = port or free_port()
    workers = "static:" + ",".join(client.address for client in cluster.router._clients.values())
    settings = ["model.path=" + str(MODEL), f"router.grpc_port={port}", "kv.block_size=16"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    with running("router", "--discover", workers, "--http-port", "0", *arguments) as command:
        yield RouterProcess(cluster, command, port)


def config(**values: object):
    return config_of(MODEL, kv__num_blocks=256, **values)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ms and more a step, so that a stream of 120 tokens is caught in its middle."""
    collect = TorchEngine.collect

    def slowly(engine: TorchEngine):
        time.sleep(0.01)
        return collect(engine)

    monkeypatch.setattr(TorchEngine, "collect", slowly)


async def test_answers_are_the_references():
    made = LocalCluster(config(decode__data_parallel=2), http=True)
    async with made as cluster, AsyncClient(f"127.0.0.1:{cluster.router.grpc_port}") as client:
        for _ in range(2):
            answers = await asyncio.gather(
                *(client.generate(ids, max_tokens=len(greedy), **GREEDY) for ids, greedy in PROMPTS)
            )
            assert [answer.token_ids for answer in answers] == [greedy for _, greedy in PROMPTS]
            assert all(answer.timings.prefill_worker for answer in answers)
        status = await client.status()
        assert status.totals.num_output_tokens == 2 * sum(len(greedy) for _, greedy in PROMPTS)


@pytest.mark.processes
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 12, "presence_penalty": 0.5}])
async def test_streams_of_a_killed_router_go_on_at_another_one(sampling, slow_steps):
    """Kill -9 in mid-stream: every stream is equal to the undisturbed one, and the workers' blocks are all free."""
    async with LocalCluster(config()) as cluster:  # noqa: SIM117 (the routers go first)
        async with router_process(cluster) as first, router_process(cluster) as second:
            await asyncio.gather(first.until_ready(), second.until_ready())
            options = {"max_tokens": 120, "ignore_eos": True, "logprobs": 0} | sampling
            async with AsyncClient(second.address) as client:
                undisturbed = await asyncio.gather(*(client.generate(ids, **options) for ids, _ in PROMPTS))
            async with AsyncClient([first.address, second.address]) as client:
                client._turn.index = 0
                progress = dict.fromkeys(range(len(PROMPTS)), 0)

                async def follow(index: int):
                    async with client.stream(PROMPTS[index][0], **options) as stream:
                        async for chunk in stream:
                            progress[index] += len(chunk.token_ids)
                        return stream.completion

                streams = [asyncio.ensure_future(follow(index)) for index in progress]
                async with asyncio.timeout(60):
                    while not all(count >= 5 for count in progress.values()):  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
                assert not any(stream.done() for stream in streams)
                first.kill()
                killed_s = time.monotonic()
                before = sum(progress.values())
                async with asyncio.timeout(60):
                    while sum(progress.values()) == before:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
                print(f"tokens again {time.monotonic() - killed_s:.3f} s after the kill")
                disturbed = await asyncio.gather(*streams)
            for calm, torn in zip(undisturbed, disturbed, strict=True):
                assert torn.token_ids == calm.token_ids
                assert torn.text == calm.text
                assert torn.num_resumes >= 1
                assert [token.chosen for token in torn.logprobs] == pytest.approx(
                    [token.chosen for token in calm.logprobs], abs=1e-4
                )
            await cluster.until_free()


@pytest.mark.processes
async def test_a_stream_waits_for_its_only_router_to_be_started_again(slow_steps):
    async with LocalCluster(config()) as cluster:
        port = free_port()
        ids, _ = PROMPTS[0]
        options = {"max_tokens": 120, **GREEDY}
        async with router_process(cluster, port) as first:
            await first.until_ready()
            with Client(first.address) as client:
                undisturbed = await asyncio.to_thread(lambda: client.generate(ids, **options))
                loop, half = asyncio.get_running_loop(), asyncio.Event()

                def follow():
                    with client.stream(ids, **options) as stream:
                        for _ in stream:
                            if len(stream.token_ids) >= 10:
                                loop.call_soon_threadsafe(half.set)
                        return stream.completion

                following = asyncio.ensure_future(asyncio.to_thread(follow))
                await asyncio.wait_for(half.wait(), 30)
                first.kill()
                killed_s = time.monotonic()
                async with router_process(cluster, port) as second:
                    completion = await asyncio.wait_for(following, 60)
                    print(f"done {time.monotonic() - killed_s:.2f} s after the kill, its restart included")
                    assert second.command.process.poll() is None
        assert completion.token_ids == undisturbed.token_ids
        assert completion.text == undisturbed.text
        assert completion.num_resumes >= 1
        await cluster.until_free()


async def test_two_hundred_cancelled_streams_leave_nothing_on_either_side(slow_steps):
    """By every way out: the stream is left, its task is cancelled, its deadline passes, the client hangs up."""
    rng = random.Random(3)
    async with LocalCluster(config(decode__max_num_seqs=16), http=True) as cluster:
        address = f"127.0.0.1:{cluster.router.grpc_port}"

        async def leave(client: AsyncClient, way: str, ids: list[int]) -> None:
            if way == "deadline":
                with pytest.raises(PdClusterError):
                    await client.generate(ids, max_tokens=400, timeout_s=rng.uniform(0.01, 0.3), **GREEDY)
                return
            async with client.stream(ids, max_tokens=400, **GREEDY) as stream:
                for _ in range(rng.randrange(4)):
                    await anext(stream)
                if way == "task":
                    reading = asyncio.ensure_future(stream.__anext__())
                    await asyncio.sleep(0)
                    reading.cancel()

        async def hang_up(ids: list[int]) -> None:
            client = AsyncClient(address, resume_timeout_s=0.0)
            stream = client.stream(ids, max_tokens=400, **GREEDY)
            await anext(stream)
            await client.close()

        async with AsyncClient(address) as client:
            for _ in range(5):
                work = []
                for index in range(40):
                    ids = [rng.randrange(100) for _ in range(rng.randrange(1, 60))]
                    way = ("leave", "task", "deadline", "hang up")[index % 4]
                    work.append(hang_up(ids) if way == "hang up" else leave(client, way, ids))
                await asyncio.wait_for(asyncio.gather(*work), 60)
            seconds = await cluster.until_free()
            print(f"free {seconds:.3f} s after the last")
            answer = await client.generate(PROMPTS[0][0], max_tokens=8, **GREEDY)
            assert answer.finish_reason is FinishReason.LENGTH
            assert answer.token_ids == PROMPTS[0][1][:8]


@pytest.mark.processes
async def test_a_pool_grows_and_shrinks_under_running_streams():
    """Real processes and NIXL: a second decode engine joins and leaves again, and no stream notices."""
    made = Cluster(config(), http=True)
    async with made as cluster, AsyncClient(f"127.0.0.1:{cluster.router.grpc_port}") as client:
        options = {"max_tokens": 100, **GREEDY}
        expected = [(await client.generate(ids, **options)).token_ids for ids, _ in PROMPTS]

        async def decoders(count: int) -> None:
            async with asyncio.timeout(60):
                while True:
                    status = await client.status()
                    found = [worker for worker in status.workers if worker.role is Role.DECODE]
                    if len(found) == count and all(worker.health is Health.READY for worker in found):
                        return
                    await asyncio.sleep(0.05)

        assert await client.scale("decode", 2) == 1
        await decoders(2)
        pids = cluster.supervisor.engines["decode-1"].pids.values()
        answers: list[tuple[int, Completion]] = []
        enough = asyncio.Event()

        async def keep_asking(index: int) -> None:
            while not enough.is_set():
                answers.append((index, await client.generate(PROMPTS[index][0], **options)))

        asking = [asyncio.ensure_future(keep_asking(i % len(PROMPTS))) for i in range(8)]
        async with asyncio.timeout(60):
            while not any(answer.timings.decode_worker == "decode-1/0" for _, answer in answers):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert await client.scale("decode", 1) == 2
        await decoders(1)
        enough.set()
        await asyncio.gather(*asking)
        assert all(answer.token_ids == expected[index] for index, answer in answers)
        assert {answer.timings.num_retries for _, answer in answers} == {0}
        async with asyncio.timeout(30):
            while any(is_alive(pid) for pid in pids):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for role, instances in (("decode", 0), ("colocated", 1)):
            with pytest.raises(InvalidRequest):
                await client.scale(role, instances)
