"""A rank of an elastic engine as a member of its group: it reads rosters, beats, begins generations, and may leave.

    store --rosters--> a thread --> halt the step under way, at once; then the event loop --> step sync (leads)
    a thread --beats, suspects--> store --> supervisor
    step sync --Formed--> engine thread: forget the dead, meet the new, begin --> placements: what holds

Every rank publishes how its dispatcher is reached under `dispatch/{life}/{rank}` before it reports, so whoever is on a
roster can be looked up. The lead of a DP rank that is to leave sends its requests elsewhere, and tells the hub when it
is idle; the hub moves the experts, and tells the supervisor when nothing there is needed any more, or why it refuses.
"""

import asyncio
import base64
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from pd_cluster.engine.elastic_sync import ElasticSync
from pd_cluster.engine.generations import ROSTER_S, AllMet, Formed
from pd_cluster.engine.loop import EngineThread
from pd_cluster.errors import EngineError, PdClusterError, TransferFailed, Unavailable
from pd_cluster.ids import EngineEpoch, Rank
from pd_cluster.launch.meeting import Rendezvous
from pd_cluster.launch.placements import Placements
from pd_cluster.launch.spec import Beat, RankSpec
from pd_cluster.log import get_log
from pd_cluster.parallel.one_sided import NixlDispatcher
from pd_cluster.parallel.roster import Roster

log = get_log(__name__)

BEAT_S = 0.2
IDLE_LOOK_S = 0.1


class Leaver(Protocol):
    """A worker that may have to go."""

    @property
    def idle(self) -> bool: ...

    def leave(self) -> None: ...

    def stay(self) -> None: ...


