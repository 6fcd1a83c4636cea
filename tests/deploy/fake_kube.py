"""A Kubernetes API in memory: enough for helm to install, upgrade, roll back, test and uninstall for real.

It serves discovery, stores objects, checks each against Kubernetes' schemas, streams watches, and plays the controllers
that helm waits for: workloads become ready, claims are bound, test pods succeed.
"""

import asyncio
import copy
import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import kubernetes_validate
from aiohttp import web
from kube_wire import Object, apply_patch, decode

KUBERNETES = "1.34"


class Kind(NamedTuple):
    plural: str
    kind: str
    namespaced: bool = True


RESOURCES: dict[str, list[Kind]] = {
    "v1": [
        Kind("secrets", "Secret"),
        Kind("configmaps", "ConfigMap"),
        Kind("services", "Service"),
        Kind("pods", "Pod"),
        Kind("serviceaccounts", "ServiceAccount"),
        Kind("persistentvolumeclaims", "PersistentVolumeClaim"),
        Kind("namespaces", "Namespace", namespaced=False),
    ],
    "apps/v1": [
        Kind("deployments", "Deployment"),
        Kind("replicasets", "ReplicaSet"),
        Kind("statefulsets", "StatefulSet"),
    ],
    "batch/v1": [Kind("jobs", "Job")],
    "policy/v1": [Kind("poddisruptionbudgets", "PodDisruptionBudget")],
    "autoscaling/v2": [Kind("horizontalpodautoscalers", "HorizontalPodAutoscaler")],
    "networking.k8s.io/v1": [Kind("networkpolicies", "NetworkPolicy"), Kind("ingresses", "Ingress")],
    "ray.io/v1": [Kind("rayservices", "RayService")],
}


class Key(NamedTuple):
    group: str
    plural: str
    namespace: str
    name: str


