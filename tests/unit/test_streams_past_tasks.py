"""Streams that are written in the turn in which their tokens came: the same bytes in the same order as by their task,
for slow clients too, and an end when a client goes.

The worker is this test, which says when a token comes; HTTP goes over sockets.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from toy_router import toy_model

from pd_cluster import messages as m
from pd_cluster.bench.completions import posted
from pd_cluster.errors import EngineError
from pd_cluster.ids import EngineEpoch, EngineId, RequestId, WorkerId
from pd_cluster.metrics import RouterMetrics
from pd_cluster.request import FinishReason, TokenLogprobs
from router.app import listen
from router.directory import Directory
from router.events import TextEvent, event
from router.http_server import HttpServer, Socket
from router.openai_api import build_app
from router.openai_schema import ChatChunk, ChatChunkChoice, ChatDelta, Completion, CompletionChoice
from router.pipeline import Pipeline
from router.serving import Serving

TEXT = 'a "quoted" \\ line\nand\tmore, with € and 𝄞 and <eos> '


class Worker:
    """Implements `Conversation`: notes what it is told, and says tokens to the pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.requests: list[RequestId] = []
        self.aborted: list[RequestId] = []
        self._pipeline = pipeline
        self._told: dict[RequestId, int] = {}
        info = m.WorkerInfo(
            worker_id=WorkerId("both-0/0"),
            engine_id=EngineId("both-0"),
            dp_rank=0,
            can_prefill=True,
            can_decode=True,
            model="toy",
            tensor_parallel=1,
            data_parallel=1,
            num_blocks=1 << 20,
            block_size=16,
            block_bytes=1 << 10,
            max_model_len=1 << 24,
            vocab_size=257,
            max_num_seqs=1 << 10,
            max_num_batched_tokens=1 << 10,
        )
        pipeline.on_welcome(self, info, EngineEpoch("both-0-1"))  # type: ignore[arg-type]

    def send(self, messages: Any) -> bool:
        for message in messages:
            if isinstance(message, m.Generate):
                self.requests.append(message.request.id)
            elif isinstance(message, m.Abort):
                self.aborted.append(message.request_id)
        return True

    async def until_asked(self, num_requests: int) -> None:
        async with asyncio.timeout(20):
            while len(self.requests) < num_requests:  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    def say(self, tokens: bytes, *indices: int, finish: FinishReason | None = None, logprobs: Any = None) -> None:
        """One message with these tokens for each of the requests, counted as they came; all of them by default."""
        deltas = []
        for request_id in [self.requests[index] for index in indices] or self.requests:
            first_index = self._told.get(request_id, 0)
            self._told[request_id] = first_index + len(tokens)
            deltas.append(m.TokenDelta(request_id, first_index, list(tokens), finish, logprobs))
        self._pipeline.on_messages(self, [m.Tokens(deltas=deltas)])  # type: ignore[arg-type]

    def fail(self, index: int) -> None:
        error = EngineError("broken").info()
        failed = m.Failed(request_id=self.requests[index], transfer_id=None, error=error)
        self._pipeline.on_messages(self, [failed])  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[str, Worker, Pipeline]]:
    pipeline = Pipeline(Directory())
    worker = Worker(pipeline)
    serving = Serving(pipeline, toy_model(), "toy", RouterMetrics())  # type: ignore[arg-type]
    listener = listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 13)  # so that not reading is felt soon
    server = HttpServer(build_app(serving), listener)
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}", worker, pipeline
        async with asyncio.timeout(20):
            while not pipeline.idle():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    finally:
        await server.stop()


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": [1, 2, 3], "max_tokens": 1 << 20, "ignore_eos": True} | changes


@contextlib.asynccontextmanager
async def asking(
    url: str, worker: Worker, body: dict[str, Any], num_choices: int = 1
) -> AsyncIterator[asyncio.StreamReader]:
    """A streamed completion, at the worker by now; nothing of the answer is read."""
    num_before = len(worker.requests)
    async with posted(url, "/v1/completions", body | {"stream": True}, limit=1 << 10) as reader:
        await worker.until_asked(num_before + num_choices)
        yield reader


def chunks(answer: bytes) -> list[dict[str, Any]]:
    """The events of a chunked answer, headers before it, in order; [DONE] is checked and left out."""
    at = answer.index(b"\r\n\r\n") + 4
    parts = []
    while at < len(answer):
        begin = answer.index(b"\r\n", at) + 2
        end = begin + int(answer[at:begin], 16)
        parts.append(answer[begin:end])
        at = end + 2
    events = b"".join(parts).decode().strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: ")]


def text(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for one in events for c in one["choices"] if c["index"] == index)


