"""How a client follows one generation over broken connections, without any network."""

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.client.asking import chat_request, prompt_request
from pd_cluster.client.following import Following
from pd_cluster.client.patience import Patience
from pd_cluster.clock import FakeClock
from pd_cluster.errors import DeadlineExceeded, InvalidRequest, Overloaded, PdClusterError, Unavailable, WorkerLost
from pd_cluster.pb.v1 import inference_pb2 as pb
from pd_cluster.request import FinishReason
from pd_cluster.rpc.status import status_of

TOKENS = list(range(10, 22))
Response = pb.GenerateStreamResponse


class Failure(grpc.RpcError):
    """A status as a call ends with."""

    def __init__(self, code: grpc.StatusCode, error: PdClusterError | None = None) -> None:
        self._code = code
        self._metadata = status_of(error)[2] if error is not None else ()

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "it broke"

    def trailing_metadata(self) -> tuple:
        return self._metadata


def following(clock: FakeClock | None = None, num_routers: int = 1, **limits: float) -> Following:
    times = {"timeout_s": 100.0, "resume_timeout_s": 30.0} | limits
    patience = Patience(clock or FakeClock(), num_routers=num_routers, **times)
    return Following(prompt_request("hi", {"temperature": 0}), patience)


def answer(request: pb.GenerateRequest) -> list[Response]:
    """What an honest router sends for a request that may continue: a token and a letter each."""
    start = len(request.output_token_ids)
    events = [{"begin": Response.Begin(request_id="r", model="toy")}]
    for index in range(start, len(TOKENS)):
        events.append({"delta": Response.Delta(first_index=index, token_ids=[TOKENS[index]], text=chr(97 + index))})
    usage = pb.Usage(num_output_tokens=len(TOKENS))
    events.append({"end": Response.End(finish_reason=pb.FINISH_REASON_LENGTH, usage=usage, text="!")})
    return [Response(sequence=sequence, **event) for sequence, event in enumerate(events)]


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 14), max_size=6), seed=st.randoms())
def test_wherever_streams_break_every_token_comes_once_and_in_order(cuts, seed):
    followed = following(resume_timeout_s=1000.0, num_routers=2)
    followed.take(answer(followed.request())[0])  # accepted once
    seen, text = [], ""
    for cut in [*cuts, 100]:
        messages = answer(followed.request())
        for message in messages[:cut]:
            chunk = followed.take(message)
            if chunk is not None:
                seen += chunk.token_ids
                text += chunk.text
        if followed.done:
            break
        followed.failed(seed.choice([None, Failure(grpc.StatusCode.UNAVAILABLE)]))
    assert seen == TOKENS
    assert text == "abcdefghijkl!"
    completion = followed.completion()
    assert (completion.token_ids, completion.text) == (TOKENS, text)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.num_resumes <= len(cuts)


def test_a_message_out_of_order_ends_the_attempt():
    messages = answer(following().request())
    followed = following()
    followed.take(messages[0])
    with pytest.raises(Unavailable, match="message 1 is missing"):
        followed.take(messages[2])
    gap = Response(sequence=0, delta=Response.Delta(first_index=1, token_ids=[5]))
    with pytest.raises(Unavailable, match="token 0 is missing"):
        following().take(gap)


def begun(clock: FakeClock | None = None, num_routers: int = 1, **limits: float) -> Following:
    followed = following(clock, num_routers, **limits)
    followed.take(answer(followed.request())[0])
    return followed


@pytest.mark.parametrize(
    ("failure", "fresh", "running"),
    [
        (Failure(grpc.StatusCode.UNAVAILABLE), True, True),
        (Failure(grpc.StatusCode.UNAVAILABLE, WorkerLost("x")), True, True),
        (Failure(grpc.StatusCode.CANCELLED), True, True),
        (Failure(grpc.StatusCode.INTERNAL), False, True),  # torn by a proxy
        (Failure(grpc.StatusCode.UNKNOWN), False, True),
        (Failure(grpc.StatusCode.INTERNAL, PdClusterError("x")), False, False),
        (Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded("x")), False, False),
        (Failure(grpc.StatusCode.DEADLINE_EXCEEDED), False, False),
        (Failure(grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest("x")), False, False),
        (None, True, True),
    ],
)
def test_only_what_another_try_may_help_is_tried_again(failure, fresh, running):
    for followed, again in ((following(num_routers=2), fresh), (begun(num_routers=2), running)):
        if again:
            assert followed.failed(failure) == 0.0  # there is another router
        else:
            with pytest.raises(PdClusterError):
                followed.failed(failure)


