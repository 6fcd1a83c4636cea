"""A rank's part in placement epochs: it prepares a stage beside its steps, votes, and flips when the hub's Go says so.

    Prepare (hub) --> Transition: loads into empty slots by the ExpertMemory --> Voted (to the hub)
    Go with Commit(step) --> tables of that step's launch are the new ones, on the engine thread
    every older step ended --> settled; the next Prepare may begin

What follows is kept for the generation in which it happens; when members of the engine change, `standing` and `hold`
settle what was under way. All of it runs on the event loop.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from pd_cluster.clock import Clock
from pd_cluster.engine.epoch_messages import (
    EpochStats,
    Loads,
    Prepare,
    Standing,
    Voted,
    decode_order,
    decode_stage,
    encode,
)
from pd_cluster.engine.expert_memory import ExpertMemory
from pd_cluster.engine.torch_engine import TorchEngine
from pd_cluster.errors import NotSupported, PdClusterError, TransferFailed
from pd_cluster.ids import Rank
from pd_cluster.log import get_log
from pd_cluster.parallel.placement import Placement
from pd_cluster.parallel.planner import Stage, all_weights
from pd_cluster.parallel.slot_table import SlotTable, slot_table
from pd_cluster.parallel.stages import Load
from pd_cluster.parallel.transition import Abandon, Decision, EpochVote, Phase, Transition

log = get_log(__name__)

REPORT_S = 1.0
"""Loads are reported with the first step that ends so long after the report before."""

LOOKUP_S = 2.0
"""How long a peer may take to say how it is read."""

Lookup = Callable[[Rank], Awaitable[bytes]]


class RankEpochs:
    """Implements `loop.Epochs`. `report` sends to the hub; `lookup` finds how a peer's experts are read."""

    def __init__(
        self,
        rank: Rank,
        life: str,
        engine: TorchEngine,
        memory: ExpertMemory | None,
        *,
        clock: Clock,
        report: Callable[[bytes], None],
        lookup: Lookup,
        is_empty: bool = False,
    ) -> None:
        """Without a `memory` nothing can be loaded here: stages that would are voted against. `is_empty`: the engine
        was built without experts.
        """
        assert engine.placement is not None, "the model has no experts"
        self.stats = EpochStats()
        self.stage = Stage(engine.placement, [{} for _ in engine.placement.layers])
        """What the next step launched computes with."""
        self.is_empty = is_empty
        self.attempt = 0
        self._rank = rank
        self._life = life
        self._engine = engine
        self._memory = memory
        self._clock = clock
        self._report = report
        self._lookup = lookup
        self._num_columns = engine.num_table_columns
        self._tables = [slot_table(self.stage.placement, layer, self._num_columns) for layer in range(self._num_layers)]
        self._running: set[int] = set()  # steps launched and not ended
        self._queue: deque[Prepare] = deque()
        self._now: Prepare | None = None  # not decided yet
        self._next_tables: list[SlotTable] = []
        self._transition: Transition | None = None
        self._ending: list[Transition] = []  # abandoned; loads of theirs may still write
        self._owner_of: dict[tuple[int, int], Transition] = {}  # loads under way
        self._flip: Callable[[], None] | None = None
        self._known: set[Rank] = set()  # peers that the memory can read from
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next_report_s = clock.now_s() + REPORT_S
        self._reported = b""

    @property
    def _num_layers(self) -> int:
        return len(self.stage.placement.layers)

    @property
    def placement(self) -> Placement:
        return self.stage.placement

    # ---- from the hub

    def order(self, payload: bytes) -> None:
        self._queue.append(decode_order(payload))
        self._advance()

    def _advance(self) -> None:
        """Begin what waits, once what came before it is decided and writes nothing any more."""
        if self._transition is not None and self._transition.is_settled and self._now is None:
            self._transition = None
        self._ending = [old for old in self._ending if not old.is_settled]
        was_changing = self.stats.is_changing
        is_free = self._transition is None and self._now is None and not self._ending
        self.stats.is_changing = not is_free or bool(self._queue)
        if is_free and self._queue:
            self._prepare(self._queue.popleft())
        elif was_changing and not self.stats.is_changing and self._memory is not None:
            self._memory.serve(False)

    def _prepare(self, prepare: Prepare) -> None:
        new, now_s = prepare.stage.placement, self._clock.now_s()
        self.attempt, self._now = prepare.attempt, prepare
        try:
            transition = Transition(
                self.placement,
                new,
                self._rank,
                now_s=now_s,
                timeout_s=prepare.timeout_s,
                live=frozenset(prepare.holders),
                may_lack=prepare.hurry,
            )
        except NotSupported as error:
            vote = EpochVote(rank=self._rank, epoch=new.epoch, digest=new.digest(), reason=error.message)
            self._report(encode(Voted(prepare.attempt, vote)))
            return
        transition.began_before(self._running)
        self._transition = transition
        self._next_tables = self._tables_of(prepare.stage)
        self._loaded_before = 0 if self._memory is None else self._memory.bytes_loaded
        if self._memory is not None:
            self._memory.serve(True, hurry=prepare.hurry)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(prepare.timeout_s + 0.01, self._pump)
        self._pump()

    def _tables_of(self, stage: Stage) -> list[SlotTable]:
        """A layer that stays as it is keeps its table."""
        shares = all_weights(stage.placement, stage.weights)
        return [
            table
            if (old, some) == (new, weights)
            else slot_table(stage.placement, layer, self._num_columns, shares[layer])
            for layer, (table, old, new, some, weights) in enumerate(
                zip(
                    self._tables,
                    self.placement.layers,
                    stage.placement.layers,
                    self.stage.weights,
                    stage.weights,
                    strict=True,
                )
            )
        ]

    def _pump(self) -> None:
        """Begin the loads that the budget allows and vote when there is something to say."""
        transition, prepare = self._transition, self._now
        if transition is None or prepare is None:
            return
        vote = transition.vote(self._clock.now_s())
        for load in transition.take_loads():
            self._owner_of[load.layer, load.slot] = transition
            self._spawn(self._begin(load))
        if vote is not None:
            loaded = 0 if self._memory is None else self._memory.bytes_loaded - self._loaded_before
            self._report(encode(Voted(prepare.attempt, vote, loaded)))

    # ---- loads

    async def _begin(self, load: Load) -> None:
        """Order one load, after meeting the peer it comes from."""
        memory = self._memory
        if memory is None:
            self._done(load, TransferFailed(f"rank {self._rank} has no room for experts that move"))
            return
        placement = self.placement
        local = load.slot - self._rank * placement.slots_per_rank
        source: tuple[Rank, int] | None = None
        if load.sources:
            owner = placement.owner(load.sources[0])
            source = owner, load.sources[0] - owner * placement.slots_per_rank
            try:
                await self._meet(memory, owner)
            except PdClusterError as error:
                self._done(load, error)
                return
        memory.begin(load, source, local)

    async def _meet(self, memory: ExpertMemory, owner: Rank) -> None:
        if owner in self._known:
            return
        try:
            async with asyncio.timeout(LOOKUP_S):
                endpoint = await self._lookup(owner)
        except TimeoutError as error:
            raise TransferFailed(f"rank {owner} does not say how its experts are read") from error
        memory.connect(owner, endpoint)
        self._known.add(owner)

    def on_done(self, load: Load, error: PdClusterError | None) -> None:
        """A load has ended; on the event loop."""
        self._done(load, error)

    def _done(self, load: Load, error: PdClusterError | None) -> None:
        transition = self._owner_of.pop((load.layer, load.slot))
        if error is None:
            transition.loaded(load, is_intact=True)
        else:
            log.warning(
                "expert_load_failed",
                rank=self._rank,
                layer=load.layer,
                expert=load.expert,
                sources=len(load.sources),
                reason=error.message,
            )
            transition.failed(load, error)
        self._pump()
        self._advance()

    def forget(self, rank: Rank) -> None:
        """A peer is gone: what is read from it fails now, and its next life is met anew."""
        self._known.discard(rank)
        if self._memory is not None:
            self._memory.forget(rank)

    # ---- steps

    def launching(self, step: int, decision: Decision | None) -> Callable[[], None] | None:
        self._running.add(step)
        if decision is not None:
            self._decided(decision)
        transition = self._transition
        if transition is not None and transition.placement_for(step) is transition.new and self._now is not None:
            self._take(self._now.stage, self._next_tables)
            self._now = None
        flip, self._flip = self._flip, None
        return flip

    def ended(self, step: int) -> None:
        self._running.discard(step)
        if self._transition is not None:
            self._transition.ended(step)
        for old in self._ending:
            old.ended(step)
        self._advance()
        if self._clock.now_s() >= self._next_report_s:
            self._next_report_s = self._clock.now_s() + REPORT_S
            self._report_loads()

    def _report_loads(self) -> None:
        counts = self._engine.load_counts().tobytes()
        if counts != self._reported:
            self._reported = counts
            self._report(encode(Loads(self._rank, self._life, counts)))

    def _decided(self, decision: Decision) -> None:
        if isinstance(decision, Abandon):
            self.stats.num_abandoned += 1
            self.stats.last_reason = decision.reason
        if self._now is None or decision.epoch != self._now.stage.placement.epoch:
            return
        if self._transition is not None:
            self._transition.decided(decision)
        if isinstance(decision, Abandon):
            self._leave()
            self._advance()

    def _leave(self) -> None:
        """What was being prepared comes to nothing."""
        if self._transition is not None:
            self._ending.append(self._transition)
        self._transition, self._now = None, None
        self._stop_timer()

    def _take(self, stage: Stage, tables: list[SlotTable]) -> None:
        """From the next launch on."""
        self._stop_timer()
        self.stage, self._tables = stage, tables
        held = {e for layer in range(self._num_layers) for e in stage.placement.rank_slots(layer, self._rank)}
        self.is_empty = self.is_empty and held != {None}  # empty as the placement says is as it should be
        self._flip = partial(self._engine.use, stage.placement, tables)
        self.stats.epoch = stage.placement.epoch
        self.stats.num_swaps += 1
        if self._memory is not None:
            self.stats.bytes_loaded = self._memory.bytes_loaded

    # ---- when members change

    def standing(self) -> bytes:
        """Where this rank stands, for the hub of a new generation; when no step is under way here."""
        return encode(Standing(self.stage, self.is_empty, self.attempt))

    def hold(self, settled: bytes) -> None:
        """What the hub answered: every rank goes on with that from the next step on, and nothing is being prepared. No
        step is under way.
        """
        stage = decode_stage(settled)
        self._queue.clear()
        self._running.clear()
        if self._now is not None:
            transition = self._transition
            if transition is not None and self._now.stage == stage:  # some member has seen its commit
                self._take(stage, self._next_tables)
                self._transition = self._now = None
            else:
                if transition is not None and transition.phase is not Phase.ABANDONED:
                    transition.decided(Abandon(self._now.stage.placement.epoch, "the engine's members changed"))
                self.stats.num_abandoned += 1
                self._leave()
        self._transition = None
        if self.stage != stage:
            self._take(stage, self._tables_of(stage))
        self._advance()

    def close(self) -> None:
        self._stop_timer()
        for task in self._tasks:
            task.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _spawn(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
