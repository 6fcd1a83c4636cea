"""The control stream over real gRPC: greeting, batching, heartbeats, loss, reconnection, and what strangers send."""

import asyncio
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import grpc
import pytest
from grpc import aio

from pd_cluster import messages as m
from pd_cluster.errors import ConfigError
from pd_cluster.ids import EngineEpoch, EngineId, RequestId, RouterId, TransferId, WorkerId
from pd_cluster.pb.v1 import control_pb2, control_pb2_grpc
from pd_cluster.request import Request, SamplingParams
from pd_cluster.rpc.client import ControlClient
from pd_cluster.rpc.outbox import FRAME_TARGET_BYTES, frames
from pd_cluster.rpc.security import Security
from pd_cluster.rpc.server import ControlServer

INFO = m.WorkerInfo(
    worker_id=WorkerId("decode-0/0"),
    engine_id=EngineId("decode-0"),
    dp_rank=0,
    can_prefill=False,
    can_decode=True,
    model="toy",
    tensor_parallel=1,
    data_parallel=1,
    num_blocks=64,
    block_size=16,
    block_bytes=1024,
    max_model_len=512,
    vocab_size=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)
EPOCH = EngineEpoch("epoch-1")


class Worker:
    """A handler that writes down what happens."""

    def __init__(self) -> None:
        self.events: list[tuple[str, RouterId]] = []
        self.batches: list[list[m.ToWorkerMessage]] = []

    def on_attach(self, router_id: RouterId) -> None:
        self.events.append(("attach", router_id))

    def on_messages(self, router_id: RouterId, messages: list[m.ToWorkerMessage]) -> None:
        self.batches.append(messages)

    def on_detach(self, router_id: RouterId) -> None:
        self.events.append(("detach", router_id))

    def load(self) -> m.WorkerLoad:
        return m.WorkerLoad(num_running=3)


class Listener:
    def __init__(self) -> None:
        self.welcomes: list[EngineEpoch] = []
        self.batches: list[list[m.ToRouterMessage]] = []
        self.lost: list[str] = []

    def on_welcome(self, client: ControlClient, info: m.WorkerInfo, epoch: EngineEpoch) -> None:
        self.welcomes.append(epoch)

    def on_messages(self, client: ControlClient, messages: list[m.ToRouterMessage]) -> None:
        self.batches.append(messages)

    def on_lost(self, client: ControlClient, reason: str) -> None:
        self.lost.append(reason)

    @property
    def messages(self) -> list[m.ToRouterMessage]:
        return [message for batch in self.batches for message in batch]


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (the condition is state behind a socket)
            await asyncio.sleep(0.005)


async def refusal(call) -> aio.AioRpcError:
    """The status that ends a raw call."""
    try:
        while await call.read() is not aio.EOF:
            pass
    except aio.AioRpcError as error:
        return error
    pytest.fail("the stream ended with OK")


Cleanup = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture
async def cleanup():
    pending: list[Callable[[], Awaitable[None]]] = []
    yield pending.append
    for close in reversed(pending):
        await close()


async def serve(cleanup: Cleanup, worker: Worker, **options: object) -> tuple[ControlServer, int]:
    epoch = options.pop("epoch", EPOCH)
    server = ControlServer(worker, INFO, epoch, **options)  # type: ignore[arg-type]
    cleanup(lambda: server.stop(0))
    return server, await server.start()


async def dial(
    cleanup: Cleanup, port: int, name: str = "router-a", **options: object
) -> tuple[ControlClient, Listener]:
    listener = Listener()
    client = ControlClient(f"127.0.0.1:{port}", RouterId(name), listener, **options)  # type: ignore[arg-type]
    cleanup(client.stop)
    client.start()
    return client, listener


def abort(name: str) -> m.Abort:
    return m.Abort(request_id=RequestId(name))


def prefill(name: str, tokens: int = 3) -> m.Prefill:
    request = Request(
        id=RequestId(name), token_ids=list(range(tokens)), num_prompt_tokens=tokens, sampling=SamplingParams()
    )
    return m.Prefill(request=request, transfer_id=TransferId("t"), deadline_s=1.0)