class ApiError(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message

    def response(self) -> web.Response:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": self.code}
        return web.json_response(status | {"reason": self.reason, "message": self.message}, status=self.code)


class Store:
    """Objects by key; every change has a number and is told to whoever watches."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.version = 1
        self.watchers: list[asyncio.Queue[tuple[str, Key, Object]]] = []

    def put(self, key: Key, found: Object) -> None:
        event = "MODIFIED" if key in self.objects else "ADDED"
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        self.objects[key] = found
        self._tell(event, key, found)

    def delete(self, key: Key) -> Object:
        found = self.objects.pop(key)
        self.version += 1
        self._tell("DELETED", key, found)
        uid = found["metadata"]["uid"]
        for other, owned in list(self.objects.items()):
            if any(owner["uid"] == uid for owner in owned["metadata"].get("ownerReferences", [])):
                self.delete(other)
        return found

    def select(self, group: str, plural: str, namespace: str, query: Any) -> Iterator[Object]:
        for key, found in sorted(self.objects.items()):
            here = (key.group, key.plural) == (group, plural) and namespace in ("", key.namespace)
            if here and _matches(found, query):
                yield found

    def _tell(self, event: str, key: Key, found: Object) -> None:
        for watcher in self.watchers:
            watcher.put_nowait((event, key, copy.deepcopy(found)))


def _matches(found: Object, query: Any) -> bool:
    labels = found["metadata"].get("labels") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        if "!=" in term:
            name, _, value = term.partition("!=")
            if labels.get(name) == value:
                return False
        elif "=" in term:
            name, _, value = term.replace("==", "=").partition("=")
            if labels.get(name) != value:
                return False
        elif term not in labels:
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        name, _, value = term.replace("==", "=").partition("=")
        if name == "metadata.name" and found["metadata"]["name"] != value:
            return False
    return True


class FakeKube:
    """`async with FakeKube() as kube`: serves on a free port of loopback; `kubeconfig(path)` points helm at it."""

    def __init__(self) -> None:
        self.store = Store()
        self.requests: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def __aenter__(self) -> "FakeKube":
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self._runner.cleanup()

    def kubeconfig(self, path: Path) -> Path:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            "users": [{"name": "fake", "user": {}}],
            "current-context": "fake",
        }
        path.write_text(json.dumps(config))
        return path

    def of_kind(self, kind: str) -> dict[str, Object]:
        return {key.name: found for key, found in self.store.objects.items() if found["kind"] == kind}

    # ---- one request

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        try:
            return self._discover(request.path) or await self._resource(request)
        except ApiError as error:
            return error.response()

    def _discover(self, path: str) -> web.Response | None:
        if path == "/version":
            major, minor = KUBERNETES.split(".")
            return web.json_response({"major": major, "minor": minor, "gitVersion": f"v{KUBERNETES}.0"})
        if path == "/api":
            return web.json_response({"kind": "APIVersions", "versions": ["v1"]})
        if path == "/apis":
            groups = []
            for group in RESOURCES:
                name, slash, version = group.partition("/")
                if slash:
                    served = {"groupVersion": group, "version": version}
                    groups.append({"name": name, "versions": [served], "preferredVersion": served})
            return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        if path == "/openapi/v3":
            return web.json_response(
                {"paths": {_base(g)[1:]: {"serverRelativeURL": f"/openapi/v3{_base(g)}"} for g in RESOURCES}}
            )
        for group, kinds in RESOURCES.items():
            if path == _base(group):
                listed = [_listed(kind) for kind in kinds]
                return web.json_response(
                    {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": listed}
                )
            if path == f"/openapi/v3{_base(group)}":
                return web.json_response(_openapi(group, kinds))
        return None

    async def _resource(self, request: web.Request) -> web.StreamResponse:
        group = next((g for g in RESOURCES if request.path.startswith(f"{_base(g)}/")), None)
        if group is None:
            raise ApiError(404, "NotFound", f"nothing is at {request.path}")
        parts = request.path.removeprefix(f"{_base(group)}/").split("/")
        namespace = ""
        if parts[0] == "namespaces" and len(parts) > 2:
            namespace, parts = parts[1], parts[2:]
        kind = next((kind for kind in RESOURCES[group] if kind.plural == parts[0]), None)
        if kind is None:
            raise ApiError(404, "NotFound", f"{group} has no {parts[0]}")
        name = parts[1] if len(parts) > 1 else ""
        key = Key(group, kind.plural, namespace, name)
        raw = await request.read()
        match request.method:
            case "GET" if not name and request.query.get("watch") in ("true", "1"):
                return await self._watch(request, key, kind)
            case "GET" if not name:
                items = list(self.store.select(group, kind.plural, namespace, request.query))
                meta = {"resourceVersion": str(self.store.version)}
                return web.json_response(
                    {"kind": f"{kind.kind}List", "apiVersion": group, "metadata": meta, "items": items}
                )
            case "GET":
                return web.json_response(self._existing(key))
            case "POST":
                return self._create(key, kind, decode(raw, request.content_type))
            case "PUT" | "PATCH":
                return self._change(request, key, kind, decode(raw, request.content_type))
            case "DELETE":
                self._existing(key)
                self.store.delete(key)
                return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})
            case method:
                raise ApiError(405, "MethodNotAllowed", method)

    def _existing(self, key: Key) -> Object:
        if key not in self.store.objects:
            raise ApiError(404, "NotFound", f'{key.plural} "{key.name}" not found')
        return self.store.objects[key]

    def _create(self, key: Key, kind: Kind, body: Object) -> web.Response:
        key = key._replace(name=body["metadata"]["name"])
        if key in self.store.objects:
            raise ApiError(409, "AlreadyExists", f'{key.plural} "{key.name}" already exists')
        return self._admit(key, kind, body, None, 201)

    def _change(self, request: web.Request, key: Key, kind: Kind, body: Object) -> web.Response:
        applying = "apply-patch" in request.content_type
        old = self.store.objects.get(key) if applying else self._existing(key)
        new = body if request.method == "PUT" else apply_patch(old, body, request.content_type)
        if kind.kind in ("Deployment", "StatefulSet") and old and new["spec"]["selector"] != old["spec"]["selector"]:
            raise ApiError(422, "Invalid", f'{kind.kind} "{key.name}" is invalid: spec.selector: field is immutable')
        return self._admit(key, kind, new, old, 200 if old else 201)

    def _admit(self, key: Key, kind: Kind, new: Object, old: Object | None, code: int) -> web.Response:
        """Check an object and keep it, with what the API server itself sets."""
        whole = {name: value for name, value in new.items() if name != "status"}
        if key.group != "ray.io/v1":  # of others' resources there is no schema here
            try:
                kubernetes_validate.validate(whole, KUBERNETES, strict=True)
            except kubernetes_validate.ValidationError as error:
                where = ".".join(map(str, error.path))
                message = f'{kind.kind} "{key.name}" is invalid: {where}: {error.message}'
                raise ApiError(422, "Invalid", message) from None
        meta = new["metadata"]
        before = old["metadata"] if old else {}
        meta["uid"] = before.get("uid", str(uuid.uuid4()))
        meta["creationTimestamp"] = before.get("creationTimestamp", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        meta["generation"] = before.get("generation", 0) + (old is None or new.get("spec") != old.get("spec"))
        if kind.namespaced:
            meta["namespace"] = key.namespace
        if kind.kind == "Service":
            address = old["spec"]["clusterIP"] if old else f"10.96.0.{len(self.store.objects) + 1}"
            new["spec"].setdefault("clusterIP", address)
        if old and "status" in old:
            new.setdefault("status", old["status"])
        self.store.put(key, new)
        task = asyncio.ensure_future(self._control(key, new))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return web.json_response(new, status=code)

    # ---- watches

    async def _watch(self, request: web.Request, key: Key, kind: Kind) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        changes: asyncio.Queue[tuple[str, Key, Object]] = asyncio.Queue()
        self.store.watchers.append(changes)

        async def send(event: str, found: Object) -> None:
            await response.write(json.dumps({"type": event, "object": found}).encode() + b"\n")

        try:
            since = int(request.query.get("resourceVersion") or 0)
            for found in self.store.select(key.group, key.plural, key.namespace, request.query):
                if since == 0 or int(found["metadata"]["resourceVersion"]) > since:
                    await send("ADDED", found)
            if request.query.get("sendInitialEvents") == "true":
                meta = {
                    "resourceVersion": str(self.store.version),
                    "annotations": {"k8s.io/initial-events-end": "true"},
                }
                await send("BOOKMARK", {"kind": kind.kind, "apiVersion": key.group, "metadata": meta})
            while True:
                event, changed, found = await changes.get()
                mine = (changed.group, changed.plural) == (key.group, key.plural)
                if mine and key.namespace in ("", changed.namespace) and _matches(found, request.query):
                    await send(event, found)
        except (ConnectionResetError, ConnectionError):
            return response
        finally:
            self.store.watchers.remove(changes)

    # ---- controllers

    async def _control(self, key: Key, found: Object) -> None:
        """Bring about, a moment later, what a cluster's controllers would."""
        await asyncio.sleep(0.05)
        if self.store.objects.get(key) is not found:
            return
        replicas = found.get("spec", {}).get("replicas", 1)
        counts = dict.fromkeys(("replicas", "readyReplicas", "availableReplicas", "updatedReplicas"), replicas)
        status: Object | None = None
        match found["kind"]:
            case "Deployment":
                self._own_replica_set(key, found, replicas)
                conditions = [
                    {"type": "Available", "status": "True"},
                    {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"},
                ]
                status = {**counts, "conditions": conditions}
            case "StatefulSet":
                revision = f"{key.name}-{found['metadata']['generation']}"
                status = {**counts, "currentReplicas": replicas}
                status |= {"currentRevision": revision, "updateRevision": revision}
            case "PersistentVolumeClaim":
                status = {"phase": "Bound"}
            case "Pod":
                status = {"phase": "Succeeded", "conditions": [{"type": "Ready", "status": "False"}]}
            case _:
                pass
        if status is not None and found.get("status") != status:
            status["observedGeneration"] = found["metadata"]["generation"]
            self.store.put(key, {**found, "metadata": dict(found["metadata"]), "status": status})

    def _own_replica_set(self, key: Key, deployment: Object, replicas: int) -> None:
        name = f"{key.name}-{deployment['metadata']['generation']}"
        template = deployment["spec"]["template"]
        owner = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": key.name,
            "uid": deployment["metadata"]["uid"],
            "controller": True,
        }
        made = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {
                "name": name,
                "namespace": key.namespace,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": deployment["metadata"]["creationTimestamp"],
                "labels": template["metadata"]["labels"],
                "ownerReferences": [owner],
            },
            "spec": {"replicas": replicas, "selector": deployment["spec"]["selector"], "template": template},
            "status": dict.fromkeys(("replicas", "readyReplicas", "availableReplicas"), replicas),
        }
        self.store.put(Key("apps/v1", "replicasets", key.namespace, name), made)


def _base(group: str) -> str:
    return f"/apis/{group}" if "/" in group else f"/api/{group}"


def _listed(kind: Kind) -> Object:
    return {
        "name": kind.plural,
        "singularName": kind.kind.lower(),
        "kind": kind.kind,
        "namespaced": kind.namespaced,
        "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
    }


def _openapi(group: str, kinds: list[Kind]) -> Object:
    """That patches take `fieldValidation`, which helm looks for."""
    name, slash, version = group.partition("/")
    names = {"group": name, "version": version} if slash else {"group": "", "version": name}
    parameters = [
        {"name": parameter, "in": "query", "schema": {"type": "string"}}
        for parameter in ("dryRun", "fieldValidation", "fieldManager")
    ]
    paths = {}
    for kind in kinds:
        scope = "/namespaces/{namespace}" if kind.namespaced else ""
        patch = {"x-kubernetes-group-version-kind": {**names, "kind": kind.kind}, "parameters": parameters}
        paths[f"{_base(group)}{scope}/{kind.plural}/{{name}}"] = {
            "patch": patch | {"responses": {"200": {"description": "ok"}}}
        }
    return {"openapi": "3.0.0", "info": {"title": "fake", "version": "1"}, "paths": paths}
