"""What prefill and decode workers share as their leads run them: routers come and go, loads and steps are told.

A worker that drains, or that is to leave its group, takes nothing new.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from pd_cluster import messages as m
from pd_cluster.clock import Clock
from pd_cluster.engine.loop import EngineLoop
from pd_cluster.engine.outcome import StartedRequest
from pd_cluster.engine.owners import Outgoing, Owners
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.engine.step_sync import StepSync
from pd_cluster.errors import Unavailable
from pd_cluster.ids import RequestId, RouterId, TransferId
from pd_cluster.parallel.placement_status import PlacementStatus
from pd_cluster.request import Request


class Worker(ABC):
    """A `ControlHandler` and a `Role`, but for what is the worker's own. What needs this object first comes by
    `attach`.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        sync: StepSync,
        clock: Clock,
        vocab_size: int,
        max_model_len: int,
        expert_load: Callable[[], list[list[int]]],
        placement: Callable[[], PlacementStatus | None] = lambda: None,
    ) -> None:
        self._scheduler = scheduler
        self._sync = sync
        self._clock = clock
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._expert_load = expert_load
        self._placement = placement
        self._draining = False
        self._leaving = False

    def _attach(self, loop: EngineLoop, outgoing: Outgoing) -> None:
        self._loop = loop
        self._outgoing = outgoing
        self._owners = Owners(outgoing)

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Nothing that a request needs is here."""

    @abstractmethod
    def _abort(self, request_id: RequestId) -> None:
        """End a request, if it is here."""

    # ---- from the group that this worker is a member of

    def leave(self) -> None:
        """Others are to do without this worker: it takes nothing new."""
        self._leaving = True

    def stay(self) -> None:
        """The group cannot do without it, or needs it again."""
        self._leaving = False

    # ---- from routers

    def on_attach(self, router_id: RouterId) -> None:
        self._outgoing.send(router_id, [m.CacheEvents(stored=self._scheduler.cached_units(), cleared=True)])

    def on_detach(self, router_id: RouterId) -> None:
        for request_id in self._owners.of(router_id):
            self._abort(request_id)

    def load(self) -> m.WorkerLoad:
        return msgspec.structs.replace(
            self._scheduler.load(),
            step_s=self._loop.step_s,
            num_steps=self._loop.num_steps,
            draining=self._draining or self._leaving,
            expert_load=self._expert_load(),
            placement=self._placement(),
        )

    def _check(self, request: Request) -> None:
        """Raise for a request this worker will not take."""
        if self._draining or self._leaving:
            raise Unavailable("this worker drains: ask another")
        request.validate(self._vocab_size, self._max_model_len)

    def _drain(self) -> None:
        self._draining = True
        self._note_drained()

    def _note_drained(self) -> None:
        if self._draining and self.idle:
            self._outgoing.broadcast([m.Drained()])

    # ---- from the engine

    def _tell_started(self, started: StartedRequest, transfer_id: TransferId) -> None:
        self._owners.tell(
            started.request_id,
            m.Started(
                request_id=started.request_id,
                transfer_id=transfer_id,
                num_cached_tokens=started.num_cached_tokens,
                queued_s=started.queued_s,
            ),
        )

    def _tell_cache_events(self) -> None:
        stored, removed = self._scheduler.take_cache_events()
        if stored or removed:
            self._outgoing.broadcast([m.CacheEvents(stored=stored, removed=removed)])
