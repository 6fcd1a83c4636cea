"""grpc.health.v1: the names of services and roles, each answered from what is true now.

`""` and `pd_cluster.v1.Inference` say that a request could be served from prefill to decode (readiness); `prefill` and
`decode` say that a worker of that role is ready; `router` and `pd_cluster.v1.Cluster` say that this process runs
(liveness: a router whose workers are away must not be restarted).
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.pipeline import Pipeline

LOOK_S = 0.25
"""Between two looks of a watch."""

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    def __init__(self, pipeline: Pipeline) -> None:
        directory = pipeline.directory
        self._names: dict[str, Callable[[], bool]] = {
            "": lambda: pipeline.ready,
            "pd_cluster.v1.Inference": lambda: pipeline.ready,
            "prefill": lambda: any(worker.is_ready for worker in directory.prefill_workers),
            "decode": lambda: any(worker.is_ready for worker in directory.decode_workers),
            "router": lambda: True,
            "pd_cluster.v1.Cluster": lambda: True,
        }

    async def Check(self, message: Any, context: Any) -> Any:  # noqa: N802
        if message.service not in self._names:
            known = ", ".join(repr(name) for name in self._names)
            await context.abort(grpc.StatusCode.NOT_FOUND, f"known services: {known}")
        return health_pb2.HealthCheckResponse(status=self._look(message.service))

    async def Watch(self, message: Any, context: Any) -> None:  # noqa: N802
        shown = None
        while True:
            status = self._look(message.service)
            if status != shown:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                shown = status
            await asyncio.sleep(LOOK_S)

    def _look(self, service: str) -> Any:
        serves = self._names.get(service)
        return UNKNOWN if serves is None else SERVING if serves() else NOT_SERVING
