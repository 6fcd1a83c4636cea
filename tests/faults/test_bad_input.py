"""Nothing that arrives on a port takes a process down: bad requests are refused by name, garbage is hung up on."""

import asyncio
import contextlib
import json
import os
import pickle
import re
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import CHECKPOINTS, LocalCluster, address_of, config_of

from pd_cluster import messages as m
from pd_cluster.ids import BlockId, EngineEpoch, RequestId, RouterId, TransferId, WorkerId
from pd_cluster.launch.rank import RankServer
from pd_cluster.request import Request, SamplingParams
from pd_cluster.rpc.client import ControlClient

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))
from processes import Command, running, until

MODEL = "qwen3_moe"
GARBAGE_BYTES = 10 << 20
PROMPT = list(range(3, 43))


# ---- a cluster of real processes


@pytest.fixture(scope="module")
def served() -> Iterator["Served"]:
    settings = [
        "kv.block_size=16",
        "kv.num_blocks=64",
        "router.http_port=0",
        "router.grpc_port=0",
        "model.dtype=float32",
    ]
    flags = [part for setting in settings for part in ("--set", setting)]
    path = str(CHECKPOINTS / MODEL)
    with running("serve", path, "--prefill-tp", "2", "--decode-dp", "2", *flags) as command:
        until(lambda: "is served at" in command.stderr or command.process.poll() is not None)
        url = re.search(r"is served at (http://[^/]+)/v1", command.stderr)
        assert url, command.stderr
        yield Served(command, url[1])


class Served:
    def __init__(self, command: Command, url: str) -> None:
        self.command = command
        self.url = url

    def post(self, body: bytes, path: str = "completions") -> tuple[int, Any]:
        asked = urllib.request.Request(f"{self.url}/v1/{path}", body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def complete(self) -> list[int]:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        status, answer = self.post(json.dumps(body).encode())
        assert status == 200, answer
        return list(answer["choices"][0]["token_ids"])

    @property
    def pids(self) -> list[int]:
        return [self.command.process.pid, *self.command.family()]


def body(**changes: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True} | changes).encode()


REFUSED: dict[str, tuple[bytes, int, str]] = {
    "no body": (b"", 400, "not valid JSON"),
    "malformed": (b'{"model": "qwen3_moe", "prompt": [1, 2', 400, "not valid JSON"),
    "not UTF-8": (b'{"model": "\xff\xfe\x00"}', 400, "not valid JSON"),
    "not an object": (b"[1, 2, 3]", 400, "Expected `object`"),
    "a pickle": (pickle.dumps({"model": MODEL}), 400, "not valid JSON"),
    "nested without end": (b'{"model": "qwen3_moe", "tools": ' + b"[" * 100_000, 400, "not valid JSON"),
    "unknown model": (body(model="gpt-9"), 404, "'gpt-9' does not exist"),
    "empty prompt": (body(prompt=[]), 400, "prompt is empty"),
    "empty batch": (body(prompt=[[], [5]]), 400, "prompt is empty"),
    "prompt too long": (body(prompt=[5] * 128), 400, "context is 128"),
    "prompt far too long": (body(prompt=[5] * 100_000), 400, "context is 128"),
    "text without a tokenizer": (body(prompt="hello"), 400, "token ids"),
    "token beyond the vocabulary": (body(prompt=[5, 512]), 400, "between 0 and 511"),
    "negative token": (body(prompt=[-1]), 400, "between 0 and 511"),
    "token as large as 64 bits": (body(prompt=[2**63]), 400, "between 0 and 511"),
    "token larger than 64 bits": (body(prompt=[10**40]), 400, "prompt"),
    "max_tokens 0": (body(max_tokens=0), 400, "max_tokens must be between 1"),
    "max_tokens negative": (body(max_tokens=-5), 400, "max_tokens must be between 1"),
    "max_tokens huge": (body(max_tokens=10**18), 400, "max_tokens must be between 1"),
    "max_tokens beyond 64 bits": (body(max_tokens=10**40), 400, "max_tokens"),
    "max_tokens fractional": (body(max_tokens=1.5), 400, "max_tokens"),
    "min_tokens above max_tokens": (body(min_tokens=5), 400, "min_tokens must be between 0 and 4"),
    "temperature negative": (body(temperature=-0.5), 400, "temperature must be between 0"),
    "temperature NaN": (body().replace(b'"max_tokens"', b'"temperature": NaN, "max_tokens"'), 400, "not valid JSON"),
    "temperature infinite": (body().replace(b'"max_tokens"', b'"temperature": 1e999, "max_tokens"'), 400, ""),
    "top_p negative": (body(top_p=-1), 400, "top_p must be between 0 and 1"),
    "top_k huge": (body(top_k=2**40), 400, "top_k must be between 0"),
    "penalty out of bounds": (body(presence_penalty=3), 400, "presence_penalty must be between -2"),
    "repetition_penalty 0": (body(repetition_penalty=0), 400, "repetition_penalty must be between"),
    "bias of an unknown token": (body(logit_bias={"512": 1}), 400, "between 0 and 511"),
    "bias NaN": (body().replace(b'"max_tokens"', b'"logit_bias": {"5": NaN}, "max_tokens"'), 400, "not valid JSON"),
    "stop token out of range": (body(stop_token_ids=[-3]), 400, "stop_token_ids must be between 0"),
    "too many samples": (body(n=10**9), 400, "n must be between 1"),
    "too many logprobs": (body(logprobs=1000), 400, "logprobs must be between 0 and 20"),
    "wrong types": (body(stream="yes", prompt={"a": [1]}), 400, "Expected"),
}  # fmt: skip


