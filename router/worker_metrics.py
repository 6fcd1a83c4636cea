"""What workers report, as metrics: read from the directory whenever somebody scrapes.

Stranded KV is memory that no running sequence uses and nobody can have: prefilled and not pushed, reserved and not
filled, or in quarantine until its writer has stopped.
"""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from pd_cluster.metrics import PREFIX, Snapshot
from router.directory import Directory, Health, Worker


class WorkerMetrics(Snapshot):
    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def collect(self) -> Iterable[Metric]:
        workers = self._directory.workers
        yield self._up(workers)
        simple: dict[str, tuple[str, Callable[[Worker], float]]] = {
            "num_requests_running": ("Sequences that run", lambda w: w.load.num_running),
            "num_requests_waiting": ("Requests in the worker's line", lambda w: w.load.num_waiting),
            "num_waiting_tokens": ("Prompt tokens not computed yet", lambda w: w.load.num_waiting_tokens),
            "num_context_tokens": ("KV tokens of running sequences", lambda w: w.load.num_context_tokens),
            "kv_blocks": ("KV blocks of the worker", lambda w: w.info.num_blocks),
            "kv_cache_usage_ratio": ("Share of KV blocks in use", _usage),
            "pending_sends": ("Transfers that this worker still has to push", lambda w: w.load.num_pending_sends),
            "pending_reservations": ("Requests that wait for blocks", lambda w: w.load.num_pending_reservations),
            "stranded_kv_oldest_age_seconds": ("Age of the oldest stranded block", lambda w: w.load.oldest_stranded_s),
            "step_seconds": ("Moving average of a step", lambda w: w.load.step_s),
            "prefill_tokens_per_second": ("Measured prefill speed", lambda w: w.load.prefill_tok_s),
            "expert_load_imbalance_ratio": ("Tokens of the busiest expert over the mean", _imbalance),
        }
        for name, (documentation, value) in simple.items():
            gauge = GaugeMetricFamily(PREFIX + name, documentation, labels=["worker", "role"])
            for worker in workers:
                gauge.add_metric([worker.id, _role(worker)], value(worker))
            yield gauge
        yield from self._stranded(workers)

    def _up(self, workers: Sequence[Worker]) -> Metric:
        gauge = GaugeMetricFamily(
            PREFIX + "worker_up", "1 in the state that it is in", labels=["worker", "role", "health"]
        )
        for worker in workers:
            for health in Health:
                gauge.add_metric([worker.id, _role(worker), health.value], float(worker.health is health))
        return gauge

    def _stranded(self, workers: Sequence[Worker]) -> Iterable[Metric]:
        labels = ["worker", "role", "state"]
        blocks = GaugeMetricFamily(PREFIX + "stranded_kv_blocks", "KV blocks that nobody can use", labels=labels)
        num_bytes = GaugeMetricFamily(PREFIX + "stranded_kv_bytes", "Their size", labels=labels)
        for worker in workers:
            load = worker.load
            states = {
                "held": load.num_held_blocks,
                "reserved": load.num_reserved_blocks,
                "quarantined": load.num_quarantined_blocks,
            }
            for state, count in states.items():
                blocks.add_metric([worker.id, _role(worker), state], count)
                num_bytes.add_metric([worker.id, _role(worker), state], count * worker.info.block_bytes)
        yield blocks
        yield num_bytes


def _role(worker: Worker) -> str:
    return "prefill" if not worker.info.can_decode else "colocated" if worker.info.can_prefill else "decode"


def _usage(worker: Worker) -> float:
    return 1.0 - worker.load.num_free_blocks / worker.info.num_blocks if worker.info.num_blocks else 0.0


def _imbalance(worker: Worker) -> float:
    """1 is perfect; 0 when the worker has no experts or has routed nothing yet."""
    ratios = [max(layer) * len(layer) / sum(layer) for layer in worker.load.expert_load if sum(layer)]
    return sum(ratios) / len(ratios) if ratios else 0.0
