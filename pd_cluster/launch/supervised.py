"""An engine under supervision: its shape, its life, and the processes of that life.

It turns what one look at its ranks and at the store found into inputs of its life, and what that decides about
processes into calls. Ranks are started elsewhere and may arrive late: what was decided about them meanwhile is done
when they are there.
"""

import signal
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from pd_cluster.config import ClusterConfig
from pd_cluster.errors import PdClusterError
from pd_cluster.ids import EngineEpoch, Rank, new_epoch
from pd_cluster.launch.group_life import GroupAction, GroupLife, KillMembers, StartMembers, TerminateMembers
from pd_cluster.launch.launcher import NODE_LOST, RankHandle
from pd_cluster.launch.lifecycle import Action, EngineDead, EngineLife, Kill, Start, State, Terminate, describe_exit
from pd_cluster.launch.roles import EngineShape, rank_specs
from pd_cluster.launch.spec import Beat, RankProgress, RankReport, RankSpec, Release
from pd_cluster.launch.store import StoreServer

AnyAction = Action | GroupAction
Ending = Terminate | Kill | TerminateMembers | KillMembers


class Seen(Struct, frozen=True, kw_only=True):
    """What one look at an engine's ranks found; `looked_s`: when. What it found may be taken a good while later."""

    looked_s: float

    reports: list[RankReport]
    progress: dict[Rank, RankProgress]
    exits: dict[Rank, str | None]  # rank -> how it ended; None when the supervisor killed it
    with_node: frozenset[Rank] = frozenset()  # of those, they were lost with their node
    beats: dict[Rank, Beat] = field(default_factory=dict)
    release: Release | None = None
    ended: str | None = None  # why its ranks cannot go on


class Engine:
    """Call `look`, `end` and `catch_up` on one thread, the rest on the event loop."""

    def __init__(self, shape: EngineShape, config: ClusterConfig) -> None:
        launch = config.launch
        self.shape = shape
        self.life: EngineLife | GroupLife = (
            GroupLife(
                shape.engine_id,
                shape.data_parallel,
                shape.tensor_parallel,
                max_restarts=launch.max_restarts,
                start_timeout_s=launch.start_timeout_s,
                leave_timeout_s=launch.shrink_timeout_s,
                new_epoch=new_epoch,
            )
            if shape.elastic
            else EngineLife(
                shape.engine_id,
                shape.num_ranks,
                max_restarts=launch.max_restarts,
                start_timeout_s=launch.start_timeout_s,
                new_epoch=new_epoch,
            )
        )
        self.handles: dict[Rank, RankHandle] = {}  # of ranks not seen dead
        self.progress: dict[Rank, RankProgress] = {}
        self.retired = False
        self._with_node: set[Rank] = set()  # in their last life
        self._config = config
        self._asked: dict[EngineEpoch, Literal["terminate", "kill"]] = {}  # how lives were told to end

    @property
    def pids(self) -> dict[Rank, int]:
        return {rank: handle.pid for rank, handle in self.handles.items() if handle.pid is not None}

    # ---- starting

    def specs(self, start: Start | StartMembers, store_address: tuple[str, int], ranks_on_host: int) -> list[RankSpec]:
        """The ranks to start; from now on their word is waited for."""
        lives = start.lives if isinstance(start, StartMembers) else None
        specs = rank_specs(self.shape, start.epoch, self._config, store_address, ranks_on_host, lives)
        for spec in specs:
            self.progress.pop(spec.rank, None)
            self._with_node.discard(spec.rank)
        return specs

    def started(self, handles: list[RankHandle]) -> None:
        """Its ranks are there; call `catch_up` next."""
        for handle in handles:
            self.handles[handle.spec.rank] = handle

    def not_started(self, start: Start | StartMembers, error: PdClusterError, now_s: float) -> list[AnyAction]:
        if isinstance(self.life, GroupLife):
            assert isinstance(start, StartMembers)
            return list(self.life.not_started(start.lives, error, now_s))
        return list(self.life.not_started(error, now_s))

    # ---- what a look finds

    def look(self, store: StoreServer, now_s: float) -> Seen:
        """Blocking. Exits come first, so that whatever a dead rank reported is seen with its death."""
        exits: dict[Rank, str | None] = {}
        with_node: set[Rank] = set()
        for rank, handle in list(self.handles.items()):
            if (code := handle.poll()) is not None:
                ours = self._asked.get(handle.spec.worker_epoch) == "kill" and code == -signal.SIGKILL
                exits[rank] = None if ours else describe_exit(handle.spec.name, code, handle.log_tail())
                if code == NODE_LOST:
                    with_node.add(rank)
        life = self.life
        awaited = life.awaited
        reports = [report for rank, epoch in awaited.items() if (report := store.report(epoch, rank)) is not None]
        progress = {rank: done for rank, epoch in awaited.items() if (done := store.progress(epoch, rank)) is not None}
        if not isinstance(life, GroupLife) or life.state is not State.READY or life.epoch is None:
            return Seen(looked_s=now_s, reports=reports, progress=progress, exits=exits, with_node=frozenset(with_node))
        return Seen(
            looked_s=now_s,
            reports=reports,
            progress=progress,
            exits=exits,
            with_node=frozenset(with_node),
            beats=store.beats(life.beating),
            release=store.release(life.epoch, life.generation) if life.leaving else None,
            ended=store.end(life.epoch),
        )

    def take(self, seen: Seen, now_s: float) -> list[AnyAction]:
        """Let the life know, worst first: errors are the cause of what else was seen."""
        life, actions = self.life, list[AnyAction]()
        self.progress |= seen.progress
        self._with_node |= seen.with_node
        if seen.ended is not None and isinstance(life, GroupLife):
            actions += life.ended(seen.ended, now_s)
        for report in sorted(seen.reports, key=lambda report: report.error is None):
            actions += life.reported(report, now_s)
        for rank, reason in seen.exits.items():
            epoch = self.handles.pop(rank).spec.worker_epoch
            if all(handle.spec.worker_epoch != epoch for handle in self.handles.values()):
                self._asked.pop(epoch, None)
            actions += life.exited(rank, reason, now_s)
        if isinstance(life, GroupLife):
            actions += life.beats(seen.beats, seen.looked_s)  # by now they may all have beaten again
            if seen.release is not None:
                actions += life.released(seen.release.generation, seen.release.refused, now_s)
        return [self._without_nodes(action) for action in actions]

    def _without_nodes(self, action: AnyAction) -> AnyAction:
        """A rank that was lost with its node has not died by itself."""
        if not isinstance(action, EngineDead):
            return action
        return replace(action, first=action.first - self._with_node)

    # ---- ending

    def end(self, action: Ending, store: StoreServer) -> None:
        """Blocking. Ranks out of reach end by themselves: the store tells them, or their lease is over."""
        lives = set(action.lives.values()) if isinstance(action, TerminateMembers | KillMembers) else {action.epoch}
        kill = isinstance(action, Kill | KillMembers)
        for life in lives:
            self._asked[life] = "kill" if kill else "terminate"
            if kill:
                store.revoke(life)
        for handle in list(self.handles.values()):
            if handle.spec.worker_epoch in lives:
                self._ask(handle)

    def catch_up(self) -> None:
        """Blocking. Tell ranks that have arrived since what was decided about their lives."""
        for handle in list(self.handles.values()):
            self._ask(handle)

    def _ask(self, handle: RankHandle) -> None:
        match self._asked.get(handle.spec.worker_epoch):
            case "kill":
                handle.kill()
            case "terminate":
                handle.terminate()