async def test_a_router_is_welcomed_and_hears_heartbeats(cleanup):
    _, port = await serve(cleanup, Worker(), heartbeat_s=0.02)
    client, listener = await dial(cleanup, port)
    await until(lambda: len(listener.messages) >= 3)
    assert listener.welcomes == [EPOCH]
    assert client.info == INFO
    assert all(message == m.Heartbeat(load=m.WorkerLoad(num_running=3)) for message in listener.messages)


async def test_a_load_that_does_not_change_is_said_at_every_other_beat(cleanup):
    worker = Worker()
    asked: list[int] = []
    worker.load = lambda: asked.append(1) or m.WorkerLoad(num_running=3)  # type: ignore[method-assign]
    _, port = await serve(cleanup, worker, heartbeat_s=0.01)
    _, listener = await dial(cleanup, port)
    await until(lambda: len(listener.messages) >= 5)
    assert len(asked) >= 7, "the first may come with the welcome"
    worker.load = lambda: asked.append(1) or m.WorkerLoad(num_running=len(asked))  # type: ignore[method-assign]
    since, heard = len(asked), len(listener.messages)
    await until(lambda: len(asked) >= since + 5)
    await until(lambda: len(listener.messages) >= heard + 5)


async def test_messages_of_one_turn_travel_as_one_batch_and_in_order(cleanup):
    worker = Worker()
    server, port = await serve(cleanup, worker, heartbeat_s=60)
    client, listener = await dial(cleanup, port)
    await until(lambda: client.attached)
    for i in range(100):
        assert client.send([abort(f"r{i}")])
        server.send(RouterId("router-a"), [m.Preempted(request_id=RequestId(f"r{i}"))])
    await until(lambda: bool(worker.batches) and len(listener.messages) >= 101)
    assert [[message.request_id for message in batch] for batch in worker.batches] == [[f"r{i}" for i in range(100)]]
    last = listener.batches[-1]
    assert [message.request_id for message in last if isinstance(message, m.Preempted)] == [f"r{i}" for i in range(100)]


async def test_each_router_gets_only_its_own_messages(cleanup):
    worker = Worker()
    server, port = await serve(cleanup, worker, heartbeat_s=60)
    a, hears_a = await dial(cleanup, port, "router-a")
    b, hears_b = await dial(cleanup, port, "router-b")
    await until(lambda: a.attached and b.attached)
    server.send(RouterId("router-b"), [m.Drained()])
    await until(lambda: m.Drained() in hears_b.messages)
    assert m.Drained() not in hears_a.messages
    assert not server.send(RouterId("nobody"), [m.Drained()])


async def test_a_batch_for_another_life_is_answered_with_failed(cleanup):
    worker = Worker()
    _, port = await serve(cleanup, worker, heartbeat_s=60)
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = control_pb2_grpc.WorkerControlStub(channel).Attach()
        hello = m.Hello(router_id=RouterId("old"))
        await call.write(control_pb2.AttachRequest(batch=m.encode(m.ToWorker(None, [hello]))))
        await call.read()
        batch = m.ToWorker(EngineEpoch("epoch-0"), [prefill("r1"), abort("r0")])
        await call.write(control_pb2.AttachRequest(batch=m.encode(batch)))
        answer = m.decode_to_router((await call.read()).batch)
    (failed,) = answer.messages
    assert isinstance(failed, m.Failed)
    assert (failed.request_id, failed.error.code) == ("r1", "worker_lost")
    assert "epoch-0" in failed.error.message
    assert worker.batches == []


async def test_a_router_that_goes_away_is_detached(cleanup):
    worker = Worker()
    server, port = await serve(cleanup, worker)
    client, listener = await dial(cleanup, port)
    await until(lambda: client.attached)
    await client.stop()
    await until(lambda: len(worker.events) == 2)
    assert worker.events == [("attach", "router-a"), ("detach", "router-a")]
    assert server.routers == []
    assert listener.lost == []  # its own doing


