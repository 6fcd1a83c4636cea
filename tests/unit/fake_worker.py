"""A worker at the level of the control protocol: toy tokens, no model, no KV, but honest about who holds what.

It answers by the rules of `pd_cluster.messages` and can be told to hold back or replace an answer. Used in memory
(`Cluster`, where the test pumps messages) and behind a real ControlServer.
"""

import asyncio
from collections.abc import Callable, Iterable

from pd_cluster import messages as m
from pd_cluster.clock import FakeClock
from pd_cluster.engine.plan import TokenLogprobs
from pd_cluster.errors import Overloaded, PdClusterError
from pd_cluster.ids import BlockId, EngineEpoch, EngineId, RequestId, RouterId, TransferId, WorkerId
from pd_cluster.kv.layout import KvFingerprint
from pd_cluster.request import FinishReason, Request, SamplingParams
from pd_cluster.rpc.server import ControlServer
from pd_cluster.transfer.contract import WorkerEndpoint
from router.attempt import Limits
from router.directory import Directory
from router.pipeline import Pipeline

VOCAB_SIZE = 257
EOS = 256
BLOCK_SIZE = 16


def next_token(token_ids: list[int]) -> int:
    """The toy model: never EOS, and different for every history of a test's size."""
    return 1 + (31 * token_ids[-1] + 7 * len(token_ids) + sum(token_ids)) % 255


def continuation(token_ids: list[int], count: int) -> list[int]:
    """What the toy model generates."""
    grown = list(token_ids)
    for _ in range(count):
        grown.append(next_token(grown))
    return grown[len(token_ids) :]


def fingerprint(weights: str = "toy") -> KvFingerprint:
    return KvFingerprint(
        weights=weights, kind="gqa", num_layers=1, num_kv_heads=1, token_values=2, dtype="float32", rope="none"
    )


def request(name: str = "r", prompt: Iterable[int] = (5, 6, 7), max_tokens: int = 4, **sampling: object) -> Request:
    token_ids = list(prompt)
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Request(id=RequestId(name), token_ids=token_ids, num_prompt_tokens=len(token_ids), sampling=params)


class Running:
    """A sequence that decodes here, or waits to be pushed."""

    def __init__(self, request: Request, reply: bytes | None = None) -> None:
        self.request = request
        self.reply = reply
        self.token_ids = list(request.token_ids)
        self.emitted = request.num_output_tokens  # output tokens that are known to the router

    def draw(self) -> tuple[int, FinishReason | None, TokenLogprobs | None]:
        sampling = self.request.sampling
        num_output = 1 + len(self.token_ids) - self.request.num_prompt_tokens
        token_id = next_token(self.token_ids)
        if self.reply is not None:
            token_id = self.reply[num_output - 1] if num_output <= len(self.reply) else EOS
        self.token_ids.append(token_id)
        finish = FinishReason.LENGTH if num_output >= sampling.max_tokens else None
        if token_id == EOS and not sampling.ignore_eos:
            finish = FinishReason.STOP
        if token_id in sampling.stop_token_ids and num_output >= sampling.min_tokens:
            finish = FinishReason.STOP
        logprobs = None
        if sampling.logprobs is not None:
            others = [(token_id + i) % VOCAB_SIZE for i in range(sampling.logprobs)]
            logprobs = TokenLogprobs(-0.5, 1, others, [-0.5 - i for i in range(len(others))])
        return token_id, finish, logprobs


