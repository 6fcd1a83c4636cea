"""`serve run router.serve_app:build` as users run it: the official client through Serve, deaths behind it, its end."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import httpx
import openai
import pytest
import ray
from processes import ROOT, free_port, until
from ray import serve

from pd_cluster import env
from pd_cluster.launch.membership import Membership, decode
from pd_cluster.launch.observer import Observer
from pd_cluster.launch.pids import ProcessIdentity
from pd_cluster.launch.serve import is_idle
from pd_cluster.messages import WorkerLoad
from pd_cluster.model.source import DEMO, open_model
from pd_cluster.rpc.security import Security
from pd_cluster.rpc.server import HEARTBEAT_S

pytestmark = pytest.mark.processes

ARGS = ["model=demo", "model.dtype=float32", "kv.max_bytes=16777216"]
SERVE = str(Path(sys.executable).parent / "serve")


class Application:
    """A running `serve run ...` on a Ray cluster of the test's own."""

    def __init__(self, port: int, errors: IO[bytes]) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self._errors = Path(errors.name)
        address = ray.get_runtime_context().gcs_address
        args = [SERVE, "run", "--address", address, "router.serve_app:build", "num_replicas=2", "num_cpus=0.2", *ARGS]
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            args, stdout=errors, stderr=errors, env=variables, cwd=ROOT, start_new_session=True
        )

    @property
    def output(self) -> str:
        return self._errors.read_text()

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.base}/v1", api_key="none", max_retries=5, timeout=60)

    def get(self, path: str) -> int:
        with urllib.request.urlopen(self.base + path, timeout=10) as answer:
            return int(answer.status)

    def membership(self) -> Membership:
        pools = serve.get_deployment_handle("pools", "default")
        return decode(pools.membership.remote(None, 0).result(timeout_s=60))

    def ranks(self) -> dict[str, ProcessIdentity]:
        """Processes of living ranks by name."""
        found = {}
        for named in ray.util.list_named_actors(all_namespaces=True):
            if named["name"].startswith(("prefill-", "decode-")):
                with contextlib.suppress(ValueError, ray.exceptions.RayError):
                    actor = ray.get_actor(named["name"], named["namespace"])
                    found[named["name"].rpartition("-")[0]] = ray.get(actor.home.remote(), timeout=10).process
        return found

    def replicas(self, deployment: str) -> list[int]:
        """Process ids of the replicas that run."""
        found = []
        for named in ray.util.list_named_actors(all_namespaces=True):
            if f"#{deployment}#" in named["name"]:
                with contextlib.suppress(ValueError, ray.exceptions.RayError):
                    actor = ray.get_actor(named["name"], named["namespace"])
                    found.append(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=10))
        return found

    def loads(self) -> list[WorkerLoad]:
        """As the workers tell them now."""
        return asyncio.run(look(self.membership().addresses))


async def look(addresses: list[str]) -> list[WorkerLoad]:
    observer = Observer(addresses, Security())
    observer.start()
    try:
        async with asyncio.timeout(10):
            while len(observer.directory) < len(addresses):  # noqa: ASYNC110 (of several streams)
                await asyncio.sleep(0.01)
        await asyncio.sleep(2.5 * HEARTBEAT_S)
        return [worker.load for worker in observer.directory.workers]
    finally:
        await observer.stop()


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    assert not ray.is_initialized()
    for name, value in env.RAY_VARIABLES.items():
        os.environ.setdefault(name, value)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init("local", num_cpus=3, object_store_memory=80 << 20, **quiet)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    with tempfile.NamedTemporaryFile(prefix="pd-cluster-serve-") as errors:
        application = Application(port, errors)
        try:
            until(lambda: application.process.poll() is not None or "is ready at" in application.output, 120)
            assert application.process.poll() is None, application.output
            yield application
        finally:
            if application.process.poll() is None:
                application.process.kill()
            application.process.wait()
            serve.shutdown()
            ray.shutdown()


PROMPT = "Once upon a time"
LONG = {"ignore_eos": True}


def start(application: Application, max_tokens: int = 400) -> "openai.Stream[openai.types.Completion]":
    return application.client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=max_tokens, temperature=0, stream=True, extra_body=LONG
    )


def texts(chunks: "Iterable[openai.types.Completion]") -> Iterator[str]:
    for chunk in chunks:
        for choice in chunk.choices:
            yield choice.text


@pytest.fixture(scope="module")
def undisturbed(application: Application) -> str:
    answer = application.client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=400, temperature=0, extra_body=LONG
    )
    return answer.choices[0].text


