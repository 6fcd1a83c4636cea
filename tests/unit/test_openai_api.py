"""The HTTP API by the official client, over real sockets: HTTP to a router, gRPC to fake workers."""

import asyncio
import json
import pickle
import subprocess
import sys

import openai
import pytest
from fake_worker import FakeWorker, ServedWorker
from toy_router import System, toy_model

from pd_cluster import messages as m
from pd_cluster.errors import ConfigError, EngineError
from pd_cluster.ids import UnitHash
from pd_cluster.kv.hashing import unit_hashes
from router.app import listen


@pytest.fixture
async def system():
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0")) as system:
        yield system
        await system.until_empty()


COMPLETION = {"model": "toy", "prompt": "hi"}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


# ---- completions


async def test_a_completion_has_text_usage_and_reason(system):
    system.say("hello wörld")
    answer = await system.client.completions.create(model="toy", prompt="hi", max_tokens=50)
    assert answer.choices[0].text == "hello wörld"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 13, 15)
    assert answer.object == "text_completion"
    assert answer.model == "toy"


async def test_a_completion_that_is_cut_says_length(system):
    system.say("hello")
    answer = await system.client.completions.create(model="toy", prompt="hi", max_tokens=3)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hel", "length")
    answer = await system.client.completions.create(model="toy", prompt="hi")
    assert answer.usage.completion_tokens == 6


async def test_a_streamed_completion_is_the_whole_one_in_pieces(system):
    system.say("hello €uro")
    stream = await system.client.completions.create(
        model="toy", prompt="hi", max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "hello €uro"
    assert len(chunks) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 13
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("prompt", "num_prompts", "num_tokens"),
    [("hi", 1, 2), (["hi", "you"], 2, 5), ([104, 105], 1, 2), ([[104], [105, 106, 107]], 2, 4)],
)
async def test_every_form_of_prompt_is_understood(system, prompt, num_prompts, num_tokens):
    system.say("ok")
    answer = await system.client.completions.create(model="toy", prompt=prompt, n=2, max_tokens=5)
    assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
    assert [choice.text for choice in answer.choices] == ["ok"] * 2 * num_prompts
    assert answer.usage.prompt_tokens == num_tokens
    sent = [message.request.token_ids for message in system.workers[0].seen if isinstance(message, m.Prefill)]
    assert len(sent) == 2 * num_prompts


async def test_samples_of_a_prompt_have_seeds_of_their_own_and_share_one_prefill(system):
    prompt = list(range(1, 49))
    stream = await system.client.completions.create(model="toy", prompt=prompt, n=3, seed=7, max_tokens=4, stream=True)
    chunks = [chunk async for chunk in stream]
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1, 2}
    prefill = system.workers[0]
    seeds = [message.request.sampling.seed for message in prefill.seen if isinstance(message, m.Prefill)]
    assert seeds == [7, 8, 9]
    kinds = [kind for kind in prefill.kinds() if kind in (m.Prefill, m.Push)]
    assert kinds[0] is m.Prefill  # the first alone
    assert kinds.index(m.Push) == 1 or kinds[1] is m.Prefill


async def test_a_prompt_is_echoed_when_asked(system):
    system.say("there")
    answer = await system.client.completions.create(model="toy", prompt="hi ", echo=True, max_tokens=9)
    assert answer.choices[0].text == "hi there"
    stream = await system.client.completions.create(model="toy", prompt="hi ", echo=True, max_tokens=9, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hi there"


async def test_completion_logprobs_are_parallel_lists(system):
    system.say("ab")
    answer = await system.client.completions.create(model="toy", prompt="hi", logprobs=2, max_tokens=9)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}]
    assert logprobs.text_offset == [0, 1]


async def test_token_ids_are_returned_when_asked(system):
    system.say("ab")
    answer = (await system.post("/v1/completions", {**COMPLETION, "return_token_ids": True})).json()
    assert answer["choices"][0]["token_ids"] == [97, 98, 256]
    assert answer["choices"][0]["prompt_token_ids"] == [104, 105]


# ---- chat