class FakeWorker:
    """Answers `handle(messages)`; `step()` decodes one token of everything that runs."""

    def __init__(
        self,
        engine: str = "prefill-0",
        *,
        dp_rank: int = 0,
        epoch: str = "1",
        engine_epoch: str | None = None,
        can_prefill: bool | None = None,
        can_decode: bool | None = None,
        num_blocks: int = 64,
        max_model_len: int = 512,
        weights: str = "toy",
        peers: "dict[WorkerId, FakeWorker] | None" = None,
    ) -> None:
        self.epoch = EngineEpoch(f"{engine}-epoch-{epoch}")
        self.info = m.WorkerInfo(
            worker_id=WorkerId(f"{engine}/{dp_rank}"),
            engine_id=EngineId(engine),
            dp_rank=dp_rank,
            can_prefill="prefill" in engine if can_prefill is None else can_prefill,
            can_decode="decode" in engine if can_decode is None else can_decode,
            model="toy",
            tensor_parallel=1,
            data_parallel=1,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            block_bytes=1024,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            endpoint=WorkerEndpoint(
                engine_id=EngineId(engine),
                epoch=self.epoch,
                dp_rank=dp_rank,
                fingerprint=fingerprint(weights),
                ranks=[],
            ),
            engine_epoch=None if engine_epoch is None else EngineEpoch(engine_epoch),
        )
        self.peers = peers if peers is not None else {}
        self.reply: bytes | None = None  # what to say instead of toy tokens, then EOS
        self.seen: list[m.ToWorkerMessage] = []
        self.replace: dict[type, Callable[[m.ToWorkerMessage], list[m.ToRouterMessage]]] = {}
        self.ignored: set[type] = set()  # kinds of messages this worker never answers
        self.held: dict[TransferId, Running] = {}  # prefilled, not pushed
        self.orders: dict[TransferId, m.Push] = {}  # pushes that wait for their prefill
        self.stuck_pushes = False  # a push begins and never ends
        self.reserved: dict[TransferId, m.Reserve] = {}
        self.quarantined: dict[TransferId, m.Reserve] = {}
        self.running: dict[RequestId, Running] = {}
        self.out: list[m.ToRouterMessage] = []
        self.leases: list[m.ExtendLease] = []
        self.dead_epochs: list[EngineEpoch] = []

    @property
    def id(self) -> WorkerId:
        return self.info.worker_id

    @property
    def empty(self) -> bool:
        """Whether nothing of any request is left here."""
        return not (self.held or self.orders or self.reserved or self.quarantined or self.running)

    def kinds(self) -> list[type]:
        return [type(message) for message in self.seen]

    def load(self) -> m.WorkerLoad:
        return m.WorkerLoad(
            num_running=len(self.running),
            num_free_blocks=self.info.num_blocks,
            num_reserved_blocks=len(self.reserved),
            num_held_blocks=len(self.held),
            num_quarantined_blocks=len(self.quarantined),
            oldest_stranded_s=1.5 if self.quarantined else 0.0,
        )

    def handle(self, messages: Iterable[m.ToWorkerMessage]) -> None:
        """Take messages in; answers gather in `out`."""
        for message in messages:
            self.seen.append(message)
            if type(message) in self.ignored:
                continue
            custom = self.replace.get(type(message))
            if custom is not None:
                self.out += custom(message)
                continue
            self._handle(message)

    def step(self) -> bool:
        """Draw one token for each running sequence; False when nothing runs."""
        deltas = []
        for request_id, sequence in list(self.running.items()):
            token_id, finish, logprobs = sequence.draw()
            deltas.append(
                m.TokenDelta(request_id, sequence.emitted, [token_id], finish, [logprobs] if logprobs else None)
            )
            sequence.emitted += 1
            if finish is not None:
                del self.running[request_id]
        if deltas:
            self.out.append(m.Tokens(deltas=deltas))
        return bool(deltas)

    def fill(self, transfer_id: TransferId, sequence: Running) -> None:
        """A source has written the KV of a transfer here."""
        reserve = self.reserved.pop(transfer_id, None)
        if reserve is None:
            return
        adopted = Running(reserve.request, self.reply)
        adopted.token_ids = list(sequence.token_ids)
        adopted.emitted = len(sequence.token_ids) - reserve.request.num_prompt_tokens
        self.running[reserve.request.id] = adopted
        self.out.append(m.Adopted(request_id=reserve.request.id, transfer_id=transfer_id, num_bytes=64))

    def failed(self, request_id: RequestId, transfer_id: TransferId | None, error: PdClusterError) -> m.Failed:
        return m.Failed(request_id=request_id, transfer_id=transfer_id, error=error.info())

    def prefill(self, message: m.Prefill) -> None:
        """Do what a Prefill asks, to its end."""
        sequence = Running(message.request, self.reply)
        started = m.Started(
            request_id=message.request.id, transfer_id=message.transfer_id, num_cached_tokens=0, queued_s=0.0
        )
        self.out.append(started)
        self.prefilled(message, sequence)

    def prefilled(self, message: m.Prefill, sequence: Running) -> None:
        token_id, finish, logprobs = sequence.draw()
        if finish is None:
            self.held[message.transfer_id] = sequence
        self.out.append(
            m.Prefilled(
                request_id=message.request.id,
                transfer_id=message.transfer_id,
                token_id=token_id,
                logprobs=logprobs,
                finish=finish,
                prefill_s=0.01,
                num_cached_tokens=0,
            )
        )
        order = self.orders.pop(message.transfer_id, None)
        if order is not None and finish is None:
            self.push(order)

    def push(self, order: m.Push) -> None:
        if order.transfer_id not in self.held or self.stuck_pushes:
            self.orders[order.transfer_id] = order
            return
        sequence = self.held.pop(order.transfer_id)
        target = self.peers[order.target]
        if target.epoch == order.target_epoch:
            target.fill(order.transfer_id, sequence)
        self.out.append(
            m.Pushed(request_id=order.request_id, transfer_id=order.transfer_id, num_bytes=128, seconds=0.002)
        )

    def _handle(self, message: m.ToWorkerMessage) -> None:
        match message:
            case m.Prefill():
                self.prefill(message)
            case m.Push():
                self.push(message)
            case m.Reserve():
                if len(self.reserved) >= self.info.num_blocks:
                    self.out.append(self.failed(message.request.id, message.transfer_id, Overloaded("full")))
                    return
                self.reserved[message.transfer_id] = message
                self.out.append(
                    m.Granted(
                        request_id=message.request.id,
                        transfer_id=message.transfer_id,
                        block_ids=[BlockId(0)],
                        num_cached_tokens=0,
                        lease_s=30.0,
                    )
                )
            case m.Generate():
                self.running[message.request.id] = Running(message.request, self.reply)
            case m.Abort():
                self._abort(message.request_id)
                if message.transfer_id is not None:
                    self.out.append(m.Stopped(request_id=message.request_id, transfer_id=message.transfer_id))
            case m.SourceStopped():
                self.quarantined.pop(message.transfer_id, None)
            case m.EngineDead():
                self.dead_epochs.append(message.dead)
                for transfer_id, reserve in list(self.quarantined.items()):
                    if reserve.source_epoch == message.dead:
                        del self.quarantined[transfer_id]
            case m.ExtendLease():
                self.leases.append(message)
            case _:
                pass

    def detach(self) -> None:
        """The router is gone: its requests end here."""
        ids = {*self.running, *(reserve.request.id for reserve in self.reserved.values())}
        ids |= {sequence.request.id for sequence in self.held.values()}
        for request_id in ids | {order.request_id for order in self.orders.values()}:
            self._abort(request_id)
        self.out.clear()

    def _abort(self, request_id: RequestId) -> None:
        self.running.pop(request_id, None)
        for transfer_id, reserve in list(self.reserved.items()):
            if reserve.request.id == request_id:
                self.quarantined[transfer_id] = self.reserved.pop(transfer_id)
        for transfer_id, sequence in list(self.held.items()):
            if sequence.request.id == request_id:
                del self.held[transfer_id]
        for transfer_id, order in list(self.orders.items()):
            if order.request_id == request_id:
                del self.orders[transfer_id]


