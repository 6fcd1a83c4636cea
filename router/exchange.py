"""One HTTP request and its answer over raw ASGI: a body with a limit, JSON or server-sent events, disconnects."""

import asyncio
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from pd_cluster.errors import PdClusterError, Unauthenticated
from pd_cluster.log import get_log
from router.http_server import Socket, socket_of
from router.openai_errors import BodyTooLargeError, error_headers, error_json
from router.serving import Serving

log = get_log(__name__)

MAX_BODY_BYTES = 8 << 20
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

Headers = list[tuple[bytes, bytes]]


class Exchange:
    """What a handler reads and writes. `status` is None until the answer has begun."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        shown = self.headers.get(b"x-request-id", b"")
        self.request_id = shown if _REQUEST_ID.fullmatch(shown) else f"req-{secrets.token_hex(12)}".encode()
        self.status: int | None = None
        self._receive = receive
        self._send = send

    async def read_body(self) -> bytes:
        """The whole body. Raises BodyTooLargeError as soon as that is known."""
        declared = self.headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"the body has {int(declared)} bytes; at most {MAX_BODY_BYTES} are accepted")
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                raise BodyTooLargeError(f"the body is too large; at most {MAX_BODY_BYTES} bytes are accepted")
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def disconnected(self) -> None:
        """Return when the client has gone. Only after the body was read."""
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await self._receive()

    async def begin(self, status: int, content_type: str, headers: Headers | None = None) -> None:
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"content-type", content_type.encode()),
                    (b"x-request-id", self.request_id),
                    *(headers or []),
                ],
            }
        )

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """A part of the body, when the client has taken enough of what came before."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def answer(
        self, body: bytes, *, status: int = 200, content_type: str = "application/json", headers: Headers | None = None
    ) -> None:
        """A whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self.begin(status, content_type, [length, *(headers or [])])
        await self.write(body, more=False)

    async def begin_events(self) -> Socket | None:
        """Server-sent events follow; nothing between here and the client may buffer them. Returns the socket, to write
        them to while no `write` is under way; None when it is not our own server's.
        """
        await self.begin(
            200,
            "text/event-stream; charset=utf-8",
            [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")],
        )
        return socket_of(self._send)

    async def fail(self, error: PdClusterError) -> None:
        """The error as an answer, or as the last event of a stream that has begun."""
        if self.status is None:
            await self.answer(error_json(error), status=error.http_status, headers=error_headers(error))
        else:
            await self.write(b"data: " + error_json(error) + b"\n\n", more=False)


class Endpoint:
    """An ASGI app for one route: authorisation, errors, metrics, and an end to the work when the client goes away."""

    def __init__(
        self, serving: Serving, route: str, handle: Callable[[Exchange], Awaitable[None]], *, protected: bool = True
    ) -> None:
        self._serving = serving
        self._route = route
        self._handle = handle
        self._protected = protected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        status = "499"  # unless we get to answer
        try:
            try:
                if self._protected:
                    self._authorise(exchange)
                await self._handle(exchange)
            except PdClusterError as error:
                await exchange.fail(error)
            except Exception:  # the edge of the process: a bug in one answer must not reach the others
                log.exception("http_handler_failed", route=self._route, request_id=exchange.request_id.decode())
                await exchange.fail(PdClusterError("internal error: see the router's log for this x-request-id"))
            if exchange.status is not None:
                status = str(exchange.status)
        finally:
            self._serving.metrics.http_requests.labels(self._route, status).inc()

    def _authorise(self, exchange: Exchange) -> None:
        key = self._serving.api_key
        if key is None:
            return
        shown = exchange.headers.get(b"authorization", b"")
        if not hmac.compare_digest(shown, f"Bearer {key}".encode()):
            raise Unauthenticated("the API key is missing or wrong: send it as 'Authorization: Bearer KEY'")


async def while_connected(exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it when the client goes away first."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(exchange.disconnected())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
