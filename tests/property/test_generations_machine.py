"""Leads that form generations while members die, come and go at any moment: one step number, one placement, one end."""

import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.engine.generations import (
    Action,
    AllMet,
    Begin,
    Fail,
    Formed,
    Generations,
    Halt,
    Hello,
    Meet,
    Phase,
)
from pd_cluster.engine.step_sync import Go, Vote, Votes
from pd_cluster.ids import EngineEpoch
from pd_cluster.parallel.roster import Roster
from pd_cluster.parallel.transition import Commit

encode = msgspec.msgpack.encode
NUM = 3
Wire = Hello | Formed | Vote | Go


class Standing(msgspec.Struct, frozen=True):
    """Where a lead stands between placement epochs: its next step computes with `epoch`, and it has promised to go to
    `ready`, with no decision seen.
    """

    epoch: int
    ready: int | None = None


def epoch_that_holds(standings: list[Standing]) -> int:
    """The latest that anyone has seen committed, for all had promised it; what nobody saw committed is abandoned."""
    return max(standing.epoch for standing in standings)


class Step(msgspec.Struct):
    """One that a lead has launched; it ends well once every member of its generation launched it."""

    generation: int
    step: int
    epoch: int
    is_void: bool = False


class Lead:
    """A member with the real decisions, and the effects of a rank without the rank."""

    def __init__(self, world: "World", dp_rank: int, life: EngineEpoch, epoch: int | None) -> None:
        self.world = world
        self.dp_rank = dp_rank
        self.life = life
        self.generations = Generations(dp_rank, life)
        self.is_alive = True
        self.seen = 0  # rosters
        self.next_step = 0
        self.formed_generation = -1
        self.running: Step | None = None
        self.beginning: Formed | None = None
        self.votes: Votes | None = None
        self.standing = Standing(-1 if epoch is None else epoch)
        self.ended: list[Step] = []
        self.reason = ""

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Halt():
                    if self.running is not None:
                        self.running.is_void = True
                case Meet(hub, hello):
                    self.world.send(self.dp_rank, hub, self.generations.generation, hello)
                case AllMet(generation, step, lives, hellos):
                    standings = [msgspec.msgpack.decode(hello.standing, type=Standing) for hello in hellos]
                    settled = encode(epoch_that_holds(standings))
                    formed = Formed(generation=generation, step=step, lives=lives, settled=settled)
                    members = [hello.dp_rank for hello in hellos]
                    self.votes = Votes(NUM, self.decide, members=members, step=step)
                    for dp_rank in members:
                        self.world.send(self.dp_rank, dp_rank, generation, formed)
                case Begin(formed):
                    self.beginning = formed
                case Fail(reason):
                    self.reason = reason
                    self.world.kill(self.dp_rank)

    def decide(self, step: int) -> Commit | None:
        """The hub commits an epoch that all have promised, when the test told them to promise."""
        members = [self.world.lead(dp_rank) for dp_rank in (self.generations.roster or self.world.rosters[-1]).members]
        promised = self.standing.ready
        if promised is None or any(lead is None or lead.standing.ready != promised for lead in members):
            return None
        return Commit(promised, step)

    # ---- what may happen to it next

    def take_roster(self) -> None:
        roster = self.world.rosters[self.seen]
        self.seen += 1
        self.do(self.generations.issued(roster, self.world.now_s))

    def rest(self) -> None:
        self.do(self.generations.at_rest(self.next_step, encode(self.standing)))

    def end_step(self) -> None:
        step, self.running = self.running, None
        assert step is not None
        if not step.is_void:
            self.ended.append(step)
        if not self.generations.is_over:
            self.vote()

    def begin(self) -> None:
        formed, self.beginning = self.beginning, None
        assert formed is not None
        epoch = msgspec.msgpack.decode(formed.settled, type=int)
        standing = self.standing
        # a promise kept, or nothing to change, or a newcomer that is given what holds
        assert epoch in (standing.epoch, standing.ready) or standing.epoch == -1, (epoch, standing)
        self.standing = Standing(epoch)
        self.generations.begun()
        self.next_step = formed.step
        self.formed_generation = formed.generation
        if not self.generations.is_over:
            self.vote()

    def vote(self) -> None:
        roster = self.generations.roster
        assert roster is not None
        self.world.send(self.dp_rank, roster.hub, self.formed_generation, Vote(self.dp_rank, self.next_step, 1))

    def receive(self, message: Wire) -> None:
        match message:
            case Hello():
                self.do(self.generations.hello(message))
            case Formed():
                self.do(self.generations.formed(message))
            case Vote():
                assert self.votes is not None
                go = self.votes.cast(message)
                if go is not None:
                    for dp_rank in (self.generations.roster or self.world.rosters[-1]).members:
                        self.world.send(self.dp_rank, dp_rank, self.generations.generation, go)
            case Go():
                if self.generations.is_over:
                    return
                assert message.step == self.next_step
                if message.decision is not None:
                    assert self.standing.ready == message.decision.epoch
                    self.standing = Standing(message.decision.epoch)
                self.running = Step(self.formed_generation, message.step, self.standing.epoch)
                self.world.launched(self, self.running)
                self.next_step = message.step + 1


