"""Which DP ranks of each engine serve, as far as a router can see from its workers."""

from collections.abc import Iterable

from msgspec import Struct

from pd_cluster.ids import EngineId
from router.directory import Health, Worker


class Members(Struct, frozen=True, kw_only=True):
    """DP ranks of one engine, ascending."""

    engine_id: EngineId
    one: Worker  # any worker of it
    up: list[int]
    leaving: list[int]
    away: list[int]


def members(workers: Iterable[Worker]) -> list[Members]:
    """Of every engine with several DP ranks, in the order in which `workers` names them."""
    engines: dict[EngineId, dict[int, Worker]] = {}
    for worker in workers:
        if worker.info.data_parallel > 1:
            engines.setdefault(worker.info.engine_id, {})[worker.info.dp_rank] = worker
    found = []
    for engine_id, by_rank in engines.items():
        one = next(iter(by_rank.values()))
        up = [rank for rank, worker in sorted(by_rank.items()) if worker.health is Health.READY]
        leaving = [rank for rank, worker in sorted(by_rank.items()) if worker.health is Health.DRAINING]
        away = [rank for rank in range(one.info.data_parallel) if rank not in (*up, *leaving)]
        found.append(Members(engine_id=engine_id, one=one, up=up, leaving=leaving, away=away))
    return found