async def test_a_router_that_attaches_again_replaces_its_former_stream(cleanup):
    worker = Worker()
    server, port = await serve(cleanup, worker)
    first, listener = await dial(cleanup, port)
    await until(lambda: first.attached)
    await dial(cleanup, port)
    await until(lambda: len(worker.events) >= 3)
    assert [event for event, _ in worker.events[:3]] == ["attach", "detach", "attach"]
    await until(lambda: bool(listener.lost))
    assert len(server.routers) == 1


async def test_a_restarted_worker_is_noticed_by_its_new_epoch(cleanup):
    first, port = await serve(cleanup, Worker())
    client, listener = await dial(cleanup, port)
    await until(lambda: client.attached)
    await first.stop(0)
    await until(lambda: len(listener.lost) == 1)
    assert not client.send([abort("r")])
    await serve(cleanup, Worker(), port=port, epoch=EngineEpoch("epoch-2"))
    await until(lambda: len(listener.welcomes) == 2)
    assert listener.welcomes == ["epoch-1", "epoch-2"]
    assert client.epoch == "epoch-2"


async def test_a_silent_worker_is_lost(cleanup):
    _, port = await serve(cleanup, Worker(), heartbeat_s=60)
    client, listener = await dial(cleanup, port, lost_after_s=0.2)
    await until(lambda: bool(listener.lost))
    assert listener.lost[0] == "no heartbeat for 0.2 s"
    await until(lambda: client.attached)  # and it is dialled again


async def test_a_worker_is_not_lost_while_the_router_itself_stands_still(cleanup):
    _, port = await serve(cleanup, Worker(), heartbeat_s=0.05)
    _, listener = await dial(cleanup, port, lost_after_s=0.4)
    for _ in range(3):
        time.sleep(0.6)  # noqa: ASYNC251 (nobody on this loop runs)
        await asyncio.sleep(0.2)
    assert listener.lost == []


async def test_a_worker_that_starts_late_is_found(cleanup):
    server, port = await serve(cleanup, Worker())
    await server.stop(0)
    client, listener = await dial(cleanup, port)
    await asyncio.sleep(0.2)
    assert not client.attached
    await serve(cleanup, Worker(), port=port)
    await until(lambda: client.attached)
    assert listener.lost == []


GARBAGE = [
    b"",
    b"\x00" * 32,
    b"not msgpack at all",
    pickle.dumps({"__reduce__": print}),
    m.encode(m.ToWorker(None, [])),
    m.encode(m.ToWorker(EPOCH, [abort("r")])),
    m.encode([None, [{"type": "hello"}]]),
    m.encode([None, [{"type": "launch_missiles"}]]),
    random.Random(0).randbytes(4096),
]


@pytest.mark.parametrize("payload", GARBAGE)
async def test_a_first_frame_of_garbage_ends_only_that_stream(cleanup, payload):
    worker = Worker()
    _, port = await serve(cleanup, worker)
    client, listener = await dial(cleanup, port, "honest")
    await until(lambda: client.attached)
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = control_pb2_grpc.WorkerControlStub(channel).Attach()
        await call.write(control_pb2.AttachRequest(batch=payload))
        assert (await refusal(call)).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert client.attached
    assert worker.events == [("attach", "honest")]
    assert listener.lost == []


@pytest.mark.parametrize("payload", [*GARBAGE[1:4], GARBAGE[-1]])
async def test_garbage_after_the_greeting_detaches_the_router(cleanup, payload):
    worker = Worker()
    _, port = await serve(cleanup, worker, heartbeat_s=60)
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = control_pb2_grpc.WorkerControlStub(channel).Attach()
        hello = m.ToWorker(None, [m.Hello(router_id=RouterId("rogue"))])
        await call.write(control_pb2.AttachRequest(batch=m.encode(hello)))
        await call.read()
        await call.write(control_pb2.AttachRequest(batch=payload))
        assert (await refusal(call)).code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: worker.events == [("attach", "rogue"), ("detach", "rogue")])
    assert worker.batches == []


async def test_bytes_that_are_not_protobuf_end_the_stream(cleanup):
    _, port = await serve(cleanup, Worker())
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/pd_cluster.v1.WorkerControl/Attach")()
        await call.write(b"\xff\xff\xff\xff")
        await refusal(call)
    client, _ = await dial(cleanup, port)
    await until(lambda: client.attached)


