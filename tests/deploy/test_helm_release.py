"""The life of a release by helm's own commands, against a Kubernetes API in memory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_kube import FakeKube
from helm_tool import CHART, Helm, HelmError

CPU = str(CHART / "examples" / "cpu.yaml")
IN = ["--namespace", "llm"]
WAIT = ["--wait", "--timeout", "30s"]


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    async with FakeKube() as server:
        yield server


async def run(helm: Helm, kube: FakeKube, path: Path, *args: str) -> str:
    return await asyncio.to_thread(helm.run, *args, *IN, kubeconfig=kube.kubeconfig(path / "kubeconfig"))


async def test_a_release_is_installed_upgraded_rolled_back_tested_and_uninstalled(
    helm: Helm, kube: FakeKube, tmp_path: Path
) -> None:
    said = await run(helm, kube, tmp_path, "install", "demo", str(CHART), "--values", CPU, *WAIT)
    assert "prefill: 1 x DP1 x TP1" in said
    assert "decode: 1 x DP2 x TP1" in said
    assert "helm -n llm test demo" in said
    assert "deployment/demo-pd-cluster-router" in said
    workloads = set(kube.of_kind("Deployment")) | set(kube.of_kind("StatefulSet"))
    assert workloads == {f"demo-pd-cluster-{role}" for role in ("router", "prefill", "decode")}
    assert all(found["metadata"]["namespace"] == "llm" for found in kube.of_kind("NetworkPolicy").values())
    first = kube.of_kind("StatefulSet")["demo-pd-cluster-decode"]

    changes = ["--set=decode.replicas=3,kv.numBlocks=77", "--set=router.podDisruptionBudget.enabled=false"]
    await run(helm, kube, tmp_path, "upgrade", "demo", str(CHART), "--values", CPU, *changes, *WAIT)
    decode = kube.of_kind("StatefulSet")["demo-pd-cluster-decode"]
    assert decode["spec"]["replicas"] == 3
    assert decode["metadata"]["uid"] == first["metadata"]["uid"], "changed in place"
    assert "num_blocks = 77" in kube.of_kind("ConfigMap")["demo-pd-cluster"]["data"]["cluster.toml"]
    assert "demo-pd-cluster-router" not in kube.of_kind("PodDisruptionBudget")

    await run(helm, kube, tmp_path, "rollback", "demo", "1", *WAIT)
    decode = kube.of_kind("StatefulSet")["demo-pd-cluster-decode"]
    assert decode["spec"]["template"] == first["spec"]["template"]
    assert decode["spec"]["replicas"] == 1
    assert "num_blocks" not in kube.of_kind("ConfigMap")["demo-pd-cluster"]["data"]["cluster.toml"]
    assert "demo-pd-cluster-router" in kube.of_kind("PodDisruptionBudget")

    said = await run(helm, kube, tmp_path, "test", "demo")
    assert said.count("Succeeded") >= 4, said
    assert not kube.of_kind("Pod"), "tests that succeeded leave no pod"

    await run(helm, kube, tmp_path, "uninstall", "demo", *WAIT)
    left = {(found["kind"], key.name) for key, found in kube.store.objects.items()}
    assert left <= {("ConfigMap", "demo-pd-cluster-smoke")}, "of hooks helm keeps the last"


async def test_the_model_cache_outlives_the_release(helm: Helm, kube: FakeKube, tmp_path: Path) -> None:
    cache = "--set=model.cache.enabled=true,model.cache.size=5Gi"
    await run(helm, kube, tmp_path, "install", "demo", str(CHART), cache, *WAIT)
    await run(helm, kube, tmp_path, "uninstall", "demo", *WAIT)
    assert list(kube.of_kind("PersistentVolumeClaim")) == ["demo-pd-cluster-models"]


async def test_a_ray_service_is_installed(helm: Helm, kube: FakeKube, tmp_path: Path) -> None:
    example = str(CHART / "examples" / "rayservice.yaml")
    said = await run(helm, kube, tmp_path, "install", "demo", str(CHART), "--values", example)
    assert "as a RayService" in said
    assert list(kube.of_kind("RayService")) == ["demo-pd-cluster"]
    assert not kube.of_kind("Deployment")


async def test_the_server_refuses_what_kubernetes_would(helm4: Helm, kube: FakeKube, tmp_path: Path) -> None:
    wrong = "--set=router.extraEnv[0].name=X,router.extraEnv[0].valeu=1"
    with pytest.raises(HelmError, match="valeu"):
        await run(helm4, kube, tmp_path, "install", "demo", str(CHART), wrong, *WAIT)
