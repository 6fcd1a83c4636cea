"""The SDK against routers on sockets: both clients, types, errors, keys, TLS, and streams that lose their router."""

import asyncio
import datetime
import ipaddress
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fake_worker import FakeWorker, continuation
from toy_router import System

from pd_cluster import messages as m
from pd_cluster.client import AsyncClient, Client, FinishReason, Health, Phase, Role, Tls
from pd_cluster.config import TlsSection
from pd_cluster.errors import (
    ConfigError,
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    NotSupported,
    Overloaded,
    PdClusterError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownWorker,
)

T = TypeVar("T")
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def system():
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0")) as system:
        yield system
        await system.until_empty()


async def blocking(work: Callable[[Client], T], address: str, **options: object) -> T:
    """Run `work` in a thread with a blocking client."""

    def run() -> T:
        with Client(address, **options) as client:  # type: ignore[arg-type]
            return work(client)

    return await asyncio.to_thread(run)


# ---- answers


async def test_both_clients_give_the_same_completion(system):
    async with AsyncClient(system.grpc_address) as client:
        first = await client.generate("hi", temperature=0, max_tokens=8, logprobs=1)
    second = await blocking(lambda c: c.generate("hi", temperature=0, max_tokens=8, logprobs=1), system.grpc_address)
    assert first.token_ids == second.token_ids == continuation(list(b"hi"), 8)
    assert first.text == second.text
    assert first.finish_reason is FinishReason.LENGTH
    assert (first.usage.num_prompt_tokens, first.usage.num_output_tokens) == (2, 8)
    assert first.timings.decode_worker == "decode-0/0"
    assert first.model == "toy"
    assert first.num_resumes == 0
    assert len(first.logprobs) == 8
    assert first.logprobs == second.logprobs
    assert first.logprobs[0].top_ids == [first.token_ids[0]]


async def test_chunks_add_up_to_the_completion(system):
    system.say("a story that ends")

    def read(client: Client) -> tuple[str, list[int], object]:
        with client.stream("hi", stop="ends", seed=5) as stream:
            chunks = list(stream)
        assert stream.text == "".join(chunk.text for chunk in chunks)
        assert stream.token_ids == [token for chunk in chunks for token in chunk.token_ids]
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason is FinishReason.STOP
        return stream.text, stream.token_ids, stream.completion

    text, token_ids, completion = await blocking(read, system.grpc_address)
    assert text == completion.text == "a story that "
    assert completion.seed == 5
    async with AsyncClient(system.grpc_address) as client, client.stream("hi", stop=["ends"]) as stream:
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == text
        assert stream.completion.token_ids == token_ids


async def test_chats_go_through_the_template(system):
    expected = continuation(list(b"user: hi\nassistant:"), 4)
    async with AsyncClient(system.grpc_address) as client:
        assert (await client.chat(CHAT, temperature=0, max_tokens=4)).token_ids == expected
        async with client.stream_chat(CHAT, temperature=0, max_tokens=4) as stream:
            async for _ in stream:
                pass
            assert stream.token_ids == expected
    answer = await blocking(lambda c: c.chat(CHAT, temperature=0, max_tokens=4), system.grpc_address)
    assert answer.token_ids == expected

    def streamed(client: Client) -> list[int]:
        with client.stream_chat(CHAT, temperature=0, max_tokens=4) as stream:
            for _ in stream:
                pass
            return stream.token_ids

    assert await blocking(streamed, system.grpc_address) == expected


async def test_tokens_and_models(system):
    async with AsyncClient(system.grpc_address) as client:
        assert await client.tokenize("wörld") == list("wörld".encode())
        assert await client.tokenize(CHAT) == list(b"user: hi\nassistant:")
        assert await client.detokenize(list("wörld".encode())) == "wörld"
        (model,) = await client.models()
    assert (model.name, model.max_model_len, model.vocab_size, model.has_tokenizer) == ("toy", 512, 257, True)
    tokens, text, models = await blocking(
        lambda c: (c.tokenize("x"), c.detokenize([104, 256]), c.models()), system.grpc_address
    )
    assert (tokens, text, models) == ([120], "h", [model])


async def test_status_watch_drain_and_scale(system):
    async with AsyncClient(system.grpc_address) as client:
        system.workers[0].ignored.add(m.Prefill)
        stream = client.stream("hi", request_id="mine")
        reading = asyncio.ensure_future(anext(stream))
        async with asyncio.timeout(5):
            while not (status := await client.status(max_requests=10)).requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (request,) = status.requests
        assert request.request_id.startswith("mine")
        assert request.phase is Phase.QUEUED
        assert status.phases.queued == 1
        reading.cancel()
        await system.until_empty()
        assert status.ready
        assert [(w.worker_id, w.role, w.health) for w in status.workers] == [
            ("prefill-0/0", Role.PREFILL, Health.READY),
            ("decode-0/0", Role.DECODE, Health.READY),
        ]
        assert status.workers[0].kv.usage == 0.0
        assert status.workers[1].idle
        drained = await client.drain("decode-0/0")
        assert drained.health is Health.DRAINING
        with pytest.raises(UnknownWorker):
            await client.drain("decode-7/0")
        with pytest.raises(NotSupported):
            await client.scale("prefill", 3)
        with pytest.raises(ValueError, match="prefil"):
            await client.scale("prefil", 3)
        watch = client.watch(0.1)
        seen = [await anext(watch), await anext(watch)]
        assert seen[1].uptime_s > seen[0].uptime_s
        await watch.aclose()
    watched = await blocking(lambda c: next(c.watch(0.1)), system.grpc_address)
    assert watched.workers[1].health is Health.DRAINING
    assert watched.router_id == status.router_id


