"""The router's end of the control stream to one worker: dial, greet, converse, notice a loss, dial again.

A worker is lost when its stream ends or when nothing, not even a heartbeat, arrives for `lost_after_s`. Whatever was in
flight is then void, and the next Welcome begins a new conversation, maybe with another epoch of the engine.
"""

import asyncio
import contextlib
import random
from collections.abc import Iterable
from typing import Any, Protocol

import grpc
import msgspec
from grpc import aio

from pd_cluster import messages as m
from pd_cluster.errors import ConfigError
from pd_cluster.ids import EngineEpoch, RouterId
from pd_cluster.log import get_log
from pd_cluster.pb.v1 import control_pb2, control_pb2_grpc
from pd_cluster.rpc.outbox import MAX_FRAME_BYTES, Outbox, OutboxFullError, frames
from pd_cluster.rpc.security import Security, is_loopback

log = get_log(__name__)

LOST_AFTER_S = 4.0
WELCOME_DEADLINE_S = 5.0
MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a stream has a connection of its own; two routers in a process stay apart
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class ControlListener(Protocol):
    """What a router does with a worker's stream; called on the event loop, must not block."""

    def on_welcome(self, client: "ControlClient", info: m.WorkerInfo, epoch: EngineEpoch) -> None:
        """The worker is there; a new conversation begins."""

    def on_messages(self, client: "ControlClient", messages: list[m.ToRouterMessage]) -> None:
        """One batch of the current conversation, in order."""

    def on_lost(self, client: "ControlClient", reason: str) -> None:
        """The conversation is over. Not proof that the worker is dead."""


class _LostError(Exception):
    pass


