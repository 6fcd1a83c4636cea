"""What is known of each engine's experts: of the reports of its workers, the one that knows most."""

from collections.abc import Iterable

from pd_cluster.ids import EngineId
from pd_cluster.parallel.placement_status import PlacementStatus
from router.directory import Worker


def placements(workers: Iterable[Worker]) -> list[tuple[EngineId, PlacementStatus]]:
    """Of engines whose ranks share experts, in the order of their first workers. Only an engine's hub sees loads."""
    found: dict[EngineId, PlacementStatus] = {}
    for worker in workers:
        status, known = worker.load.placement, found.get(worker.info.engine_id)
        if status is not None and (known is None or _knows(status) > _knows(known)):
            found[worker.info.engine_id] = status
    return list(found.items())


def _knows(status: PlacementStatus) -> tuple[bool, int, int]:
    return bool(status.layers), status.bytes_moved, status.epoch
