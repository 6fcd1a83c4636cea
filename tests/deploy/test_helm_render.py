"""What the chart renders to: valid for Kubernetes, equal under both helms, and what its values say."""

from typing import Any

import kubernetes_validate
import msgspec
import pytest
from custom_resources import check, is_custom
from helm_tool import CHART, EXAMPLES, Helm, of_kind, pod_templates

from pd_cluster.config import EngineSection, load_config
from pd_cluster.errors import ConfigError

KUBERNETES = ("1.28", "1.34")
EVERYTHING = [
    "--set=router.httpRoute.enabled=true,router.httpRoute.gateway=edge,router.httpRoute.hostnames={llm.example.org}",
    "--set=router.grpcRoute.enabled=true,router.grpcRoute.gateway=edge,router.grpcRoute.gatewayNamespace=infra",
    "--set=router.ingress.enabled=true,router.autoscaling.enabled=true",
    "--set=monitoring.serviceMonitor.enabled=true,monitoring.podMonitor.enabled=true",
    "--set=monitoring.prometheusRule.enabled=true,monitoring.dashboard.enabled=true",
    "--set=image.pullSecrets={registry},image.digest=sha256:" + "0" * 64,
    "--set=decode.hostNetwork=true,security.allowInsecure=true,security.token.existingSecret=token",
    "--set=model.huggingFace.existingSecret=hf,model.cache.enabled=true",
    "--set=networkPolicy.clientsFrom[0].podSelector.matchLabels.app=web",
]
VARIANTS: dict[str, list[str]] = {
    "defaults": [],
    **{name: ["--values", str(CHART / "examples" / f"{name}.yaml")] for name in EXAMPLES},
    "everything": EVERYTHING,
    "colocated": ["--set=prefill.enabled=false"],
    "many-pods": ["--set=decode.podsPerEngine=4,decode.engine.dataParallel=4,decode.engine.tensorParallel=2"],
}


@pytest.fixture(scope="module")
def rendered(helm4: Helm) -> dict[str, list[dict[str, Any]]]:
    return {name: helm4.template(*args) for name, args in VARIANTS.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_example_passes_the_strict_lint(helm: Helm, variant: str) -> None:
    helm.run("lint", "--strict", str(CHART), *VARIANTS[variant])


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_helms_render_the_same(helm: Helm, rendered: dict[str, list[dict[str, Any]]], variant: str) -> None:
    assert helm.template(*VARIANTS[variant]) == rendered[variant]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_is_valid_for_kubernetes(
    rendered: dict[str, list[dict[str, Any]]], variant: str, version: str
) -> None:
    assert rendered[variant]
    for found in rendered[variant]:
        if is_custom(found):
            check(found)
        else:
            kubernetes_validate.validate(found, version, strict=True)
    for name, pod in pod_templates(rendered[variant]).items():
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **pod["metadata"]}, "spec": pod["spec"]}
        kubernetes_validate.validate(whole, version, strict=True)


