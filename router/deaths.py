"""Which workers died while they computed for a request: one may be chance, two are taken for the request's doing.

A broken stream only makes a death possible; the verdict is the supervisor's, or a new life of the engine. Until it is
there, a request that may have killed its second worker is not given a third.
"""

from collections.abc import Collection

from pd_cluster.errors import PoisonRequest
from pd_cluster.ids import EngineEpoch, WorkerId
from router.attempt import Leg

MAX_DEATHS = 2

VERDICT_S = 1.0
"""How long such a request waits for the verdict; then the worker has the benefit of the doubt."""


class Deaths:
    """Of one request."""

    def __init__(self) -> None:
        self._lost: dict[EngineEpoch, WorkerId] = {}  # no verdict yet
        self._died: list[WorkerId] = []

    @property
    def hold_s(self) -> float:
        """How long to wait before the request is given another worker."""
        return VERDICT_S if self._lost and len(self._lost) + len(self._died) >= MAX_DEATHS else 0.0

    def lost(self, leg: Leg) -> None:
        """The stream of a worker broke while it computed for the request."""
        self._lost[leg.epoch] = leg.worker_id

    def alive(self, epoch: EngineEpoch) -> None:
        """The engine is still there: only the stream was broken."""
        self._lost.pop(epoch, None)

    def dead(self, epoch: EngineEpoch, first: Collection[WorkerId] | None) -> PoisonRequest | None:
        """The engine is dead; `first` of its workers died by themselves, the rest for their sake. None: not known.

        Returns why the request is refused, once it has to be.
        """
        worker_id = self._lost.pop(epoch, None)
        if worker_id is None or (first is not None and worker_id not in first):
            return None
        self._died.append(worker_id)
        if len(self._died) < MAX_DEATHS:
            return None
        return PoisonRequest(
            f"the request is refused: {' and '.join(self._died)} died while they computed it, and it is not tried on a "
            "third worker"
        )