def test_what_was_never_accepted_is_tried_once_at_each_router():
    followed = following(num_routers=3)
    lost = Failure(grpc.StatusCode.UNAVAILABLE)
    assert [followed.failed(lost), followed.failed(lost)] == [0.0, 0.0]
    with pytest.raises(Unavailable):
        followed.failed(lost)
    assert followed.num_resumes == 0


def test_a_stream_that_broke_goes_on_trying_until_its_patience_ends():
    clock = FakeClock()
    followed = begun(clock, num_routers=2, resume_timeout_s=30.0)
    delays = []

    def break_for_ever() -> None:
        while True:
            delays.append(followed.failed(Failure(grpc.StatusCode.UNAVAILABLE)))
            clock.advance(delays[-1] + 0.01)

    with pytest.raises(Unavailable):
        break_for_ever()
    assert 30 <= clock.now_s() < 33
    assert delays[0::2] == [0.0] * len(delays[0::2])  # the second router of a round at once
    waits = delays[1::2]
    assert waits[0] < 0.13
    assert all(wait <= 2.4 for wait in waits)
    assert waits[-1] > 1.5


def test_tokens_renew_the_patience():
    clock = FakeClock()
    followed = begun(clock, resume_timeout_s=1.0)
    for index in range(5):
        followed.failed(Failure(grpc.StatusCode.UNAVAILABLE))
        clock.advance(2.0)
        for message in answer(followed.request())[:2]:
            followed.take(message)
        assert len(followed.token_ids) == index + 1


def test_the_deadline_is_of_the_whole():
    clock = FakeClock()
    followed = begun(clock, timeout_s=10.0)
    clock.advance(4.0)
    assert followed.timeout_s() == pytest.approx(6.0)
    clock.advance(7.0)
    with pytest.raises(DeadlineExceeded):
        followed.timeout_s()


def test_a_request_continues_with_its_seed_and_its_tokens():
    followed = Following(
        prompt_request([1, 2], {"temperature": 0.5, "stop": "x"}),
        Patience(FakeClock(), timeout_s=1.0, resume_timeout_s=1.0, num_routers=1),
    )
    first = followed.request()
    followed.take(Response(sequence=0, delta=Response.Delta(first_index=0, token_ids=[7, 8])))
    second = followed.request()
    assert first.sampling.HasField("seed")
    assert second.sampling == first.sampling
    assert list(second.output_token_ids) == [7, 8]
    assert list(second.prompt_token_ids.ids) == [1, 2]
    assert list(second.sampling.stop) == ["x"]


def test_none_is_left_out_and_what_does_not_exist_is_named():
    request = prompt_request("hi", {"temperature": None, "seed": None, "max_tokens": 0, "model": "m"})
    assert not request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")
    assert request.sampling.HasField("max_tokens")
    assert request.model == "m"
    with pytest.raises(TypeError, match="max_token"):
        prompt_request("hi", {"max_token": 3})


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: prompt_request("hi", {"temperature": "hot"}), "temperature"),
        (lambda: prompt_request("hi", {"top_k": -1}), "top_k"),
        (lambda: prompt_request("hi", {"stop": [1]}), "stop"),
        (lambda: prompt_request([1, -2], {}), "prompt"),
        (lambda: prompt_request([1, "x"], {}), "prompt"),
        (lambda: prompt_request("\ud800", {}), "prompt"),
        (lambda: chat_request([{"role": "user", "content": 5}], {}), "messages"),
        (lambda: chat_request([{"role": "user", "text": "hi"}], {}), "messages"),
    ],
)
def test_values_of_the_wrong_type_are_named_before_anything_is_sent(make, param):
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.param == param
