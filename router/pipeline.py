"""The sole orchestrator of requests: it joins flights, workers' streams, transfers and time.

`submit` (or `generate`) takes a request and gives a stream of its tokens. Everything here runs on one event loop;
nothing awaits while it changes state, and every wait of a flight has a deadline that `tick` watches.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Collection

from msgspec import structs

from pd_cluster import messages as m
from pd_cluster.clock import Clock, SystemClock
from pd_cluster.errors import (
    Cancelled,
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    PdClusterError,
    TransferError,
    Unavailable,
)
from pd_cluster.ids import EngineEpoch, EngineId, RequestId, UnitHash, WorkerId
from pd_cluster.kv.hashing import UnitChain
from pd_cluster.log import get_log
from pd_cluster.metrics import RouterMetrics
from pd_cluster.request import UNIT_TOKENS, Phase, Request
from router.alarms import Alarms
from router.attempt import Delta, Leg, Limits, Link
from router.conversations import Conversation, Conversations
from router.directory import Directory, Health, Worker
from router.flight import Flight
from router.links import Links
from router.lives import Lives
from router.policy import Choice, pick_decode, pick_prefill
from router.prefix_index import PrefixIndex
from router.stream import TokenStream
from router.turn import Turn
from router.wakeup import Wakeup

log = get_log(__name__)

TICK_S = 0.05


class Pipeline:
    """All requests of one router. Listens to its control clients; is the port of its flights."""

    def __init__(
        self,
        directory: Directory,
        *,
        limits: Limits | None = None,
        max_queue: int = 1024,
        request_timeout_s: float = 600.0,
        clock: Clock | None = None,
        metrics: RouterMetrics | None = None,
    ) -> None:
        self.directory = directory
        self.index = PrefixIndex()
        self.metrics = metrics or RouterMetrics()
        self.turn = Turn()
        """For readers of several streams: those that a step has fed write in one turn of the loop."""
        self._limits = limits or Limits()
        self._max_queue = max_queue
        self._request_timeout_s = request_timeout_s
        self._clock = clock or SystemClock()
        self._flights: dict[RequestId, Flight] = {}
        self._streams: dict[RequestId, TokenStream] = {}
        self._chains: dict[RequestId, UnitChain] = {}
        self._by_wire: dict[RequestId, Flight] = {}
        self._conversations = Conversations()
        self._links = Links(self._conversations.send)
        self._lives = Lives()
        self._turn = 0
        self._num_in_phase: Counter[Phase] = Counter()
        self._alarms = Alarms(self._flights)
        self._changed: set[Flight] = set()
        self._lease_s = 30.0
        self._next_extension_s = 0.0
        self._ticker: asyncio.Task[None] | None = None
        self._active = asyncio.Event()  # there is something to watch
        self._closing = False

    # ---- for clients

    def submit(
        self,
        request: Request,
        *,
        timeout_s: float | None = None,
        prefer: WorkerId | None = None,
        ready: Wakeup | None = None,
    ) -> TokenStream:
        """Send a request off; iterate over the stream for its tokens, and leave it or cancel it at any time.

        `prefer` names a worker that has the prompt's KV cached; `ready` is set whenever the stream has something.

        Raises InvalidRequest, ContextTooLong, DuplicateRequest, Overloaded, Unavailable or PeerIncompatible at once.
        """
        if self._closing:
            raise Unavailable("the router is shutting down")
        if request.id in self._flights:
            raise DuplicateRequest(f"request {request.id} is in flight already")
        if self._num_in_phase[Phase.QUEUED] >= self._max_queue:
            raise Overloaded(f"{self._max_queue} requests wait already: retry later")
        request = self._checked(request)
        deadline_s = self.now_s() + (self._request_timeout_s if timeout_s is None else timeout_s)
        flight = Flight(request, self, self._limits, deadline_s, prefer)
        stream = TokenStream(flight, ready)
        self._flights[flight.id] = flight
        self._streams[flight.id] = stream
        self._active.set()
        self._count(flight.phase, 1)
        try:
            flight.start()
        except PdClusterError as error:
            self._drop(flight)
            self.metrics.requests.labels(error.code).inc()
            raise
        self._alarms.keep(flight)
        return stream

    async def generate(self, request: Request, *, timeout_s: float | None = None) -> AsyncIterator[Delta]:
        """The tokens of `request` as they come; closing the iterator cancels the request."""
        async with self.submit(request, timeout_s=timeout_s) as stream:
            async for delta in stream:
                yield delta

    def cancel(self, request_id: RequestId) -> bool:
        """End a request with Cancelled, freeing both sides; False when it is not in flight."""
        flight = self._flights.get(request_id)
        if flight is None:
            return False
        flight.cancel(Cancelled("the client went away"))
        return True

    def idle(self) -> bool:
        """Whether nothing is left: no request, no transfer whose end is not known."""
        return not (self._flights or self._by_wire or self._streams or self._chains or len(self._links))

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def flights(self) -> list[Flight]:
        """The requests in flight, the oldest first."""
        return list(self._flights.values())

    @property
    def ready(self) -> bool:
        """Whether a request could be served from prefill to decode."""
        return not self._closing and self.directory.ready

    @property
    def max_model_len(self) -> int | None:
        """The context that every worker has; None while no worker is known."""
        return min((worker.info.max_model_len for worker in self.directory.workers), default=None)

    def _checked(self, request: Request) -> Request:
        """Valid, and with a `max_tokens` that fits into every worker's context, so that it ends at the same token
        wherever it runs.
        """
        max_model_len = self.max_model_len
        if max_model_len is None:
            if not request.token_ids:
                raise InvalidRequest("the prompt is empty: send at least one token", param="prompt")
            return request
        request.validate(min(worker.info.vocab_size for worker in self.directory.workers), max_model_len)
        sampling, room = request.sampling, max_model_len - request.num_prompt_tokens
        if sampling.max_tokens <= room:
            return request
        bounded = structs.replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        return structs.replace(request, sampling=bounded)

    # ---- life

    def start(self) -> None:
        """Begin to watch deadlines and to extend leases."""
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick_forever(), name="pipeline-ticker")

    async def finish(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what runs; whether it ended within `timeout_s`."""
        self._closing = True
        give_up_s = self.now_s() + timeout_s
        while self._flights and self.now_s() < give_up_s:  # noqa: ASYNC110 (a deadline on the pipeline's clock)
            await asyncio.sleep(TICK_S)
        return not self._flights

    async def stop(self, drain_s: float = 0.0) -> None:
        """Take nothing new, wait for what runs at most `drain_s`, cancel the rest."""
        await self.finish(drain_s)
        for flight in list(self._flights.values()):
            flight.cancel(Unavailable("the router is shutting down"))
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
            self._ticker = None

    async def _tick_forever(self) -> None:
        while True:
            await self._active.wait()
            await asyncio.sleep(TICK_S)
            self.tick()
            if self.idle():
                self._active.clear()

    def tick(self) -> None:
        """Do what is due."""
        now_s = self.now_s()
        for flight in self._alarms.due(now_s):
            flight.on_time(now_s)
        self._settle()
        if now_s >= self._next_extension_s:
            self._next_extension_s = now_s + self._lease_s / 3
            self._links.extend(self._lease_s)

    def _settle(self) -> None:
        while self._changed:
            self._alarms.keep(self._changed.pop())

    # ---- from the control streams

    def on_welcome(self, client: Conversation, info: m.WorkerInfo, epoch: EngineEpoch) -> None:
        """A worker is there: new, restarted, or the same one again, for which nothing of ours runs any more.

        One whose engine is known to be dead is a process that came back to life: it gets nothing, for its peers have
        given its blocks away.
        """
        if self._conversations.is_dead(epoch):
            log.warning("dead_worker_ignored", worker_id=info.worker_id, epoch=epoch)
            self._conversations.forget(client)
            return
        leg = Leg(info.worker_id, epoch)
        for former in self._lives.begun(info, epoch):
            self.engine_dead(former)
        known = self.directory.get(info.worker_id)
        if known is not None and known.health is not Health.LOST:
            self._lose(Leg(known.id, known.epoch), "it attached again")
        self._conversations.begin(client, leg)
        self.directory.welcome(info, epoch)
        self.index.add_worker(info.worker_id, info.num_blocks * info.block_size // UNIT_TOKENS)
        self._links.welcomed(leg)
        for flight in self.flights:
            flight.on_welcome(epoch)
        self._settle()
        log.info("worker_ready", worker_id=info.worker_id, epoch=epoch, num_blocks=info.num_blocks)

    def on_messages(self, client: Conversation, messages: list[m.ToRouterMessage]) -> None:
        """One batch from a worker."""
        leg = self._conversations.leg_of(client)
        worker = self.directory.get(leg.worker_id) if leg is not None else None
        if leg is None or worker is None or worker.epoch != leg.epoch:
            return
        for message in messages:
            match message:
                case m.Tokens():
                    by_wire = self._by_wire
                    for delta in message.deltas:
                        flight = by_wire.get(delta.request_id)
                        if flight is not None:
                            flight.on_tokens(leg, delta)
                case m.Heartbeat():
                    worker.observe_load(message.load)
                case m.CacheEvents():
                    self.index.apply(worker.id, message)
                case m.Drained():
                    worker.health = Health.DRAINING
                case m.Quarantined():
                    for quarantine in message.transfers:
                        if self._conversations.is_open(Leg(quarantine.source, quarantine.source_epoch)):
                            self._links.orphan(leg, quarantine)
                case m.Welcome():
                    pass
                case _:
                    self._on_request_message(worker, leg, message)
        self._settle()

    def _on_request_message(
        self,
        worker: Worker,
        leg: Leg,
        message: m.Started | m.Granted | m.Prefilled | m.Pushed | m.Stopped | m.Adopted | m.Preempted | m.Failed,
    ) -> None:
        flight = self._by_wire.get(message.request_id)
        if flight is not None:
            if isinstance(message, m.Prefilled) and flight.attempt is not None and flight.attempt.prefill == leg:
                num_new_tokens = flight.attempt.num_tokens - message.num_cached_tokens
                worker.costs.observe_prefill(num_new_tokens, message.num_cached_tokens, message.prefill_s)
            if isinstance(message, m.Granted):
                self._lease_s = message.lease_s
                self._next_extension_s = min(self._next_extension_s, self.now_s() + message.lease_s / 3)
            flight.on_message(leg, message)
            self._alarms.keep(flight)
        if isinstance(message, m.Pushed):
            self.metrics.transfer_bytes.inc(message.num_bytes)
            self.metrics.transfer_time.observe(message.seconds)
            worker.costs.observe_transfer(message.num_bytes, message.seconds)
        if isinstance(message, m.Pushed | m.Stopped):
            self._links.quiet(leg, message.transfer_id)

    def on_lost(self, client: Conversation, reason: str) -> None:
        """A worker's stream broke."""
        leg = self._conversations.leg_of(client)
        if leg is not None and self._conversations.is_open(leg) and self._conversations.is_current(client, leg):
            self._lose(leg, reason)
        self._settle()

    def remove_worker(self, worker_id: WorkerId, reason: str = "it was removed") -> None:
        """A worker is gone for good; its requests go on elsewhere."""
        worker = self.directory.get(worker_id)
        if worker is None:
            return
        leg = Leg(worker_id, worker.epoch)
        self._lose(leg, reason)
        self._conversations.forget_leg(leg)
        self.directory.remove(worker_id)
        self.index.remove_worker(worker_id)
        self._links.gone(leg)
        self._settle()

    def forget(self, client: Conversation, reason: str) -> None:
        """Hang up on whoever speaks through `client`: it is removed, unless it speaks through another by now."""
        leg = self._conversations.leg_of(client)
        self._conversations.forget(client)
        if leg is not None and self._conversations.is_current(client, leg):
            worker = self.directory.get(leg.worker_id)
            if worker is not None and worker.epoch == leg.epoch:
                self.remove_worker(leg.worker_id, reason)

    def engine_dead(self, epoch: EngineEpoch, first: Collection[WorkerId] | None = None) -> None:
        """Every process of that life, of an engine or of one worker, is dead: the supervisor saw it. Nothing is written
        by it any more.

        `first` of its workers died by themselves, the others were ended for their sake; None: not known.
        """
        for worker in self.directory.workers:
            if worker.epoch == epoch:
                self._lose(Leg(worker.id, epoch), "its engine died")
        self._conversations.bury(epoch)
        self._links.dead(epoch)
        for flight in self.flights:
            flight.on_dead(epoch, first)
        self._settle()

    def drain(self, worker_id: WorkerId) -> None:
        """Send nothing new to a worker and tell it to take nothing new."""
        worker = self.directory.get(worker_id)
        if worker is not None:
            worker.health = Health.DRAINING if worker.is_ready else worker.health
            self.send(Leg(worker.id, worker.epoch), m.Drain())

    def is_busy(self, engine_id: EngineId) -> bool:
        """Whether a request of ours is at an engine, or its workers' last words were that something is."""
        workers = [worker for worker in self.directory.workers if worker.info.engine_id == engine_id]
        legs = {Leg(worker.id, worker.epoch) for worker in workers}
        attempts = [flight.attempt for flight in self._flights.values() if flight.attempt is not None]
        return any(attempt.prefill in legs or attempt.decode in legs for attempt in attempts) or any(
            worker.load.num_running
            + worker.load.num_waiting
            + worker.load.num_reserved_blocks
            + worker.load.num_held_blocks
            + worker.load.num_quarantined_blocks
            for worker in workers
            if worker.health is not Health.LOST
        )

    def _lose(self, leg: Leg, reason: str) -> None:
        self._conversations.end(leg)
        self.directory.lose(leg.worker_id, reason)
        for flight in list(self._by_wire.values()):
            flight.on_lost(leg, reason)
            self._changed.add(flight)

    # ---- the port of flights

    def now_s(self) -> float:
        return self._clock.now_s()

    def choose_prefill(self, flight: Flight, avoid: frozenset[WorkerId]) -> Choice:
        self._turn += 1
        cached = self.index.match(self._hashes(flight))
        if flight.prefer is not None:
            cached[flight.prefer] = max(
                cached.get(flight.prefer, 0), flight.request.num_prompt_tokens // UNIT_TOKENS * UNIT_TOKENS
            )
        remaining_s = flight.deadline_s - self.now_s()
        num_tokens = len(flight.token_ids)
        return pick_prefill(self.directory, num_tokens, cached, remaining_s=remaining_s, turn=self._turn, avoid=avoid)

    def choose_decode(self, flight: Flight, source: Leg, avoid: frozenset[WorkerId]) -> Choice:
        self._turn += 1
        worker = self.directory.get(source.worker_id)
        if worker is None or worker.epoch != source.epoch:
            raise Unavailable(f"{source.worker_id} is gone")
        cached = self.index.match(self._hashes(flight))
        return pick_decode(self.directory, worker, len(flight.token_ids), cached, turn=self._turn, avoid=avoid)

    def _hashes(self, flight: Flight) -> list[UnitHash]:
        if not self.index.num_hashes:
            return []
        chain = self._chains.get(flight.id)
        if chain is None:
            chain = self._chains[flight.id] = UnitChain(flight.request.cache_salt)
        chain.extend(flight.token_ids)
        return chain.hashes

    def send(self, leg: Leg, message: m.ToWorkerMessage) -> None:
        """Send to a worker in that life; dropped when it is not reachable, for then it gives up what it has of ours."""
        self._conversations.send(leg, message)

    def push(self, link: Link, granted: m.Granted, deadline_s: float) -> None:
        """Tell the source to write; with the target's endpoint the first time."""
        target = self.directory.get(link.target.worker_id)
        is_new = self._conversations.introduce(link.source, link.target)
        endpoint = target.info.endpoint if target is not None and is_new else None
        message = m.Push(
            request_id=link.wire_id,
            transfer_id=link.transfer_id,
            target=link.target.worker_id,
            target_epoch=link.target.epoch,
            endpoint=endpoint,
            block_ids=granted.block_ids,
            num_cached_tokens=granted.num_cached_tokens,
            deadline_s=deadline_s,
        )
        self.send(link.source, message)

    def open_link(self, link: Link) -> None:
        self._links.open(link)

    def close_link(self, link: Link) -> None:
        self._links.close(link)

    def settle_link(self, link: Link) -> None:
        self._links.settle(link)

    def load_prefill(self, leg: Leg, num_tokens: int) -> None:
        worker = self.directory.get(leg.worker_id)
        if worker is not None and worker.epoch == leg.epoch:
            worker.add_prefill(num_tokens)

    def load_decode(self, leg: Leg, num_tokens: int) -> None:
        worker = self.directory.get(leg.worker_id)
        if worker is not None and worker.epoch == leg.epoch:
            worker.add_decode(num_tokens)

    def mark_incompatible(self, source: Leg, target: Leg, reason: str) -> None:
        log.warning("peers_incompatible", source=source.worker_id, target=target.worker_id, reason=reason)
        self.directory.mark_incompatible(source.epoch, target.epoch, reason)

    def moved(self, flight: Flight, before: Phase, after: Phase) -> None:
        self._changed.add(flight)
        if before is not after:
            self._count(before, -1)
            if not flight.done:
                self._count(after, 1)

    def _count(self, phase: Phase, step: int) -> None:
        self._num_in_phase[phase] += step
        self.metrics.requests_in_phase.labels(phase.value).set(self._num_in_phase[phase])

    def renamed(self, flight: Flight, before: RequestId | None, after: RequestId | None) -> None:
        if before is not None:
            self._by_wire.pop(before, None)
        if after is not None:
            self._by_wire[after] = flight

    def deliver(self, flight: Flight, delta: Delta) -> None:
        stream = self._streams[flight.id]
        if delta.token_ids:
            now_s = self.now_s()
            if stream.last_token_s is None:
                self.metrics.ttft.observe(flight.timings.ttft_s)
                self.metrics.tokens.first(len(delta.token_ids))
            else:
                self.metrics.tokens.further(len(delta.token_ids), now_s - stream.last_token_s)
            stream.last_token_s = now_s
        if delta.finish is not None:
            self._end(flight, delta.finish.value)
        stream.put(delta)

    def fail(self, flight: Flight, error: PdClusterError) -> None:
        stream = self._streams[flight.id]
        self._end(flight, error.code)
        stream.fail(error)

    def retried(self, flight: Flight, error: PdClusterError) -> None:
        self._changed.add(flight)
        self.metrics.retries.labels(error.code).inc()
        if isinstance(error, TransferError):
            self.metrics.transfer_failures.labels(error.code).inc()
        log.warning("request_retried", request_id=flight.id, phase=flight.phase, reason=error.message)

    def _end(self, flight: Flight, outcome: str) -> None:
        timings = flight.timings
        self.metrics.requests.labels(outcome).inc()
        self.metrics.e2e.observe(timings.e2e_s)
        if timings.ttft_s:
            self.metrics.queue_time.observe(timings.queued_s)
            self.metrics.prefill_time.observe(timings.prefill_s)
        self.metrics.prompt_tokens.inc(timings.num_prompt_tokens)
        self.metrics.cached_tokens.inc(timings.num_cached_tokens)
        self._drop(flight)
        log.debug("request_ended", request_id=flight.id, outcome=outcome, e2e_s=timings.e2e_s)

    def _drop(self, flight: Flight) -> None:
        self._flights.pop(flight.id, None)
        self._streams.pop(flight.id, None)
        self._chains.pop(flight.id, None)
        self._changed.discard(flight)
        if not flight.done:  # it never started
            self._count(flight.phase, -1)
