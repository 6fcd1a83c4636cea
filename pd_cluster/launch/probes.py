"""What a worker's pod answers over HTTP: probes and metrics.

`/startupz`: the workers of this pod have served once. `/livez`: this process's loop runs, and not a word about others.
`/readyz`, also `/health`: they serve now, and do not drain.
"""

from collections.abc import Iterable
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pd_cluster.ids import EngineId
from pd_cluster.metrics import CONTENT_TYPE, PREFIX, Snapshot
from router.directory import Directory
from router.worker_metrics import WorkerMetrics


class Status(Protocol):
    @property
    def engine_id(self) -> EngineId: ...

    @property
    def started(self) -> bool: ...

    @property
    def trouble(self) -> str | None:
        """Why no request should be sent here; None when all is well."""

    @property
    def draining(self) -> bool: ...

    @property
    def num_starts(self) -> int:
        """Lives of the engine that this process has seen."""


class NodeMetrics(Snapshot):
    """Of this pod as a whole; its workers' own metrics stand beside."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        engine = [self._status.engine_id]
        gauges = {
            "node_ready": ("1 while this pod's part of an engine takes requests", self._status.trouble is None),
            "node_draining": ("1 while it finishes what it has", self._status.draining),
        }
        for name, (documentation, value) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, documentation, labels=["engine"])
            gauge.add_metric(engine, float(value))
            yield gauge
        starts = CounterMetricFamily(PREFIX + "engine_starts", "Lives of the engine seen here", labels=["engine"])
        starts.add_metric(engine, self._status.num_starts)
        yield starts


def build_probes(status: Status, directory: Directory) -> Starlette:
    """The ASGI app; `directory` holds the workers of this pod."""
    registry = CollectorRegistry()
    registry.register(NodeMetrics(status))
    registry.register(WorkerMetrics(directory))

    async def live(_: Request) -> Response:
        return _answer(200, {"status": "alive"})

    async def started(_: Request) -> Response:
        if status.started:
            return _answer(200, {"status": "started"})
        return _answer(503, {"status": "starting", "reason": status.trouble})

    async def ready(_: Request) -> Response:
        if status.trouble is None:
            return _answer(200, {"status": "ready"})
        return _answer(503, {"status": "not ready", "reason": status.trouble})

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE)

    return Starlette(
        routes=[
            Route("/livez", live),
            Route("/startupz", started),
            Route("/readyz", ready),
            Route("/health", ready),
            Route("/metrics", metrics),
        ]
    )


def _answer(code: int, body: dict[str, str | None]) -> Response:
    return Response(msgspec.json.encode(body), code, media_type="application/json")