async def test_a_chat_goes_through_the_template(system):
    system.say("hello!")
    answer = await system.client.chat.completions.create(
        model="toy",
        messages=[
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
    )
    assert answer.choices[0].message.content == "hello!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    (prefill,) = [message for message in system.workers[0].seen if isinstance(message, m.Prefill)]
    assert bytes(prefill.request.token_ids).decode() == "system: be kind\nuser: a\nb\nassistant:"
    assert prefill.request.sampling.max_tokens == 512 - len(prefill.request.token_ids)


async def test_chat_chunks_come_in_the_order_clients_expect(system):
    system.say("hi €")
    stream = await system.client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    first, *middle, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].delta.content for chunk in middle] == ["h", "i", " ", "€"]
    assert all(chunk.choices[0].finish_reason is None for chunk in [first, *middle])
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage.total_tokens == usage.usage.prompt_tokens + 7


async def test_the_stream_ends_with_done_and_has_no_usage_unless_asked(system):
    system.say("hi")
    answer = await system.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert "usage" not in answer.text
    assert all(json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk" for line in lines[:-1])


async def test_chat_logprobs_carry_bytes(system):
    system.say("é")
    answer = await system.client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=1)
    content = answer.choices[0].logprobs.content
    assert bytes(byte for token in content for byte in token.bytes).decode() == "é"
    assert [len(token.top_logprobs) for token in content] == [1, 1]
    stream = await system.client.chat.completions.create(**CHAT, logprobs=True, stream=True)
    streamed = [chunk.choices[0].logprobs async for chunk in stream]
    tokens = [token for logprobs in streamed if logprobs for token in logprobs.content]
    assert bytes(byte for token in tokens for byte in token.bytes).decode() == "é"


async def test_max_completion_tokens_wins(system):
    system.say("abcdef")
    answer = await system.client.chat.completions.create(**CHAT, max_completion_tokens=2, max_tokens=5)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("ab", "length")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_request_everywhere(system, stream):
    system.say("one two three STOP four")
    body = {**CHAT, "stop": ["STOP", "never"], "stream": stream}
    answer = await system.post("/v1/chat/completions", body)
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = answer.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("one two three ", "stop")


async def test_sampling_parameters_reach_the_workers(system):
    system.say("x")
    await system.post(
        "/v1/chat/completions",
        {
            **CHAT, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -3, "presence_penalty": 1,
            "frequency_penalty": -1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": False,
            "stop_token_ids": [3], "logit_bias": {"5": -100}, "user": "me", "metadata": {"a": "b"}, "store": True,
            "service_tier": "auto", "parallel_tool_calls": True, "max_tokens": 8, "cache_salt": "tenant",
        },
    )  # fmt: skip
    (prefill,) = [message for message in system.workers[0].seen if isinstance(message, m.Prefill)]
    sampling = prefill.request.sampling
    assert prefill.request.cache_salt == "tenant"
    assert sampling.seed == 2**63 - 3
    assert sampling.logit_bias == {5: -100.0}
    assert sampling.stop_token_ids == (3,)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.1)


# ---- refusals


REFUSALS = [
    ("completions", {"model": "gpt"}, 404, "model", "does not exist"),
    ("completions", {"prompt": ""}, 400, "prompt", "empty"),
    ("completions", {"prompt": []}, 400, "prompt", "empty"),
    ("completions", {"prompt": [[]]}, 400, "prompt", "empty"),
    ("completions", {"prompt": "x" * 512}, 400, "prompt", "context is 512"),
    ("completions", {"prompt": [300]}, 400, "prompt", "between 0 and 256"),
    ("completions", {"prompt": [-1]}, 400, "prompt", "between 0 and 256"),
    ("completions", {"prompt": [1, "a"]}, 400, "prompt", "mixes"),
    ("completions", {"prompt": {"a": 1}}, 400, "prompt", "Expected"),
    ("completions", {"max_tokens": "5"}, 400, "max_tokens", "Expected `int | null`, got `str`"),
    ("completions", {"max_tokens": 0}, 400, "max_tokens", "between 1"),
    ("completions", {"temperature": -1}, 400, "temperature", "between 0"),
    ("completions", {"temperature": True}, 400, "temperature", "Expected"),
    ("completions", {"top_p": 0}, 400, "top_p", "above 0"),
    ("completions", {"n": 0}, 400, "n", "between 1"),
    ("completions", {"n": 1000}, 400, "n", "between 1"),
    ("completions", {"best_of": 3}, 400, "best_of", "best_of is not supported"),
    ("completions", {"suffix": "end"}, 400, "suffix", "suffix is not supported"),
    ("completions", {"echo": True, "logprobs": 1}, 400, "echo", "not supported"),
    ("completions", {"logprobs": 21}, 400, "logprobs", "between 0 and 20"),
    ("completions", {"stop": list("abcde")}, 400, "stop", "at most 4"),
    ("completions", {"stop": ""}, 400, "stop", "empty string"),
    ("completions", {"logit_bias": {"a": 1}}, 400, "logit_bias", "token ids"),
    ("completions", {"logit_bias": {"5": 101}}, 400, "logit_bias", "between -100"),
    ("completions", {"stream_options": {}}, 400, "stream_options", "only for stream"),
    ("chat/completions", {"messages": []}, 400, "messages", "empty"),
    ("chat/completions", {"messages": "hi"}, 400, "messages", "Expected `array`"),
    ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages[0]", "role"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, 400, "response_format", "json_object"),
    ("chat/completions", {"tools": [{"type": "function"}]}, 400, "tools", "tools are not supported"),
    ("chat/completions", {"top_logprobs": 3}, 400, "top_logprobs", "needs logprobs=true"),
    ("chat/completions", {"modalities": ["audio"]}, 400, "modalities", "not supported"),
    ("chat/completions", {"max_completion_tokens": -5}, 400, "max_tokens", "between 1"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages[0].content",
        "only text",
    ),
]  # fmt: skip


