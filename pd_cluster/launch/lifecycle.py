"""The life of one engine as its supervisor decides it: starting -> ready -> ending -> backoff -> starting ..., pure.

An engine cannot go on without one of its ranks: when one dies the rest are killed, and only when all are seen dead is
the epoch announced as dead, for then nothing of it writes any more. A first start that fails is not repeated: its cause
is most likely the configuration, and the user waits for it. An engine that served and died is started again at once,
and after growing pauses when it dies again soon, until it is given up; when there is no room for it, it waits for some.
"""

import signal
from collections.abc import Callable, Iterable
from enum import StrEnum

from msgspec import Struct

from pd_cluster.errors import ConfigError, ModelError, PdClusterError, Unavailable, from_info
from pd_cluster.ids import EngineEpoch, EngineId, Rank
from pd_cluster.launch.launcher import NODE_LOST
from pd_cluster.launch.spec import LoadedModel, RankReport

GRACE_S = 5.0
"""How long ranks may take to end by themselves when the cluster stops."""

BACKOFF_S = 1.0
"""Before the second restart; doubled for each one after it. The first comes at once."""

MAX_BACKOFF_S = 30.0
FORGIVEN_S = 300.0
"""An engine that served this long starts counting its restarts anew."""


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"  # killed or asked to end; some ranks still live
    BACKOFF = "backoff"
    FAILED = "failed"  # given up
    STOPPED = "stopped"


NEXT: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.READY, State.ENDING}),
    State.READY: frozenset({State.ENDING}),
    State.ENDING: frozenset({State.BACKOFF, State.FAILED, State.STOPPED}),
    State.BACKOFF: frozenset({State.STARTING, State.STOPPED}),
    State.FAILED: frozenset({State.STOPPED}),
    State.STOPPED: frozenset(),
}


# ---- what the supervisor shall do


class Start(Struct, frozen=True):
    epoch: EngineEpoch


class Terminate(Struct, frozen=True):
    epoch: EngineEpoch


class Kill(Struct, frozen=True):
    epoch: EngineEpoch


# ---- what subscribers shall hear


class EngineUp(Struct, frozen=True):
    """All ranks serve; `addresses` are of the workers, by DP rank. With `dp_rank`: of that one, in life `epoch`."""

    engine_id: EngineId
    epoch: EngineEpoch
    addresses: list[str]
    dp_rank: int | None = None


class EngineLost(Struct, frozen=True):
    """The engine, or only that DP rank of it, serves no more. Some of its processes may still run."""

    engine_id: EngineId
    epoch: EngineEpoch
    addresses: list[str]
    reason: str
    expected: bool = False  # it was told to end
    dp_rank: int | None = None


class EngineDead(Struct, frozen=True):
    """Every process of the epoch is dead: nothing of it writes any more.

    `first`: the ranks that were found dead while the engine served; the others were killed, or died, for their sake.
    """

    engine_id: EngineId
    epoch: EngineEpoch
    first: frozenset[Rank] = frozenset()


class EngineFailed(Struct, frozen=True):
    """The engine will not be started again."""

    engine_id: EngineId
    reason: str


EngineEvent = EngineUp | EngineLost | EngineDead | EngineFailed
Action = Start | Terminate | Kill | EngineEvent


def describe_exit(name: str, code: int, log_tail: str) -> str:
    """One line on how a rank ended, with its last word; then the lines before that."""
    if code == NODE_LOST:
        how = "was lost with its node"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (out of memory?)"
    else:
        how = f"exited with code {code}"
    lines = log_tail.strip().splitlines()
    return f"{name} {how}: {lines[-1].strip()}\n{log_tail.rstrip()}" if lines else f"{name} {how}"


def backoff_s(num_before: int) -> float:
    """How long the next life waits after so many that were in vain."""
    return min(BACKOFF_S * 2 ** (num_before - 1), MAX_BACKOFF_S) if num_before else 0.0