class Member:
    """`on_failure`: this rank cannot go on; `on_left`: nobody needs it any more. Call `start` before the report."""

    def __init__(
        self,
        spec: RankSpec,
        rendezvous: Rendezvous,
        dispatcher: NixlDispatcher,
        thread: EngineThread,
        sync: ElasticSync,
        placements: Placements,
        *,
        on_failure: Callable[[EngineError], None],
        on_left: Callable[[], None],
    ) -> None:
        self.roster: Roster | None = None
        self.worker: Leaver | None = None  # of a lead
        self._spec = spec
        self._rendezvous = rendezvous
        self._dispatcher = dispatcher
        self._thread = thread
        self._sync = sync
        self._placements = placements
        self._on_failure = on_failure
        self._on_left = on_left
        self._loop = asyncio.get_running_loop()
        self._closing = threading.Event()
        self._generation = -1  # begun
        self._lives: dict[Rank, EngineEpoch] = {}  # of the other ranks, in that generation
        self._leaving: asyncio.Task[None] | None = None
        self._vacant: set[int] = set()  # at the hub: DP ranks that are idle and may go, by the latest roster
        self._is_placed = False  # at the hub: no expert is where it may go
        sync.standing = placements.epochs.standing
        sync.settle = self._settle
        sync.on_begin = self._begin
        sync.on_running = self._running
        sync.on_vacant = self._vacated

    @property
    def life(self) -> EngineEpoch:
        return self._spec.worker_epoch

    async def start(self) -> None:
        """Be found by other ranks, and begin to beat and to read rosters."""
        endpoint = await asyncio.to_thread(self._dispatcher.endpoint)
        await self._rendezvous.meeting().publish(
            _endpoint_key(self.life, self._spec.rank), base64.b64encode(endpoint).decode()
        )
        for work, name in ((self._beat, "beat"), (self._read_rosters, "rosters")):
            threading.Thread(target=work, name=f"{name}-{self._spec.name}", daemon=True).start()

    async def close(self) -> None:
        self._closing.set()
        if self._leaving is not None:
            self._leaving.cancel()

    # ---- threads

    def _beat(self) -> None:
        count = 0
        with contextlib.suppress(Unavailable):  # the lease says what follows from that
            while not self._closing.wait(BEAT_S if count else 0.0):
                count += 1
                self._rendezvous.beat(Beat(count, self._dispatcher.suspects(), self._sync.awaited()))

    def _read_rosters(self) -> None:
        before: Roster | None = None
        generation = -1
        try:
            while not self._closing.is_set():
                roster = self._rendezvous.roster_after(generation)
                generation = roster.generation
                if before is None or before.lives != roster.lives:
                    self._dispatcher.halt(generation)
                before = roster
                self._call(partial(self._issued, roster))
        except EngineError as error:
            self._call(partial(self._on_failure, error))

    def _call(self, function: Callable[[], None]) -> None:
        if not self._closing.is_set() and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
                self._loop.call_soon_threadsafe(function)

    # ---- rosters

    def _issued(self, roster: Roster) -> None:
        before, self.roster = self.roster, roster
        dp_rank = self._spec.dp_rank
        if roster.lives[dp_rank] != self.life and before is not None and before.lives[dp_rank] == self.life:
            if dp_rank in before.leaving:
                self._on_left()
            else:
                self._on_failure(EngineError(f"roster {roster.generation} goes on without DP rank {dp_rank}"))
            return
        self._vacant, self._is_placed = set(), False
        if not self._spec.is_lead:
            return
        self._sync.issued(roster)
        if roster.lives[dp_rank] != self.life:
            return
        if dp_rank in roster.leaving and self._leaving is None:
            self._leaving = asyncio.ensure_future(self._leave())
        elif dp_rank not in roster.leaving and self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
            if self.worker is not None:
                self.worker.stay()
        if before is not None and before.lives == roster.lives:
            self._place()

    async def _leave(self) -> None:
        """Move requests elsewhere, and tell the hub of the latest roster again and again when none is left."""
        log.info("dp_rank_leaves", rank=self._spec.name)
        worker = self.worker
        assert worker is not None
        worker.leave()
        while True:
            await asyncio.sleep(IDLE_LOOK_S)
            if worker.idle and self.roster is not None:
                self._sync.vacate(self.roster.generation)

    # ---- at the hub

    def _settle(self, met: AllMet) -> bytes:
        assert self.roster is not None
        leaving = self.roster.live - self.roster.staying
        return self._placements.become_hub().form({hello.dp_rank: hello.standing for hello in met.hellos}, leaving)

    def _running(self, formed: Formed) -> None:
        if not self._sync.is_hub:
            self._placements.leave_hub()
        elif formed.generation:
            self._place()

    def _place(self) -> None:
        """Bring experts to whom they should be at by the latest roster."""
        roster, hub = self.roster, self._placements.hub
        if roster is None or hub is None or not self._sync.is_hub or self._sync.generations.is_over:
            return
        placed = hub.request_placement(roster.staying)
        placed.add_done_callback(partial(self._placed, roster))

    def _placed(self, roster: Roster, placed: "asyncio.Future[None]") -> None:
        if placed.cancelled():
            return
        error = placed.exception()
        if error is not None and not isinstance(error, PdClusterError):
            raise error
        if roster is not self.roster or not roster.leaving:
            if error is not None:
                log.warning("experts_stay", generation=roster.generation, reason=str(error))
            return
        if isinstance(error, PdClusterError):
            self._rendezvous.released(roster.generation, error.message)
            return
        self._is_placed = True
        self._release_if_done()

    def _vacated(self, dp_rank: int, generation: int) -> None:
        if self.roster is not None and generation == self.roster.generation and dp_rank not in self._vacant:
            self._vacant.add(dp_rank)
            self._release_if_done()

    def _release_if_done(self) -> None:
        roster = self.roster
        if self._is_placed and roster is not None and roster.leaving and roster.leaving <= self._vacant:
            log.info("dp_ranks_released", generation=roster.generation, dp_ranks=sorted(roster.leaving))
            self._rendezvous.released(roster.generation, None)

    # ---- generations

    async def _begin(self, formed: Formed) -> None:
        """No step is under way on this rank. Raises EngineError."""
        lives = {
            rank: life
            for dp_rank, life in enumerate(formed.lives)
            if life is not None
            for rank in self._ranks_of(dp_rank)
            if rank != self._spec.rank
        }
        lookup = self._rendezvous.meeting().lookup
        new = [rank for rank, life in lives.items() if self._lives.get(rank) != life]
        endpoints = {rank: base64.b64decode(await lookup(_endpoint_key(lives[rank], rank))) for rank in new}
        gone = [rank for rank, life in self._lives.items() if lives.get(rank) != life]
        unreachable = await self._thread.call(partial(self._begin_exchange, formed.generation, lives, endpoints, gone))
        self._lives, self._generation = lives, formed.generation
        for rank in unreachable:
            del self._lives[rank]  # so that the next generation tries again
        if unreachable:
            self._loop.call_later(ROSTER_S, self._give_up, formed.generation, unreachable)
        epochs = self._placements.epochs
        self._placements.lives = {**lives, self._spec.rank: self.life}
        for rank in {*gone, *new}:
            epochs.forget(rank)
        epochs.hold(formed.settled)

    def _begin_exchange(
        self, generation: int, lives: dict[Rank, EngineEpoch], endpoints: dict[Rank, bytes], gone: list[Rank]
    ) -> list[Rank]:
        """On the engine thread; ranks that cannot be reached, most likely because they died since."""
        dispatcher = self._dispatcher
        for rank in gone:
            dispatcher.forget(rank)
        unreachable = []
        for rank, endpoint in endpoints.items():
            try:
                dispatcher.connect(rank, endpoint)
            except TransferFailed as error:
                log.warning("rank_unreachable", rank=self._spec.name, peer=rank, reason=error.message)
                dispatcher.mask(rank)
                unreachable.append(rank)
        dispatcher.begin(generation, [*lives, self._spec.rank])
        return unreachable

    def _give_up(self, generation: int, unreachable: list[Rank]) -> None:
        if self._generation == generation and not self._closing.is_set():
            ranks = ", ".join(map(str, unreachable))
            self._on_failure(EngineError(f"ranks {ranks} cannot be reached, and no roster goes on without them"))

    def _ranks_of(self, dp_rank: int) -> list[Rank]:
        size = self._spec.tensor_parallel
        return [Rank(dp_rank * size + tp_rank) for tp_rank in range(size)]


def _endpoint_key(life: EngineEpoch, rank: Rank) -> str:
    return f"dispatch/{life}/{rank}"
