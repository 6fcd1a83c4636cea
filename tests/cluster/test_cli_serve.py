"""`pd-cluster serve` over real processes, as the official client meets it: it answers, heals and stops clean."""

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator

import openai
import pytest
from processes import Command, running, until

from pd_cluster.model.source import DEMO, open_model

pytestmark = pytest.mark.processes

CPU = min(os.sched_getaffinity(0))
ARGS = ["--port", "0", "--decode-dp", "2", "--dtype", "float32", "--set", "kv.max_bytes=16777216"]
ARGS += ["--set", f"prefill.cpus={CPU}"]


def url(command: Command) -> str:
    until(lambda: command.process.poll() is not None or " is served at " in command.stderr, 120)
    found = re.search(r"is served at (http://\S+)/v1", command.stderr)
    assert found, command.stderr
    return found[1]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Command, str]]:
    with running("serve", "demo", "--served-model-name", "stories", *ARGS) as command:
        yield command, url(command)


def client(base: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=5, timeout=60)


def reference() -> tuple[str, list[int]]:
    case = json.loads((DEMO / "reference.json").read_text())["cases"][0]
    return case["prompt"], case["greedy_ids"]


def complete(base: str, max_tokens: int = 12) -> str:
    prompt, _ = reference()
    answer = client(base).completions.create(model="stories", prompt=prompt, max_tokens=max_tokens, temperature=0)
    return answer.choices[0].text


def test_the_official_client_gets_the_reference_continuation(server: tuple[Command, str]) -> None:
    _, base = server
    assert [model.id for model in client(base).models.list()] == ["stories"]
    assert complete(base) == ", there was a little girl named Lily. She"
    prompt, _ = reference()
    stream = client(base).chat.completions.create(
        model="stories", messages=[{"role": "user", "content": prompt}], max_tokens=12, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == ", there was a little girl named Lily. She"


def test_probes_and_metrics_answer(server: tuple[Command, str]) -> None:
    _, base = server
    for path in ("/health", "/livez", "/readyz"):
        with urllib.request.urlopen(base + path, timeout=10) as answer:
            assert answer.status == 200
    with urllib.request.urlopen(base + "/metrics", timeout=10) as answer:
        assert b"pd_cluster_time_to_first_token_seconds" in answer.read()


def test_a_pool_runs_on_the_cpus_it_was_given(server: tuple[Command, str]) -> None:
    command, _ = server
    where = [os.sched_getaffinity(pid) for pid in command.ranks()]
    assert where.count({CPU}) == (3 if len(os.sched_getaffinity(0)) == 1 else 1)


def test_a_rank_killed_in_mid_stream_is_replaced_and_the_client_sees_no_seam(server: tuple[Command, str]) -> None:
    command, base = server
    before = set(command.ranks())
    assert len(before) == 3
    prompt, token_ids = reference()
    stream = client(base).completions.create(
        model="stories", prompt=prompt, max_tokens=len(token_ids), temperature=0, stream=True
    )
    texts: list[str] = []
    for chunk in stream:
        texts += [choice.text for choice in chunk.choices]
        if len(texts) == 8:
            os.kill(next(pid for pid in before if is_decode_rank(pid)), signal.SIGKILL)
    tokenizer = open_model("demo").tokenizer
    assert tokenizer is not None
    assert "".join(texts) == tokenizer.decode(token_ids)
    assert len(command.ranks()) == 3
    assert len(before & set(command.ranks())) == 1, "the prefill rank lives on"


def is_decode_rank(pid: int) -> bool:
    return any("decode" in os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (1, 2))


def test_sigterm_ends_the_server_and_every_rank(server: tuple[Command, str]) -> None:
    command, _ = server
    command.signal(signal.SIGTERM)
    code, _, err = command.finish(30)
    assert code == 0, err
    assert "Traceback" not in err
    assert command.family() == []


def test_a_taken_port_is_refused_before_any_rank_starts() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with running("serve", "demo", "--port", port) as command:
            code, _, err = command.finish(60)
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in err.splitlines()[-1]
