"""The containers of a rendered chart, as plain processes: they start, find each other, answer, drain and end.

Commands, ports, probes and hooks are read from the rendered objects. Control streams run with certificates and a token;
the decode engine is spread over two pods.
"""

import json
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helm_tool import Helm, of_kind
from kubelet import Node, Pod, get, until
from processes import free_port

from pd_cluster.model.source import DEMO

pytestmark = pytest.mark.processes

API_KEY = "open sesame"
LONG = 400  # tokens: seconds enough for a hook to come in between
VALUES = {
    "decode.podsPerEngine": 2,
    "kv.numBlocks": 64,
    "model.dtype": "float32",
    "model.servedName": "stories",
    "router.apiKey.existingSecret": "keys",
    "security.tls.existingSecret": "tls",
    "security.tls.serverName": "workers.internal",
    "security.token.existingSecret": "token",
    "router.drain.delaySeconds": 1,
    "router.drain.timeoutSeconds": 30,
    "prefill.drain.timeoutSeconds": 30,
    "decode.drain.timeoutSeconds": 30,
    "router.logFormat": "logfmt",
    "decode.logFormat": "logfmt",
}


def certificates(directory: Path) -> dict[str, bytes]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine makes certificates")
    key, certificate = directory / "tls.key", directory / "tls.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
         "-subj", "/CN=pd-cluster", "-addext", "subjectAltName=DNS:workers.internal",
         "-keyout", str(key), "-out", str(certificate)],
        capture_output=True, check=True,
    )  # fmt: skip
    pem = certificate.read_bytes()
    return {"tls.crt": pem, "ca.crt": pem, "tls.key": key.read_bytes()}


