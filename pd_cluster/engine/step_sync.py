"""Ranks of one engine agree on each step: leads vote, the hub says go, followers get their lead's plan.

    follower <-- Run, Tell --> lead -- Vote --> hub (rank 0)
                                    <-- Go ---
             <---------------- Note --------------->

A lead votes once it is ready for a step, with the tokens it would compute; a vote of 0 means "nothing to do, but
count on me" and may be raised later. As soon as every lead has voted and one of them has tokens, the hub says Go with
all counts: each lead then runs exactly what it voted, and one whose raise crossed the Go runs an empty step first.
With no work anywhere nothing is sent.

A Go may carry a decision about the placement of experts, which holds from that very step on; without work anywhere it
then begins an empty step. While the placement lacks experts no step has work. Notes about placements travel between
the hub and every rank beside the steps; what goes down arrives in the order of the steps' messages.

Engines whose DP ranks share no experts need no agreement: each lead is then its own hub. Every connection opens with
the engine's epoch, which only its ranks know; anything else is hung up on. A connection that breaks ends the engine:
every wait raises EngineError.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any

import msgspec
from msgspec import Struct

from pd_cluster.engine.generations import Formed, Hello
from pd_cluster.engine.plan import StepPlan
from pd_cluster.errors import EngineError
from pd_cluster.ids import EngineEpoch, Rank
from pd_cluster.parallel.transition import Decision

MAX_FRAME_BYTES = 1 << 30
JOIN_FRAME_BYTES = 4096
"""What a stranger may send before it has shown the epoch."""


class Join(Struct, frozen=True, tag="join"):
    epoch: EngineEpoch
    rank: Rank


class Vote(Struct, frozen=True, tag="vote"):
    """From a lead: the tokens it would compute in `step`; a later vote for the same step replaces it."""

    dp_rank: int
    step: int
    num_tokens: int


class Go(Struct, frozen=True, tag="go"):
    """From the hub: run `step`; `step_tokens[dp_rank]` is what each lead voted, or 0 for all. What `decision` says
    holds from this step on.
    """

    step: int
    step_tokens: list[int]
    decision: Decision | None = None


class Run(Struct, frozen=True, tag="run"):
    """From a lead to its followers: run this plan, in the order received."""

    plan: StepPlan
    step_tokens: list[int]
    decision: Decision | None = None


class Tell(Struct, frozen=True, tag="tell"):
    """Anything else between a lead and its followers; a follower handles it after the plans received before."""

    payload: bytes


class Note(Struct, frozen=True, tag="note"):
    """About the placement of experts: from the hub to every rank by way of the leads, or from a rank to the hub."""

    payload: bytes


class Begun(Struct, frozen=True, tag="begun"):
    """From a follower to its lead: it has begun the generation that was formed."""

    generation: int


class Vacant(Struct, frozen=True, tag="vacant"):
    """From a lead that a roster tells to leave to the hub: nothing runs there any more, and nothing is kept."""

    generation: int
    dp_rank: int


Message = Join | Vote | Go | Run | Tell | Note | Hello | Formed | Begun | Vacant
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class GenerationOver(Exception):
    """Who computes together changes: no step begins before the ranks have formed again. No error."""


class Votes:
    """The hub's decision: `cast` and `go` return a Go when it falls.

    `decide(step)` is asked for what a Go of `step` would carry, which it gives once; then `may_run()`, whether steps
    may have work.
    """

    def __init__(
        self,
        num_leads: int,
        decide: Callable[[int], Decision | None] = lambda _step: None,
        may_run: Callable[[], bool] = lambda: True,
        *,
        members: Iterable[int] | None = None,
        step: int = 0,
    ) -> None:
        """`members`: the leads that vote, all by default; of the others a Go says 0. `step`: the first."""
        voting = set(range(num_leads) if members is None else members)
        self._unknown: list[int | None] = [None if lead in voting else 0 for lead in range(num_leads)]
        self._tokens = self._unknown.copy()
        self._step = step
        self.decide = decide
        self.may_run = may_run

    def cast(self, vote: Vote) -> Go | None:
        """The Go that a vote completes, if it does."""
        if vote.step != self._step:
            assert vote.step < self._step, "a lead cannot be ahead of the hub"
            return None  # a raise that crossed the Go: its lead votes again after that step
        self._tokens[vote.dp_rank] = vote.num_tokens
        return self.go()

    @property
    def missing(self) -> list[int]:
        """Leads whose votes keep a step that has work from beginning."""
        tokens = self._tokens.copy()
        return [lead for lead, num_tokens in enumerate(tokens) if num_tokens is None] if any(tokens) else []

    def go(self) -> Go | None:
        """The next Go, if every lead has voted and there is work or a decision."""
        tokens = [t for t in self._tokens if t is not None]
        if len(tokens) < len(self._tokens):
            return None
        decision = self.decide(self._step)
        if not self.may_run():
            tokens = [0] * len(tokens)
        if not any(tokens) and decision is None:
            return None
        go = Go(self._step, tokens, decision)
        self._step += 1
        self._tokens = self._unknown.copy()
        return go


class Link:
    """One framed connection: 4 bytes of length, then a message."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: Message) -> None:
        body = _encode(message)
        self._writer.write(len(body).to_bytes(4, "big") + body)

    async def receive(self, limit: int = MAX_FRAME_BYTES) -> Message:
        """The next message. Raises EngineError when the peer is gone or sends what is not one."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            if size > limit:
                raise EngineError(f"a frame of {size} bytes on a step-sync connection, at most {limit} are accepted")
            return _decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError) as error:
            raise EngineError(f"step-sync connection lost: {error}") from error

    def close(self) -> None:
        self._writer.close()


class Meeting(Struct, frozen=True, kw_only=True):
    """How ranks find each other: `publish(key, value)` and `lookup(key)`, which waits until it is there."""

    publish: Callable[[str, str], Awaitable[None]]
    lookup: Callable[[str], Awaitable[str]]


class StepSync:
    """One rank's part. `shared`: DP ranks step together (they share experts)."""

    def __init__(
        self, *, epoch: EngineEpoch, rank: Rank, data_parallel: int, tensor_parallel: int, shared: bool
    ) -> None:
        self.epoch = epoch
        self.rank = rank
        self.dp_rank, self.tp_rank = divmod(rank, tensor_parallel)
        self.num_followers = tensor_parallel - 1 if self.tp_rank == 0 else 0
        self._tensor_parallel = tensor_parallel
        self._data_parallel = data_parallel
        self._hub_rank = 0 if shared else self.dp_rank * tensor_parallel
        self._num_leads = data_parallel if shared else 1
        self._votes = Votes(self._num_leads) if rank == self._hub_rank else None
        self.on_order: Callable[[bytes], None] = lambda _payload: None
        self.on_report: Callable[[bytes], None] = lambda _payload: None  # at the hub
        self._leads: dict[int, Link] = {}  # at the hub: by dp_rank
        self._followers: dict[Rank, Link] = {}  # at a lead
        self._up: Link | None = None  # at a follower: its lead; at a lead: the hub
        self._go: deque[Go | EngineError] = deque()
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._all_joined = asyncio.Event()
        self.on_tell: Callable[[Rank, bytes], None] = lambda _rank, _payload: None

    @property
    def is_hub(self) -> bool:
        return self._votes is not None

    @property
    def is_lead(self) -> bool:
        return self.tp_rank == 0

    async def start(self, meeting: Meeting, host: str, timeout_s: float) -> None:
        """Listen, publish the address, connect upwards and wait for everyone below. Raises EngineError after
        `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._start(meeting, host)
        except TimeoutError as error:
            raise EngineError(f"rank {self.rank}: the engine's ranks did not meet within {timeout_s:g} s") from error

    async def _start(self, meeting: Meeting, host: str) -> None:
        if self._num_below():
            self._server = await asyncio.start_server(self._welcome, host, 0)
            port = self._server.sockets[0].getsockname()[1]
            await meeting.publish(f"sync/{self.rank}", f"{host}:{port}")
        above = self._hub_rank if self.is_lead else self.dp_rank * self._tensor_parallel
        if above != self.rank:
            address, _, port_text = (await meeting.lookup(f"sync/{above}")).rpartition(":")
            self._up = Link(*await asyncio.open_connection(address, int(port_text)))
            self._up.send(Join(self.epoch, self.rank))
            if self.is_lead:
                self._spawn(self._read_hub(self._up))
        if self._num_below():
            await self._all_joined.wait()

    def _num_below(self) -> int:
        return self.num_followers + (self._num_leads - 1 if self.rank == self._hub_rank else 0)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(10.0):
                join = await link.receive(JOIN_FRAME_BYTES)
            if isinstance(join, Join) and join.epoch == self.epoch:
                self._admit(join.rank, link)
                return
        link.close()

    def _admit(self, rank: Rank, link: Link) -> None:
        dp_rank, tp_rank = divmod(rank, self._tensor_parallel)
        if tp_rank:
            self._followers[rank] = link
            self._spawn(self._read_follower(rank, link))
        else:
            self._leads[dp_rank] = link
            self._spawn(self._read_lead(link))
        if len(self._leads) + len(self._followers) == self._num_below():
            self._all_joined.set()

    def _spawn(self, reading: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await reading
            except EngineError as error:
                self._arrive(error)

        task = asyncio.get_running_loop().create_task(guarded())
        task.add_done_callback(lambda _task: reading.close())  # cancelled before it began
        self._tasks.append(task)

    async def _read_hub(self, link: Link) -> None:
        while True:
            message = await link.receive()
            if isinstance(message, Go):
                self._arrive(message)
            elif isinstance(message, Note):
                self._order(message)

    async def _read_lead(self, link: Link) -> None:
        while True:
            message = await link.receive()
            if isinstance(message, Vote):
                self._cast(message)
            elif isinstance(message, Note):
                self.on_report(message.payload)

    async def _read_follower(self, rank: Rank, link: Link) -> None:
        while True:
            self._hear_follower(rank, await link.receive())

    def _hear_follower(self, rank: Rank, message: Message) -> None:
        if isinstance(message, Tell):
            self.on_tell(rank, message.payload)
        elif isinstance(message, Note):
            self.report(message.payload)

    def _arrive(self, go: Go | EngineError) -> None:
        self._go.append(go)
        self._arrived.set()

    def _cast(self, vote: Vote) -> None:
        assert self._votes is not None
        self._say(self._votes.cast(vote))

    def _say(self, go: Go | None) -> None:
        if go is not None:
            for link in self._leads.values():
                link.send(go)
            self._arrive(go)

    # ---- of placement epochs

    def order(self, payload: bytes) -> None:
        """From the hub to every rank, itself too."""
        assert self.is_hub
        note = Note(payload)
        for link in self._leads.values():
            link.send(note)
        self._order(note)

    def _order(self, note: Note) -> None:
        for link in self._followers.values():
            link.send(note)
        self.on_order(note.payload)

    def report(self, payload: bytes) -> None:
        """To the hub, from any rank."""
        if self.is_hub:
            self.on_report(payload)
        else:
            assert self._up is not None
            self._up.send(Note(payload))

    def steer(self, decide: Callable[[int], Decision | None], may_run: Callable[[], bool]) -> None:
        """At the hub: ask these at every Go, see `Votes`."""
        assert self._votes is not None
        self._votes.decide, self._votes.may_run = decide, may_run

    def nudge(self) -> None:
        """At the hub: `decide` or `may_run` may answer otherwise than at the last vote."""
        assert self._votes is not None
        self._say(self._votes.go())

    # ---- of a lead

    def vote(self, step: int, num_tokens: int) -> None:
        vote = Vote(self.lead_index, step, num_tokens)
        if self._votes is not None:
            self._cast(vote)
        else:
            assert self._up is not None
            self._up.send(vote)

    async def form(self, next_step: int) -> int:
        """Before the first vote, and after GenerationOver: wait until all ranks may compute together, no step of this
        one being under way. Returns the step to vote for. Raises EngineError.
        """
        return next_step

    async def begin(self, formed: Formed) -> None:
        """On every rank, when no step is under way: a generation has formed."""
        raise EngineError("this engine has one generation")

    async def go(self) -> Go:
        """Wait for the next Go, however long. Raises EngineError when a rank is lost, and GenerationOver."""
        await self._arrived.wait()
        go = self._go[0]
        if isinstance(go, EngineError):
            raise go
        self._go.popleft()
        if not self._go:
            self._arrived.clear()
        return go

    async def wait_go(self) -> None:
        """Wait until `go` would return (or raise) at once."""
        await self._arrived.wait()

    def has_go(self) -> bool:
        """Whether `go` would return (or raise) at once."""
        return self._arrived.is_set()

    def run_followers(self, plan: StepPlan, step_tokens: list[int], decision: Decision | None = None) -> None:
        for link in self._followers.values():
            link.send(Run(plan, step_tokens, decision))

    def tell_followers(self, payload: bytes) -> None:
        for link in self._followers.values():
            link.send(Tell(payload))

    # ---- of a follower

    def tell_lead(self, payload: bytes) -> None:
        assert self._up is not None
        self._up.send(Tell(payload))

    async def orders(self) -> AsyncIterator[Run | Tell | Formed]:
        """What the lead says, in order. Raises EngineError when it is gone."""
        assert self._up is not None
        while True:
            message = await self._up.receive()
            if isinstance(message, Run | Tell | Formed):
                yield message
            elif isinstance(message, Note):
                self.on_order(message.payload)

    @property
    def lead_index(self) -> int:
        """Where this rank's lead stands in `step_tokens`."""
        return self.dp_rank if self._num_leads > 1 else 0

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for link in [*self._leads.values(), *self._followers.values(), *([self._up] if self._up else [])]:
            link.close()
        if self._server is not None:
            self._server.close()