class ControlClient:
    """Keeps one conversation with the worker at `address` (`host:port`) for as long as it runs."""

    def __init__(
        self,
        address: str,
        router_id: RouterId,
        listener: ControlListener,
        *,
        security: Security | None = None,
        lost_after_s: float = LOST_AFTER_S,
        welcome_deadline_s: float = WELCOME_DEADLINE_S,
        max_queued_messages: int = 200_000,
    ) -> None:
        self.address = address
        self.info: m.WorkerInfo | None = None
        self.epoch: EngineEpoch | None = None  # of the current conversation; None when there is none
        self._router_id = router_id
        self._listener = listener
        self._security = security or Security()
        self._lost_after_s = lost_after_s
        self._welcome_deadline_s = welcome_deadline_s
        self._max_queued_messages = max_queued_messages
        self._outbox: Outbox[m.ToWorkerMessage] | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_heard_s = 0.0

    @property
    def attached(self) -> bool:
        return self.epoch is not None

    def start(self) -> None:
        """Begin to dial. Raises ConfigError when a token would cross the network in the clear."""
        host = self.address.rpartition(":")[0]
        in_the_clear = self._security.token is not None and not self._security.uses_tls
        if in_the_clear and not (is_loopback(host) or self._security.allow_insecure):
            raise ConfigError(f"a token for {self.address} would travel in the clear: configure TLS or allow_insecure")
        self._task = asyncio.create_task(self._run(), name=f"control-{self.address}")

    async def stop(self) -> None:
        """Flush what is queued, end the conversation (the listener hears no more of it) and stop dialling."""
        if self._outbox is not None:
            self._outbox.close("the router stops")
        task, self._task = self._task, None
        if task is None:
            return
        if self._outbox is not None:
            await asyncio.wait([task], timeout=1.0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def send(self, messages: Iterable[m.ToWorkerMessage]) -> bool:
        """Queue messages for the current conversation; False when there is none."""
        if self._outbox is None or self.epoch is None:
            return False
        self._outbox.put(messages)
        return True

    async def _run(self) -> None:
        backoff_s = MIN_BACKOFF_S
        credentials = self._security.channel_credentials()
        options = OPTIONS + self._security.channel_options()
        reported = ""
        while True:
            channel = (
                aio.secure_channel(self.address, credentials, options=options)
                if credentials
                else aio.insecure_channel(self.address, options=options)
            )
            welcomed = False
            try:
                async with channel:
                    await self._attach(channel)
            except _LostError as error:
                reason = str(error)
            except grpc.RpcError as error:
                reason = _describe(error)
            except Exception as error:  # one worker's message that breaks us must not silence its stream for good
                log.exception("control_stream_failed", address=self.address)
                reason = f"{type(error).__name__}: {error}"
            else:
                reason = "the worker ended the stream"
            finally:
                welcomed, self.epoch, self._outbox = self.epoch is not None, None, None
            if self._task is None:
                return
            if welcomed:
                backoff_s = MIN_BACKOFF_S
                log.warning(
                    "worker_lost", address=self.address, worker_id=self.info and self.info.worker_id, reason=reason
                )
                self._listener.on_lost(self, reason)
            elif reason != reported:
                reported = reason
                log.info("worker_unreachable", address=self.address, reason=reason)
            await asyncio.sleep(backoff_s * random.uniform(0.8, 1.2))
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def _attach(self, channel: aio.Channel) -> None:
        """One conversation; returns when the worker ends it, raises _LostError or RpcError otherwise."""
        call = control_pb2_grpc.WorkerControlStub(channel).Attach(metadata=self._security.metadata())
        hello = m.ToWorker(None, [m.Hello(router_id=self._router_id)])
        try:
            async with asyncio.timeout(self._welcome_deadline_s):
                await call.write(control_pb2.AttachRequest(batch=m.encode(hello)))
                first = await self._read(call)
        except TimeoutError:
            call.cancel()
            raise _LostError("no Welcome came") from None
        except asyncio.InvalidStateError:  # the call was already over when we wrote; its status says why
            raise _LostError(f"{(await call.code()).name}: {await call.details()}") from None
        if first is None or not first.messages or not isinstance(first.messages[0], m.Welcome):
            call.cancel()
            raise _LostError("the worker did not answer with a Welcome")
        self.info, self.epoch = first.messages[0].info, first.epoch
        outbox = self._outbox = Outbox(self._max_queued_messages)
        self._last_heard_s = asyncio.get_running_loop().time()
        log.info("worker_attached", address=self.address, worker_id=self.info.worker_id, epoch=self.epoch)
        self._listener.on_welcome(self, self.info, self.epoch)
        if len(first.messages) > 1:
            self._listener.on_messages(self, first.messages[1:])
        tasks = [
            asyncio.create_task(self._read_all(call), name=f"control-read-{self.address}"),
            asyncio.create_task(self._write_all(call, outbox, self.epoch), name=f"control-write-{self.address}"),
            asyncio.create_task(self._watch(), name=f"control-watch-{self.address}"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _read(self, call: Any) -> m.ToRouter | None:
        response = await call.read()  # raises RpcError unless the stream ended with OK
        if response is aio.EOF:
            return None
        try:
            return m.decode_to_router(response.batch)
        except msgspec.DecodeError as error:
            raise _LostError(f"undecodable frame: {error}") from None

    async def _read_all(self, call: Any) -> None:
        clock = asyncio.get_running_loop().time
        while (batch := await self._read(call)) is not None:
            self._last_heard_s = clock()
            if batch.epoch == self.epoch:
                self._listener.on_messages(self, batch.messages)

    async def _write_all(self, call: Any, outbox: Outbox[m.ToWorkerMessage], epoch: EngineEpoch) -> None:
        def encode(batch: list[m.ToWorkerMessage]) -> bytes:
            return m.encode(m.ToWorker(epoch, batch))

        while True:
            try:
                batch = await outbox.take()
            except OutboxFullError as error:
                raise _LostError(str(error)) from None
            if not batch:
                await call.done_writing()
                return
            for frame in frames(encode, batch):
                try:
                    await call.write(control_pb2.AttachRequest(batch=frame))
                except asyncio.InvalidStateError:
                    raise _LostError("the stream is over") from None

    async def _watch(self) -> None:
        """Time in which this process stood still is no silence of the worker's: its words may wait to be read."""
        clock = asyncio.get_running_loop().time
        while True:
            remaining_s = self._last_heard_s + self._lost_after_s - clock()
            if remaining_s <= 0:
                raise _LostError(f"no heartbeat for {self._lost_after_s:g} s")
            look_s = clock() + min(remaining_s, self._lost_after_s / 4)
            await asyncio.sleep(look_s - clock())
            self._last_heard_s += clock() - look_s


def _describe(error: grpc.RpcError) -> str:
    if isinstance(error, aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return repr(error)