# ---- errors


async def test_errors_are_the_classes_of_the_tree(system):
    async with AsyncClient(system.grpc_address) as client:
        with pytest.raises(UnknownModel):
            await client.generate("hi", model="gpt")
        with pytest.raises(ContextTooLong):
            await client.generate("x" * 600)
        with pytest.raises(InvalidRequest) as bad:
            await client.generate("hi", top_p=2.0)
        assert bad.value.param == "top_p"  # as the caller named it
        system.workers[0].ignored.add(m.Prefill)
        with pytest.raises(DeadlineExceeded):
            await client.generate("hi", timeout_s=0.3)

    def refuse(client: Client) -> PdClusterError:
        with pytest.raises(InvalidRequest) as caught:
            client.generate("hi", max_tokens=0)
        return caught.value

    assert (await blocking(refuse, system.grpc_address)).param == "max_tokens"
    await system.until_empty()


async def test_an_overloaded_router_says_when_to_come_back():
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0"), max_queue=1) as system:
        system.workers[0].ignored.add(m.Prefill)
        async with AsyncClient(system.grpc_address) as client:
            stream = client.stream("hi")
            first = asyncio.ensure_future(anext(stream))
            async with asyncio.timeout(5):
                while not system.router.pipeline.num_in_flight:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            with pytest.raises(Overloaded) as caught:
                await client.generate("hi")
            assert caught.value.retry_after_s == 1.0
            first.cancel()
        await system.until_empty()


async def test_a_router_that_is_not_there_is_unavailable_soon():
    for address in ("127.0.0.1:1", "127.0.0.1:1,127.0.0.1:2"):
        with pytest.raises(Unavailable):
            await blocking(lambda c: c.generate("hi"), address)
        async with AsyncClient(address) as client:
            with pytest.raises(Unavailable):
                await client.status()


def test_a_key_does_not_travel_in_the_clear():
    with pytest.raises(ConfigError, match="in the clear"):
        Client("10.0.0.1:8001", api_key="secret")
    with pytest.raises(ConfigError, match="in the clear"):
        AsyncClient("dns:///router.example:8001", api_key="secret")
    Client("10.0.0.1:8001", api_key="secret", allow_insecure=True).close()
    Client("10.0.0.1:8001", api_key="secret", tls=Tls()).close()
    Client("127.0.0.1:8001", api_key="secret").close()


@pytest.mark.parametrize("addresses", ["", [], "host", " , ", "host:"])
def test_addresses_without_a_port_are_refused(addresses):
    with pytest.raises(ConfigError, match=r"HOST:PORT|address"):
        Client(addresses)


async def test_keys_are_shown():
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0"), api_key="secret", admin_key="boss") as system:
        async with AsyncClient(system.grpc_address) as client:
            with pytest.raises(Unauthenticated):
                await client.generate("hi")
        async with AsyncClient(system.grpc_address, api_key="secret") as client:
            assert (await client.generate("hi", max_tokens=2)).usage.num_output_tokens == 2
            with pytest.raises(PermissionDenied):
                await client.drain("decode-0/0")
        drained = await blocking(lambda c: c.drain("decode-0/0"), system.grpc_address, api_key="boss")
        assert drained.worker_id == "decode-0/0"


# ---- TLS


def make_certificates(folder) -> dict[str, str]:
    """A root, and a server's and a client's certificate that it signed, as PEM files."""
    now = datetime.datetime.now(datetime.UTC)
    root_key = ec.generate_private_key(ec.SECP256R1())
    root_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "root")])
    files = {}

    def write(name: str, key, subject: x509.Name, ca: bool) -> None:
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(root_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
            .sign(root_key, hashes.SHA256())
        )
        for kind, data in (
            ("crt", certificate.public_bytes(serialization.Encoding.PEM)),
            (
                "key",
                key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                ),
            ),
        ):
            path = folder / f"{name}.{kind}"
            path.write_bytes(data)
            files[f"{name}.{kind}"] = str(path)

    write("root", root_key, root_name, ca=True)
    for name in ("server", "client"):
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        write(name, ec.generate_private_key(ec.SECP256R1()), subject, ca=False)
    return files


