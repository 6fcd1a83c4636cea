"""The worker's end of the control stream: any number of routers attach, each with a queue of its own.

A stream begins with Hello and Welcome. From then on batches go both ways and a heartbeat with the worker's load
leaves on a timer of its own. What cannot be decoded ends that stream with INVALID_ARGUMENT and nothing else. A router
that attaches again replaces its former stream, whose requests are over: the handler sees a detach, then an attach.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import grpc
import msgspec
from google.protobuf.message import DecodeError
from grpc import aio

from pd_cluster import messages as m
from pd_cluster.errors import ConfigError, WorkerLost
from pd_cluster.ids import EngineEpoch, RouterId
from pd_cluster.log import get_log
from pd_cluster.pb.v1 import control_pb2, control_pb2_grpc
from pd_cluster.rpc.outbox import MAX_FRAME_BYTES, Outbox, OutboxFullError, frames
from pd_cluster.rpc.security import Security

log = get_log(__name__)

HEARTBEAT_S = 0.25
"""Twice as long while the load does not change."""

HELLO_DEADLINE_S = 10.0

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 5000),  # a router behind a cut network is noticed without sending to it
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),  # a port taken by another process is an error, not a shared queue
]


class ControlHandler(Protocol):
    """What a worker does with its routers; called on the event loop, must not block."""

    def on_attach(self, router_id: RouterId) -> None:
        """A router is there; it knows nothing of earlier streams."""

    def on_messages(self, router_id: RouterId, messages: list[m.ToWorkerMessage]) -> None:
        """One batch, in order."""

    def on_detach(self, router_id: RouterId) -> None:
        """The stream is gone; the router has given up the requests it had here."""

    def load(self) -> m.WorkerLoad:
        """The snapshot for the next heartbeat."""


class _RefusedError(Exception):
    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status = status
        self.details = details


class ControlServer(control_pb2_grpc.WorkerControlServicer):
    """Serves Attach for one worker. `await start()` returns the bound port; `send` may be called at any time."""

    def __init__(
        self,
        handler: ControlHandler,
        info: m.WorkerInfo,
        epoch: EngineEpoch,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        security: Security | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        max_queued_messages: int = 200_000,
    ) -> None:
        self._handler = handler
        self._info = info
        self._epoch = epoch
        self._host = host
        self._port = port
        self._security = security or Security()
        self._heartbeat_s = heartbeat_s
        self._max_queued_messages = max_queued_messages
        self._outboxes: dict[RouterId, Outbox[m.ToRouterMessage]] = {}
        self._server: aio.Server | None = None
        self._heartbeat: asyncio.Task[None] | None = None

    @property
    def routers(self) -> list[RouterId]:
        return list(self._outboxes)

    async def start(self) -> int:
        """Listen; returns the port. Raises ConfigError when the port is taken or would be open to the network."""
        self._security.check_exposed(self._host)
        server = aio.server(options=OPTIONS)
        control_pb2_grpc.add_WorkerControlServicer_to_server(self, server)
        address = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        credentials = self._security.server_credentials()
        try:
            bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from error
        if not bound:
            raise ConfigError(f"cannot listen on {address}: is the port taken?")
        await server.start()
        self._server = server
        self._heartbeat = asyncio.create_task(self._beat(), name="control-heartbeat")
        return int(bound)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Flush what is queued, end every stream and stop listening."""
        for outbox in self._outboxes.values():
            outbox.close("the worker stops")
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._heartbeat
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None

    def send(self, router_id: RouterId, messages: Iterable[m.ToRouterMessage]) -> bool:
        """Queue messages for a router; False when it is not attached (its requests are void)."""
        outbox = self._outboxes.get(router_id)
        if outbox is None:
            return False
        outbox.put(messages)
        return True

    def broadcast(self, messages: Sequence[m.ToRouterMessage]) -> None:
        """Queue messages for every router."""
        for outbox in self._outboxes.values():
            outbox.put(messages)

    async def _beat(self) -> None:
        said: m.WorkerLoad | None = None
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if not self._outboxes:
                continue
            load = self._handler.load()
            if load == said:
                said = None  # nothing new: every other beat is enough to be known alive
                continue
            said = load
            self.broadcast([m.Heartbeat(load=load)])

    # ---- one stream

    async def Attach(  # type: ignore[override]  # noqa: N802 (the name in proto/; an aio coroutine)
        self, request_iterator: Any, context: Any
    ) -> None:
        """One router, from its Hello to the end of its stream."""
        try:
            router_id = await self._greet(context)
        except _RefusedError as error:
            log.warning("router_refused", peer=context.peer(), reason=error.details)
            await context.abort(error.status, error.details)
            return
        outbox: Outbox[m.ToRouterMessage] = Outbox(self._max_queued_messages)
        former = self._outboxes.get(router_id)
        if former is not None:
            self._detach(router_id, former, "it attached again")
        self._outboxes[router_id] = outbox
        outbox.put([m.Welcome(info=self._info), m.Heartbeat(load=self._handler.load())])
        log.info("router_attached", router_id=router_id, peer=context.peer())
        self._handler.on_attach(router_id)
        refusal = await self._converse(router_id, outbox, context)
        if refusal is not None:
            await context.abort(refusal.status, refusal.details)

    async def _greet(self, context: Any) -> RouterId:
        if not self._security.admits(context.invocation_metadata() or ()):
            raise _RefusedError(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
        try:
            first = await asyncio.wait_for(self._read(context), HELLO_DEADLINE_S)
        except TimeoutError:
            raise _RefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, "no Hello came") from None
        if first is None or not first.messages or not isinstance(first.messages[0], m.Hello):
            raise _RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "the first frame must hold a Hello")
        hello = first.messages[0]
        if hello.protocol != m.PROTOCOL_VERSION:
            raise _RefusedError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this worker speaks protocol {m.PROTOCOL_VERSION}, the router {hello.protocol}: run the same version",
            )
        return hello.router_id

    async def _converse(
        self, router_id: RouterId, outbox: Outbox[m.ToRouterMessage], context: Any
    ) -> _RefusedError | None:
        """Read and write until either ends; the status to end the stream with, None for OK."""
        tasks = [
            asyncio.create_task(self._read_all(router_id, outbox, context), name=f"control-read-{router_id}"),
            asyncio.create_task(self._write_all(outbox, context), name=f"control-write-{router_id}"),
        ]
        refusal: _RefusedError | None = None
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if isinstance(error, _RefusedError):
                    refusal = error
                elif error is not None and not isinstance(error, grpc.RpcError | aio.UsageError):
                    raise error
        finally:
            for task in tasks:
                task.cancel()
            # before any await: a cancellation may arrive again while this coroutine winds up
            self._detach(router_id, outbox, str(refusal or outbox.closed or "the stream ended"))
            await asyncio.gather(*tasks, return_exceptions=True)
        return refusal

    def _detach(self, router_id: RouterId, outbox: Outbox[m.ToRouterMessage], reason: str) -> None:
        outbox.close(reason)
        if self._outboxes.get(router_id) is outbox:
            del self._outboxes[router_id]
            log.info("router_detached", router_id=router_id, reason=reason)
            self._handler.on_detach(router_id)

    async def _read(self, context: Any) -> m.ToWorker | None:
        try:
            request = await context.read()
            return None if request is aio.EOF else m.decode_to_worker(request.batch)
        except (msgspec.DecodeError, DecodeError) as error:
            raise _RefusedError(grpc.StatusCode.INVALID_ARGUMENT, f"undecodable frame: {error}") from None

    async def _read_all(self, router_id: RouterId, outbox: Outbox[m.ToRouterMessage], context: Any) -> None:
        while (batch := await self._read(context)) is not None:
            if outbox.closed is not None:
                return
            if batch.epoch == self._epoch:
                self._handler.on_messages(router_id, batch.messages)
            else:
                outbox.put(self._refusals(batch))

    def _refusals(self, batch: m.ToWorker) -> list[m.ToRouterMessage]:
        """Answers to a batch that was meant for another life of this engine."""
        error = WorkerLost(f"this is epoch {self._epoch} of {self._info.worker_id}, not {batch.epoch}").info()
        refused: list[m.ToRouterMessage] = []
        for message in batch.messages:
            if isinstance(message, m.Prefill | m.Reserve):
                refused.append(m.Failed(request_id=message.request.id, transfer_id=message.transfer_id, error=error))
            elif isinstance(message, m.Push):
                refused.append(m.Failed(request_id=message.request_id, transfer_id=message.transfer_id, error=error))
            elif isinstance(message, m.Generate):
                refused.append(m.Failed(request_id=message.request.id, transfer_id=None, error=error))
        return refused

    async def _write_all(self, outbox: Outbox[m.ToRouterMessage], context: Any) -> None:
        def encode(batch: list[m.ToRouterMessage]) -> bytes:
            return m.encode(m.ToRouter(self._epoch, batch))

        while True:
            try:
                batch = await outbox.take()
            except OutboxFullError as error:
                raise _RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None
            if not batch:
                return
            for frame in frames(encode, batch):
                await context.write(control_pb2.AttachResponse(batch=frame))
