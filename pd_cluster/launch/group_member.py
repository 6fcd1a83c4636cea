"""A member of an elastic engine as its supervisor knows it: one DP rank, through all of its lives; pure.

    away <-> pausing -> starting -> up <-> leaving
    starting, up, leaving -> ending -> pausing

A life of it is over when all of its processes are dead, and the next one begins after a pause, the longer the more
often that was in vain.
"""

from enum import StrEnum

from msgspec import Struct, field

from pd_cluster.ids import EngineEpoch, Rank
from pd_cluster.launch.lifecycle import FORGIVEN_S, MAX_BACKOFF_S, backoff_s
from pd_cluster.launch.spec import RankReport

MISMATCH_S = MAX_BACKOFF_S
"""Before a member that has loaded another model is tried again: files do not change back by themselves."""

DESPAIR_S = FORGIVEN_S
"""A member that was started `max_restarts` times in vain is tried again each so long: the group serves without it."""


class Stage(StrEnum):
    AWAY = "away"  # nothing of it runs, and nothing shall
    PAUSING = "pausing"  # waits for its next life
    STARTING = "starting"
    UP = "up"
    LEAVING = "leaving"  # computes still; takes nothing new
    ENDING = "ending"  # off the roster; some process of it may still run


NEXT_STAGE: dict[Stage, frozenset[Stage]] = {
    Stage.AWAY: frozenset({Stage.PAUSING}),
    Stage.PAUSING: frozenset({Stage.STARTING, Stage.AWAY}),
    Stage.STARTING: frozenset({Stage.UP, Stage.ENDING}),
    Stage.UP: frozenset({Stage.LEAVING, Stage.ENDING}),
    Stage.LEAVING: frozenset({Stage.UP, Stage.ENDING}),
    Stage.ENDING: frozenset({Stage.PAUSING, Stage.AWAY}),
}


class Member(Struct, kw_only=True, eq=False):
    """One DP rank, through all of its lives."""

    dp_rank: int
    ranks: list[Rank]
    stage: Stage = Stage.PAUSING
    life: EngineEpoch | None = None  # while some process of it may run
    living: set[Rank] = field(default_factory=set)
    reports: dict[Rank, RankReport] = field(default_factory=dict)
    first_dead: set[Rank] = field(default_factory=set)
    since_s: float = 0.0  # when the present stage began
    due_s: float = 0.0  # when its next life begins
    num_restarts: int = 0
    num_refusals: int = 0  # by the launcher, since it last started
    mismatched: bool = False  # this life has loaded another model than the others
    reason: str = ""  # why its last life ended

    def begin(self, life: EngineEpoch, now_s: float) -> None:
        self.life, self.living, self.reports, self.first_dead = life, set(self.ranks), {}, set()
        self.mismatched = False
        self.to(Stage.STARTING, now_s)

    def to(self, stage: Stage, now_s: float) -> None:
        assert stage in NEXT_STAGE[self.stage], f"DP rank {self.dp_rank}: {self.stage} -> {stage}"
        self.stage, self.since_s = stage, now_s

    @property
    def computes(self) -> bool:
        """Whether it is on the roster."""
        return self.stage in (Stage.UP, Stage.LEAVING)

    @property
    def address(self) -> str:
        address = self.reports[self.ranks[0]].control_address
        assert address is not None
        return address

    @property
    def has_reported(self) -> bool:
        return not self.missing

    @property
    def missing(self) -> list[Rank]:
        """Its ranks that have not reported."""
        return [rank for rank in self.ranks if rank not in self.reports]

    def bury(self, max_restarts: int, now_s: float) -> None:
        """Nothing of its life runs any more: the next one begins after a pause, if one shall."""
        self.life = None
        if self.stage is Stage.STARTING:
            self.to(Stage.ENDING, now_s)
        self.to(Stage.PAUSING, now_s)
        if self.num_refusals:
            pause_s = backoff_s(self.num_refusals)
        elif self.num_restarts > max_restarts:
            pause_s = DESPAIR_S
        else:
            pause_s = max(backoff_s(max(0, self.num_restarts - 1)), MISMATCH_S if self.mismatched else 0.0)
        self.due_s = now_s + pause_s
