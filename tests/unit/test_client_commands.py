"""chat, status, top, drain and scale against a router on sockets, as a user runs them."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from fake_worker import FakeWorker
from toy_router import System
from typer.testing import CliRunner

from pd_cluster import messages as m
from pd_cluster.cli.main import app
from pd_cluster.cli.status_view import Moment, bar, duration, milliseconds
from pd_cluster.client import AsyncClient


@pytest.fixture
async def system():
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0"), FakeWorker("decode-1")) as system:
        yield system
        await system.until_empty()


async def run(system: System, *args: str, stdin: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""

    def invoke() -> tuple[int, str, str]:
        environment = {"PD_CLUSTER_ADDRESS": system.grpc_address, "COLUMNS": "160"}
        result = CliRunner().invoke(app, list(args), input=stdin, env=environment)
        return result.exit_code, result.stdout, result.stderr

    return await asyncio.to_thread(invoke)


async def test_chat_answers_what_stdin_says(system):
    system.say("good day")
    assert await run(system, "chat", stdin="hello") == (0, "good day\n", "")
    prefill = next(message for message in system.workers[0].seen if isinstance(message, m.Prefill))
    assert bytes(prefill.request.token_ids).decode() == "user: hello\nassistant:"
    options = ["--system", "be kind", "--temperature", "0", "--max-tokens", "4", "--seed", "3", "--top-p", "0.5"]
    assert await run(system, "chat", *options, stdin="hello") == (0, "good\n", "")
    prefill = [message for message in system.workers[0].seen if isinstance(message, m.Prefill)][-1]
    assert bytes(prefill.request.token_ids).decode() == "system: be kind\nuser: hello\nassistant:"
    sampling = prefill.request.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed, sampling.top_p) == (0, 4, 3, 0.5)


async def test_chat_says_what_went_wrong(system):
    code, out, errors = await run(system, "chat", "--model", "gpt", stdin="hello")
    assert (code, out) == (2, "")
    assert errors.startswith("pd-cluster: the model 'gpt' does not exist")


@pytest.mark.parametrize("command", [("chat",), ("status",), ("top", "--once"), ("drain", "decode-0")])
async def test_an_address_where_nobody_listens_is_said_in_the_same_words_by_all(system, command):
    code, out, errors = await run(system, *command, "--address", "127.0.0.1:1", stdin="hello")
    assert (code, out) == (1, "")
    assert errors.startswith("pd-cluster: no router answers at 127.0.0.1:1 (Connection refused)")


class Terminal:
    """`pd-cluster chat` on a pseudo terminal, which the test types into."""

    def __init__(self, *args: str) -> None:
        self._here, there = pty.openpty()
        command = [sys.executable, "-m", "pd_cluster.cli.main", "chat", *args]
        self.process = subprocess.Popen(
            command, stdin=there, stdout=there, stderr=there, start_new_session=True, env=os.environ | {"TERM": "dumb"}
        )
        os.close(there)
        os.set_blocking(self._here, False)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._here, text.encode())

    async def until(self, pattern: str, within_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not re.search(pattern, self.shown, re.DOTALL):
            assert time.monotonic() < deadline_s, self.shown
            try:
                self.shown += os.read(self._here, 65536).decode().replace("\r\n", "\n")
            except BlockingIOError:
                await asyncio.sleep(0.01)

    async def end(self) -> int:
        try:
            return await asyncio.to_thread(self.process.wait, 10)
        finally:
            self.process.kill()
            os.close(self._here)


async def test_chat_on_a_terminal_remembers_retries_and_forgets(system):
    system.say("good day")
    terminal = Terminal("--address", system.grpc_address, "--stats")
    try:
        await terminal.until("> $")
        for line, turns in (("one", 1), ("two", 2), ("/retry", 3)):
            terminal.type(line + "\n")
            await terminal.until(r"(good day\n\[\d+ tokens in.*)" + f"{{{turns}}}\n> $")
        terminal.type("/reset\n")
        await terminal.until("/reset\n> $")
        system.served[1].step_s = system.served[2].step_s = 0.02
        system.say("a very long answer indeed " * 15)
        terminal.type("three\n")
        await terminal.until("a very")
        terminal.process.send_signal(signal.SIGINT)  # Ctrl-C ends the answer, not the conversation
        await terminal.until(r"a very[a-z ]*\n> $")
        await system.until_empty()
        terminal.type("\x04")
        assert await terminal.end() == 0
    finally:
        terminal.process.kill()
    prompts = [
        bytes(message.request.token_ids).decode()
        for message in system.workers[0].seen
        if isinstance(message, m.Prefill)
    ]
    first = "user: one\nassistant: good day\nuser: two\nassistant:"
    assert prompts == ["user: one\nassistant:", first, first, "user: three\nassistant:"]


async def test_status_shows_every_worker_and_says_it_in_json(system):
    code, out, _ = await run(system, "status")
    assert code == 0
    assert "toy at router-" in out
    assert "ready" in out
    for worker in system.workers:
        assert worker.id in out
    code, out, _ = await run(system, "status", "--json")
    status = json.loads(out)
    assert status["ready"] is True
    assert [worker["role"] for worker in status["workers"]] == ["prefill", "decode", "decode"]


async def test_top_shows_one_frame_with_rates(system):
    system.served[1].step_s = system.served[2].step_s = 0.01
    async with AsyncClient(system.grpc_address) as client:
        stream = client.stream("hi", request_id="the-one", max_tokens=400)
        reading = asyncio.ensure_future(stream.__anext__())
        await reading
        code, out, _ = await run(system, "top", "--once", "--interval", "0.3")
        stream.close()
    assert code == 0, out
    assert re.search(r"the-one\.\w+ +decoding", out), out
    rate = float(re.search(r"tokens: ([\d.]+)/s out", out)[1])
    assert 20 < rate < 110  # of a token every 10 ms and more
    assert "TPOT" in out
    assert "TTFT" not in out  # the first token came before this window


async def test_rates_are_of_the_window_and_of_the_whole_life_after_a_restart(system):
    async with AsyncClient(system.grpc_address) as client:
        before = await client.status()
        await client.generate("hi", max_tokens=50)
        after = await client.status()
    moment = Moment(after, before)
    assert moment.since("num_output_tokens") == 50
    assert moment.rate("num_output_tokens") == pytest.approx(50 / (after.uptime_s - before.uptime_s))
    assert moment.mean_s("ttft") > 0
    assert Moment(before, after).since("num_output_tokens") == 0  # time does not go back: it was restarted
    assert Moment(after, after).mean_s("ttft") is not None


async def test_drain_takes_workers_and_whole_engines_and_waits(system):
    code, out, errors = await run(system, "drain", "decode-0", "--wait")
    assert code == 0
    assert errors == ""  # decode-1 goes on
    assert out == "decode-0/0 drains: 0 run, 0 wait\ndecode-0/0: nothing is left\n"
    assert m.Drain in system.workers[1].kinds()
    assert m.Drain not in system.workers[2].kinds()
    code, _, errors = await run(system, "drain", "decode-9/0")
    assert code == 2
    assert "decode-1/0" in errors  # what there is instead
    system.served[2].step_s = 0.02
    async with AsyncClient(system.grpc_address) as client:
        answer = asyncio.ensure_future(client.generate("hi", max_tokens=30))
        async with asyncio.timeout(5):
            while not system.workers[2].running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        code, _, errors = await run(system, "drain", "decode-1/0", "--wait", "--timeout", "0.1")
        assert code == 1
        assert "still busy" in errors
        code, out, _ = await run(system, "drain", "decode-1/0", "--wait")
        assert "nothing is left" in out
        assert len((await answer).token_ids) == 30  # drained, not cut


async def test_draining_the_last_worker_of_a_role_says_what_follows_and_how_to_undo_it(system):
    code, _, errors = await run(system, "drain", "prefill-0")
    assert code == 0
    assert "no other prefill worker is ready: new requests are refused" in errors
    assert "a restart of prefill-0" in errors


async def test_scale_says_who_can(system):
    code, _, errors = await run(system, "scale", "prefill", "2")
    assert code == 1
    assert "does not start engines" in errors


def test_numbers_as_people_read_them():
    assert [duration(s) for s in (12, 90, 7200, 200_000)] == ["12 s", "2 min", "2.0 h", "2.3 d"]
    assert [milliseconds(s) for s in (0.0123, 2.5)] == ["12.3 ms", "2.50 s"]
    assert bar(0.5).plain == "█████░░░░░  50%"
    assert bar(1.0).plain == "██████████ 100%"
