"""A small relay in front of a peer's split, for comparisons: vLLM joins its two servers by an outside proxy.

Each streamed completion is first sent to the prefill server for one token, with `do_remote_decode` in its
`kv_transfer_params`; those that come back, which say where its KV lies, go with the request to the decode server, whose
stream is passed on as it comes. One connection for one request, HTTP/1.1 over plain sockets: it costs little beside
what it joins. No product: nothing is retried and nothing is cancelled at the servers but by closing connections.
"""

import asyncio
import json
from typing import Any

from pd_cluster.bench.completions import posted
from pd_cluster.errors import Unavailable

LIMIT = 16 << 20
CHUNK = 1 << 16

WANTED: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """The request as the prefill server gets it: one token, no stream."""
    return body | {"stream": False, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": WANTED}


def for_decode(body: dict[str, Any], prefilled: dict[str, Any]) -> dict[str, Any]:
    """The request as the decode server gets it. Raises Unavailable when the prefill server kept no KV for it."""
    found = prefilled.get("kv_transfer_params")
    if not found:
        raise Unavailable(f"the prefill server names no KV to fetch: {json.dumps(prefilled)[:300]}")
    return body | {"kv_transfer_params": found}


async def read_message(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """The first line and the body of an HTTP message with a Content-Length or that ends with its connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "content-length" in headers:
        return first, await reader.readexactly(int(headers["content-length"]))
    return first, await reader.read(-1)


class Relay:
    """Relays what it is asked on its port from the prefill to the decode server."""

    def __init__(self, prefill_url: str, decode_url: str) -> None:
        self._prefill_url = prefill_url
        self._decode_url = decode_url

    async def start(self, host: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._serve, host, port, limit=LIMIT)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._relay(reader, writer)
        except (OSError, EOFError, ValueError, Unavailable) as error:
            text = f"{error}".encode()
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
        finally:
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, data = await read_message(reader)
        path, body = first.split()[1], json.loads(data)
        async with posted(self._prefill_url, path, for_prefill(body), LIMIT) as answers:
            status, prefilled = await read_message(answers)
        if status.split()[1] != "200":
            raise Unavailable(f"the prefill server answered {status}: {prefilled[:300].decode(errors='replace')}")
        async with posted(self._decode_url, path, for_decode(body, json.loads(prefilled)), LIMIT) as tokens:
            while chunk := await tokens.read(CHUNK):
                writer.write(chunk)
                await writer.drain()


async def serve(prefill_url: str, decode_url: str, host: str, port: int) -> None:
    """Relay until cancelled."""
    server = await Relay(prefill_url, decode_url).start(host, port)
    async with server:
        await server.serve_forever()
