"""How many DP ranks an elastic engine shall have for the load that it has: a pure policy, and the task that follows it.

The engine grows when its DP ranks have been fuller than `high` for a while, or requests have waited for room that long,
and shrinks when they have been emptier than `low` and fewer would still be well below `high`. Either way it goes at
once to the number that leaves them in the middle of the two, or that has room for all experts.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

from msgspec import Struct

from pd_cluster.clock import Clock
from pd_cluster.config import AutoscaleSection
from pd_cluster.errors import InvalidRequest, Unavailable
from pd_cluster.ids import EngineId
from pd_cluster.launch.group_life import GroupLife
from pd_cluster.launch.lifecycle import State
from pd_cluster.launch.supervisor import Supervisor
from pd_cluster.log import get_log
from router.directory import Directory, Worker

log = get_log(__name__)

LOOK_S = 1.0
REFUSED_FACTOR = 10
"""After a refusal nothing is tried for so many times `hold_s`: what did not fit will not fit soon."""


class RankLoad(Struct, frozen=True):
    """Of one DP rank: the share of its sequences or KV blocks that is taken, whichever is larger, and who waits."""

    usage: float
    num_waiting: int = 0


class Policy:
    """For one engine of `max_members` DP ranks. Time is an argument."""

    def __init__(self, section: AutoscaleSection, max_members: int, tensor_parallel: int) -> None:
        self._section = section
        self.least = min(max_members, math.ceil((section.min_ranks or 1) / tensor_parallel))
        self._max = max_members
        self._since_s: float | None = None  # when the load became what it is
        self._was = 0  # 1: high, -1: low
        self._not_before_s = -math.inf
        self._taught = 0  # by refusals since it grew last: fewer will not do
        self._latest = 0, 0  # from how many DP ranks it decided to go to how many

    def decide(self, loads: Sequence[RankLoad], now_s: float, least: int = 1) -> int | None:
        """The loads of the DP ranks that serve, and how many have room for all experts; how many shall serve, when that
        is another number.
        """
        num_members = len(loads)
        if not num_members:
            return None
        usage = sum(load.usage for load in loads) / num_members
        waits = any(load.num_waiting for load in loads)
        middle = (self._section.low + self._section.high) / 2
        least = min(self._max, max(self.least, least, self._taught))
        wanted = max(least, min(self._max, math.ceil(num_members * usage / middle)))
        is_now = 0
        if usage > self._section.high or waits:
            wanted = min(self._max, max(wanted, num_members + 1))
            is_now = int(wanted > num_members)
        elif usage < self._section.low:
            is_now = -int(wanted < num_members)
        if is_now != self._was or not is_now:
            self._was, self._since_s = is_now, now_s
        assert self._since_s is not None
        if not is_now or now_s - self._since_s < self._section.hold_s or now_s < self._not_before_s:
            return None
        self.forget()
        self._latest = num_members, wanted
        if wanted > num_members:
            self._taught = 0
        return wanted

    def forget(self) -> None:
        """The engine changes: what its load was says nothing about what it will be."""
        self._was, self._since_s = 0, None

    def refused(self, now_s: float) -> None:
        """The change that was decided last could not be made; after a shrink the next one goes less far."""
        self.forget()
        before, wanted = self._latest
        if wanted < before:
            self._taught = wanted + 1
        self._not_before_s = now_s + REFUSED_FACTOR * self._section.hold_s


class Change(Struct, frozen=True):
    """Of the size of an engine, under way."""

    task: asyncio.Task[None]
    give_up_s: float  # when it has taken too long


class Autoscaler:
    """Follows the policy for every elastic engine whose section asks for it, until `run` is cancelled. A change that
    takes `change_timeout_s` is given up: what serves by then is what there shall be.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        directory: Directory,
        section_of: Callable[[str], AutoscaleSection],
        clock: Clock,
        *,
        change_timeout_s: float,
    ) -> None:
        self._supervisor = supervisor
        self._directory = directory
        self._section_of = section_of
        self._clock = clock
        self._change_timeout_s = change_timeout_s
        self._policies: dict[EngineId, Policy] = {}
        self._changing: dict[EngineId, Change] = {}

    async def run(self) -> None:
        try:
            while True:
                self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            tasks = [change.task for change in self._changing.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        """Decide about every engine once, and begin what was decided."""
        for engine_id, engine in self._supervisor.engines.items():
            section, life = self._section_of(engine.shape.role), engine.life
            if not section.enabled or not isinstance(life, GroupLife):
                continue
            shape = engine.shape
            policy = self._policies.setdefault(engine_id, Policy(section, shape.data_parallel, shape.tensor_parallel))
            if engine_id in self._changing:
                if self._clock.now_s() >= self._changing[engine_id].give_up_s:
                    life.resize(max(policy.least, life.num_up))  # which the waiting task hears of
                continue
            if life.state is not State.READY or not life.settled:
                policy.forget()
                continue
            workers = [worker for worker in self._directory.workers if worker.info.engine_id == engine_id]
            loads = [load_of(worker) for worker in workers if worker.is_ready]
            if len(loads) != life.num_wanted:
                continue
            wanted = policy.decide(loads, self._clock.now_s(), life.least_members)
            if wanted is not None:
                log.info("autoscale", engine=engine_id, members=len(loads), wanted=wanted)
                task = asyncio.create_task(self._change(engine_id, wanted, policy))
                self._changing[engine_id] = Change(task, self._clock.now_s() + self._change_timeout_s)

    async def _change(self, engine_id: EngineId, wanted: int, policy: Policy) -> None:
        try:
            await self._supervisor.resize(engine_id, wanted)
        except (InvalidRequest, Unavailable) as error:
            log.warning("autoscale_refused", engine=engine_id, wanted=wanted, reason=error.message)
            policy.refused(self._clock.now_s())
        finally:
            del self._changing[engine_id]


def load_of(worker: Worker) -> RankLoad:
    """As the router knows it."""
    info, load = worker.info, worker.load
    blocks = 1 - load.num_free_blocks / info.num_blocks if info.num_blocks else 0.0
    return RankLoad(max(load.num_running / info.max_num_seqs, blocks), load.num_waiting + load.num_pending_reservations)