@pytest.fixture(scope="module")
def node(helm4: Helm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    ports = {"router.httpPort": free_port(""), "router.grpc.port": free_port("")}  # a router listens on every address
    sets = [f"--set={key}={value}" for key, value in (VALUES | ports).items()]
    objects = helm4.example("cpu", *sets)
    secrets = {
        "tls": certificates(tmp_path_factory.mktemp("tls")),
        "token": {"token": b"between us\n"},
        "keys": {"api-key": f"{API_KEY}\n".encode()},
    }
    node = Node(objects, secrets, tmp_path_factory.mktemp("node"))
    node.start()
    try:
        yield node
    finally:
        node.stop()


@pytest.fixture(scope="module")
def router(node: Node) -> Pod:
    """When everything serves."""
    (router,) = node.of_component("router")
    took_s = 0.0
    for probe in ("startupProbe", "readinessProbe"):
        took_s += until(lambda probe=probe: all(pod.probe(probe) == 200 for pod in node.pods), 150, node.pods)  # type: ignore[misc]
    print(f"\n{len(node.pods)} pods were ready in {took_s:.1f} s")
    return router


def complete(router: Pod, max_tokens: int, on_token: threading.Event | None = None) -> tuple[str, str | None]:
    """Text and finish reason of a greedy, streamed completion of the reference's prompt."""
    case = json.loads((DEMO / "reference.json").read_text())["cases"][0]
    body = {"model": "stories", "prompt": case["prompt"], "max_tokens": max_tokens, "temperature": 0, "stream": True}
    headers = {"content-type": "application/json", "authorization": f"Bearer {API_KEY}"}
    url = f"http://{router.ip}:{router.port('http')}/v1/completions"
    text, finish = "", None
    request = urllib.request.Request(url, json.dumps({**body, "ignore_eos": True}).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            data = line.decode().removeprefix("data:").strip()
            if data and data != "[DONE]":
                event = json.loads(data)
                assert "error" not in event, event
                choice = event["choices"][0]
                text, finish = text + choice["text"], choice["finish_reason"] or finish
                if on_token is not None:
                    on_token.set()
    return text, finish


@pytest.fixture(scope="module")
def undisturbed(router: Pod) -> tuple[str, str | None]:
    """What a long completion brings when nothing happens meanwhile."""
    return complete(router, LONG)


class Running(threading.Thread):
    """A completion that runs while something happens to the cluster."""

    def __init__(self, router: Pod) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.result: tuple[str, str | None] | Exception | None = None
        self._router = router
        self.start()
        assert self.begun.wait(60)

    def run(self) -> None:
        try:
            self.result = complete(self._router, LONG, self.begun)
        except (OSError, AssertionError) as error:
            self.result = error

    def finish(self) -> tuple[str, str | None]:
        self.join(60)
        assert isinstance(self.result, tuple), self.result
        return self.result


def test_the_release_answers_with_the_reference_continuation(router: Pod) -> None:
    assert complete(router, 12) == (", there was a little girl named Lily. She", "length")


def test_liveness_says_nothing_about_others(node: Node, router: Pod) -> None:
    assert [pod.probe("livenessProbe") for pod in node.pods] == [200] * len(node.pods)


def test_a_client_without_the_key_is_refused(router: Pod) -> None:
    assert get(f"http://{router.ip}:{router.port('http')}/v1/models")[0] == 401


def test_helm_tests_pass(node: Node, router: Pod) -> None:
    names = []
    for pod in node.tests():
        done = pod.run()
        assert done.returncode == 0, done.stdout + done.stderr
        names.append(done.stdout.partition(":")[0])
    assert sorted(names) == ["completion", "grpc", "health", "models"]


def test_monitors_point_at_metrics(node: Node, router: Pod, helm4: Helm) -> None:
    monitors = helm4.template("--set=monitoring.serviceMonitor.enabled=true,monitoring.podMonitor.enabled=true")
    (service,) = of_kind(monitors, "ServiceMonitor").values()
    (pods,) = of_kind(monitors, "PodMonitor").values()
    (at_router,), (at_pods,) = service["spec"]["endpoints"], pods["spec"]["podMetricsEndpoints"]
    for pod in node.pods:
        endpoint = at_router if pod is router else at_pods
        status, text = get(f"http://{pod.ip}:{pod.port(endpoint['port'])}{endpoint['path']}")
        assert status == 200
        assert "# TYPE pd_cluster_kv_cache_usage_ratio gauge" in text


def test_a_worker_that_ends_finishes_its_requests_and_its_engine_comes_back(
    node: Node, router: Pod, undisturbed: tuple[str, str | None]
) -> None:
    first, second = node.of_component("decode")
    running = Running(router)
    hook = second.pre_stop()
    assert hook.returncode == 0, hook.stderr
    assert running.finish() == undisturbed
    assert second.probe("readinessProbe") == 503
    assert first.probe("readinessProbe") == 503, "one engine: it drains as a whole"
    assert second.terminate() == 0, second.log.read_text()[-3000:]
    assert second.family() == []
    second.start()  # as a StatefulSet does
    within_s = until(lambda: all(pod.probe("readinessProbe") == 200 for pod in node.pods), 120, node.pods)
    print(f"\nthe decode engine served again {within_s:.1f} s after its pod was started anew")
    assert complete(router, 12)[0] == ", there was a little girl named Lily. She"


def test_a_router_that_ends_finishes_its_requests_and_takes_no_new_ones(
    node: Node, router: Pod, undisturbed: tuple[str, str | None]
) -> None:
    running = Running(router)
    hooks: list[Any] = []
    hook = threading.Thread(target=lambda: hooks.append(router.pre_stop()))
    hook.start()
    until(lambda: router.probe("readinessProbe") == 503, 30, node.pods)
    if running.is_alive():
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(router, 4)
        assert refused.value.code == 503
    assert running.finish() == undisturbed
    hook.join(60)
    assert hooks[0].returncode == 0, hooks[0].stderr
    assert router.terminate() == 0
    assert "Traceback" not in router.log.read_text()


def test_sigterm_alone_ends_workers_and_leaves_nothing(node: Node, router: Pod) -> None:
    workers = [pod for pod in node.pods if pod is not router]
    started_s = time.monotonic()
    for pod in workers:
        assert pod.terminate() == 0, pod.log.read_text()[-3000:]
    print(f"\n{len(workers)} idle workers ended in {time.monotonic() - started_s:.1f} s")
    assert [pod.family() for pod in node.pods] == [[]] * len(node.pods)
    for pod in workers:
        assert "Traceback" not in pod.log.read_text(), pod.name