def test_a_misspelt_field_would_be_noticed(rendered: dict[str, list[dict[str, Any]]]) -> None:
    deployment = of_kind(rendered["defaults"], "Deployment")["demo-pd-cluster-router"]
    broken = msgspec.convert(msgspec.to_builtins(deployment), dict[str, Any])
    broken["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(broken, KUBERNETES[-1], strict=True)
    monitor = of_kind(rendered["everything"], "PodMonitor")["demo-pd-cluster-workers"]
    monitor = {**monitor, "spec": {**monitor["spec"], "podMetricEndpoints": []}}
    with pytest.raises(msgspec.ValidationError, match="podMetricEndpoints"):
        check(monitor)


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_are_unique_and_everything_is_in_the_namespace(
    rendered: dict[str, list[dict[str, Any]]], variant: str
) -> None:
    seen = [(found["kind"], found["metadata"]["name"]) for found in rendered[variant]]
    assert len(seen) == len(set(seen))
    assert {found["metadata"].get("namespace") for found in rendered[variant]} == {"llm"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pod_runs_with_the_least_rights(rendered: dict[str, list[dict[str, Any]]], variant: str) -> None:
    pods = pod_templates(rendered[variant])
    assert pods
    for pod in pods.values():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            assert set(context["capabilities"].get("add", [])) <= {"IPC_LOCK"}
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_selector_finds_its_pods(rendered: dict[str, list[dict[str, Any]]], variant: str) -> None:
    labels = [pod["metadata"].get("labels", {}) for pod in pod_templates(rendered[variant]).values()]
    for found in rendered[variant]:
        spec = found.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector") or {}
        wanted = selector.get("matchLabels", selector if found["kind"] == "Service" else {})
        if found["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment", "StatefulSet"):
            assert any(wanted.items() <= have.items() for have in labels), found["metadata"]["name"]


def cluster_file(objects: list[dict[str, Any]]) -> str:
    return str(of_kind(objects, "ConfigMap")["demo-pd-cluster"]["data"]["cluster.toml"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cluster_file_is_one(rendered: dict[str, list[dict[str, Any]]], variant: str, tmp_path: Any) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_file(rendered[variant]))
    load_config(path)


def test_every_value_of_the_cluster_file_can_be_set(helm4: Helm, tmp_path: Any) -> None:
    sets = {
        "model.source": "acme/model",
        "model.servedName": "it",
        "model.dtype": "bfloat16",
        "model.maxModelLen": 777,
        "kv.blockSize": 32,
        "kv.numBlocks": 99,
        "kv.memoryFraction": 0.25,
        "kv.maxBytes": 5 << 30,
        "kv.prefixCache": "false",
        "kv.verify": "true",
        "kv.leaseSeconds": 7,
        "kv.transferDeadlineSeconds": 8,
        "decode.engine.tensorParallel": 2,
        "decode.engine.dataParallel": 4,
        "decode.engine.maxNumSeqs": 11,
        "decode.engine.maxNumBatchedTokens": 12,
        "decode.engine.redundantExperts": 13,
        "decode.engine.blockSize": 48,
        "decode.engine.numBlocks": 14,
        "decode.engine.threads": 15,
        "router.httpPort": 9000,
        "router.grpc.port": 9001,
        "router.maxQueue": 16,
        "router.requestTimeoutSeconds": 17,
        "router.maxRetries": 18,
        "router.apiKey.existingSecret": "keys",
        "router.adminKey.existingSecret": "keys",
        "router.grpc.tls.existingSecret": "grpc-tls",
        "security.tls.existingSecret": "tls",
        "security.tls.serverName": "workers",
        "security.token.existingSecret": "token",
    }
    objects = helm4.template(*(f"--set={key}={value}" for key, value in sets.items()))
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_file(objects))
    config = load_config(path)
    assert (config.model.path, config.model.served_model_name, config.model.max_model_len) == ("acme/model", "it", 777)
    assert (config.kv.block_size, config.kv.num_blocks, config.kv.max_bytes) == (32, 99, 5 << 30)
    assert (config.kv.prefix_cache, config.kv.verify, config.kv.lease_s) == (False, True, 7.0)
    assert (config.decode.tensor_parallel, config.decode.data_parallel, config.decode.threads) == (2, 4, 15)
    assert (config.router.http_port, config.router.grpc_port, config.router.max_retries) == (9000, 9001, 18)
    assert config.security.allow_insecure is False
    mounts = of_kind(objects, "Deployment")["demo-pd-cluster-router"]["spec"]["template"]["spec"]["containers"][0]
    paths = {mount["mountPath"] for mount in mounts["volumeMounts"]}
    files = [config.router.api_key_file, config.security.token_file, config.security.certificate]
    files += [config.router.grpc_tls.certificate] if config.router.grpc_tls else []
    assert all(any(str(file).startswith(f"{mounted}/") for mounted in paths) for file in files)


ENGINE: dict[str, tuple[str, Any, Any]] = {  # the cluster file's key -> the chart's, a value, and what is read of it
    "tensor_parallel": ("tensorParallel", 2, 2),
    "data_parallel": ("dataParallel", 4, 4),
    "max_num_seqs": ("maxNumSeqs", 11, 11),
    "max_num_batched_tokens": ("maxNumBatchedTokens", 12, 12),
    "ttft_target_s": ("ttftTargetSeconds", 1.5, 1.5),
    "dispatcher": ("dispatcher", "nixl", "nixl"),
    "dispatch_dtype": ("dispatchDtype", "fp8", "fp8"),
    "micro_batches": ("microBatches", "auto", "auto"),
    "redundant_experts": ("redundantExperts", 13, 13),
    "expert_slots_per_rank": ("expertSlotsPerRank", 16, 16),
    "replica_choice": ("replicaChoice", "step", "step"),
    "rebalance": ("rebalance", "off", "off"),
    "block_size": ("blockSize", 48, 48),
    "num_blocks": ("numBlocks", 14, 14),
    "threads": ("threads", 15, 15),
    "cpus": ("cpus", "{0-3,4-7}", ["0-3", "4-7"]),
}
ELSEWHERE = {
    "instances",  # replicas
    "device",  # gpus.count
    "autoscale",  # of `serve` alone
    "rebalance_threshold",  # by extraConfig, as these are seldom needed
    "rebalance_sustain_s",
    "rebalance_cooldown_s",
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_every_key_of_an_engine_can_be_set(helm4: Helm, tmp_path: Any, role: str) -> None:
    assert ENGINE.keys() | ELSEWHERE == set(EngineSection.__struct_fields__)
    objects = helm4.template(*(f"--set={role}.engine.{key}={value}" for key, value, _ in ENGINE.values()))
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_file(objects))
    section = getattr(load_config(path), role)
    assert {key: getattr(section, key) for key in ENGINE} == {key: value for key, (_, _, value) in ENGINE.items()}
    assert section.elastic


def test_an_engine_is_by_default_what_it_is_without_the_chart(
    rendered: dict[str, list[dict[str, Any]]], tmp_path: Any
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_file(rendered["defaults"]))
    config = load_config(path)
    assert (config.prefill, config.decode) == (EngineSection(), EngineSection())


def test_pods_that_are_given_gpus_ask_kubernetes_for_them_and_must_compute_on_them(helm4: Helm, tmp_path: Any) -> None:
    sets = "decode.gpus.count=4,decode.engine.dataParallel=8,decode.podsPerEngine=2"
    objects = helm4.template(f"--set={sets}")
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_file(objects))
    config = load_config(path)
    assert (config.prefill.device, config.decode.device) == ("auto", "cuda")
    assert (config.kv.memory_fraction, config.kv.max_bytes) == (None, None)
    for role, count in (("prefill", None), ("decode", 4)):
        pod = of_kind(objects, "StatefulSet")[f"demo-pd-cluster-{role}"]["spec"]["template"]["spec"]
        resources = pod["containers"][0]["resources"]
        assert resources["limits"].get("nvidia.com/gpu") == count
        assert resources["requests"].get("nvidia.com/gpu") == count
    path.write_text(cluster_file(helm4.template(f"--set={sets},extraConfig.decode.device=auto,kv.memoryFraction=0.8")))
    assert (load_config(path).decode.device, load_config(path).kv.memory_fraction) == ("auto", 0.8)
    path.write_text(cluster_file(helm4.template("--set=mode=rayservice,decode.gpus.count=4")))
    assert load_config(path).decode.device == "auto"  # Ray says what its nodes have


def test_keys_that_the_chart_does_not_name_go_through(helm4: Helm, tmp_path: Any) -> None:
    extra = "extraConfig.kv.lease_s=4,extraConfig.launch.max_restarts=9,extraConfig.kv.verify=true"
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_file(helm4.template(f"--set={extra}")))
    config = load_config(path)
    assert (config.kv.lease_s, config.kv.verify, config.launch.max_restarts) == (4.0, True, 9)
    path.write_text(cluster_file(helm4.template("--set=extraConfig.kv.leese_s=4")))
    with pytest.raises(ConfigError, match=r"kv\.leese_s"):
        load_config(path)


