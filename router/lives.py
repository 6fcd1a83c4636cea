"""Which lives are over because another has begun: what a router may conclude without a supervisor's word.

An engine, or a worker that lives and dies on its own, is started anew only when every process of its last life is dead.
So the greeting of a new life proves the death of the one before.
"""

from msgspec import Struct

from pd_cluster.ids import EngineEpoch, EngineId, WorkerId
from pd_cluster.messages import WorkerInfo


class _Met(Struct, frozen=True):
    engine: EngineEpoch
    life: EngineEpoch


class Lives:
    """The latest life of every worker ever met, by engine."""

    def __init__(self) -> None:
        self._met: dict[EngineId, dict[WorkerId, _Met]] = {}

    def begun(self, info: WorkerInfo, life: EngineEpoch) -> list[EngineEpoch]:
        """A worker greets in that life; the lives that are over then."""
        now = _Met(info.engine_epoch or life, life)
        met = self._met.get(info.engine_id, {})
        over = {
            worker_id: before
            for worker_id, before in met.items()
            if before.engine != now.engine or (worker_id == info.worker_id and before.life != life)
        }
        kept = {worker_id: before for worker_id, before in met.items() if worker_id not in over}
        self._met[info.engine_id] = kept | {info.worker_id: now}
        return list(dict.fromkeys(before.life for before in over.values()))