class Life:
    """What the lives of all engines share: the state, and whether and when another life begins."""

    def __init__(
        self,
        engine_id: EngineId,
        *,
        max_restarts: int,
        start_timeout_s: float,
        new_epoch: Callable[[], EngineEpoch],
    ) -> None:
        self.engine_id = engine_id
        self.state = State.BACKOFF
        self.epoch: EngineEpoch | None = None
        self.error: PdClusterError | None = None  # why the latest life ended
        self.num_restarts = 0
        self.model: LoadedModel | None = None  # what the ranks of the latest life have loaded
        self._num_refusals = 0  # by the launcher, since ranks last started
        self._max_restarts = max_restarts
        self._start_timeout_s = start_timeout_s
        self._new_epoch = new_epoch
        self._was_ready = False
        self._stopping = False
        self._since_s = 0.0  # when the present state began
        self._restart_at_s = 0.0

    def _late(self, ranks: Iterable[Rank]) -> Unavailable:
        return Unavailable(
            f"{self.engine_id} was not ready after {self._start_timeout_s:g} s "
            f"(ranks {', '.join(map(str, ranks))} did not report); raise launch.start_timeout_s if it needs longer"
        )

    def _mismatch(self, report: RankReport) -> ModelError | None:
        """Why the rank must not compute with the others: its share of each sum would be that of another model."""
        found = report.model
        if found is None or report.error is not None:
            return None
        if self.model is None:
            self.model = found
        if found.weights == self.model.weights:
            return None
        return ModelError(
            f"{self.engine_id}: rank {report.rank} has loaded other weights than the ranks before it: {found.path} has "
            f"identity {found.weights} there, theirs, from {self.model.path}, is {self.model.weights}; give all ranks "
            "the same files, or, if the new ones are meant, restart the whole engine"
        )

    def _died_too(self, reason: str | None) -> None:
        """Another rank is dead: the one that was seen dead first may have died of this one's death."""
        if reason and not self._stopping and isinstance(self.error, Unavailable):
            self.error = Unavailable(f"{self.error.message}\nalso: {reason.splitlines()[0]}")

    def _over(self, now_s: float, no_room: bool = False) -> list[EngineFailed]:
        """Nothing of this life runs any more. With `no_room` nothing of it ran: that costs no restart when the engine
        has served, for nodes may be lost for longer than any restart takes.
        """
        if self._stopping:
            self._to(State.STOPPED, now_s)
            return []
        if no_room and self._was_ready:
            self._num_refusals += 1
            self._back_off(now_s, self._num_refusals)
            return []
        hopeless = isinstance(self.error, ConfigError | ModelError) or not self._was_ready
        if hopeless or self.num_restarts >= self._max_restarts:
            assert self.error is not None
            self._to(State.FAILED, now_s)
            return [EngineFailed(self.engine_id, self.error.message)]
        self.num_restarts += 1
        self._back_off(now_s, self.num_restarts - 1)
        return []

    def _back_off(self, now_s: float, num_before: int) -> None:
        self._restart_at_s = now_s + backoff_s(num_before)
        self._to(State.BACKOFF, now_s)

    def _to(self, state: State, now_s: float) -> None:
        assert state in NEXT[self.state], f"{self.engine_id}: {self.state} -> {state}"
        self.state = state
        self._since_s = now_s

    def _epoch(self) -> EngineEpoch:
        assert self.epoch is not None
        return self.epoch


