"""What workers report, as metrics: read from the directory whenever somebody scrapes.

Stranded KV is memory that no running sequence uses and nobody can have: prefilled and not pushed, reserved and not
filled, or in quarantine until its writer has stopped.
"""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from pd_cluster.ids import EngineId
from pd_cluster.metrics import PREFIX, Snapshot
from pd_cluster.parallel.placement_status import PlacementStatus
from router.directory import Directory, Health, Worker
from router.placements import placements


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
        yield from self._experts(placements(workers))

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

    def _experts(self, found: Sequence[tuple[EngineId, PlacementStatus]]) -> Iterable[Metric]:
        """Of engines whose ranks share experts; ratios are 0 before there was load to measure."""
        simple: dict[str, tuple[str, Callable[[PlacementStatus], float]]] = {
            "expert_placement_epoch": ("Placement of experts that steps run with", lambda p: p.epoch),
            "expert_rank_imbalance_ratio": (
                "Load of the busiest rank over the mean",
                lambda p: p.imbalance,
            ),
            "expert_worst_layer_imbalance_ratio": (
                "The same of the least even layer",
                lambda p: max((layer.ratio for layer in p.layers), default=0.0),
            ),
        }
        for name, (documentation, value) in simple.items():
            gauge = GaugeMetricFamily(PREFIX + name, documentation, labels=["engine"])
            for engine_id, placement in found:
                gauge.add_metric([engine_id], value(placement))
            yield gauge
        changes = CounterMetricFamily(
            PREFIX + "expert_placement_changes", "Changes of placement", labels=["engine", "outcome"]
        )
        moved = CounterMetricFamily(PREFIX + "expert_moved_bytes", "Experts loaded for them", labels=["engine"])
        layers = {
            "expert_layer_imbalance_ratio": "Load of the busiest rank over the mean",
            "expert_layer_hottest_share_ratio": "Share of its layer's load that the busiest expert has",
        }
        by_layer = {
            name: GaugeMetricFamily(PREFIX + name, documentation, labels=["engine", "layer"])
            for name, documentation in layers.items()
        }
        for engine_id, placement in found:
            changes.add_metric([engine_id, "made"], placement.num_swaps)
            changes.add_metric([engine_id, "abandoned"], placement.num_abandoned)
            moved.add_metric([engine_id], placement.bytes_moved)
            for number, layer in enumerate(placement.layers):
                share = layer.hottest[0].share if layer.hottest else 0.0
                by_layer["expert_layer_imbalance_ratio"].add_metric([engine_id, str(number)], layer.ratio)
                by_layer["expert_layer_hottest_share_ratio"].add_metric([engine_id, str(number)], share)
        yield from (changes, moved, *by_layer.values())


def _role(worker: Worker) -> str:
    return "prefill" if not worker.info.can_decode else "colocated" if worker.info.can_prefill else "decode"


def _usage(worker: Worker) -> float:
    return 1.0 - worker.load.num_free_blocks / worker.info.num_blocks if worker.info.num_blocks else 0.0


def _imbalance(worker: Worker) -> float:
    """1 is perfect; 0 when the worker has no experts or has routed nothing yet."""
    ratios = [max(layer) * len(layer) / sum(layer) for layer in worker.load.expert_load if sum(layer)]
    return sum(ratios) / len(ratios) if ratios else 0.0
