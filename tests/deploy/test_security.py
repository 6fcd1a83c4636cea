"""checkov's policies on every object of every example and on the Dockerfile: nothing fails without a reason.

`make security` installs checkov into a virtual environment of its own, for its dependencies would not fit beside ours.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_tool import EXAMPLES, ROOT, Helm, tools_directory

CONFIG = ROOT / "deploy" / "security" / "checkov.yaml"
PROBES = {"CKV_K8S_8", "CKV_K8S_9"}


@pytest.fixture(scope="module")
def checkov() -> str:
    found = shutil.which("checkov") or tools_directory() / "checkov" / "bin" / "checkov"
    if not Path(found).exists():
        pytest.skip("checkov is not installed: `make security` does that, and runs this test")
    return os.fspath(found)


def scan(checkov: str, *args: str) -> list[dict[str, Any]]:
    """Failed checks. Raises when nothing was looked at."""
    command = [checkov, *args, "--config-file", str(CONFIG), "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    reports = json.loads(done.stdout)
    reports = reports if isinstance(reports, list) else [reports]
    assert sum(report["summary"]["passed"] for report in reports) > 50, done.stderr
    assert not any(report["summary"]["parsing_errors"] for report in reports)
    return [failed for report in reports for failed in report["results"]["failed_checks"]]


def test_nothing_fails_without_a_reason(helm4: Helm, checkov: str, tmp_path: Path) -> None:
    for name in EXAMPLES:
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(helm4.example(name)))
    (tmp_path / "manifest.yaml").write_text((ROOT / "deploy" / "ray" / "rayservice.yaml").read_text())
    (tmp_path / "Dockerfile").write_text((ROOT / "deploy" / "docker" / "Dockerfile").read_text())
    failed = scan(checkov, "--directory", str(tmp_path))
    assert [f"{found['check_id']} {found['check_name']}: {found['resource']}" for found in failed] == []


def test_a_careless_pod_would_be_noticed(helm4: Helm, checkov: str, tmp_path: Path) -> None:
    objects = helm4.example("cpu")
    (deployment,) = [found for found in objects if found["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    container["securityContext"] = {"privileged": True}
    (tmp_path / "cpu.yaml").write_text(yaml.safe_dump_all(objects))
    assert "CKV_K8S_16" in {found["check_id"] for found in scan(checkov, "--directory", str(tmp_path))}


def test_only_pods_of_helm_test_go_without_probes(helm4: Helm) -> None:
    """The policies about probes are left out as a whole; this holds what they would say of all other pods."""
    assert set(yaml.safe_load(CONFIG.read_text())["skip-check"]) >= PROBES
    for name in EXAMPLES:
        for found in helm4.example(name):
            if found["kind"] in ("Deployment", "StatefulSet"):
                for container in found["spec"]["template"]["spec"]["containers"]:
                    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