@pytest.mark.processes
def test_bad_requests_are_refused_with_their_reason_and_the_next_one_is_served(served: Served) -> None:
    expected = served.complete()
    for name, (sent, status, words) in REFUSED.items():
        found, answer = served.post(sent)
        assert found == status, (name, answer)
        assert words in answer["error"]["message"], (name, answer)
        assert answer["error"]["code"], name
    too_large = b'{"model": "' + b"x" * GARBAGE_BYTES + b'"}'
    with contextlib.suppress(OSError):  # hung up on before it was read
        assert served.post(too_large)[0] == 413
    assert served.post(b'{"messages": []}', "chat/completions")[0] == 400
    assert served.post(body(), "embeddings")[0] == 404
    assert served.complete() == expected


# ---- garbage on every port


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses on which a process accepts connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                inodes.add(found[1])
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            host, port = fields[1].split(":")
            if fields[3] == "0A" and fields[9] in inodes:
                quad = socket.inet_ntoa(bytes.fromhex(host[-8:])[::-1])  # v4, or v4 in v6
                addresses.append(("127.0.0.1" if quad == "0.0.0.0" else quad, int(port, 16)))
    return addresses


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def throw(address: tuple[str, int], garbage: bytes) -> None:
    with (
        contextlib.suppress(OSError),
        socket.create_connection(address, 5) as connection,
    ):  # hung up on, sooner or later
        connection.settimeout(0.3)
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass


@pytest.mark.processes
def test_ten_megabytes_of_garbage_on_every_port_harm_nobody(served: Served, tmp_path: Path) -> None:
    expected = served.complete()
    pids = served.pids
    ports = {address: pid for pid in pids for address in listening(pid)}
    per_process = {pid: sum(owner == pid for owner in ports.values()) for pid in pids if pid in ports.values()}
    print(f"{len(ports)} ports of {len(per_process)} processes")
    assert len(per_process) == 5, "the router and four ranks"
    assert len(ports) >= 5 + 3 + 2, "HTTP or control, step sync, NIXL"
    bomb = tmp_path / "unpickled"
    header = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10485760\r\n\r\n"
    kinds = {
        "noise": os.urandom(GARBAGE_BYTES),
        "zeros": bytes(GARBAGE_BYTES),
        "ones": b"\xff" * GARBAGE_BYTES,
        "pickle": pickle.dumps(Bomb(bomb)) * 200,
        "framed pickle": len(pickle.dumps(Bomb(bomb))).to_bytes(4, "big") + pickle.dumps(Bomb(bomb)),
        "HTTP": header + os.urandom(GARBAGE_BYTES),
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(GARBAGE_BYTES),
        "nothing": b"",
    }
    for name, garbage in kinds.items():
        with ThreadPoolExecutor(8) as throwers:
            list(throwers.map(throw, ports, [garbage] * len(ports)))
        assert served.complete() == expected, name
        # engines may begin to plan placements meanwhile, in processes of their own
        assert set(pids) <= set(served.pids), f"{name}: {served.command.stderr[-2000:]}"
    assert not bomb.exists()
    assert "Traceback" not in served.command.stderr