class EngineLife(Life):
    """Inputs are method calls, with the time; outputs are the actions they return, to be done in order."""

    def __init__(
        self,
        engine_id: EngineId,
        num_ranks: int,
        *,
        max_restarts: int,
        start_timeout_s: float,
        new_epoch: Callable[[], EngineEpoch],
    ) -> None:
        super().__init__(engine_id, max_restarts=max_restarts, start_timeout_s=start_timeout_s, new_epoch=new_epoch)
        self.num_ranks = num_ranks
        self.reports: dict[Rank, RankReport] = {}
        self._living: set[Rank] = set()
        self._first_dead: set[Rank] = set()

    @property
    def addresses(self) -> list[str]:
        """Of the workers of this life, by DP rank."""
        return [r.control_address for _, r in sorted(self.reports.items()) if r.control_address is not None]

    @property
    def missing(self) -> list[Rank]:
        """Ranks of this life that have not reported."""
        return [rank for rank in map(Rank, range(self.num_ranks)) if rank not in self.reports]

    @property
    def awaited(self) -> dict[Rank, EngineEpoch]:
        """Ranks whose report is due, with the life that it is of."""
        return dict.fromkeys(self.missing, self._epoch()) if self.state is State.STARTING else {}

    def tick(self, now_s: float) -> list[Action]:
        """Let time pass. The first call starts the engine."""
        if self.state is State.BACKOFF and now_s >= self._restart_at_s:
            self.epoch = self._new_epoch()
            self.reports = {}
            self.error = self.model = None
            self._living = {Rank(rank) for rank in range(self.num_ranks)}
            self._first_dead = set()
            self._to(State.STARTING, now_s)
            return [Start(self.epoch)]
        if self.state is State.STARTING and now_s - self._since_s >= self._start_timeout_s:
            return self._end(self._late(self.missing), now_s)
        if self.state is State.READY and now_s - self._since_s >= FORGIVEN_S:
            self.num_restarts = 0
        if self.state is State.ENDING and now_s - self._since_s >= GRACE_S:
            self._since_s = now_s
            return [Kill(self._epoch())]
        return []

    def reported(self, report: RankReport, now_s: float) -> list[Action]:
        """A rank of the present life wrote its report."""
        if self.state is not State.STARTING:
            return []
        self.reports[report.rank] = report
        self._num_refusals = 0
        if report.error is not None:
            return self._end(from_info(report.error), now_s)
        if (mismatch := self._mismatch(report)) is not None:
            return self._end(mismatch, now_s)
        if self.missing:
            return []
        self._was_ready = True
        self._to(State.READY, now_s)
        return [EngineUp(self.engine_id, self._epoch(), self.addresses)]

    def exited(self, rank: Rank, reason: str | None, now_s: float) -> list[Action]:
        """A rank of the present life is dead; `reason` is None when it was killed as decided here."""
        self._living.discard(rank)
        seen_together = self.state is State.ENDING and self._first_dead and now_s == self._since_s
        if self.state is State.READY or (seen_together and reason):
            self._first_dead.add(rank)
        if self.state is State.ENDING:
            self._died_too(reason)
        if self.state in (State.STARTING, State.READY):
            return self._end(Unavailable(reason or "killed"), now_s)
        if self.state is State.ENDING and not self._living:
            return self._gone(now_s)
        return []

    def not_started(self, error: PdClusterError, now_s: float) -> list[Action]:
        """The launcher could not start the present life; none of its ranks lives."""
        assert self.state is State.STARTING
        self.error = error
        self._living.clear()
        self._to(State.ENDING, now_s)
        return self._gone(now_s, no_room=isinstance(error, Unavailable))

    def stop(self, now_s: float, reason: str = "the cluster stops") -> list[Action]:
        """End for good: ranks are asked, and killed when they take longer than GRACE_S."""
        self._stopping = True
        if self.state in (State.BACKOFF, State.FAILED):
            self._to(State.STOPPED, now_s)
        elif self.state in (State.STARTING, State.READY):
            lost = self._lost(reason, expected=True)
            self._to(State.ENDING, now_s)
            return [*lost, Terminate(self._epoch())]
        return []

    def _end(self, error: PdClusterError, now_s: float) -> list[Action]:
        self.error = error
        lost = self._lost(error.message)
        self._to(State.ENDING, now_s)
        if not self._living:
            return lost + self._gone(now_s)
        return [*lost, Kill(self._epoch())]

    def _lost(self, reason: str, expected: bool = False) -> list[Action]:
        if self.state is not State.READY:
            return []
        return [EngineLost(self.engine_id, self._epoch(), self.addresses, reason, expected)]

    def _gone(self, now_s: float, no_room: bool = False) -> list[Action]:
        return [EngineDead(self.engine_id, self._epoch(), frozenset(self._first_dead)), *self._over(now_s, no_room)]
