"""A placement epoch begins: prepared in shadow slots, verified, voted on, flipped at an agreed step; the old retires.

                 all loads verified       Commit(step)          a step >= commit began      all older steps ended
    PREPARING -----------------> READY -----------> COMMITTED --------------> FLIPPED --------------> RETIRED
        | deadline, a failed load  |  Abandon
        +--------------------------+-----------------> ABANDONED

Every rank has a `Transition` from the placement it runs to the next stage (of `stages.stages`), and the engine's hub
has a `Ballot`. Both are plain state with time as an argument; who loads, sends and computes is elsewhere. An engine
uses them so:

- On a new stage every rank makes `Transition(old, new, rank, ...)`. One that does not fit raises NotSupported, the same
  on every rank. The rank begins what `take_loads` returns, which keeps to a budget so that steps stay flat: an expert
  into its empty slot, from a peer or the store, then its checksums (of every tensor, FP8 scales included); `loaded` or
  `failed` reports it. Only empty slots are written, never one that a step may read.
- With its step-sync votes a rank sends `vote(now)` whenever that is not None. READY is a promise: from then on only the
  hub may abandon.
- The hub casts the votes in its `Ballot` and asks `decide(step, now)` whenever it says Go; the decision travels on that
  Go, so every rank learns it before it launches that very step. An agreed step number is the commit: nobody reads a
  flag. An idle engine runs an empty step to decide.
- A rank calls `placement_for(step)` when it launches a step, and computes it with what that returns: slots, the map
  from logical to physical experts, and weights of copies change under one epoch. It calls `ended(step)` when the
  results are in. A rank that launches ahead may have steps of both epochs in flight; one step has one epoch.
- When `may_reuse_slots`, the slots that this stage emptied may be written. Every older step has ended on this rank, and
  no peer still copies from them: all had loaded everything before the commit.
- ABANDONED leaves the old placement as if nothing had been. A load that was under way may still write its empty slot,
  so the next stage begins when `is_settled`, whichever way this one went.

The deadline is the same duration everywhere. A rank that is not ready by then votes no; the hub abandons, and does so
as well when a rank says nothing. Whether that rank is dead is the supervisor's question.
"""

from collections.abc import Iterable
from enum import Enum

from msgspec import Struct

from pd_cluster.errors import ChecksumMismatch, NotSupported, PdClusterError
from pd_cluster.ids import Rank, SlotId
from pd_cluster.parallel.placement import Placement
from pd_cluster.parallel.stages import Load, check_stage, loads, missing


class Phase(Enum):
    PREPARING = "preparing"
    READY = "ready"
    COMMITTED = "committed"
    FLIPPED = "flipped"
    RETIRED = "retired"
    ABANDONED = "abandoned"


NEXT = {
    Phase.PREPARING: {Phase.READY, Phase.ABANDONED},
    Phase.READY: {Phase.COMMITTED, Phase.ABANDONED},
    Phase.COMMITTED: {Phase.FLIPPED},
    Phase.FLIPPED: {Phase.RETIRED},
    Phase.RETIRED: set[Phase](),
    Phase.ABANDONED: set[Phase](),
}


class EpochVote(Struct, frozen=True, kw_only=True):
    """From a rank, with its step vote. `digest` is of the placement it prepared; `reason` why it cannot, None if it is
    ready.
    """

    rank: Rank
    epoch: int
    digest: bytes
    reason: str | None = None


class Commit(Struct, frozen=True, tag="commit"):
    """Steps from `step` on run `epoch`."""

    epoch: int
    step: int


class Abandon(Struct, frozen=True, tag="abandon"):
    epoch: int
    reason: str


Decision = Commit | Abandon