class World:
    """The supervisor, the wires between leads, and a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_lives = 0
        self.leads: dict[int, Lead] = {}
        self.dead: list[Lead] = []
        self.rosters: list[Roster] = []
        self.wires: dict[tuple[EngineEpoch, EngineEpoch, int], deque[Wire]] = {}
        self.launches: dict[tuple[int, int], set[EngineEpoch]] = {}
        self.generation_of_step: dict[int, int] = {}
        self.epoch_of_step: dict[tuple[int, int], int] = {}
        for dp_rank in range(NUM):
            self.join(dp_rank, epoch=0)
        self.issue()

    # ---- wires: in order, one pair for each generation; what is under way to or from the dead may be lost

    def lead(self, dp_rank: int) -> Lead | None:
        lead = self.leads.get(dp_rank)
        return lead if lead is not None and lead.is_alive else None

    def send(self, source: int, target: int, generation: int, message: Wire) -> None:
        a, b = self.leads[source], self.lead(target)
        roster = a.generations.roster
        if b is not None and roster is not None and b.life == roster.lives[target]:
            self.wires.setdefault((a.life, b.life, generation), deque()).append(message)

    def deliver(self, key: tuple[EngineEpoch, EngineEpoch, int]) -> None:
        message = self.wires[key].popleft()
        if not self.wires[key]:
            del self.wires[key]
        lead = next((lead for lead in self.leads.values() if lead.life == key[1] and lead.is_alive), None)
        if lead is None:
            return
        if isinstance(message, Vote | Go) and key[2] != lead.generations.generation:
            return  # its connection was closed with its generation
        lead.receive(message)

    # ---- the supervisor

    def join(self, dp_rank: int, epoch: int | None = None) -> None:
        self.num_lives += 1
        self.leads[dp_rank] = Lead(self, dp_rank, EngineEpoch(f"{dp_rank}.{self.num_lives}"), epoch)

    def kill(self, dp_rank: int) -> None:
        lead = self.leads[dp_rank]
        lead.is_alive = False
        self.dead.append(lead)

    def lose_wires(self, lead: Lead) -> None:
        for key in [key for key in self.wires if lead.life in key[:2]]:
            del self.wires[key]
        for other in self.leads.values():
            if other.is_alive:
                other.generations.lost(lead.life, self.now_s)

    def issue(self) -> None:
        lives = tuple(lead.life if (lead := self.lead(d)) is not None else None for d in range(NUM))
        if any(lives):
            self.rosters.append(Roster(generation=len(self.rosters), tensor_parallel=1, lives=lives))

    def is_stale(self) -> bool:
        lives = tuple(lead.life if (lead := self.lead(d)) is not None else None for d in range(NUM))
        return any(lives) and self.rosters[-1].lives != lives

    # ---- what must hold of steps

    def launched(self, lead: Lead, step: Step) -> None:
        assert self.epoch_of_step.setdefault((step.generation, step.step), step.epoch) == step.epoch
        self.launches.setdefault((step.generation, step.step), set()).add(lead.life)
        assert not lead.ended or lead.ended[-1].step < step.step

    def may_end(self, lead: Lead) -> bool:
        step = lead.running
        if step is None:
            return False
        roster = next(r for r in self.rosters if r.generation == step.generation)
        return step.is_void or self.launches[step.generation, step.step] == set(filter(None, roster.lives))

    def check(self) -> None:
        for lead in (*self.leads.values(), *self.dead):
            for step in lead.ended:
                # a step that ended well did so in one generation only
                assert self.generation_of_step.setdefault(step.step, step.generation) == step.generation

    # ---- what may happen next

    def possible(self) -> list[Callable[[], None]]:
        events: list[Callable[[], None]] = [lambda key=key: self.deliver(key) for key in sorted(self.wires)]  # type: ignore[misc]
        for lead in self.leads.values():
            if not lead.is_alive:
                continue
            if lead.seen < len(self.rosters):
                events.append(lead.take_roster)
            if self.may_end(lead):
                events.append(lead.end_step)
            if lead.beginning is not None:
                events.append(lead.begin)
            elif lead.running is None and lead.generations.phase is Phase.HALTING:
                events.append(lead.rest)
        return events

    def disasters(self) -> list[Callable[[], None]]:
        alive = [lead for lead in self.leads.values() if lead.is_alive]
        events: list[Callable[[], None]] = []
        for lead in alive:
            # when nobody is left who knows a placement the engine ends, and another begins
            if any(other.standing.epoch >= 0 for other in alive if other is not lead):
                events.append(lambda d=lead.dp_rank: self.kill(d))  # type: ignore[misc]
        events += [lambda lead=lead: self.lose_wires(lead) for lead in self.dead[-1:]]  # type: ignore[misc]
        events += [lambda d=d: self.join(d) for d in range(NUM) if self.lead(d) is None]  # type: ignore[misc]
        if self.is_stale():
            events.append(self.issue)
        events.append(self.promise)
        return events

    def promise(self) -> None:
        """All members of a generation that runs prepare the next placement."""
        leads = [lead for lead in self.leads.values() if lead.is_alive and not lead.generations.is_over]
        if len(leads) == len(self.rosters[-1].members) and {lead.standing.ready for lead in leads} == {None}:
            for lead in leads:
                lead.standing = Standing(lead.standing.epoch, lead.standing.epoch + 1)

    def settle(self, rng: random.Random) -> None:
        """No more disasters: everything under way arrives, in some order, and steps end well again."""
        if self.is_stale():
            self.issue()
        for lead in list(self.dead):
            self.lose_wires(lead)
        alive = [lead for lead in self.leads.values() if lead.is_alive]
        goal = max(lead.next_step for lead in alive) + 3
        for _ in range(5_000):
            if all(lead.ended and lead.ended[-1].step >= goal for lead in alive):
                return
            events = self.possible()
            assert events, [(lead.life, lead.generations.phase, lead.next_step) for lead in alive]
            rng.choice(events)()
            self.check()
        raise AssertionError("never came to rest")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([0.03, 0.1, 0.3]))
def test_every_interleaving_of_deaths_ends_in_one_step_number_and_one_placement(seed: int, disasters: float) -> None:
    rng = random.Random(seed)
    world = World()
    for _ in range(rng.randrange(300)):
        events = world.disasters() if rng.random() < disasters else world.possible()
        if events:
            rng.choice(events)()
        world.check()
    world.settle(rng)
    alive = [lead for lead in world.leads.values() if lead.is_alive]
    assert not any(lead.reason for lead in (*alive, *world.dead)), "nobody gives up when rosters come in time"
    assert len({lead.generations.generation for lead in alive}) == 1
    assert len({lead.standing.epoch for lead in alive}) == 1
