"""Step sync of an engine whose DP ranks come and go: who is hub, and who votes, changes from generation to generation.

    follower <-- Formed -- lead -- Hello --> hub (the lowest live lead)
             --- Begun -->      <- Formed --

`generations.Generations` decides; here are the connections. Every lead listens from the start, for any may become hub.
A lead that halts hangs up, and opens a new connection for its next hello, so what arrives on a connection belongs to
one generation. A broken connection between leads ends nothing: a roster will say what it meant. One within a DP rank
ends that DP rank.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from pd_cluster.clock import Clock
from pd_cluster.engine.generations import Action, AllMet, Begin, Fail, Formed, Generations, Halt, Hello, Meet, Phase
from pd_cluster.engine.step_sync import (
    Begun,
    GenerationOver,
    Go,
    Join,
    Link,
    Meeting,
    Message,
    Note,
    StepSync,
    Vacant,
    Vote,
    Votes,
)
from pd_cluster.errors import EngineError, PdClusterError
from pd_cluster.ids import EngineEpoch, Rank
from pd_cluster.log import get_log
from pd_cluster.parallel.roster import Roster
from pd_cluster.parallel.transition import Decision

log = get_log(__name__)

TICK_S = 0.25
CALL_AGAIN_S = 0.05
AWAITED_S = 0.5
"""Whoever keeps a step from beginning for longer is named by `awaited`."""


async def _nothing_to_begin(_formed: Formed) -> None:
    pass


class ElasticSync(StepSync):
    """One rank's part. Leads are told of every roster by `issued`.

    `on_begin`: begin a generation on this rank, no step being under way. `standing` and `settle`: where placements
    stand when this DP rank halts, and, at the hub, what of all that holds; `settle` may raise. `on_running`: at a lead,
    all its ranks have begun; notes to and from the hub arrive from now on.
    """

    def __init__(
        self,
        *,
        epoch: EngineEpoch,
        life: EngineEpoch,
        rank: Rank,
        data_parallel: int,
        tensor_parallel: int,
        clock: Clock,
        on_begin: Callable[[Formed], Awaitable[None]] = _nothing_to_begin,
        standing: Callable[[], bytes] = lambda: b"",
        settle: Callable[[AllMet], bytes] = lambda _met: b"",
        on_running: Callable[[Formed], None] = lambda _formed: None,
    ) -> None:
        super().__init__(
            epoch=epoch, rank=rank, data_parallel=data_parallel, tensor_parallel=tensor_parallel, shared=True
        )
        self.life = life
        self.generations = Generations(self.dp_rank, life)
        self.standing = standing
        self.settle = settle
        self.on_begin = on_begin
        self.on_running = on_running
        self.on_vacant: Callable[[int, int], None] = lambda _dp_rank, _generation: None  # at the hub
        self._clock = clock
        self._votes = None
        self._steering: tuple[Callable[[int], Decision | None], Callable[[], bool]] | None = None
        self._meeting: Meeting | None = None
        self._callers: dict[int, tuple[Hello, Link]] = {}  # leads that said hello, by DP rank
        self._formed: Formed | None = None
        self._early_notes: list[Note] = []
        self._begun: dict[Rank, int] = {}  # followers, the generation that each has begun
        self._changed = asyncio.Event()
        self._failure: EngineError | None = None
        self._hub = 0  # of the present generation
        self._waiting_since_s: float | None = None  # a lead that has work: for the next step, here or at another lead

    # ---- connections

    async def _start(self, meeting: Meeting, host: str) -> None:
        self._meeting = meeting
        lead = Rank(self.dp_rank * self._tensor_parallel)
        if self.is_lead:
            self._server = await asyncio.start_server(self._welcome, host, 0)
            port = self._server.sockets[0].getsockname()[1]
            await meeting.publish(_address_key(self.life, lead), f"{host}:{port}")
            if self.num_followers:
                await self._all_joined.wait()
            self._tasks.append(asyncio.get_running_loop().create_task(self._tick()))
        else:
            self._up = await self._call(lead, self.life)

    async def _call(self, rank: Rank, life: EngineEpoch) -> Link:
        """Raises OSError when nobody answers."""
        assert self._meeting is not None
        address, _, port = (await self._meeting.lookup(_address_key(life, rank))).rpartition(":")
        link = Link(*await asyncio.open_connection(address, int(port)))
        link.send(Join(self.epoch, self.rank))
        return link

    def _num_below(self) -> int:
        return self.num_followers

    def _admit(self, rank: Rank, link: Link) -> None:
        if rank % self._tensor_parallel:
            super()._admit(rank, link)
        else:
            self._spawn(self._read_caller(rank // self._tensor_parallel, link))

    async def _read_caller(self, dp_rank: int, link: Link) -> None:
        """At a lead that is hub, or will be once it knows of the roster that makes it so."""
        try:
            hello = await link.receive()
            if not isinstance(hello, Hello) or hello.dp_rank != dp_rank:
                link.close()
                return
            known = self._callers.get(dp_rank)
            if known is None or known[0].generation <= hello.generation:
                self._callers[dp_rank] = hello, link
                self._do(self.generations.hello(hello))
            while True:
                message = await link.receive()
                if self._leads.get(dp_rank) is not link:
                    continue  # of a generation that is over
                if isinstance(message, Vote):
                    self._cast(message)
                elif isinstance(message, Note):
                    self.on_report(message.payload)
                elif isinstance(message, Vacant):
                    self.on_vacant(message.dp_rank, message.generation)
        except EngineError:
            link.close()
            if self._leads.get(dp_rank) is link:
                self.generations.lost(f"DP rank {dp_rank}", self._clock.now_s())

    async def _read_hub_of(self, generation: int, hub: int, hello: Hello) -> None:
        """Say hello until somebody hears it, then read what the hub says for as long as the generation lasts."""
        roster = self.generations.roster
        assert roster is not None
        life = roster.lives[hub]
        assert life is not None
        while self.generations.generation == generation:
            try:
                link = await self._call(Rank(hub * self._tensor_parallel), life)
            except OSError:
                await asyncio.sleep(CALL_AGAIN_S)  # it is dead, most likely, and a roster will say so
                continue
            if self.generations.generation != generation:
                link.close()
                return
            self._up = link
            link.send(hello)
            with contextlib.suppress(EngineError):
                while True:
                    message = await link.receive()
                    if self._up is not link:
                        return
                    self._hear_hub(message)
            if self._up is link:
                self._up = None
                self.generations.lost(f"its hub, DP rank {hub}", self._clock.now_s())
            if self.generations.phase is not Phase.MEETING:
                return
            await asyncio.sleep(CALL_AGAIN_S)

    def _hear_hub(self, message: Message) -> None:
        if isinstance(message, Formed):
            self._do(self.generations.formed(message))
        elif isinstance(message, Note):
            self._hear_note(message)
        elif isinstance(message, Go) and not self.generations.is_over:
            self._arrive(message)

    def _hear_note(self, note: Note) -> None:
        if self.generations.is_over:
            self._early_notes.append(note)  # the hub may have begun before this DP rank
        else:
            self._order(note)

    def _hear_follower(self, rank: Rank, message: Message) -> None:
        if isinstance(message, Begun):
            self._begun[rank] = message.generation
            self._changed.set()
        else:
            super()._hear_follower(rank, message)

    # ---- generations

    def issued(self, roster: Roster) -> None:
        """The next roster, at a lead; each in its turn."""
        self._do(self.generations.issued(roster, self._clock.now_s()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._do(self.generations.tick(self._clock.now_s()))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Halt():
                    self._hang_up()
                case Meet(hub, hello):
                    self._hub = hub
                    if hub == self.dp_rank:
                        self._do(self.generations.hello(hello))
                    else:
                        self._spawn(self._read_hub_of(hello.generation, hub, hello))
                case AllMet():
                    self._form_all(action)
                case Begin(formed):
                    self._formed = formed
                    self._changed.set()
                case Fail(reason):
                    self._fail(EngineError(reason))

    def _hang_up(self) -> None:
        """No message of the generation that ends counts any more."""
        for link in self._leads.values():
            link.close()
        self._leads = {}
        self._votes = None
        if self._up is not None:
            self._up.close()
            self._up = None
        self._formed = None
        self._early_notes = []
        self._waiting_since_s = None
        self._go.clear()
        self._arrived.set()
        self._changed.set()

    def _form_all(self, met: AllMet) -> None:
        try:
            settled = self.settle(met)
        except PdClusterError as error:
            self._fail(EngineError(error.message))
            return
        formed = Formed(generation=met.generation, step=met.step, lives=met.lives, settled=settled)
        members = [hello.dp_rank for hello in met.hellos]
        self._votes = Votes(self._num_leads, members=members, step=met.step)
        if self._steering is not None:
            self._votes.decide, self._votes.may_run = self._steering
        self._leads = {dp_rank: self._callers[dp_rank][1] for dp_rank in members if dp_rank != self.dp_rank}
        for link in self._leads.values():
            link.send(formed)
        self._do(self.generations.formed(formed))

    def _fail(self, error: EngineError) -> None:
        self._failure = self._failure or error
        self._arrive(error)
        self._changed.set()

    async def form(self, next_step: int) -> int:
        """See `StepSync`. `next_step` follows the last one that this rank began."""
        while True:
            await self._until(lambda: self.generations.phase is Phase.HALTING)
            self._do(self.generations.at_rest(next_step, self.standing()))
            await self._until(lambda: self._formed is not None or self.generations.phase is Phase.HALTING)
            if (formed := self._formed) is None:
                continue
            await self._begin_all(formed)
            next_step = formed.step
            self.generations.begun()
            if self.generations.is_over:
                continue
            self._arrived.clear()
            if not self.is_hub and self._up is None:
                self.generations.lost("its hub", self._clock.now_s())
            log.info("generation_formed", generation=formed.generation, step=next_step, members=_members(formed))
            self.on_running(formed)
            notes, self._early_notes = self._early_notes, []
            for note in notes:
                self._order(note)
            return next_step

    async def _begin_all(self, formed: Formed) -> None:
        """On this rank and its followers, whatever happens meanwhile: none may be left between two generations."""
        for link in self._followers.values():
            link.send(formed)
        await self.on_begin(formed)
        await self._until(lambda: all(self._begun.get(r) == formed.generation for r in self._followers))

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Raises EngineError when this DP rank can go on no longer."""
        while not condition():
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def begin(self, formed: Formed) -> None:
        """At a follower, in the order of its lead's messages."""
        await self.on_begin(formed)
        assert self._up is not None
        self._up.send(Begun(formed.generation))

    def _arrive(self, go: Go | EngineError) -> None:
        if isinstance(go, EngineError):
            self._failure = self._failure or go
            self._changed.set()
        self._waiting_since_s = None
        super()._arrive(go)

    def _cast(self, vote: Vote) -> None:
        super()._cast(vote)
        assert self._votes is not None
        if self._votes.missing:
            self._wait()

    def _wait(self) -> None:
        if self._waiting_since_s is None:
            self._waiting_since_s = self._clock.now_s()

    def awaited(self) -> list[Rank]:
        """Leads that keep work waiting between two steps: at the hub those that have not voted, at another lead the
        hub, whomever that waits for itself. Any thread may ask.
        """
        since_s, votes = self._waiting_since_s, self._votes
        if since_s is None or self._clock.now_s() - since_s < AWAITED_S:
            return []
        late = votes.missing if votes is not None else [self._hub]
        return [Rank(dp_rank * self._tensor_parallel) for dp_rank in late]

    # ---- of a lead

    def vote(self, step: int, num_tokens: int) -> None:
        if not self.generations.is_over and (self._votes is not None or self._up is not None):
            if num_tokens and not self.is_hub:
                self._wait()
            super().vote(step, num_tokens)

    async def go(self) -> Go:
        await self._arrived.wait()
        if self._failure is not None:
            raise self._failure
        if self.generations.is_over:
            raise GenerationOver
        return await super().go()

    def vacate(self, generation: int) -> None:
        """Tell the hub that this DP rank, which the roster of that generation tells to leave, is idle; say it again,
        for the hub may change.
        """
        if self.is_hub:
            self.on_vacant(self.dp_rank, generation)
        elif self._up is not None and not self.generations.is_over:
            self._up.send(Vacant(generation, self.dp_rank))

    def order(self, payload: bytes) -> None:
        """See `StepSync`. Ranks that have not begun yet hear it then; when the generation is over, nobody does."""
        if not self.is_hub:
            return
        note = Note(payload)
        for link in self._leads.values():
            link.send(note)
        self._hear_note(note)

    def report(self, payload: bytes) -> None:
        """Lost when it comes between generations, for then all placements are settled anew."""
        if self.is_hub or self._up is not None:
            super().report(payload)

    def steer(self, decide: Callable[[int], Decision | None], may_run: Callable[[], bool]) -> None:
        self._steering = decide, may_run
        if self._votes is not None:
            self._votes.decide, self._votes.may_run = self._steering

    def nudge(self) -> None:
        if self._votes is not None and not self.generations.is_over:
            super().nudge()

    async def close(self) -> None:
        for _, link in self._callers.values():
            link.close()
        await super().close()


def _members(formed: Formed) -> list[int]:
    return [dp_rank for dp_rank, life in enumerate(formed.lives) if life is not None]


def _address_key(life: EngineEpoch, rank: Rank) -> str:
    return f"sync/{life}/{rank}"
