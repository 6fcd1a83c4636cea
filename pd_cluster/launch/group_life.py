"""The life of an elastic engine as its supervisor decides it, pure: its DP ranks live and die one by one.

All members start together and make up the roster of generation 0. From then on a member that dies is off the roster at
once and its other ranks are killed; when all of them are seen dead its life is announced as dead, and it gets another
one, which joins by the next roster when it has reported, if it has loaded the weights that the others have. The engine
as a whole ends, and starts anew as any engine does (see `lifecycle`), when no member is left or when those that are
left say that they cannot go on. How many members there shall be may change at any time: those that leave are ended when
the others can do without them, and stay when they cannot.

Every stage has a deadline: starting `start_timeout_s`, leaving `leave_timeout_s`, ending repeats the kill each GRACE_S,
pausing ends by itself, and whoever is up must give heartbeats.
"""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from pd_cluster.errors import PdClusterError, Unavailable, from_info
from pd_cluster.ids import EngineEpoch, EngineId, Rank
from pd_cluster.launch.group_member import Member, Stage
from pd_cluster.launch.heartbeats import Heartbeats
from pd_cluster.launch.lifecycle import (
    FORGIVEN_S,
    GRACE_S,
    EngineDead,
    EngineEvent,
    EngineLost,
    EngineUp,
    Life,
    State,
)
from pd_cluster.launch.spec import Beat, RankReport
from pd_cluster.parallel.roster import Roster

STAYS_FIRST = [Stage.UP, Stage.LEAVING, Stage.STARTING, Stage.PAUSING, Stage.ENDING, Stage.AWAY]


# ---- what the supervisor shall do; `lives` are by DP rank


class Issue(Struct, frozen=True):
    epoch: EngineEpoch
    roster: Roster


class StartMembers(Struct, frozen=True):
    epoch: EngineEpoch
    lives: dict[int, EngineEpoch]


class TerminateMembers(Struct, frozen=True):
    epoch: EngineEpoch
    lives: dict[int, EngineEpoch]


class KillMembers(Struct, frozen=True):
    epoch: EngineEpoch
    lives: dict[int, EngineEpoch]


class Mismatch(Struct, frozen=True):
    """A member was not let in, because it has loaded another model than the others."""

    engine_id: EngineId
    dp_rank: int
    reason: str


GroupAction = Issue | StartMembers | TerminateMembers | KillMembers | Mismatch | EngineEvent