# ---- a router gone mad


class Listener:
    def __init__(self) -> None:
        self.failed: list[m.Failed] = []
        self.lost: list[str] = []
        self.ready, self.refused = asyncio.Event(), asyncio.Event()

    def on_welcome(self, client: ControlClient, info: m.WorkerInfo, epoch: EngineEpoch) -> None:
        self.ready.set()

    def on_messages(self, client: ControlClient, messages: list[m.ToRouterMessage]) -> None:
        self.failed += [message for message in messages if isinstance(message, m.Failed)]
        if self.failed:
            self.refused.set()

    def on_lost(self, client: ControlClient, reason: str) -> None:
        self.lost.append(reason)


async def tell(lead: RankServer, messages: list[m.ToWorkerMessage], patience_s: float = 30.0) -> Listener:
    """Say something as a router of one's own, and listen until it is refused."""
    listener = Listener()
    client = ControlClient(address_of(lead), RouterId("mad"), listener)
    client.start()
    await asyncio.wait_for(listener.ready.wait(), 30)
    client.send(messages)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(listener.refused.wait(), patience_s)
    await client.stop()
    return listener


def asked(token_ids: list[int], name: str = "x", num_prompt_tokens: int | None = None, **sampling: Any) -> Request:
    return Request(
        id=RequestId(name),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=SamplingParams(**({"temperature": 0.0, "max_tokens": 4} | sampling)),
    )


MAD = {
    "no tokens": asked([]),
    "negative token": asked([5, -1]),
    "token too large": asked([2**62]),
    "more prompt than tokens": asked([5, 6], num_prompt_tokens=9),
    "negative prompt": asked([5, 6], num_prompt_tokens=-1),
    "NaN": asked([5], temperature=float("nan")),
    "infinite": asked([5], top_p=float("inf")),
    "no output": asked([5], max_tokens=0),
    "too long": asked([5] * 5000),
}


async def test_a_router_that_sends_nonsense_is_answered_and_harms_nobody_else() -> None:
    config = config_of(CHECKPOINTS / "deepseek_v3_yarn")
    async with LocalCluster(config, nixl=True) as cluster:
        expected = (await cluster.greedy(PROMPT)).token_ids
        (prefill,), (decode,) = cluster.leads("prefill"), cluster.leads("decode")
        transfer, source = TransferId("t"), WorkerId("prefill-0/0")
        for name, bad in MAD.items():
            reserve = m.Reserve(
                request=bad, transfer_id=transfer, source=source, source_epoch=prefill.spec.epoch, deadline_s=5.0
            )
            for lead, message in (
                (prefill, m.Prefill(request=bad, transfer_id=transfer, deadline_s=5.0)),
                (decode, reserve),
                (decode, m.Generate(request=bad, deadline_s=5.0)),
            ):
                listener = await tell(lead, [message])
                assert [failed.error.code for failed in listener.failed], (name, type(message))
                assert not listener.lost
        endpoint = decode.part.server._info.endpoint  # type: ignore[union-attr]
        orders = {"no such block": [1 << 40] * 3, "negative block": [-1] * 3, "too few blocks": [0]}
        for name, block_ids in orders.items():
            push = m.Push(
                request_id=RequestId(name),
                transfer_id=TransferId(name),
                target=WorkerId("decode-0/0"),
                target_epoch=decode.spec.epoch,
                endpoint=endpoint,
                block_ids=[BlockId(block_id) for block_id in block_ids],
                num_cached_tokens=0,
                deadline_s=5.0,
            )
            begin = m.Prefill(request=asked([7] * 40, name), transfer_id=TransferId(name), deadline_s=5.0)
            listener = await tell(prefill, [begin, push])
            assert [failed.error.code for failed in listener.failed] == ["transfer_failed"], name
        await tell(decode, [m.Abort(request_id=RequestId("unknown")), m.SourceStopped(transfer_id=transfer)], 0.5)
        await tell(prefill, [m.EngineDead(dead=EngineEpoch("unknown")), m.Abort(request_id=RequestId("unknown"))], 0.5)
        assert (await cluster.greedy(PROMPT)).token_ids == expected
