"""Which worker prefills a request and which one decodes it: the least predicted time, ties in turn.

Pure functions of the directory. They explain their choice, and raise Unavailable when nobody is ready, PeerIncompatible
when those that are cannot exchange KV, and Overloaded when the answer would come after its deadline.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct

from pd_cluster.errors import ContextTooLong, Overloaded, PeerIncompatible, Unavailable
from pd_cluster.ids import WorkerId
from router.directory import Directory, Worker

TIE = 1.02
"""Predictions within this ratio are equal: they are not that good."""


class Choice(Struct, frozen=True):
    """A worker, the seconds predicted for it, the prompt tokens it has cached, and why it was chosen."""

    worker: Worker
    predicted_s: float
    num_cached_tokens: int
    reason: str


def pick_prefill(
    directory: Directory,
    num_tokens: int,
    cached: Mapping[WorkerId, int],
    *,
    remaining_s: float,
    turn: int = 0,
    avoid: Collection[WorkerId] = (),
) -> Choice:
    """The worker where a sequence of `num_tokens` has its next token soonest.

    `cached` says how many of them each worker has; those in `avoid` failed this request before and come last. A worker
    that can also decode does the whole request; any other needs a ready decode worker to hand over to.
    """
    candidates = [worker for worker in directory.prefill_workers if worker.is_ready]
    if not candidates:
        raise Unavailable(_nobody("prefill", directory.prefill_workers))
    targets = [worker for worker in directory.decode_workers if worker.is_ready]
    if not targets:
        raise Unavailable(_nobody("decode", directory.decode_workers))
    paired = [
        worker
        for worker in candidates
        if worker.info.can_decode or any(directory.incompatibility(worker, target) is None for target in targets)
    ]
    if not paired:
        reason = directory.incompatibility(candidates[0], targets[0])
        raise PeerIncompatible(f"no prefill worker can hand over to any decode worker: {reason}")
    fitting = _fitting(paired, num_tokens)

    def predicted_s(worker: Worker) -> float:
        num_cached = min(cached.get(worker.id, 0), num_tokens - 1)
        own_s = worker.costs.prefill_s(num_tokens - num_cached, num_cached)
        return worker.costs.backlog_s(worker.num_waiting_tokens) + own_s

    best_s, worker = _least(_preferred(fitting, avoid), predicted_s, cached, turn)
    if best_s > remaining_s and worker.costs.knows_prefill:  # a guess is no reason to turn anybody away
        raise Overloaded(
            f"the first token is expected in {best_s:.1f} s and the deadline is in {remaining_s:.1f} s: retry later"
        )
    num_cached = min(cached.get(worker.id, 0), num_tokens - 1)
    reason = f"{worker.num_waiting_tokens} tokens wait, {num_cached} of {num_tokens} are cached"
    return Choice(worker, best_s, num_cached, reason)


def pick_decode(
    directory: Directory,
    source: Worker,
    num_tokens: int,
    cached: Mapping[WorkerId, int],
    *,
    turn: int = 0,
    avoid: Collection[WorkerId] = (),
) -> Choice:
    """The worker to decode a sequence of `num_tokens` that `source` prefills: room first, then the shortest step."""
    candidates = [worker for worker in directory.decode_workers if worker.is_ready]
    if not candidates:
        raise Unavailable(_nobody("decode", directory.decode_workers))
    reasons = {worker.id: directory.incompatibility(source, worker) for worker in candidates}
    compatible = [worker for worker in candidates if reasons[worker.id] is None]
    if not compatible:
        raise PeerIncompatible(f"no decode worker can take KV from {source.id}: {reasons[candidates[0].id]}")
    fitting = _fitting(compatible, num_tokens)
    preferred = _preferred(fitting, avoid)
    roomy = [
        worker
        for worker in preferred
        if worker.num_free_blocks >= worker.num_blocks_for(num_tokens + 1)
        and worker.num_seqs < worker.info.max_num_seqs
    ]

    def predicted_s(worker: Worker) -> float:
        num_pushed = num_tokens - min(cached.get(worker.id, 0), num_tokens)
        step_s = worker.costs.step_s(worker.num_seqs + 1, worker.num_context_tokens + num_tokens)
        if worker not in roomy:  # it waits for others to finish: the more of them, the longer
            step_s *= 1 + worker.num_seqs
        return step_s + worker.costs.transfer_s(num_pushed)

    best_s, worker = _least(roomy or preferred, predicted_s, cached, turn)
    room = "has room" if roomy else "must wait for room"
    reason = f"{worker.num_seqs} sequences, {worker.num_free_blocks} free blocks, {room}"
    return Choice(worker, best_s, min(cached.get(worker.id, 0), num_tokens), reason)


def _nobody(role: str, workers: Sequence[Worker]) -> str:
    if not workers:
        return f"no {role} worker is known"
    states = ", ".join(sorted(f"{worker.id} is {worker.health}" for worker in workers)[:4])
    return f"no {role} worker is ready: {states}"


def _fitting(workers: Sequence[Worker], num_tokens: int) -> list[Worker]:
    """Those whose context and memory can ever hold the sequence and one token more."""
    fitting = [
        worker
        for worker in workers
        if num_tokens < worker.info.max_model_len and worker.num_blocks_for(num_tokens + 1) <= worker.info.num_blocks
    ]
    if not fitting:
        most = max(min(w.info.max_model_len, w.info.num_blocks * w.info.block_size) for w in workers)
        raise ContextTooLong(f"{num_tokens} tokens do not fit: shorten them to at most {most - 1}", param="prompt")
    return fitting


def _preferred(workers: Sequence[Worker], avoid: Collection[WorkerId]) -> Sequence[Worker]:
    return [worker for worker in workers if worker.id not in avoid] or workers


def _least(
    workers: Sequence[Worker], predicted_s: Callable[[Worker], float], cached: Mapping[WorkerId, int], turn: int
) -> tuple[float, Worker]:
    """The worker with the least prediction; of equals one with the most cached, and of these each in turn."""
    predictions = [predicted_s(worker) for worker in workers]
    limit = min(predictions) * TIE
    equal = [(seconds, worker) for seconds, worker in zip(predictions, workers, strict=True) if seconds <= limit]
    most = max(cached.get(worker.id, 0) for _, worker in equal)
    equal = [(seconds, worker) for seconds, worker in equal if cached.get(worker.id, 0) == most]
    return equal[turn % len(equal)]
