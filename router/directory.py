"""The workers a router knows: who they are, how they are, how busy they are, and who cannot work with whom.

Pure state, changed by the control streams and read by the policy. A worker's load comes with its heartbeats; what this
router sent or saw done since the last one is added, so that a burst within one heartbeat does not land on one worker.
"""

from enum import StrEnum

from msgspec import structs

from pd_cluster.costs.calibration import Corrections, WorkerCosts
from pd_cluster.costs.roofline import Hardware, ModelWork
from pd_cluster.ids import EngineEpoch, WorkerId
from pd_cluster.messages import WorkerInfo, WorkerLoad


class Health(StrEnum):
    READY = "ready"
    DRAINING = "draining"  # finishes what it has
    LOST = "lost"  # not reachable; may come back


class Worker:
    """One worker in one life."""

    def __init__(self, info: WorkerInfo, epoch: EngineEpoch, costs: WorkerCosts) -> None:
        self.info = info
        self.epoch = epoch
        self.costs = costs
        self.health = Health.READY
        self.load = WorkerLoad(num_free_blocks=info.num_blocks)
        self.lost_reason = ""
        self._prefill_tokens_since = 0
        self._seqs_since = 0
        self._context_since = 0
        self._blocks_since = 0

    def __repr__(self) -> str:
        return f"Worker({self.info.worker_id}, {self.health}, epoch {self.epoch})"

    @property
    def id(self) -> WorkerId:
        return self.info.worker_id

    @property
    def is_ready(self) -> bool:
        return self.health is Health.READY

    # ---- what the policy asks

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens not computed yet."""
        return max(0, self.load.num_waiting_tokens + self._prefill_tokens_since)

    @property
    def num_seqs(self) -> int:
        """Sequences that decode here, adopted or on their way."""
        return max(0, self.load.num_running + self.load.num_pending_reservations + self._seqs_since)

    @property
    def num_context_tokens(self) -> int:
        return max(0, self.load.num_context_tokens + self._context_since)

    @property
    def num_free_blocks(self) -> int:
        return self.load.num_free_blocks - self._blocks_since

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.info.block_size)

    # ---- what happens

    def observe_load(self, load: WorkerLoad) -> None:
        if load.step_s > 0 and load.num_running:
            self.costs.observe_step(load.num_running, load.num_context_tokens, load.step_s)
        drained, self.load = self.load.draining, load
        self._prefill_tokens_since = self._seqs_since = self._context_since = self._blocks_since = 0
        if self.health is not Health.LOST:
            self.health = Health.DRAINING if load.draining else Health.READY if drained else self.health

    def add_prefill(self, num_tokens: int) -> None:
        """Prompt tokens were sent there; negative when they are computed or aborted."""
        self._prefill_tokens_since += num_tokens

    def add_decode(self, num_tokens: int) -> None:
        """A sequence of that many tokens was sent there; negative when it has left."""
        sign = 1 if num_tokens >= 0 else -1
        self._seqs_since += sign
        self._context_since += num_tokens
        self._blocks_since += sign * self.num_blocks_for(abs(num_tokens))


class Directory:
    """All workers by id. A worker that attaches again under a new epoch is a new one; its costs are kept."""

    def __init__(self, hardware: Hardware | None = None, work: ModelWork | None = None) -> None:
        self._hardware = hardware
        self._work = work or ModelWork()
        self._pool = Corrections()
        self._workers: dict[WorkerId, Worker] = {}
        self._pairs: dict[tuple[EngineEpoch, EngineEpoch], str | None] = {}  # why (not) KV goes from one to the other

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: WorkerId) -> Worker | None:
        return self._workers.get(worker_id)

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    @property
    def prefill_workers(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.info.can_prefill]

    @property
    def decode_workers(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.info.can_decode]

    def welcome(self, info: WorkerInfo, epoch: EngineEpoch) -> Worker:
        """A worker is there, new, restarted or reconnected."""
        known = self._workers.get(info.worker_id)
        work = structs.replace(self._work, kv_token_bytes=max(1.0, info.block_bytes / max(1, info.block_size)))
        peers = [worker for worker in self._workers.values() if worker.info.engine_id == info.engine_id]
        # DP ranks of an engine step together: what one measured holds for all, also for those that had nothing to do
        shared = (known or (peers[0] if peers else None)) if info.data_parallel > 1 else known
        costs = shared.costs if shared is not None else WorkerCosts(self._hardware, work, self._pool)
        worker = self._workers[info.worker_id] = Worker(info, epoch, costs)
        self._forget_old_pairs()
        return worker

    def lose(self, worker_id: WorkerId, reason: str) -> None:
        """Its stream broke; nothing is sent there until it is welcomed again."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.health = Health.LOST
            worker.lost_reason = reason

    def remove(self, worker_id: WorkerId) -> None:
        """It is gone for good."""
        self._workers.pop(worker_id, None)
        self._forget_old_pairs()

    def mark_incompatible(self, prefill: EngineEpoch, decode: EngineEpoch, reason: str) -> None:
        """These two engines cannot exchange KV, in their present lives."""
        self._pairs[prefill, decode] = reason

    def incompatibility(self, prefill: Worker, decode: Worker) -> str | None:
        """Why KV cannot go from one to the other; None when it can, as far as is known."""
        pair = prefill.epoch, decode.epoch
        if pair not in self._pairs:
            self._pairs[pair] = _difference(prefill.info, decode.info)
        return self._pairs[pair]

    @property
    def ready(self) -> bool:
        """Whether some request could be served from prefill to decode."""
        return any(
            source.is_ready and target.is_ready and (source is target or self.incompatibility(source, target) is None)
            for source in self.prefill_workers
            for target in self.decode_workers
        )

    def _forget_old_pairs(self) -> None:
        alive = {worker.epoch for worker in self._workers.values()}
        self._pairs = {pair: why for pair, why in self._pairs.items() if pair[0] in alive and pair[1] in alive}


def _difference(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    if prefill.endpoint is None or decode.endpoint is None:
        return None
    difference = prefill.endpoint.fingerprint.difference(decode.endpoint.fingerprint)
    return f"{prefill.worker_id} and {decode.worker_id} hold different KV: {difference}" if difference else None