async def test_tls_and_client_certificates(tmp_path):
    files = make_certificates(tmp_path)
    section = TlsSection(certificate=files["server.crt"], private_key=files["server.key"])
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0"), grpc_tls=section, api_key="secret") as system:
        trusting = Tls(roots=files["root.crt"])
        answer = await blocking(
            lambda c: c.generate("hi", max_tokens=2), system.grpc_address, tls=trusting, api_key="secret"
        )
        assert len(answer.token_ids) == 2
        for wrong in (Tls(), None):
            with pytest.raises(Unavailable):
                await blocking(lambda c: c.models(), system.grpc_address, tls=wrong, api_key="secret")
    mutual = TlsSection(
        certificate=files["server.crt"], private_key=files["server.key"], client_roots=files["root.crt"]
    )
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0"), grpc_tls=mutual) as system:
        known = Tls(roots=files["root.crt"], certificate=files["client.crt"], private_key=files["client.key"])
        async with AsyncClient(system.grpc_address, tls=known) as client:
            assert (await client.models())[0].name == "toy"
        async with AsyncClient(system.grpc_address, tls=trusting) as client:
            with pytest.raises(Unavailable):
                await client.models()
    with pytest.raises(ConfigError, match="belong together"):
        Client("h:1", tls=Tls(certificate=files["client.crt"]))
    with pytest.raises(ConfigError, match="cannot read"):
        Client("h:1", tls=Tls(roots="/no/such/file"))


# ---- leaving early


async def test_leaving_a_stream_frees_both_sides(system):
    system.served[1].step_s = 0.02

    def leave(client: Client) -> int:
        with client.stream("hi", max_tokens=400) as stream:
            next(stream)
            next(stream)
        assert list(stream) == []
        return len(stream.token_ids)

    assert 2 <= await blocking(leave, system.grpc_address) < 100
    await system.until_empty()
    async with AsyncClient(system.grpc_address) as client:
        async with client.stream("hi", max_tokens=400) as stream:
            await anext(stream)
        await system.until_empty()
        task = asyncio.ensure_future(client.generate("hi", max_tokens=400))
        async with asyncio.timeout(5):
            while not system.router.pipeline.num_in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await system.until_empty()


async def test_a_stream_closed_from_elsewhere_just_ends(system):
    system.workers[0].ignored.add(m.Prefill)
    async with AsyncClient(system.grpc_address) as client:
        stream = client.stream("hi")
        reading = asyncio.ensure_future(read_all(stream))
        await asyncio.sleep(0.1)
        stream.close()
        assert await asyncio.wait_for(reading, 5) == []
    with Client(system.grpc_address) as client:
        other = client.stream("hi")
        timer = threading.Timer(0.2, other.close)
        timer.start()
        assert await asyncio.to_thread(list, other) == []
    await system.until_empty()


async def read_all(stream) -> list:
    return [chunk async for chunk in stream]


# ---- losing a router


@pytest.mark.parametrize("kind", ["async", "blocking"])
async def test_a_stream_goes_on_where_the_router_comes_back(system, kind):
    """The same port, another router: nothing of the first one's memory is left."""
    system.served[1].step_s = 0.01
    loop = asyncio.get_running_loop()
    half = asyncio.Event()
    options = {"temperature": 0, "max_tokens": 60}
    tokens: list[int] = []
    texts: list[str] = []

    def note(chunk) -> None:
        tokens.extend(chunk.token_ids)
        texts.append(chunk.text)
        if len(tokens) > 20:
            loop.call_soon_threadsafe(half.set)

    async def follow():
        async with AsyncClient(system.grpc_address) as client, client.stream("hi", **options) as stream:
            async for chunk in stream:
                note(chunk)
            return stream.completion

    def follow_blocking(client: Client):
        with client.stream("hi", **options) as stream:
            for chunk in stream:
                note(chunk)
            return stream.completion

    work = follow() if kind == "async" else blocking(follow_blocking, system.grpc_address)
    following = asyncio.ensure_future(work)
    await asyncio.wait_for(half.wait(), 10)
    await system.restart()
    completion = await asyncio.wait_for(following, 20)
    assert tokens == completion.token_ids == continuation(list(b"hi"), 60)
    assert "".join(texts) == completion.text
    assert completion.num_resumes >= 1
    assert completion.usage.num_output_tokens == 60
    continued = [message.request for message in system.workers[0].seen if isinstance(message, m.Prefill)][-1]
    assert continued.num_output_tokens > 20  # from its tokens, not from the start


async def test_a_watch_goes_on_where_the_router_comes_back(system):
    async with AsyncClient(system.grpc_address) as client:
        watch = client.watch(0.1)
        before = (await anext(watch)).router_id
        await system.restart()
        async with asyncio.timeout(20):
            while (await anext(watch)).router_id == before:
                pass
        await watch.aclose()


async def test_whoever_answers_is_asked_again_and_the_next_one_when_it_is_gone():
    dead = "127.0.0.1:1"
    async with System(FakeWorker("prefill-0"), FakeWorker("decode-0")) as system:
        for order in ([dead, system.grpc_address], [system.grpc_address, dead]):
            async with AsyncClient(order) as client:
                for _ in range(3):
                    assert (await client.generate("hi", temperature=0, max_tokens=3)).num_resumes == 0
                assert (await client.status()).ready


def test_the_sdk_loads_no_torch_and_no_ray():
    script = "import sys, pd_cluster.client; sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'router')))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