class GroupLife(Life):
    """Inputs are method calls, with the time; outputs are the actions they return, to be done in order."""

    def __init__(
        self,
        engine_id: EngineId,
        data_parallel: int,
        tensor_parallel: int,
        *,
        max_restarts: int,
        start_timeout_s: float,
        leave_timeout_s: float,
        new_epoch: Callable[[], EngineEpoch],
    ) -> None:
        super().__init__(engine_id, max_restarts=max_restarts, start_timeout_s=start_timeout_s, new_epoch=new_epoch)
        self.tensor_parallel = tensor_parallel
        self.num_wanted = data_parallel
        self.refusal: str | None = None  # why the latest shrink was taken back
        self.members = [
            Member(dp_rank=dp_rank, ranks=[Rank(dp_rank * tensor_parallel + tp) for tp in range(tensor_parallel)])
            for dp_rank in range(data_parallel)
        ]
        self._generation = 0
        self._heartbeats = Heartbeats(tensor_parallel)
        self._leave_timeout_s = leave_timeout_s

    # ---- what others ask

    @property
    def addresses(self) -> list[str]:
        """Of the workers that serve, by DP rank."""
        return [member.address for member in self.members if member.computes]

    @property
    def missing(self) -> list[Rank]:
        """Ranks that were started and have not reported."""
        return [rank for member in self.members if member.stage is Stage.STARTING for rank in member.missing]

    @property
    def awaited(self) -> dict[Rank, EngineEpoch]:
        """Ranks whose report is due, with the life that it is of."""
        return {rank: self._life(self._member_of(rank)) for rank in self.missing}

    @property
    def beating(self) -> dict[Rank, EngineEpoch]:
        """Ranks whose heartbeats count, with the life that they are of."""
        computing = [member for member in self.members if member.computes]
        return {rank: self._life(member) for member in computing for rank in member.ranks}

    @property
    def generation(self) -> int:
        """Of the latest roster."""
        return self._generation

    @property
    def leaving(self) -> frozenset[int]:
        return frozenset(member.dp_rank for member in self.members if member.stage is Stage.LEAVING)

    @property
    def num_up(self) -> int:
        """Members that serve and shall go on to."""
        return sum(member.stage is Stage.UP for member in self.members)

    @property
    def least_members(self) -> int:
        """Fewer have no room for all experts; 1 where nothing is known of them."""
        model = self.model
        if model is None or not model.expert_slots:
            return 1
        return min(len(self.members), -(-model.num_experts // (model.expert_slots * self.tensor_parallel)))

    def does_not_fit(self, num_members: int) -> str | None:
        """Why so few members cannot hold all experts, if they cannot."""
        model, num_ranks = self.model, num_members * self.tensor_parallel
        if model is None or num_members >= self.least_members:
            return None
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        return (
            f"{model.num_experts} experts do not fit {ranks} with expert_slots_per_rank {model.expert_slots}: each "
            f"would need {-(-model.num_experts // num_ranks)}; as it was started the engine needs at least "
            f"{self.least_members * self.tensor_parallel} ranks"
        )

    @property
    def settled(self) -> bool:
        """Whether as many members serve as shall, and nobody is on the way in or out."""
        stages = [member.stage for member in self.members]
        return stages.count(Stage.UP) == self.num_wanted and set(stages) <= {Stage.UP, Stage.AWAY}

    def resize(self, num_members: int) -> None:
        """So many members shall serve from the next tick on."""
        assert 1 <= num_members <= len(self.members)
        self.num_wanted = num_members
        self.refusal = None
        for member in self.members:  # an operator who asks again wants another try
            if member.stage in (Stage.PAUSING, Stage.AWAY):
                member.num_restarts = 0
                member.due_s = 0.0

    # ---- what happens

    def tick(self, now_s: float) -> list[GroupAction]:
        """Let time pass. The first call starts the engine."""
        if self.state is State.BACKOFF and now_s >= self._restart_at_s:
            return self._begin(now_s)
        if self.state is State.STARTING and now_s - self._since_s >= self._start_timeout_s:
            return self._end(self._late(self.missing), now_s)
        if self.state is State.READY:
            if now_s - self._since_s >= FORGIVEN_S:
                self.num_restarts = 0
            return self._tick_members(now_s)
        if self.state is State.ENDING and now_s - self._since_s >= GRACE_S:
            self._since_s = now_s
            return self._kill(member for member in self.members if member.living)
        return []

    def reported(self, report: RankReport, now_s: float) -> list[GroupAction]:
        """A rank wrote its report, in its present life."""
        member = self._member_of(report.rank)
        if member.stage is not Stage.STARTING or self.state not in (State.STARTING, State.READY):
            return []
        member.reports[report.rank] = report
        self._num_refusals = member.num_refusals = 0
        if report.error is not None:
            error = from_info(report.error)
            return self._end(error, now_s) if self.state is State.STARTING else self._lose(member, error.message, now_s)
        if (mismatch := self._mismatch(report)) is not None:
            if self.state is State.STARTING:
                return self._end(mismatch, now_s)
            member.mismatched = True
            told = Mismatch(self.engine_id, member.dp_rank, mismatch.message)
            return [told, *self._lose(member, mismatch.message, now_s)]
        if self.state is State.READY:
            if not member.has_reported:
                return []
            ups = self._join([member], now_s)
            return [self._issue(), *ups]
        if not all(each.has_reported for each in self.members):
            return []
        self._was_ready = True
        self._to(State.READY, now_s)
        return self._join(self.members, now_s)

    def exited(self, rank: Rank, reason: str | None, now_s: float) -> list[GroupAction]:
        """A rank is dead; `reason` is None when it was killed as decided here."""
        member = self._member_of(rank)
        member.living.discard(rank)
        member.num_refusals = 0
        seen_together = member.stage is Stage.ENDING and member.first_dead and now_s == member.since_s
        if member.computes or (seen_together and reason):
            member.first_dead.add(rank)
        if self.state is State.STARTING:
            return self._end(Unavailable(reason or "killed"), now_s)
        if self.state is State.ENDING:
            self._died_too(reason)
            return self._bury(member, now_s) + self._gone_if_empty(now_s)
        if member.stage is Stage.ENDING:
            return self._bury(member, now_s)
        return self._lose(member, reason or "killed", now_s)

    def not_started(self, dp_ranks: Iterable[int], error: PdClusterError, now_s: float) -> list[GroupAction]:
        """The launcher could not start these members; none of their ranks lives. Lack of room costs no restart."""
        no_room = isinstance(error, Unavailable)
        is_first = self.state is State.STARTING
        if is_first:
            self.error = error
            self._to(State.ENDING, now_s)
        dead = []
        for member in [self.members[dp_rank] for dp_rank in dp_ranks]:
            member.living.clear()
            if no_room:
                member.num_refusals += 1
            else:
                member.num_restarts += 1
            member.reason = error.message
            if member.stage is not Stage.ENDING:
                member.to(Stage.ENDING, now_s)
            dead += self._bury(member, now_s)
        return dead + self._gone_if_empty(now_s, no_room and is_first)

    def beats(self, seen: Mapping[Rank, Beat], now_s: float) -> list[GroupAction]:
        """The latest heartbeats of the ranks that are up; those that stand still too long are lost."""
        if self.state is not State.READY:
            return []
        self._heartbeats.observe(seen, now_s)
        lost = self._heartbeats.lost(now_s)
        actions: list[GroupAction] = []
        for dp_rank, reason in lost.items():
            member = self.members[dp_rank]
            if member.computes:
                member.first_dead |= member.living
                actions += self._lose(member, f"{self.engine_id}: {reason}", now_s)
        return actions

    def released(self, generation: int, refused: str | None, now_s: float) -> list[GroupAction]:
        """The group can do without those who leave with that roster, or refuses to."""
        if self.state is not State.READY or generation != self._generation or not self.leaving:
            return []
        if refused is not None:
            return self._refuse(refused, now_s)
        leaving = [member for member in self.members if member.stage is Stage.LEAVING]
        lost: list[GroupAction] = []
        for member in leaving:
            lost += self._off(member, "its engine shrinks", now_s, expected=True)
        return [self._issue(), *lost, self._terminate(leaving)]

    def ended(self, reason: str, now_s: float) -> list[GroupAction]:
        """The ranks that are left say that they cannot go on."""
        return self._end(Unavailable(f"{self.engine_id}: {reason}"), now_s) if self.state is State.READY else []

    def stop(self, now_s: float, reason: str = "the cluster stops") -> list[GroupAction]:
        """End for good: ranks are asked, and killed when they take longer than GRACE_S."""
        self._stopping = True
        if self.state in (State.BACKOFF, State.FAILED):
            self._to(State.STOPPED, now_s)
        elif self.state in (State.STARTING, State.READY):
            actions = self._all_off(reason, now_s, expected=True)
            self._to(State.ENDING, now_s)
            return [*actions, self._terminate(member for member in self.members if member.living)]
        return []

    # ---- the whole engine

    def _begin(self, now_s: float) -> list[GroupAction]:
        self.epoch = self._new_epoch()
        self.error = self.model = None
        self._generation = 0
        self._to(State.STARTING, now_s)
        for member in self.members:
            if member.stage is Stage.AWAY:
                member.to(Stage.PAUSING, now_s)
            member.num_restarts = 0
            member.begin(self._new_epoch(), now_s)
        lives = self._lives(self.members)
        roster = Roster(generation=0, tensor_parallel=self.tensor_parallel, lives=tuple(lives.values()))
        return [Issue(self.epoch, roster), StartMembers(self.epoch, lives)]

    def _end(self, error: PdClusterError, now_s: float) -> list[GroupAction]:
        self.error = error
        actions = self._all_off(error.message, now_s)
        self._to(State.ENDING, now_s)
        for member in self.members:
            if not member.living:
                actions += self._bury(member, now_s)
        return actions + self._kill(member for member in self.members if member.living) + self._gone_if_empty(now_s)

    def _all_off(self, reason: str, now_s: float, expected: bool = False) -> list[GroupAction]:
        actions: list[GroupAction] = []
        for member in self.members:
            if member.computes:
                actions += self._off(member, reason, now_s, expected)
            elif member.stage is Stage.STARTING:
                member.to(Stage.ENDING, now_s)
        return actions

    def _gone_if_empty(self, now_s: float, no_room: bool = False) -> list[GroupAction]:
        if self.state is not State.ENDING or any(member.life is not None for member in self.members):
            return []
        self._heartbeats.clear()
        return [*self._over(now_s, no_room)]

    # ---- members

    def _tick_members(self, now_s: float) -> list[GroupAction]:
        actions: list[GroupAction] = []
        for member in self.members:
            age_s = now_s - member.since_s
            if member.stage is Stage.STARTING and age_s >= self._start_timeout_s:
                actions += self._lose(member, self._late(member.missing).message, now_s)
            elif member.stage is Stage.ENDING and age_s >= GRACE_S:
                member.since_s = now_s
                actions += self._kill([member])
            elif member.stage is Stage.UP and age_s >= FORGIVEN_S:
                member.num_restarts = 0
            elif member.stage is Stage.LEAVING and age_s >= self._leave_timeout_s:
                why = f"{self.engine_id}: its experts and requests did not move in {self._leave_timeout_s:g} s"
                actions += self._refuse(why, now_s)
        if self.state is State.READY:
            actions += self._reconcile(now_s)
        return actions

    def _reconcile(self, now_s: float) -> list[GroupAction]:
        """One step towards as many members as shall be; those that serve stay before those that do not."""
        by_rank = sorted(self.members, key=lambda member: (STAYS_FIRST.index(member.stage), member.dp_rank))
        actions: list[GroupAction] = []
        changed = False
        due: list[Member] = []
        for index, member in enumerate(by_rank):
            stays = index < self.num_wanted
            match member.stage:
                case Stage.UP if not stays:
                    member.to(Stage.LEAVING, now_s)
                    changed = True
                case Stage.LEAVING if stays:
                    member.to(Stage.UP, now_s)
                    changed = True
                case Stage.STARTING if not stays:
                    member.to(Stage.ENDING, now_s)
                    actions.append(self._terminate([member]))
                case Stage.PAUSING if not stays:
                    member.to(Stage.AWAY, now_s)
                case Stage.AWAY if stays:
                    member.to(Stage.PAUSING, now_s)
            if member.stage is Stage.PAUSING and now_s >= member.due_s:
                member.begin(self._new_epoch(), now_s)
                due.append(member)
        if changed:
            actions.append(self._issue())
        if due:
            actions.append(StartMembers(self._epoch(), self._lives(due)))
        return actions

    def _join(self, members: list[Member], now_s: float) -> list[GroupAction]:
        for member in members:
            member.to(Stage.UP, now_s)
            self._heartbeats.expect(member.ranks, now_s)
        return [EngineUp(self.engine_id, self._life(member), [member.address], member.dp_rank) for member in members]

    def _lose(self, member: Member, reason: str, now_s: float) -> list[GroupAction]:
        """A member is dead, or taken for dead: the others go on without it at once."""
        member.reason = reason
        member.num_restarts += 1
        actions: list[GroupAction] = []
        if member.computes:
            lost = self._off(member, reason, now_s)
            if not any(each.computes for each in self.members):
                return lost + self._end(Unavailable(reason), now_s)
            self._keep_somebody(now_s)
            actions = [self._issue(), *lost]
        else:
            member.to(Stage.ENDING, now_s)
        return actions + (self._kill([member]) if member.living else self._bury(member, now_s))

    def _keep_somebody(self, now_s: float) -> None:
        """When those that were to stay are dead, those that were to leave stay."""
        if not any(member.stage is Stage.UP for member in self.members):
            for member in self.members:
                if member.stage is Stage.LEAVING:
                    member.to(Stage.UP, now_s)

    def _off(self, member: Member, reason: str, now_s: float, expected: bool = False) -> list[GroupAction]:
        """Take a member off the roster."""
        lost = EngineLost(self.engine_id, self._life(member), [member.address], reason, expected, member.dp_rank)
        member.to(Stage.ENDING, now_s)
        self._heartbeats.forget(member.ranks)
        return [lost]

    def _bury(self, member: Member, now_s: float) -> list[GroupAction]:
        """Announce the death of a life when nothing of it runs any more, and decide about the next."""
        if member.living or member.life is None:
            return []
        dead = EngineDead(self.engine_id, member.life, frozenset(member.first_dead))
        member.bury(self._max_restarts, now_s)
        return [dead]

    def _refuse(self, reason: str, now_s: float) -> list[GroupAction]:
        """Those that were to leave stay."""
        self.refusal = reason
        for member in self.members:
            if member.stage is Stage.LEAVING:
                member.to(Stage.UP, now_s)
        meant = (Stage.UP, Stage.STARTING, Stage.PAUSING)
        self.num_wanted = max(self.num_wanted, sum(member.stage in meant for member in self.members))
        return [self._issue()]

    # ---- parts of actions

    def _issue(self) -> Issue:
        self._generation += 1
        lives = tuple(member.life if member.computes else None for member in self.members)
        roster = Roster(
            generation=self._generation, tensor_parallel=self.tensor_parallel, lives=lives, leaving=self.leaving
        )
        return Issue(self._epoch(), roster)

    def _terminate(self, members: Iterable[Member]) -> TerminateMembers:
        return TerminateMembers(self._epoch(), self._lives(members))

    def _kill(self, members: Iterable[Member]) -> list[GroupAction]:
        lives = self._lives(members)
        return [KillMembers(self._epoch(), lives)] if lives else []

    def _lives(self, members: Iterable[Member]) -> dict[int, EngineEpoch]:
        return {member.dp_rank: self._life(member) for member in members}

    def _member_of(self, rank: Rank) -> Member:
        return self.members[rank // self.tensor_parallel]

    @staticmethod
    def _life(member: Member) -> EngineEpoch:
        assert member.life is not None
        return member.life
