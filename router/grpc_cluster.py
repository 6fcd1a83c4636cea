"""pd_cluster.v1.Cluster: status once and watched, drain, scale."""

import asyncio
import itertools
import time
from typing import Any, Protocol

from pd_cluster.errors import InvalidRequest, NotSupported, UnknownWorker
from pd_cluster.ids import RouterId, WorkerId
from pd_cluster.log import get_log
from pd_cluster.pb.v1 import cluster_pb2 as pb
from pd_cluster.pb.v1 import cluster_pb2_grpc
from router.cluster_status import cluster_status, worker_status
from router.grpc_edge import answering, require_admin
from router.serving import Serving

log = get_log(__name__)

MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 60.0
MAX_REQUESTS = 1000

ROLES = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode", pb.ROLE_COLOCATED: "colocated"}


class Pools(Protocol):
    """Whoever starts engines."""

    async def scale(self, role: str, instances: int) -> int:
        """Let so many engines of a role run; how many were meant to before. Raises InvalidRequest."""

    async def scale_ranks(self, role: str, ranks: int, engine_id: str | None) -> tuple[str, int]:
        """Let so many ranks of one engine compute; its id, and how many were meant to before. Returns when they do.
        Raises InvalidRequest when that cannot be.
        """


class Cluster(cluster_pb2_grpc.ClusterServicer):
    def __init__(self, serving: Serving, router_id: RouterId, *, admin_key: str | None, pools: Pools | None) -> None:
        self._serving = serving
        self._router_id = router_id
        self._admin_key = admin_key
        self._pools = pools
        self._started_s = time.monotonic()

    async def GetStatus(self, message: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:  # noqa: N802
        async with answering(context, "GetStatus", self._serving.metrics):
            return pb.GetStatusResponse(status=self._status(message.max_requests))

    async def WatchStatus(self, message: pb.WatchStatusRequest, context: Any) -> None:  # type: ignore[override] # noqa: N802
        async with answering(context, "WatchStatus", self._serving.metrics):
            interval_s = message.interval_ms / 1000 if message.HasField("interval_ms") else 1.0
            interval_s = min(max(interval_s, MIN_INTERVAL_S), MAX_INTERVAL_S)
            for sequence in itertools.count():
                status = self._status(message.max_requests)
                await context.write(pb.WatchStatusResponse(sequence=sequence, status=status))
                await asyncio.sleep(interval_s)

    async def Drain(self, message: pb.DrainRequest, context: Any) -> pb.DrainResponse:  # noqa: N802
        async with answering(context, "Drain", self._serving.metrics):
            require_admin(context, self._admin_key)
            pipeline = self._serving.pipeline
            worker = pipeline.directory.get(WorkerId(message.worker_id))
            if worker is None:
                known = ", ".join(sorted(worker.id for worker in pipeline.directory.workers)) or "none"
                name = message.worker_id[:200]
                raise UnknownWorker(f"there is no worker {name!r}; known: {known}", param="worker_id")
            log.info("drain_asked", worker_id=worker.id, peer=context.peer())
            pipeline.drain(worker.id)
            return pb.DrainResponse(worker=worker_status(worker))

    async def Scale(self, message: pb.ScaleRequest, context: Any) -> pb.ScaleResponse:  # noqa: N802
        async with answering(context, "Scale", self._serving.metrics):
            require_admin(context, self._admin_key)
            role = ROLES.get(message.role)
            if role is None:
                raise InvalidRequest("role must be prefill, decode or colocated", param="role")
            if self._pools is None:
                raise NotSupported(
                    "this router does not start engines: change the number of workers where they are deployed"
                )
            if message.instances and message.ranks:
                raise InvalidRequest("either instances or ranks, not both", param="ranks")
            if message.ranks:
                engine_id = message.engine_id or None
                log.info("scale_asked", role=role, engine=engine_id, ranks=message.ranks, peer=context.peer())
                name, before = await self._pools.scale_ranks(role, message.ranks, engine_id)
                return pb.ScaleResponse(engine_id=name, ranks_before=before)
            log.info("scale_asked", role=role, instances=message.instances, peer=context.peer())
            return pb.ScaleResponse(instances_before=await self._pools.scale(role, message.instances))

    def _status(self, max_requests: int) -> pb.ClusterStatus:
        return cluster_status(
            self._serving.pipeline,
            router_id=self._router_id,
            model=self._serving.model_name,
            uptime_s=time.monotonic() - self._started_s,
            max_requests=min(max_requests, MAX_REQUESTS),
        )