async def test_a_bad_request_is_refused_by_name_before_any_worker_sees_it(system):
    for path, change, status, param, says in REFUSALS:
        body = {**(COMPLETION if path == "completions" else CHAT), **change}
        answer = await system.post(f"/v1/{path}", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), change
        assert says in error["message"], change
        assert error["type"] == "invalid_request_error"
        assert answer.headers["x-request-id"]
    assert system.workers[0].seen == []


@pytest.mark.parametrize("change", [{"response_format": {"type": "text"}}, {"tools": [{}], "tool_choice": "none"}])
async def test_what_changes_nothing_is_accepted(system, change):
    system.say("x")
    assert (await system.post("/v1/chat/completions", {**CHAT, **change})).status_code == 200


async def test_a_body_that_is_no_json_object_is_a_clear_400(system):
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", pickle.dumps({"a": 1}), b"[" * 100_000):
        answer = await system.http.post("/v1/completions", content=body)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_beyond_the_cap_is_413(system):
    answer = await system.http.post("/v1/completions", content=b"x" * (8 << 20) + b"x")
    assert answer.status_code == 413

    async def endless():
        for _ in range(9 << 4):
            yield b"x" * (1 << 16)

    answer = await system.http.post("/v1/completions", content=endless())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


async def test_unknown_paths_and_methods_answer_in_the_same_shape(system):
    answer = await system.http.get("/v2/nothing")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
    answer = await system.http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_bytes_that_are_not_http_harm_nobody(system):
    system.say("ok")
    for payload in (b"\x80\x04\x95garbage\r\n\r\n", b"\x00" * 1000, pickle.dumps(["x"] * 100)):
        reader, writer = await asyncio.open_connection("127.0.0.1", system.router.http_port)
        writer.write(payload)
        writer.write_eof()
        async with asyncio.timeout(5):
            await reader.read()
        writer.close()
    assert (await system.post("/v1/completions", COMPLETION)).status_code == 200


async def test_the_clients_request_id_comes_back(system):
    answer = await system.http.get("/v1/models", headers={"x-request-id": "trace-1"})
    assert answer.headers["x-request-id"] == "trace-1"
    answer = await system.http.get("/v1/models", headers={"x-request-id": "x" * 200})
    assert answer.headers["x-request-id"].startswith("req-")


# ---- models, probes, metrics


async def test_the_model_is_listed(system):
    models = await system.client.models.list()
    assert [model.id for model in models.data] == ["toy"]
    assert (await system.client.models.retrieve("toy")).id == "toy"
    with pytest.raises(openai.NotFoundError):
        await system.client.models.retrieve("other/model")


async def test_probes_tell_the_process_from_its_workers():
    async with System() as system:
        for path, status in {"/livez": 200, "/readyz": 503, "/health": 503, "/startupz": 503}.items():
            assert (await system.http.get(path)).status_code == status
    async with System(FakeWorker("prefill-0")) as system:
        answer = await system.http.get("/readyz")
        assert answer.status_code == 503
        assert "prefill-0/0 is ready" in answer.json()["error"]["message"]
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0")) as system:
        assert (await system.http.get("/readyz")).status_code == 200


async def test_metrics_show_requests_workers_and_stranded_kv(system):
    system.say("hello")
    await system.client.completions.create(model="toy", prompt="hi")
    await system.until_empty()
    text = (await system.http.get("/metrics")).text
    for line in (
        'pd_cluster_requests_total{outcome="stop"} 1.0',
        'pd_cluster_worker_up{health="ready",role="prefill",worker="prefill-0/0"} 1.0',
        'pd_cluster_stranded_kv_blocks{role="decode",state="quarantined",worker="decode-0/0"} 0.0',
        'pd_cluster_http_requests_total{route="/v1/completions",status="200"} 1.0',
        'pd_cluster_kv_cache_usage_ratio{role="decode",worker="decode-0/0"} 0.0',
        "pd_cluster_time_to_first_token_seconds_count 1.0",
        "pd_cluster_kv_transfer_seconds_count 1.0",
    ):
        assert line in text


# ---- trouble


async def test_without_workers_the_answer_is_503_with_retry_after():
    async with System() as system:
        answer = await system.post("/v1/completions", COMPLETION)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["type"] == "server_error"
        with pytest.raises(openai.InternalServerError):
            await system.client.completions.create(**COMPLETION)


async def test_a_full_queue_is_429_with_retry_after():
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0"), max_queue=1) as system:
        system.workers[0].ignored.add(m.Prefill)
        first = asyncio.create_task(system.post("/v1/completions", COMPLETION))
        async with asyncio.timeout(5):
            while not system.router.pipeline.num_in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        with pytest.raises(openai.RateLimitError) as caught:
            await system.client.completions.create(**COMPLETION)
        assert caught.value.response.headers["retry-after"]
        first.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_has_its_own_status(system, stream):
    prefill = system.workers[0]
    prefill.replace[m.Prefill] = lambda message: [
        prefill.failed(message.request.id, message.transfer_id, EngineError("NaN in layer 3"))
    ]
    with pytest.raises(openai.InternalServerError, match="NaN in layer 3") as caught:
        await system.client.completions.create(**COMPLETION, stream=stream)
    assert caught.value.response.headers["x-should-retry"] == "false"


async def test_an_error_in_mid_stream_reaches_the_client(system):
    decode = system.workers[1]
    decode.replace[m.Reserve] = lambda message: [
        decode.failed(message.request.id, message.transfer_id, EngineError("out of luck"))
    ]
    stream = await system.client.chat.completions.create(**CHAT, stream=True)
    with pytest.raises(openai.APIError, match="out of luck"):
        _ = [chunk async for chunk in stream]


async def test_a_worker_lost_in_mid_stream_is_not_noticed_by_the_client():
    first, second = FakeWorker("decode-0"), FakeWorker("decode-1")
    async with System(FakeWorker("prefill-0"), first, second) as system:
        text = "a long story about a small cluster that never lost a token"
        system.say(text)
        for served in system.served:
            served.step_s = 0.005
        stream = await system.client.chat.completions.create(**CHAT, stream=True)
        seen = ""
        async for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
            if len(seen) == 10:
                (busy,) = [served for served in system.served if served.worker.running]
                await busy.stop()
        assert seen == text
        assert sum(isinstance(message, m.Prefill) for message in system.workers[0].seen) == 2


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_everything(system, path, stream):
    for served in system.served:
        served.step_s = 0.01
    body = {**(COMPLETION if path == "completions" else CHAT), "max_tokens": 400, "stream": stream, "n": 2}
    raw = json.dumps(body).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", system.router.http_port)
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    writer.write(head + raw)
    async with asyncio.timeout(5):
        while not system.workers[1].running:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    writer.close()
    started = asyncio.get_running_loop().time()
    await system.until_empty()
    assert asyncio.get_running_loop().time() - started < 1.0


async def test_streams_cancelled_two_hundred_times_leave_nothing(system):
    for _ in range(40):
        streams = [await system.client.chat.completions.create(**CHAT, max_tokens=400, stream=True) for _ in range(5)]
        for stream in streams:
            await stream.close()
    await system.until_empty()


async def test_many_streams_at_once_get_their_own_tokens(system):
    async def one(i: int) -> None:
        prompt = [i + 1, i + 2]
        body = {"model": "toy", "prompt": prompt, "max_tokens": 6, "return_token_ids": True, "seed": i}
        answer = (await system.post("/v1/completions", body)).json()
        grown = list(prompt)
        for _ in range(6):
            grown.append(1 + (31 * grown[-1] + 7 * len(grown) + sum(grown)) % 255)
        assert answer["choices"][0]["token_ids"] == grown[2:]

    await asyncio.gather(*(one(i) for i in range(64)))


async def test_prompts_go_where_their_prefix_is_cached():
    first, second = FakeWorker("prefill-0"), FakeWorker("prefill-1")
    async with System(first, second, FakeWorker("decode-0")) as system:
        system.say("ok")
        prompt = [7] * 64
        stored: list[UnitHash] = unit_hashes(prompt)
        served = system.served[1]
        served.server.send(served.router_id, [m.CacheEvents(stored=stored)])
        await asyncio.sleep(0.1)
        for _ in range(6):
            await system.post("/v1/completions", {"model": "toy", "prompt": prompt})
        assert first.seen == []
        assert second.kinds().count(m.Prefill) == 6


async def test_the_api_key_is_asked_for_on_the_api_only():
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0"), api_key="secret") as system:
        with pytest.raises(openai.AuthenticationError):
            await system.client.models.list()
        assert (await system.http.get("/readyz")).status_code == 200
        answer = await system.http.get("/v1/models", headers={"authorization": "Bearer secret"})
        assert answer.status_code == 200


async def test_a_model_without_a_tokenizer_speaks_token_ids():
    model = toy_model(tokenizer=None, chat_template=None)
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0"), model=model) as system:
        answer = await system.post("/v1/completions", COMPLETION)
        assert answer.status_code == 400
        assert "token ids" in answer.json()["error"]["message"]
        answer = await system.post("/v1/chat/completions", CHAT)
        assert "no chat template" in answer.json()["error"]["message"]
        body = {"model": "toy", "prompt": [1, 2], "return_token_ids": True, "logprobs": 1}
        answer = await system.post("/v1/completions", body)
        assert len(answer.json()["choices"][0]["token_ids"]) == 16
        assert answer.json()["choices"][0]["text"] == ""


async def test_a_slow_first_token_is_bridged_by_comments(system, monkeypatch):
    monkeypatch.setattr("router.events.HEADERS_AFTER_S", 0.05)
    monkeypatch.setattr("router.events.KEEP_ALIVE_S", 0.05)
    prefill = system.workers[0]
    orders: list[m.Prefill] = []
    prefill.replace[m.Prefill] = lambda message: orders.append(message) or []
    task = asyncio.create_task(system.post("/v1/completions", {**COMPLETION, "stream": True, "max_tokens": 2}))
    async with asyncio.timeout(5):
        while not orders:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.3)
    prefill.prefill(orders[0])
    answer = await task
    assert answer.text.startswith(": waiting\n\n: waiting\n\n")
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_stopping_the_router_ends_streams_with_an_error():
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0")) as system:
        for served in system.served:
            served.step_s = 0.02
        stream = await system.client.chat.completions.create(**CHAT, stream=True)
        await anext(aiter(stream))
        stop = asyncio.create_task(system.router.stop())
        with pytest.raises(openai.APIError, match="shutting down"):
            _ = [chunk async for chunk in stream]
        await stop


