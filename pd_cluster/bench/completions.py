"""A request over a plain socket, HTTP/1.1 on a connection of its own: whoever measures a server should cost little."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from pd_cluster.errors import Unavailable

LIMIT = 1 << 20
"""Bytes of a line."""


@contextlib.asynccontextmanager
async def posted(url: str, path: str, body: dict[str, Any], limit: int = LIMIT) -> AsyncIterator[asyncio.StreamReader]:
    """Send `body` as JSON; the answer from its first line on. Raises Unavailable when nobody can be reached there."""
    parts = urlsplit(url)
    host, data = parts.hostname or "127.0.0.1", json.dumps(body).encode()
    try:
        reader, writer = await asyncio.open_connection(host, parts.port or 80, limit=limit)
    except OSError as error:
        raise Unavailable(f"{url} cannot be reached: {error}") from error
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        yield reader
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def streamed(url: str, body: dict[str, Any], limit: int = LIMIT) -> AsyncIterator[asyncio.StreamReader]:
    """A streamed completion: what follows the first line of the answer, headers among it. Raises Unavailable when the
    server refuses or cannot be reached.
    """
    async with posted(url, "/v1/completions", body | {"stream": True}, limit) as reader:
        status = (await reader.readline()).split()
        if status[1:2] != [b"200"]:
            answer = b" ".join(status[1:]) + b"\n" + await reader.read(500)
            raise Unavailable(f"{url} answered {answer.decode(errors='replace').strip()}")
        yield reader
