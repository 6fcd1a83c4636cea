"""One lead's way from one generation of its engine to the next. Pure: time is an argument, effects are returned.

    OUTSIDE --------------------------+
                                      v  at_rest           formed               begun
    RUNNING --a roster changes--> HALTING -----> MEETING ---------> BEGINNING ---------> RUNNING
               who lives              ^             |                   |
                                      +-------------+-------------------+   another such roster

A roster that changes who lives ends the generation for every lead at once: none waits for a peer any more, so that
whatever step is under way comes to its end, void if anything was missing. A lead whose ranks rest says hello to the
hub, the lowest lead of the roster, with the step it would run next and where its placement of experts stands. When all
have, the hub tells them the greatest of those steps and the placement that holds; all ranks begin, and only then their
leads vote. So no rank runs a step of a generation before every rank has begun it, and no two leads run a step of one
number with different peers. Any member may die at any moment, the hub too: the next roster then starts this over.

A peer that is lost is the supervisor's to judge. Whoever misses one waits for a roster, and gives up by name when none
comes: a lead before the hub, so that one broken connection costs one member and not all of them.
"""

from enum import Enum

from msgspec import Struct

from pd_cluster.ids import EngineEpoch
from pd_cluster.parallel.roster import Roster

FORM_S = 30.0
"""How long a generation may take to form; new members connect to everybody in that time."""

ROSTER_S = 10.0
"""How long a lead that lost its hub waits for the roster that says who is dead."""


class Phase(Enum):
    OUTSIDE = "outside"  # no roster names this life yet
    HALTING = "halting"  # a step, or the beginning of a generation, may still be under way here
    MEETING = "meeting"
    BEGINNING = "beginning"
    RUNNING = "running"
    FAILED = "failed"


NEXT = {
    Phase.OUTSIDE: {Phase.HALTING, Phase.FAILED},
    Phase.HALTING: {Phase.MEETING, Phase.FAILED},
    Phase.MEETING: {Phase.BEGINNING, Phase.HALTING, Phase.FAILED},
    Phase.BEGINNING: {Phase.RUNNING, Phase.HALTING, Phase.FAILED},
    Phase.RUNNING: {Phase.HALTING, Phase.FAILED},
    Phase.FAILED: set[Phase](),
}


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """From a lead whose ranks rest to the hub of a generation."""

    generation: int
    dp_rank: int
    life: EngineEpoch
    next_step: int
    standing: bytes = b""  # where its placement of experts stands


class Formed(Struct, frozen=True, kw_only=True, tag="formed"):
    """From the hub to all leads, and from them to their followers: begin, and go on with `step`."""

    generation: int
    step: int
    lives: tuple[EngineEpoch | None, ...]
    settled: bytes = b""  # the placement that holds


# ---- what is to be done


class Halt(Struct, frozen=True):
    """Let no step wait for a peer any more; call `at_rest` when nothing is under way."""


class Meet(Struct, frozen=True):
    """Say this hello to the lead of that DP rank, which may be this one."""

    hub: int
    hello: Hello


class AllMet(Struct, frozen=True):
    """At the hub: settle where these stand, then tell every one of them that the generation formed, with `step`."""

    generation: int
    step: int
    lives: tuple[EngineEpoch | None, ...]
    hellos: list[Hello]  # by DP rank


class Begin(Struct, frozen=True):
    """Begin on all ranks of this DP rank, then call `begun`."""

    formed: Formed


class Fail(Struct, frozen=True):
    """This member cannot go on."""

    reason: str


Action = Halt | Meet | AllMet | Begin | Fail