async def test_a_taken_port_is_a_configuration_error():
    taken = listen("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(ConfigError, match="http_port"):
        listen("127.0.0.1", taken.getsockname()[1])
    taken.close()


async def test_workers_can_be_removed_and_added_while_requests_run(system):
    system.say("abcdefghij" * 5)
    extra = FakeWorker("decode-9")
    extra.peers = system.workers[0].peers
    extra.peers[extra.id] = extra
    extra.reply = system.workers[0].reply
    served = ServedWorker(extra)
    await served.start()
    task = asyncio.create_task(system.post("/v1/completions", {**COMPLETION, "max_tokens": 50}))
    await asyncio.sleep(0.03)
    system.router.add_worker(served.address)
    async with asyncio.timeout(5):
        await system.router.until_ready(3)
    system.router.remove_worker(system.served[1].address)
    answer = (await task).json()
    assert answer["choices"][0]["text"] == "abcdefghij" * 5
    assert system.router.directory.get(system.workers[1].id) is None
    await system.until_empty()
    await served.stop()


def test_the_router_runs_on_uvloop_and_loads_no_torch():
    code = """
import sys, asyncio, uvloop
sys.path.insert(0, "tests/unit")
from test_openai_api import System, FakeWorker, COMPLETION
async def main():
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0")) as system:
        system.say("hello")
        answer = await system.client.completions.create(**COMPLETION)
        assert answer.choices[0].text == "hello", answer
        assert "uvloop" in repr(type(asyncio.get_running_loop()))
uvloop.run(main())
assert "torch" not in sys.modules and "ray" not in sys.modules and "nixl" not in sys.modules
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "fine\n", done.stderr