class Transition:
    """One rank's part in going from `old` to `new`. Raises NotSupported when that does not fit the slots."""

    def __init__(
        self,
        old: Placement,
        new: Placement,
        rank: Rank,
        *,
        now_s: float,
        timeout_s: float,
        max_loads_in_flight: int = 2,
        live: frozenset[Rank] | None = None,
        may_lack: bool = False,
    ) -> None:
        """`live`: the ranks whose copies count, default all. `may_lack`: experts may be on none of them, for no step
        has work until a later stage has loaded those.
        """
        check_stage(old, new)
        if live is not None and not may_lack and (gone := missing(new, live)):
            layer, expert = gone[0]
            raise NotSupported(f"placement epoch {new.epoch} has expert {expert} of MoE layer {layer} on no live rank")
        self.old = old
        self.new = new
        self.rank = rank
        self.reason: str | None = None
        self.commit_step: int | None = None
        self._digest = new.digest()
        self._deadline_s = now_s + timeout_s
        self._max_in_flight = max_loads_in_flight
        self._waiting = loads(old, new, rank, live)
        self._in_flight: dict[tuple[int, SlotId], Load] = {}
        self._running: set[int] = set()  # steps launched and not ended
        self._voted = False
        self.phase = Phase.PREPARING
        self._ready_if_done()

    # ---- preparing

    def take_loads(self) -> list[Load]:
        """Loads to begin now, within the budget; each is to be reported once by `loaded` or `failed`."""
        if self.phase is not Phase.PREPARING:
            return []
        begin = self._waiting[: max(self._max_in_flight - len(self._in_flight), 0)]
        del self._waiting[: len(begin)]
        for load in begin:
            self._in_flight[load.layer, load.slot] = load
        return begin

    def loaded(self, load: Load, *, is_intact: bool) -> None:
        """A load has ended and its checksums were compared."""
        if is_intact:
            del self._in_flight[load.layer, load.slot]
            self._ready_if_done()
        else:
            self.failed(load, ChecksumMismatch(f"expert {load.expert} of MoE layer {load.layer} arrived damaged"))

    def failed(self, load: Load, error: PdClusterError) -> None:
        """A load has ended without its expert. It is tried again from the next source, then from the store; when that
        was the store, the stage is abandoned.
        """
        del self._in_flight[load.layer, load.slot]
        if self.phase is not Phase.PREPARING:
            return
        if load.sources:
            self._waiting.append(Load(layer=load.layer, expert=load.expert, slot=load.slot, sources=load.sources[1:]))
        else:
            self._abandon(error.message)

    def _ready_if_done(self) -> None:
        if self.phase is Phase.PREPARING and not self._waiting and not self._in_flight:
            self._go(Phase.READY)

    def expire(self, now_s: float) -> None:
        """Give up if not ready in time; a rank that is ready waits for the hub."""
        if self.phase is Phase.PREPARING and now_s >= self._deadline_s:
            num_loads = len(self._waiting) + len(self._in_flight)
            self._abandon(f"{num_loads} experts were not loaded in time on rank {self.rank}")

    def vote(self, now_s: float) -> EpochVote | None:
        """What to tell the hub, once: ready, or why not."""
        self.expire(now_s)
        if self._voted or self.phase not in (Phase.READY, Phase.ABANDONED):
            return None
        self._voted = True
        return EpochVote(rank=self.rank, epoch=self.new.epoch, digest=self._digest, reason=self.reason)

    # ---- committing

    def decided(self, decision: Decision) -> None:
        """What came with a Go, before that step is launched."""
        if decision.epoch != self.new.epoch:
            return
        if isinstance(decision, Abandon):
            if self.phase is not Phase.ABANDONED:
                self._abandon(decision.reason)
            return
        assert self.phase is Phase.READY, (
            f"epoch {decision.epoch} was committed while rank {self.rank} was {self.phase}"
        )
        assert not self._running or max(self._running) < decision.step, "the commit step already began"
        self._go(Phase.COMMITTED)
        self.commit_step = decision.step

    def placement_for(self, step: int) -> Placement:
        """The placement that `step` is computed with, as it is launched. Steps ascend."""
        self._running.add(step)
        if self.commit_step is None or step < self.commit_step:
            return self.old
        if self.phase is Phase.COMMITTED:
            self._go(Phase.FLIPPED)
            self._retire_if_done()
        return self.new

    def ended(self, step: int) -> None:
        """`step` reads no slot any more. Steps launched before this transition was made are reported here too."""
        self._running.discard(step)
        self._retire_if_done()

    def began_before(self, steps: Iterable[int]) -> None:
        """Steps in flight when this transition was made."""
        self._running.update(steps)

    def _retire_if_done(self) -> None:
        is_last = self.commit_step is not None and all(step >= self.commit_step for step in self._running)
        if self.phase is Phase.FLIPPED and is_last:
            self._go(Phase.RETIRED)

    @property
    def may_reuse_slots(self) -> bool:
        """Whether the slots that this stage emptied may be written."""
        return self.phase is Phase.RETIRED

    @property
    def is_settled(self) -> bool:
        """Whether the next stage may begin: this one is over and writes nothing more."""
        return self.phase is Phase.RETIRED or (self.phase is Phase.ABANDONED and not self._in_flight)

    @property
    def placement(self) -> Placement:
        """Where the next stage starts from, once settled."""
        return self.new if self.phase in (Phase.COMMITTED, Phase.FLIPPED, Phase.RETIRED) else self.old

    def _abandon(self, reason: str) -> None:
        self._go(Phase.ABANDONED)
        self.reason = reason
        self._waiting.clear()

    def _go(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], f"{self.phase} cannot become {phase}"
        self.phase = phase


class Ballot:
    """The hub's part: all ranks ready for the same placement, or nothing. Decides once."""

    def __init__(self, new: Placement, ranks: frozenset[Rank], *, now_s: float, timeout_s: float) -> None:
        self.epoch = new.epoch
        self.decision: Decision | None = None
        self._digest = new.digest()
        self._missing = set(ranks)
        self._deadline_s = now_s + timeout_s
        self._reason: str | None = None

    def cast(self, vote: EpochVote) -> None:
        """A vote for another epoch is an old one and counts for nothing."""
        if vote.epoch != self.epoch or self.decision is not None:
            return
        if vote.reason is not None:
            self._reason = self._reason or f"rank {vote.rank}: {vote.reason}"
        elif vote.digest != self._digest:
            self._reason = self._reason or f"rank {vote.rank} planned another placement for epoch {vote.epoch}"
        else:
            self._missing.discard(vote.rank)

    def decide(self, next_step: int, now_s: float) -> Decision | None:
        """The decision, if it falls now, for the Go of `next_step`; None before and after."""
        if self.decision is not None:
            return None
        if self._reason is not None:
            self.decision = Abandon(self.epoch, self._reason)
        elif not self._missing:
            self.decision = Commit(self.epoch, next_step)
        elif now_s >= self._deadline_s:
            silent = ", ".join(map(str, sorted(self._missing)))
            self.decision = Abandon(self.epoch, f"ranks {silent} were not ready in time")
        return self.decision