class Generations:
    """Inputs are method calls; outputs are the actions they return, to be done in order."""

    def __init__(self, dp_rank: int, life: EngineEpoch) -> None:
        self.phase = Phase.OUTSIDE
        self.roster: Roster | None = None
        self.generation = -1
        """The latest that changed who lives: what the members form for."""
        self._dp_rank = dp_rank
        self._life = life
        self._hellos: dict[int, Hello] = {}  # by dp_rank, the latest of each lead
        self._deadline_s: float | None = None
        self._waits_for = ""

    @property
    def is_hub(self) -> bool:
        return self.roster is not None and self.roster.hub == self._dp_rank

    @property
    def is_over(self) -> bool:
        """Whether no step may begin."""
        return self.phase is not Phase.RUNNING

    def issued(self, roster: Roster, now_s: float) -> list[Action]:
        """The next roster, each in its turn."""
        assert self.roster is None or roster.generation == self.roster.generation + 1
        before, self.roster = self.roster, roster
        if before is not None and before.lives == roster.lives:
            return []
        self.generation = roster.generation
        if self.phase is Phase.FAILED:
            return []
        if roster.lives[self._dp_rank] != self._life:
            if self.phase is Phase.OUTSIDE:
                return []
            return self._fail(f"roster {roster.generation} goes on without DP rank {self._dp_rank}")
        if self.phase is not Phase.HALTING:
            self._to(Phase.HALTING)
        self._deadline_s = None
        if roster.generation:  # how long a whole engine may take to start is for others to say
            self._await(f"generation {roster.generation} to form", now_s + FORM_S * self._patience)
        return [Halt()]

    def at_rest(self, next_step: int, standing: bytes) -> list[Action]:
        """No rank of this DP rank computes; `next_step` follows the last step that began here."""
        assert self.roster is not None
        self._to(Phase.MEETING)
        hello = Hello(
            generation=self.generation,
            dp_rank=self._dp_rank,
            life=self._life,
            next_step=next_step,
            standing=standing,
        )
        return [Meet(self.roster.hub, hello)]

    def hello(self, hello: Hello) -> list[Action]:
        """A lead came, this one too. It may know of a roster before this one does."""
        known = self._hellos.get(hello.dp_rank)
        if known is None or known.generation <= hello.generation:
            self._hellos[hello.dp_rank] = hello
        return self._meet()

    def _meet(self) -> list[Action]:
        if self.phase is not Phase.MEETING or not self.is_hub or self.roster is None:
            return []
        hellos = [hello for dp_rank in self.roster.members if (hello := self._hellos.get(dp_rank)) is not None]
        lives = {hello.dp_rank: hello.life for hello in hellos if hello.generation == self.generation}
        if lives != {dp_rank: self.roster.lives[dp_rank] for dp_rank in self.roster.members}:
            return []
        step = max(hello.next_step for hello in hellos)
        return [AllMet(self.generation, step, self.roster.lives, hellos)]

    def formed(self, formed: Formed) -> list[Action]:
        """What the hub said; of an older generation it means nothing."""
        if self.phase is not Phase.MEETING or formed.generation != self.generation:
            return []
        self._to(Phase.BEGINNING)
        return [Begin(formed)]

    def begun(self) -> None:
        """All ranks of this DP rank have begun what `Begin` said last."""
        if self.phase is Phase.BEGINNING:
            self._to(Phase.RUNNING)
            self._deadline_s = None

    def lost(self, whom: str, now_s: float) -> None:
        """The connection to a peer broke: a roster should say why."""
        if self.phase is Phase.RUNNING and self._deadline_s is None:
            self._await(f"a roster, having lost {whom}", now_s + ROSTER_S * self._patience)

    def tick(self, now_s: float) -> list[Action]:
        if self._deadline_s is None or now_s < self._deadline_s or self.phase is Phase.FAILED:
            return []
        return self._fail(f"DP rank {self._dp_rank} waited in vain for {self._waits_for}")

    @property
    def _patience(self) -> float:
        return 2.0 if self.is_hub else 1.0

    def _await(self, what: str, deadline_s: float) -> None:
        self._waits_for, self._deadline_s = what, deadline_s

    def _fail(self, reason: str) -> list[Action]:
        self._to(Phase.FAILED)
        return [Fail(reason)]

    def _to(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], f"{self.phase} cannot become {phase}"
        self.phase = phase