def test_the_official_client_works_unchanged(application: Application) -> None:
    case = json.loads((DEMO / "reference.json").read_text())["cases"][0]
    tokenizer = open_model("demo").tokenizer
    assert tokenizer is not None
    text = tokenizer.decode(case["greedy_ids"])
    client = application.client
    assert [model.id for model in client.models.list()] == ["demo"]
    asked = {"model": "demo", "prompt": case["prompt"], "max_tokens": 64, "temperature": 0}
    answer = client.completions.create(**asked)
    assert answer.choices[0].text == text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 64
    pieces = list(texts(client.completions.create(**asked, stream=True)))
    assert "".join(pieces) == text
    assert len(pieces) > 20, "tokens come one by one"
    messages = [{"role": "user", "content": case["prompt"]}]
    chat = client.chat.completions.create(model="demo", messages=messages, max_tokens=12, temperature=0, stream=True)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chat) == ", there was a little girl named Lily. She"
    )
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="a")


def test_several_routers_serve_the_same_pools_and_say_how_they_are(application: Application) -> None:
    deployments = serve.status().applications["default"].deployments
    assert {name: dict(status.replica_states) for name, status in deployments.items()} == {
        "router": {"RUNNING": 2},
        "pools": {"RUNNING": 1},
    }
    assert [application.get(path) for path in ("/health", "/readyz", "/livez", "/metrics")] == [200] * 4
    assert len(application.membership().addresses) == 2


def test_a_client_that_goes_away_frees_its_request(application: Application) -> None:
    running = start(application, max_tokens=1500)
    pieces = texts(running)
    for _ in range(5):
        next(pieces)
    assert not all(map(is_idle, application.loads()))
    running.close()
    closed_s = time.monotonic()
    until(lambda: all(map(is_idle, application.loads())), 10)
    print(f"free {time.monotonic() - closed_s:.2f} s after the client went away, the look included")


@pytest.mark.parametrize("victim", ["decode-0.0", "prefill-0.0"])
def test_a_rank_killed_in_mid_stream_is_replaced(application: Application, undisturbed: str, victim: str) -> None:
    before = application.ranks()
    pieces = texts(start(application))
    received = [next(pieces) for _ in range(20)]
    os.kill(before[victim].pid, signal.SIGKILL)
    killed_s = time.monotonic()
    received += pieces
    assert "".join(received) == undisturbed
    until(lambda: len(application.membership().addresses) == 2 and victim in application.ranks())
    healed_s = time.monotonic() - killed_s
    answer = application.client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=400, temperature=0, extra_body=LONG
    )
    assert answer.choices[0].text == undisturbed
    assert application.ranks()[victim] != before[victim]
    print(f"{victim} killed: all workers after {healed_s:.2f} s")


def test_a_router_killed_loses_its_streams_alone_and_is_replaced(application: Application, undisturbed: str) -> None:
    before = application.replicas("router")
    streams = [texts(start(application)) for _ in range(4)]
    received = [[next(pieces)] for pieces in streams]
    os.kill(before[0], signal.SIGKILL)
    num_whole = 0
    for pieces, so_far in zip(streams, received, strict=True):
        with contextlib.suppress(openai.APIError, httpx.HTTPError):
            so_far.extend(pieces)
            num_whole += 1
            assert "".join(so_far) == undisturbed
    assert num_whole >= 1, "those of the other router are whole"
    answer = application.client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=400, temperature=0, extra_body=LONG
    )
    assert answer.choices[0].text == undisturbed
    until(lambda: all(map(is_idle, application.loads())), 10)
    until(lambda: len(application.replicas("router")) == 2 and before[0] not in application.replicas("router"))


def test_the_owner_of_the_pools_killed_starts_them_anew_and_requests_go_on(
    application: Application, undisturbed: str
) -> None:
    before = application.ranks()
    pieces = texts(start(application))
    received = [next(pieces) for _ in range(20)]
    (owner,) = application.replicas("pools")
    os.kill(owner, signal.SIGKILL)
    killed_s = time.monotonic()
    received += pieces
    print(f"owner of the pools killed: the stream was over {time.monotonic() - killed_s:.2f} s later")
    assert "".join(received) == undisturbed
    until(lambda: application.ranks().keys() == before.keys())
    assert not set(before.values()) & set(application.ranks().values())
    assert not any(process.lives() for process in before.values())


def test_a_deleted_application_finishes_its_streams_and_leaves_no_process(
    application: Application, undisturbed: str
) -> None:
    ranks = application.ranks()
    assert len(ranks) == 2
    pieces = texts(start(application))
    received = [next(pieces)]
    serve.delete("default", _blocking=False)
    received += pieces
    assert "".join(received) == undisturbed
    until(lambda: not application.replicas("pools") and not any(process.lives() for process in ranks.values()))
    assert application.ranks() == {}
    assert "CPU" not in set(ray.cluster_resources()) - set(ray.available_resources()), "every CPU is free"
    application.process.send_signal(signal.SIGINT)
    assert application.process.wait(60) == 0, application.output
    assert "Traceback" not in application.output
