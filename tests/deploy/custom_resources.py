"""The parts of other projects' resources that the chart writes, as strict types: an unknown or misspelt field fails.

The API server checks them against the projects' own definitions; these types hold what their documentation says.
"""

from typing import Any, Literal

import msgspec
from msgspec import Struct

Labels = dict[str, str]


class _Strict(Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class Selector(_Strict):
    matchLabels: Labels
    matchExpressions: list[dict[str, Any]] = []


class Endpoint(_Strict):
    port: str
    path: str
    interval: str


class ServiceMonitor(_Strict):
    selector: Selector
    endpoints: list[Endpoint]


class PodMonitor(_Strict):
    selector: Selector
    podMetricsEndpoints: list[Endpoint]


class Rule(_Strict):
    expr: str
    record: str | None = None
    alert: str | None = None
    labels: Labels = {}
    annotations: Labels = {}
    for_: str | None = msgspec.field(default=None, name="for")


class RuleGroup(_Strict):
    name: str
    rules: list[Rule]


class PrometheusRule(_Strict):
    groups: list[RuleGroup]


class SecretKey(_Strict):
    name: str
    key: str


class ValueFrom(_Strict):
    secretKeyRef: SecretKey


class RedisPassword(_Strict):
    valueFrom: ValueFrom


class GcsFaultTolerance(_Strict):
    redisAddress: str
    redisPassword: RedisPassword | None = None


class HeadGroup(_Strict):
    rayStartParams: Labels
    template: dict[str, Any]


class WorkerGroup(_Strict):
    groupName: str
    replicas: int
    minReplicas: int
    maxReplicas: int
    rayStartParams: Labels
    template: dict[str, Any]


class RayCluster(_Strict):
    rayVersion: str
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]
    enableInTreeAutoscaling: bool = False
    gcsFaultToleranceOptions: GcsFaultTolerance | None = None


class UpgradeStrategy(_Strict):
    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]


class RayService(_Strict):
    serveConfigV2: str
    rayClusterConfig: RayCluster
    excludeHeadPodFromServeSvc: bool = False
    upgradeStrategy: UpgradeStrategy | None = None


class RollingUpdate(_Strict):
    maxUnavailable: int
    maxSurge: int


class Rollout(_Strict):
    type: Literal["RollingUpdate"]
    rollingUpdateConfiguration: RollingUpdate


class LeaderWorkerTemplate(_Strict):
    size: int
    workerTemplate: dict[str, Any]
    restartPolicy: Literal["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]


class LeaderWorkerSet(_Strict):
    replicas: int
    startupPolicy: Literal["LeaderCreated", "LeaderReady"]
    rolloutStrategy: Rollout
    leaderWorkerTemplate: LeaderWorkerTemplate


class ParentRef(_Strict):
    name: str
    namespace: str | None = None


class BackendRef(_Strict):
    name: str
    port: int


class RouteRule(_Strict):
    backendRefs: list[BackendRef]


class Route(_Strict):
    parentRefs: list[ParentRef]
    rules: list[RouteRule]
    hostnames: list[str] = []


TYPES: dict[tuple[str, str], type[Struct]] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): ServiceMonitor,
    ("monitoring.coreos.com/v1", "PodMonitor"): PodMonitor,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PrometheusRule,
    ("ray.io/v1", "RayService"): RayService,
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LeaderWorkerSet,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): Route,
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): Route,
}


def is_custom(found: dict[str, Any]) -> bool:
    return (found["apiVersion"], found["kind"]) in TYPES


def check(found: dict[str, Any]) -> None:
    """Raises msgspec.ValidationError that names the field."""
    msgspec.convert(found["spec"], TYPES[found["apiVersion"], found["kind"]])