async def test_bytes_that_are_not_http2_harm_nobody(cleanup):
    _, port = await serve(cleanup, Worker())
    client, listener = await dial(cleanup, port)
    await until(lambda: client.attached)
    for payload in (b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95" * 100, random.Random(1).randbytes(5000)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(payload)
        async with asyncio.timeout(5):
            while await reader.read(4096):
                pass
        writer.close()
    assert client.attached
    assert listener.lost == []


async def test_an_older_protocol_is_refused_by_name(cleanup):
    _, port = await serve(cleanup, Worker())
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = control_pb2_grpc.WorkerControlStub(channel).Attach()
        hello = m.ToWorker(None, [m.Hello(router_id=RouterId("x"), protocol=0)])
        await call.write(control_pb2.AttachRequest(batch=m.encode(hello)))
        error = await refusal(call)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "protocol 1" in error.details()


async def test_a_wrong_token_is_refused_and_the_right_one_is_not(cleanup):
    _, port = await serve(cleanup, Worker(), security=Security(token="secret"))
    wrong, _ = await dial(cleanup, port, "wrong", security=Security(token="guess"))
    right, _ = await dial(cleanup, port, "right", security=Security(token="secret"))
    await until(lambda: right.attached)
    await asyncio.sleep(0.1)
    assert not wrong.attached


async def test_an_open_port_beyond_loopback_must_be_asked_for(cleanup):
    with pytest.raises(ConfigError, match="leaves this machine"):
        await serve(cleanup, Worker(), host="0.0.0.0")
    await serve(cleanup, Worker(), host="0.0.0.0", security=Security(allow_insecure=True))


async def test_a_token_is_not_sent_in_the_clear_beyond_loopback():
    client = ControlClient("10.0.0.1:1", RouterId("r"), Listener(), security=Security(token="secret"))
    with pytest.raises(ConfigError, match="in the clear"):
        client.start()


@pytest.fixture
def certified(tmp_path):
    """A self-signed certificate for loopback that is also its own root."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    done = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("no openssl on this machine")
    return Security(certificate=str(certificate), private_key=str(key), root_certificates=str(certificate))


async def test_both_sides_show_certificates_when_roots_are_given(cleanup, certified):
    _, port = await serve(cleanup, Worker(), security=certified)
    no_certificate = Security(root_certificates=certified.root_certificates)
    stranger, _ = await dial(cleanup, port, "stranger", security=no_certificate)
    member, _ = await dial(cleanup, port, "member", security=certified)
    await until(lambda: member.attached)
    await asyncio.sleep(0.1)
    assert not stranger.attached


async def test_a_router_that_never_reads_is_cut_off(cleanup):
    worker = Worker()
    server, port = await serve(cleanup, worker, heartbeat_s=60, max_queued_messages=10)
    client, listener = await dial(cleanup, port)
    await until(lambda: client.attached)
    server.send(RouterId("router-a"), [m.Drained()] * 11)
    await until(lambda: bool(listener.lost))
    assert "RESOURCE_EXHAUSTED" in listener.lost[0]


async def test_what_was_queued_before_stop_still_arrives(cleanup):
    worker = Worker()
    _, port = await serve(cleanup, worker)
    client, _ = await dial(cleanup, port)
    await until(lambda: client.attached)
    client.send([abort("last words")])
    await client.stop()
    await until(lambda: bool(worker.batches))
    assert worker.batches == [[abort("last words")]]


def test_a_batch_beyond_the_frame_target_is_split_in_order():
    batch: list[m.ToWorkerMessage] = [prefill(f"r{i}", tokens=1_500_000) for i in range(5)]
    parts = frames(lambda messages: m.encode(m.ToWorker(EPOCH, messages)), batch)
    assert len(parts) > 1
    assert all(len(part) <= FRAME_TARGET_BYTES for part in parts)
    assert [message.request.id for part in parts for message in m.decode_to_worker(part).messages] == [
        f"r{i}" for i in range(5)
    ]


def test_the_committed_stubs_match_proto():
    pytest.importorskip("grpc_tools")
    done = subprocess.run(
        [sys.executable, "-m", "pd_cluster.rpc.generate", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