class ServedWorker:
    """A fake worker behind a real ControlServer; it decodes a token every `step_s`."""

    def __init__(self, worker: FakeWorker, step_s: float = 0.001, **options: object) -> None:
        self.worker = worker
        self.step_s = step_s
        self.server = ControlServer(self, worker.info, worker.epoch, **options)  # type: ignore[arg-type]
        self.port = 0
        self.router_id: RouterId | None = None
        self._stepping: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.port = await self.server.start()
        self._stepping = asyncio.create_task(self._step())

    async def stop(self) -> None:
        if self._stepping is not None:
            self._stepping.cancel()
        await self.server.stop(0)

    def on_attach(self, router_id: RouterId) -> None:
        self.router_id = router_id

    def on_messages(self, router_id: RouterId, messages: list[m.ToWorkerMessage]) -> None:
        self.worker.handle(messages)
        self.flush()

    def on_detach(self, router_id: RouterId) -> None:
        self.worker.detach()

    def load(self) -> m.WorkerLoad:
        return self.worker.load()

    def flush(self) -> None:
        out, self.worker.out = self.worker.out, []
        if out and self.router_id is not None:
            self.server.send(self.router_id, out)

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            self.worker.step()
            self.flush()


class Conversation:
    """A control stream without a network: the test moves the messages."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.inbox: list[m.ToWorkerMessage] = []
        self.open = True

    def send(self, messages: Iterable[m.ToWorkerMessage]) -> bool:
        if self.open:
            self.inbox += messages
        return self.open


class Cluster:
    """A pipeline and fake workers in one thread under a fake clock."""

    def __init__(self, *workers: FakeWorker, limits: Limits | None = None, **options: object) -> None:
        self.clock = FakeClock(1000.0)
        self.pipeline = Pipeline(Directory(), limits=limits, clock=self.clock, **options)  # type: ignore[arg-type]
        self.workers: dict[WorkerId, FakeWorker] = {}
        self.conversations: dict[WorkerId, Conversation] = {}
        for worker in workers:
            self.attach(worker)

    def attach(self, worker: FakeWorker) -> Conversation:
        worker.peers = self.workers
        worker.detach()
        self.workers[worker.id] = worker
        conversation = self.conversations[worker.id] = Conversation(worker)
        self.pipeline.on_welcome(conversation, worker.info, worker.epoch)
        return conversation

    def lose(self, worker: FakeWorker, reason: str = "the stream broke") -> None:
        """The connection breaks; what was under way in either direction is gone."""
        conversation = self.conversations.pop(worker.id)
        conversation.open = False
        conversation.inbox.clear()
        worker.out.clear()
        self.pipeline.on_lost(conversation, reason)

    def deliver(self) -> bool:
        """Move every waiting message once; False when there was none."""
        moved = False
        for conversation in list(self.conversations.values()):
            inbox, conversation.inbox = conversation.inbox, []
            conversation.worker.handle(inbox)
            moved = moved or bool(inbox)
        for conversation in list(self.conversations.values()):
            out, conversation.worker.out = conversation.worker.out, []
            if out:
                moved = True
                self.pipeline.on_messages(conversation, out)
        return moved

    def settle(self) -> None:
        """Deliver until nobody has anything more to say, without decoding."""
        while self.deliver():
            pass

    def run(self, max_steps: int = 100) -> None:
        """Deliver and decode until nothing moves."""
        for _ in range(max_steps):
            self.settle()
            stepped = [worker.step() for worker in self.workers.values()]
            if not any(stepped):
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    def advance(self, seconds: float, tick_s: float = 0.5) -> None:
        """Let time pass, ticking and delivering."""
        end_s = self.clock.now_s() + seconds
        while self.clock.now_s() < end_s:
            self.clock.advance(min(tick_s, end_s - self.clock.now_s()))
            self.pipeline.tick()
            self.settle()

    def check_nothing_is_left(self) -> None:
        self.settle()
        assert self.pipeline.idle()
        for worker in self.workers.values():
            assert worker.empty, f"{worker.id} still holds something"
