"""Plays kubelet for rendered pods: their containers are plain processes with addresses of loopback, one for each pod.

It does what the pod says: arguments with `$(NAMES)` expanded, environment by field references, ConfigMaps and Secrets
as files, probes by named ports, the preStop hook before SIGTERM, and SIGKILL when the grace period is over.
"""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helm_tool import of_kind

Object = dict[str, Any]
SITE = Path(__file__).parent / "cluster_dns"
BIN = Path(sys.executable).parent


class Pod:
    """One pod with one container."""

    def __init__(self, name: str, ip: str, pod: Object, files: "Files", directory: Path, dns: Path) -> None:
        self.name = name
        self.ip = ip
        self.labels: dict[str, str] = pod["metadata"].get("labels", {})
        self.spec: Object = pod["spec"]
        (self.container,) = self.spec["containers"]
        self._directory = directory
        self._mounts = self._mount(files)
        self._env = self._environment(pod["metadata"], files, dns)
        self.process: subprocess.Popen[bytes] | None = None
        self.log = directory / "log"

    # ---- what kubelet prepares

    def _mount(self, files: "Files") -> dict[str, Path]:
        """Where each mount path really is. Longer paths come first, so that /etc/x-tls is not taken for /etc/x."""
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes", [])}
        mounts = {}
        for mount in self.container.get("volumeMounts", []):
            place = self._directory / mount["name"]
            place.mkdir(parents=True)
            for file, content in files.of_volume(volumes[mount["name"]]).items():
                (place / file).write_bytes(content)
            mounts[mount["mountPath"]] = place
        mounts = dict(sorted(mounts.items(), key=lambda item: -len(item[0])))
        for place in mounts.values():
            for file in place.glob("*.toml"):
                file.write_text(_placed(file.read_text(), mounts))
        return mounts

    def _environment(self, metadata: Object, files: "Files", dns: Path) -> dict[str, str]:
        fields = {"status.podIP": self.ip, "metadata.name": self.name}
        fields |= {f"metadata.labels['{key}']": value for key, value in metadata.get("labels", {}).items()}
        env = {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(SITE),
            "CLUSTER_DNS": str(dns),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._mounts.get("/tmp", self._directory)),  # a container's /tmp is its own
        }
        for entry in self.container.get("env", []):
            if "value" in entry:
                env[entry["name"]] = _placed(entry["value"], self._mounts)
            elif "fieldRef" in entry["valueFrom"]:
                env[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                reference = entry["valueFrom"]["secretKeyRef"]
                env[entry["name"]] = files.secrets[reference["name"]][reference["key"]].decode()
        return env

    def command(self) -> list[str]:
        words = [*self.container["command"], *self.container.get("args", [])]
        expanded = [re.sub(r"\$\((\w+)\)", lambda found: self._env[found[1]], word) for word in words]
        return [_placed(word, self._mounts) for word in expanded]

    # ---- its life

    def start(self) -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(),
                env=self._env,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def probe(self, name: str) -> int:
        """The HTTP status of a probe; 0 when nobody answers."""
        http = self.container[name]["httpGet"]
        return get(f"http://{self.ip}:{self.port(http['port'])}{http['path']}")[0]

    def port(self, name: str | int) -> int:
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        return int(ports.get(name, name))

    def pre_stop(self) -> "subprocess.CompletedProcess[str]":
        hook = self.container["lifecycle"]["preStop"]["exec"]["command"]
        grace_s = self.spec["terminationGracePeriodSeconds"]
        return subprocess.run(hook, env=self._env, capture_output=True, text=True, timeout=grace_s, check=False)

    def terminate(self) -> int:
        """SIGTERM, and the exit code; kills and fails when the grace period does not suffice."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(self.spec["terminationGracePeriodSeconds"])

    def family(self) -> list[int]:
        """Process ids of everything that the container started and that still lives."""
        mark = f"TMPDIR={self._env['TMPDIR']}".encode()
        found = []
        for path in Path("/proc").iterdir():
            try:
                if path.name.isdecimal() and mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
            except OSError:
                continue  # it ended, or is another user's
        return found

    def clean_up(self) -> None:
        for pid in self.family():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self.process is not None:
            self.process.wait(10)

    def run(self) -> "subprocess.CompletedProcess[str]":
        """A pod that ends by itself."""
        where = {"env": self._env, "cwd": self._directory}
        return subprocess.run(self.command(), **where, capture_output=True, text=True, timeout=120, check=False)


def _placed(text: str, mounts: dict[str, Path]) -> str:
    """`text` with mount paths replaced by where they really are, each only once."""
    if not mounts:
        return text
    paths = "|".join(map(re.escape, mounts))
    return re.sub(rf"(?<![\w./-])({paths})(?=/|$|\")", lambda found: str(mounts[found[1]]), text, flags=re.MULTILINE)


class Files:
    """ConfigMaps of the release and Secrets of the test."""

    def __init__(self, objects: list[Object], secrets: dict[str, dict[str, bytes]]) -> None:
        self.secrets = dict(secrets)
        self._maps = {name: found["data"] for name, found in of_kind(objects, "ConfigMap").items()}
        for name, found in of_kind(objects, "Secret").items():
            self.secrets[name] = {key: base64.b64decode(value) for key, value in found["data"].items()}

    def of_volume(self, volume: Object) -> dict[str, bytes]:
        if "configMap" in volume:
            return {file: text.encode() for file, text in self._maps[volume["configMap"]["name"]].items()}
        sources = volume.get("projected", {}).get("sources", [])
        if "secret" in volume:
            secret = volume["secret"]
            sources = [{"secret": {"name": secret["secretName"], "items": secret.get("items")}}]
        found = {}
        for source in sources:
            values = self.secrets[source["secret"]["name"]]
            items = source["secret"].get("items") or [{"key": key, "path": key} for key in values]
            found |= {item["path"]: values[item["key"]] for item in items}
        return found


class Node:
    """Starts the pods of a rendered release, and knows their names as the cluster's DNS would."""

    def __init__(self, objects: list[Object], secrets: dict[str, dict[str, bytes]], directory: Path) -> None:
        self._objects = objects
        self._files = Files(objects, secrets)
        self._directory = directory
        self._dns = directory / "dns.json"
        self._num_pods = 0
        network = os.getpid() % (250 * 250)
        self._network = f"127.{network // 250 + 2}.{network % 250 + 2}"  # another run on this machine has another one
        self.pods: list[Pod] = []
        for kind in ("StatefulSet", "Deployment"):
            for name, found in of_kind(objects, kind).items():
                for ordinal in range(found["spec"]["replicas"]):
                    self.pods.append(self._pod(f"{name}-{ordinal}", found["spec"]["template"]))
        self._write_dns()

    def _pod(self, name: str, pod: Object) -> Pod:
        self._num_pods += 1
        directory = self._directory / name
        directory.mkdir()
        return Pod(name, f"{self._network}.{self._num_pods}", pod, self._files, directory, self._dns)

    def _write_dns(self) -> None:
        names: dict[str, list[str]] = {}
        for name, service in of_kind(self._objects, "Service").items():
            domain = f"{name}.{service['metadata']['namespace']}.svc.cluster.local"
            for pod in self.pods:
                if service["spec"]["selector"].items() <= pod.labels.items():
                    names.setdefault(domain, []).append(pod.ip)
                    names[f"{pod.name}.{domain}"] = [pod.ip]
        self._dns.write_text(json.dumps(names))

    def of_component(self, component: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.labels["app.kubernetes.io/component"] == component]

    def tests(self) -> list[Pod]:
        """The pods of `helm test`."""
        return [self._pod(name, found) for name, found in of_kind(self._objects, "Pod").items()]

    def start(self) -> None:
        for pod in self.pods:
            pod.start()

    def stop(self) -> None:
        for pod in self.pods:
            pod.clean_up()


def get(url: str, timeout_s: float = 10.0) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def until(condition: Callable[[], bool], within_s: float, pods: list[Pod]) -> float:
    """The seconds it took. Fails with the pods' logs."""
    started_s = time.monotonic()
    while not condition():
        ended = [pod.name for pod in pods if pod.process is not None and pod.process.poll() not in (None, 0)]
        if ended or time.monotonic() - started_s > within_s:
            logs = "\n".join(f"== {pod.name}\n{pod.log.read_text()[-3000:]}" for pod in pods)
            raise AssertionError(f"waited in vain; ended: {ended}\n{logs}")
        time.sleep(0.1)
    return time.monotonic() - started_s
