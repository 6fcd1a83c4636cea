"""The hub's part in placement epochs: it watches expert loads, plans, and takes all ranks through the stages of a plan.

                 ratio high for long, a plan worth it      all ready              next stage, or done
    IDLE --look--> PLANNING ---------------------> BALLOT --------> Commit on a Go -------+
                      ^   a placement is asked for    | a rank says no, or is late         |
                      |                               +----> Abandon on a Go --> IDLE <----+

Ranks report their counts once a second while they step. A ballot is decided only at a Go, so that every rank learns of
it before it launches that very step; an engine without work runs an empty step for it. While the placement puts experts
on ranks that do not have them, no step has work, and everything else waits.
"""

# L MoE layers, E experts

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from pd_cluster.clock import Clock
from pd_cluster.engine.epoch_messages import EpochStats, Loads, Prepare, decode_report, decode_standing, encode
from pd_cluster.engine.planning import Planner
from pd_cluster.errors import EngineError, NotSupported, PdClusterError, from_info
from pd_cluster.ids import Rank
from pd_cluster.log import get_log
from pd_cluster.parallel.load_window import LoadWindow, Trigger, TriggerPolicy
from pd_cluster.parallel.placement import LayerPlacement, Placement
from pd_cluster.parallel.planner import Question, Stage
from pd_cluster.parallel.stages import missing
from pd_cluster.parallel.transition import Ballot, Commit, Decision

log = get_log(__name__)

LOOK_S = 5.0
"""Between two looks at the ratio, while steps run."""

STAGE_S = 120.0
GRACE_S = 5.0
"""How long ranks may prepare a stage, and how much later the hub stops waiting for their word."""

MAX_RETRIES = 3
"""Of a placement that was asked for; a rebalance that fails is not tried again before the next cooldown has passed."""