def test_an_event_of_a_text_is_the_one_that_encodes_it_all() -> None:
    for model in ("toy", 'the "model" \0text\0', "text"):
        completion = Completion(id="a", created=5, model=model, choices=[CompletionChoice(index=3, text="")])
        chat = ChatChunk(id="a", created=5, model=model, choices=[ChatChunkChoice(index=3, delta=ChatDelta())])
        completion.usage = None
        for piece in (TEXT, "", " ", "\0", "\0text\0", '"', "\ud7ff"):
            completion.choices[0].text = TextEvent.MARK
            chat.choices[0].delta = ChatDelta(content=TextEvent.MARK)
            ready = TextEvent(event(completion)), TextEvent(event(chat))
            completion.choices[0].text = piece
            chat.choices[0].delta = ChatDelta(content=piece)
            assert ready[0].of(piece) == event(completion)
            assert ready[1].of(piece) == event(chat)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What goes past a task to its socket."""
    seen: list[bytes] = []
    write = Socket.write

    def noted(self: Socket, body: bytes) -> None:
        seen.append(body)
        write(self, body)

    monkeypatch.setattr(Socket, "write", noted)
    return seen


async def test_each_step_is_one_write_for_each_answer_and_its_text_is_whole(writes: list[bytes]) -> None:
    raw = TEXT.encode()
    with_usage = asked(stream_options={"include_usage": True})
    async with (
        served() as (url, worker, _),
        asking(url, worker, with_usage) as one,
        asking(url, worker, asked(prompt="x", n=2), num_choices=2) as two,
    ):
        worker.say(raw[:1])
        await one.readline()
        await two.readline()  # both have begun, in their tasks
        for byte in raw[1:]:
            worker.say(bytes([byte]))
            assert not writes  # a step is taken in before any of it goes out
            await asyncio.sleep(0)
            assert len(writes) == 2 or byte >= 0x80  # or a character is not complete
            writes.clear()
        worker.say(b"!", finish=FinishReason.LENGTH)
        events = chunks(await one.read(-1))
        assert text(events) == TEXT + "!"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert all(event["usage"] is None for event in events[:-1])
        assert events[-1]["usage"]["completion_tokens"] == len(raw) + 1
        events = chunks(await two.read(-1))
        assert (text(events, 0), text(events, 1)) == (TEXT + "!", TEXT + "!")


async def test_a_client_that_reads_nothing_for_a_while_gets_all_in_order_and_holds_up_nobody() -> None:
    async with (
        served() as (url, worker, pipeline),
        asking(url, worker, asked()) as slow,
        asking(url, worker, asked()) as quick,
    ):
        said = b""
        quick_answer = asyncio.create_task(quick.read(-1))
        stream = pipeline._streams[next(iter(pipeline._streams))]
        while len(stream._waiting) < 1000:  # its socket is full, and what comes waits for it
            assert len(said) < 1 << 20
            for _ in range(100):
                word = b"%06d " % (len(said) // 7)
                said += word
                worker.say(word)
                await asyncio.sleep(0)
        worker.say(b".", 1, finish=FinishReason.LENGTH)
        assert text(chunks(await quick_answer)) == said.decode() + "."
        slow_answer = asyncio.create_task(slow.read(-1))
        await until(lambda: not stream._waiting)
        for letter in b"abc":  # the client keeps up again
            worker.say(bytes([letter]), 0)
            await asyncio.sleep(0.01)
        worker.say(b"?", 0, finish=FinishReason.LENGTH)
        events = chunks(await slow_answer)
        assert text(events) == said.decode() + "abc?"
        assert max(len(event["choices"][0]["text"]) for event in events) >= 7000  # what waited was joined


async def test_a_stop_string_and_logprobs_come_out_past_the_task_too(writes: list[bytes]) -> None:
    async with (
        served() as (url, worker, _),
        asking(url, worker, asked(stop=["END"])) as stopped,
        asking(url, worker, asked(logprobs=0)) as weighed,
    ):
        logprobs = [TokenLogprobs(chosen=-0.5, rank=1, top_ids=[], top_logprobs=[])]
        worker.say(b"a", 0)
        worker.say(b"a", 1, logprobs=logprobs)
        await stopped.readline()
        await weighed.readline()
        for byte in b"bcEN ENDno":
            worker.say(bytes([byte]), 0)
            worker.say(bytes([byte]), 1, logprobs=logprobs)
            await asyncio.sleep(0)
        assert len(writes) > 10
        await until(lambda: worker.aborted == [worker.requests[0]])
        worker.say(b"", 1, finish=FinishReason.LENGTH)
        events = chunks(await stopped.read(-1))
        assert text(events) == "abcEN "
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        events = chunks(await weighed.read(-1))
        assert text(events) == "abcEN ENDno"
        chosen = [c["logprobs"]["token_logprobs"] for event in events for c in event["choices"] if c["logprobs"]]
        assert [value for values in chosen for value in values] == [-0.5] * 11


async def test_an_error_after_the_first_write_is_the_last_event(writes: list[bytes]) -> None:
    async with served() as (url, worker, _), asking(url, worker, asked()) as reader:
        worker.say(b"a")
        await reader.readline()
        worker.say(b"b")
        await asyncio.sleep(0)
        assert len(writes) == 1
        for _ in range(2):  # an engine's error is given another try
            worker.fail(len(worker.requests) - 1)
            await asyncio.sleep(0.01)
        answer = (await reader.read(-1)).decode()
        assert '"text":"a"' in answer
        assert '"text":"b"' in answer
        assert answer.index('"text":"b"') < answer.index('"error"')


async def test_a_client_that_hangs_up_between_two_tokens_frees_its_request() -> None:
    async with served() as (url, worker, _):
        async with asking(url, worker, asked()) as reader:
            worker.say(b"a")
            await reader.readline()
            worker.say(b"b")
            await asyncio.sleep(0)
        for _ in range(200):
            if worker.aborted:
                break
            worker.say(b"c")
            await asyncio.sleep(0.01)
        assert worker.aborted == worker.requests