def test_a_change_of_the_cluster_file_restarts_pods_and_a_change_of_replicas_does_not(helm4: Helm) -> None:
    def checksums(*args: str) -> set[str]:
        pods = pod_templates(helm4.template("--set=tests.enabled=false", *args))
        return {pod["metadata"]["annotations"]["checksum/config"] for pod in pods.values()}

    before = checksums()
    assert len(before) == 1
    assert checksums("--set=kv.numBlocks=9") != before
    assert checksums("--set=prefill.replicas=7,router.replicas=5") == before


def test_replicas_are_left_to_the_autoscaler_when_it_is_on(rendered: dict[str, list[dict[str, Any]]]) -> None:
    pd = rendered["pd"]
    scaled = {hpa["spec"]["scaleTargetRef"]["name"] for hpa in of_kind(pd, "HorizontalPodAutoscaler").values()}
    assert scaled == {"demo-pd-cluster-router", "demo-pd-cluster-prefill", "demo-pd-cluster-decode"}
    workloads = of_kind(pd, "StatefulSet") | of_kind(pd, "Deployment")
    assert all("replicas" not in workload["spec"] for workload in workloads.values())
    decode = of_kind(pd, "HorizontalPodAutoscaler")["demo-pd-cluster-decode"]["spec"]
    assert decode["metrics"][0]["pods"]["target"]["averageValue"] == "800m"
    assert decode["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 900


def test_pods_outlive_their_drain(rendered: dict[str, list[dict[str, Any]]]) -> None:
    for objects in rendered.values():
        for pod in pod_templates(objects).values():
            for container in pod["spec"]["containers"]:
                hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
                seconds = [float(arg.split("=")[1]) for arg in hook if "=" in arg]
                assert sum(seconds) < pod["spec"].get("terminationGracePeriodSeconds", 30)


def test_rdma_pods_ask_for_their_devices_and_may_lock_memory(rendered: dict[str, list[dict[str, Any]]]) -> None:
    decode = pod_templates(rendered["rdma"])["demo-pd-cluster-decode"]
    (container,) = decode["spec"]["containers"]
    for side in ("requests", "limits"):
        resources = container["resources"][side]
        assert (resources["rdma/hca"], resources["nvidia.com/gpu"], resources["hugepages-2Mi"]) == (8, 8, "4Gi")
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert decode["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"].startswith("rdma-net-0,")
    workload = of_kind(rendered["rdma"], "LeaderWorkerSet")["demo-pd-cluster-decode"]["spec"]
    assert (workload["replicas"], workload["leaderWorkerTemplate"]["size"]) == (1, 40)


def test_routers_look_at_every_control_port_and_the_policy_opens_just_these(
    rendered: dict[str, list[dict[str, Any]]],
) -> None:
    objects = rendered["rdma"]
    (router,) = of_kind(objects, "Deployment")["demo-pd-cluster-router"]["spec"]["template"]["spec"]["containers"]
    found = [arg for arg in router["args"] if arg.startswith("--discover=")]
    domain = "llm.svc.cluster.local"
    assert found == [
        f"--discover=dns:demo-pd-cluster-prefill.{domain}:7000-7001",
        f"--discover=dns:demo-pd-cluster-decode.{domain}:7000-7001",
    ]
    policy = of_kind(objects, "NetworkPolicy")["demo-pd-cluster-decode"]["spec"]
    control, workers, probes = policy["ingress"]
    assert control["ports"] == [{"port": 7000, "endPort": 7001}]
    assert control["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
    assert "ports" not in workers
    roles = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in workers["from"]]
    assert roles == ["prefill", "decode"]
    assert probes["ports"] == [{"port": "probes"}]