class EpochHub:
    """On the event loop of the lead that is hub. `order` sends to every rank; `nudge` asks for a Go with a decision.

    `steer(decide, may_run)` and `on_report` of the step sync lead here. `on_failure` is told when the engine cannot go
    on: experts are missing and do not fit.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        tensor_parallel: int,
        expert_bytes: int,
        clock: Clock,
        order: Callable[[bytes], None],
        nudge: Callable[[], None],
        stats: EpochStats,
        on_failure: Callable[[EngineError], None],
        policy: TriggerPolicy | None,
        planner: Planner | None = None,
    ) -> None:
        """`policy` None: nothing is moved but where members change, or somebody asks."""
        self.stats = stats
        self.stage = stage
        num_ranks = stage.placement.num_ranks
        self.live = frozenset(Rank(rank) for rank in range(num_ranks))
        self.staying = self.live
        self._holders = self.live
        self._tensor_parallel = tensor_parallel
        self._expert_bytes = expert_bytes
        self._clock = clock
        self._order = order
        self._nudge = nudge
        self._on_failure = on_failure
        self._rebalances = policy is not None
        self._policy = policy or TriggerPolicy()
        self._trigger = Trigger(self._policy)
        self._window = LoadWindow(len(stage.placement.layers), stage.placement.num_experts)
        self._planner = planner or Planner()
        self._stage_s = STAGE_S
        self._next_look_s = clock.now_s() + LOOK_S
        self._attempt = 0
        self._ballot: Ballot | None = None
        self._stages: deque[Stage] = deque()  # after the one that is voted on
        self._voting: Stage | None = None
        self._planning: asyncio.Task[None] | None = None
        self._wanted: asyncio.Future[None] | None = None  # of `request_placement`
        self._is_asked = False  # and not planned for
        self._num_retries = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_sound = True
        self._idle = asyncio.Event()

    @property
    def placement(self) -> Placement:
        return self.stage.placement

    @property
    def is_idle(self) -> bool:
        return self._ballot is None and self._planning is None and not self._stages and self._voting is None

    # ---- asked by the votes, at every Go

    def decide(self, step: int) -> Decision | None:
        ballot = self._ballot
        if ballot is None:
            return None
        decision = ballot.decide(step, self._clock.now_s())
        if decision is None:
            return None
        self._ballot = None
        self._stop_timer()
        asyncio.get_running_loop().call_soon(self._after, self._attempt, decision)  # behind the Go
        if isinstance(decision, Commit):
            assert self._voting is not None
            self._set_stage(self._voting)
        return decision

    def may_run(self) -> bool:
        """Whether every expert is where the placement says, so that steps may have work."""
        return self._is_sound

    # ---- from the ranks

    def on_report(self, payload: bytes) -> None:
        report = decode_report(payload)
        if isinstance(report, Loads):
            self._observe(report)
        elif report.attempt == self._attempt and self._ballot is not None:
            self.stats.bytes_moved += report.bytes_loaded
            self._ballot.cast(report.vote)
            self._nudge()

    def _observe(self, report: Loads) -> None:
        shape = len(self.placement.layers), self.placement.num_experts
        counts_LE = np.frombuffer(report.counts, np.int64).reshape(shape)
        now_s = self._clock.now_s()
        self._window.observe(int(report.rank), counts_LE, now_s, life=report.life)
        if self._rebalances and self.is_idle and now_s >= self._next_look_s and self._is_sound:
            self._next_look_s = now_s + LOOK_S
            self._plan(self._look())

    # ---- planning

    def _question(self, kind: str) -> Question:
        return Question(
            kind=kind,  # type: ignore[arg-type]
            placement=self.placement,
            weights=self.stage.weights,
            loads=self._window.loads(self._clock.now_s()).tobytes(),
            live=sorted(self._holders),
            staying=sorted(self.staying if self._is_sound else self.staying & self._holders),
            expert_bytes=self._expert_bytes,
            policy=self._policy,
        )

    async def _look(self) -> None:
        answer = await self._planner.ask(self._question("look"))
        if answer.ratio is not None:
            self.stats.imbalance = answer.ratio
        self.stats.layers = answer.layers
        if not self._trigger.due(answer.ratio, self._clock.now_s()):
            return
        answer = await self._planner.ask(self._question("rebalance"))
        self._trigger.planned(self._clock.now_s())
        log.info(
            "placement_planned",
            ratio=answer.ratio,
            predicted=answer.predicted,
            num_stages=len(answer.stages),
            reason=answer.reason,
        )
        if not answer.stages:
            self._note_refusal(answer.reason)
        elif answer.predicted is not None:
            self.stats.predicted = answer.predicted
        self._stages.extend(answer.stages)

    async def _move(self) -> None:
        """What was asked for, or what a change of members calls for."""
        self._is_asked = self._is_asked and not self._is_sound
        ask = self._planner.ask if self._is_sound else self._planner.ask_here
        answer = await ask(self._question("move"))
        if answer.error is not None:
            raise from_info(answer.error)
        if not answer.stages and not (self._is_sound and self._is_where_wanted()):
            raise NotSupported(f"no change of placement leads to experts on ranks {sorted(self.staying)} alone")
        self._stages.extend(answer.stages)

    def _plan(self, work: Awaitable[None]) -> None:
        async def planned() -> None:
            try:
                await work
            except PdClusterError as error:
                self._planning = None
                self._note_refusal(error.message)
                self._give_up(error)
            else:
                self._planning = None
                self._next_stage()

        self._planning = asyncio.ensure_future(planned())
        self._planning.add_done_callback(self._check_planned)

    def _check_planned(self, task: "asyncio.Task[None]") -> None:
        """A plan that fails in no way that was foreseen would leave the hub waiting for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(EngineError(f"planning the placement of experts failed: {error!r}"))

    def request_placement(self, staying: frozenset[Rank]) -> "asyncio.Future[None]":
        """Bring all experts to ranks of `staying` and nothing elsewhere, beside the steps. The future raises
        NotSupported, by name, when they do not fit there, and EngineError when ranks fail to do it again and again; a
        later request cancels it.
        """
        if self._wanted is not None and not self._wanted.done():
            self._wanted.cancel()
        self._wanted = asyncio.get_running_loop().create_future()
        self._num_retries = 0
        self._is_asked = True
        self.staying = staying
        if not staying:
            self._wanted.set_exception(NotSupported("experts need ranks that stay"))
            return self._wanted
        self._stages.clear()  # of a plan for other ranks
        if self.is_idle:
            self._settled()
        return self._wanted

    # ---- stages

    async def change(self, stages: list[Stage]) -> None:
        """Go through stages that follow each other and the current placement; returns when they are committed or the
        change was abandoned, which `stats` tells apart. Only while idle.
        """
        assert self.is_idle, "another change is on"
        self._stages.extend(stages)
        self._next_stage()
        while not self.is_idle:
            self._idle.clear()
            await self._idle.wait()

    def _next_stage(self) -> None:
        if self._ballot is not None or self._planning is not None or self._voting is not None:
            return
        if not self._stages:
            self._settled()
            return
        stage = self._stages.popleft()
        self._attempt += 1
        self._voting = stage
        now_s = self._clock.now_s()
        self._ballot = Ballot(stage.placement, self.live, now_s=now_s, timeout_s=self._stage_s + GRACE_S)
        self._timer = asyncio.get_running_loop().call_later(self._stage_s + GRACE_S + 0.01, self._nudge)
        self.stats.is_changing = True
        prepare = Prepare(
            attempt=self._attempt,
            stage=stage,
            holders=sorted(self._holders),
            timeout_s=self._stage_s,
            hurry=not self._is_sound,
        )
        self._order(encode(prepare))

    def _settled(self) -> None:
        """No stage is left: is anything still to be done?"""
        self._idle.set()
        is_wanted = self._wanted is not None and not self._wanted.done()
        if not self._holders:
            self._give_up(NotSupported("no member has any of them"))
        elif not self._is_sound or (is_wanted and (self._is_asked or not self._is_where_wanted())):
            self._plan(self._move())
        elif self._wanted is not None and is_wanted:
            self._wanted.set_result(None)

    def _is_where_wanted(self) -> bool:
        return _ranks_with_experts(self.placement) <= self.staying

    def _after(self, attempt: int, decision: Decision) -> None:
        """The Go with the decision is on its way."""
        if attempt != self._attempt:
            return
        self._voting = None
        if isinstance(decision, Commit):
            self._num_retries = 0
            log.info("placement_epoch", epoch=decision.epoch, step=decision.step, num_stages_left=len(self._stages))
            self._next_stage()
            return
        log.warning("placement_abandoned", epoch=decision.epoch, reason=decision.reason)
        self._stages.clear()
        self._trigger.planned(self._clock.now_s())
        self._num_retries += 1
        if self._num_retries > MAX_RETRIES:
            self._give_up(EngineError(f"the placement of experts could not be changed: {decision.reason}"))
        else:
            self._settled()

    def _note_refusal(self, reason: str) -> None:
        """A change that no stage was begun for; one that was is counted when it is abandoned."""
        self.stats.num_abandoned += 1
        self.stats.last_reason = reason

    def _give_up(self, error: PdClusterError) -> None:
        self.stats.last_reason = error.message
        self._idle.set()
        if not self._is_sound:
            message = f"experts were lost with their ranks and cannot be brought back: {error.message}"
            self._on_failure(EngineError(message))
        elif self._wanted is not None and not self._wanted.done():
            self._wanted.set_exception(error)
        else:
            log.warning("placement_not_planned", reason=error.message)

    def _set_stage(self, stage: Stage) -> None:
        self.stage = stage
        self._look_at_soundness()

    def _look_at_soundness(self) -> None:
        """Ranks on which the placement puts nothing have all that it puts there."""
        held = _ranks_with_experts(self.placement)
        self._holders |= self.live - held
        self._is_sound = held <= self._holders

    # ---- when members change

    def form(self, standings: dict[int, bytes], leaving: frozenset[Rank] = frozenset()) -> bytes:
        """A generation of the DP ranks in `standings` forms, each with its rank's `RankEpochs.standing`; no step is
        under way. What every rank is to `hold`. Experts that no rank has any more are brought back by themselves,
        before any step has work; what else should follow from the change is for `request_placement`.
        """
        size = self._tensor_parallel
        by_rank = {
            Rank(dp_rank * size + tp_rank): decode_standing(standing)
            for dp_rank, standing in standings.items()
            for tp_rank in range(size)
        }
        # whoever has seen the commit of an epoch knows that all had promised it, so it holds for all
        having = [standing for standing in by_rank.values() if not standing.is_empty]
        stage = max(having or by_rank.values(), key=lambda standing: standing.stage.placement.epoch).stage
        self._cancel()
        self._attempt = max(self._attempt, *(standing.attempt for standing in by_rank.values()))
        for rank in range(stage.placement.num_ranks):
            if rank not in by_rank or by_rank[Rank(rank)].is_empty:
                self._window.forget(rank)
        self.live = frozenset(by_rank)
        self.staying = self.live - leaving
        self._holders = frozenset(rank for rank, standing in by_rank.items() if not standing.is_empty)
        if not missing(stage.placement, self._holders):
            stage = _without(stage, self._holders)
        self._set_stage(stage)
        if not self._is_sound:
            asyncio.get_running_loop().call_soon(self._settled)
        return encode(stage)

    def _cancel(self) -> None:
        """Whatever is under way belongs to the generation before."""
        self._stop_timer()
        if self._planning is not None:
            self._planning.cancel()
        self._planning, self._ballot, self._voting = None, None, None
        self._stages.clear()
        self._attempt += 1
        self._num_retries = 0
        if self._wanted is not None and not self._wanted.done():
            self._wanted.cancel()
        self._wanted = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        self._cancel()
        self._planner.close()


def _ranks_with_experts(placement: Placement) -> frozenset[Rank]:
    size = placement.slots_per_rank
    return frozenset(
        Rank(slot // size)
        for layer in placement.layers
        for slot, expert in enumerate(layer.slots)
        if expert is not None
    )


def _without(stage: Stage, holders: frozenset[Rank]) -> Stage:
    """The same without copies on other ranks than `holders`, which must have one of every expert; with even weights in
    layers that change.
    """
    placement = stage.placement
    if _ranks_with_experts(placement) <= holders:
        return stage
    size = placement.slots_per_rank
    layers, weights = [], []
    for layer, shares in zip(placement.layers, stage.weights, strict=True):
        kept = tuple(expert if slot // size in holders else None for slot, expert in enumerate(layer.slots))
        layers.append(layer if kept == layer.slots else LayerPlacement(kept))
        weights.append(shares if kept == layer.slots else {})
    changed = msgspec.structs.replace(placement, epoch=placement.epoch + 1, layers=tuple(layers))
    return Stage(changed, weights)
