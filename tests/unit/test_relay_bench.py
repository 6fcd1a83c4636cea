"""The relay in front of a peer's split: one token at the prefill server, the rest at the decode server."""

import asyncio
import json
from typing import Any

from pd_cluster.bench.completions import posted
from pd_cluster.bench.relay import Relay, for_decode, for_prefill, read_message

FOUND = {"remote_engine_id": "p", "remote_block_ids": [1, 2], "do_remote_prefill": True}


class FakeServer:
    """Answers every POST with what `answer` says."""

    def __init__(self, answer: bytes) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._answer = answer

    async def start(self) -> tuple[asyncio.Server, str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, body = await read_message(reader)
        self.bodies.append(json.loads(body))
        writer.write(self._answer)
        writer.close()


def whole(value: dict[str, Any], status: str = "200 OK") -> bytes:
    data = json.dumps(value).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def relayed(prefill: FakeServer, decode: FakeServer, body: dict[str, Any]) -> tuple[str, bytes]:
    async def run() -> tuple[str, bytes]:
        first, prefill_url = await prefill.start()
        second, decode_url = await decode.start()
        relay = await Relay(prefill_url, decode_url).start("127.0.0.1", 0)
        async with first, second, relay:
            url = f"http://127.0.0.1:{relay.sockets[0].getsockname()[1]}"
            async with posted(url, "/v1/completions", body) as reader:
                return await read_message(reader)

    return asyncio.run(run())


def test_a_request_goes_to_prefill_for_one_token_and_then_to_decode_with_what_it_said() -> None:
    prefill = FakeServer(whole({"choices": [], "kv_transfer_params": FOUND}))
    stream = b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [1]}\n\ndata: [DONE]\n\n'
    decode = FakeServer(stream)
    body = {"model": "m", "prompt": [1, 2], "max_tokens": 9, "stream": True}
    status, passed_on = relayed(prefill, decode, body)
    assert status == "HTTP/1.1 200 OK"
    assert passed_on == b'data: {"choices": [1]}\n\ndata: [DONE]\n\n'
    assert prefill.bodies == [for_prefill(body)]
    assert (prefill.bodies[0]["max_tokens"], prefill.bodies[0]["stream"]) == (1, False)
    assert decode.bodies == [for_decode(body, {"kv_transfer_params": FOUND})]
    assert (decode.bodies[0]["max_tokens"], decode.bodies[0]["kv_transfer_params"]) == (9, FOUND)


def test_what_prefill_refuses_or_keeps_no_kv_for_is_an_answer_that_says_so() -> None:
    decode = FakeServer(b"")
    status, why = relayed(FakeServer(whole({"error": "full"}, "503 Unavailable")), decode, {"prompt": [1]})
    assert status.startswith("HTTP/1.1 502")
    assert b"the prefill server answered HTTP/1.1 503 Unavailable" in why
    status, why = relayed(FakeServer(whole({"choices": []})), decode, {"prompt": [1]})
    assert status.startswith("HTTP/1.1 502")
    assert b"names no KV to fetch" in why
    assert not decode.bodies
