"""What Ray Serve and KubeRay are given: valid by Ray's own schema, and pods that Kubernetes takes."""

import warnings
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from custom_resources import check
from helm_tool import ROOT, Helm, of_kind, pod_templates

from pd_cluster.launch.serve_options import read_args

RAY = ROOT / "deploy" / "ray"


@pytest.fixture(scope="module")
def schema() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's modules use what its pydantic calls deprecated
        from ray.serve.schema import ServeDeploySchema
    return ServeDeploySchema


def serve_configs(helm: Helm) -> dict[str, dict[str, Any]]:
    manifest = yaml.safe_load((RAY / "rayservice.yaml").read_text())
    chart = of_kind(helm.example("rayservice"), "RayService")["demo-pd-cluster"]
    return {
        "serve.yaml": yaml.safe_load((RAY / "serve.yaml").read_text()),
        "rayservice.yaml": yaml.safe_load(manifest["spec"]["serveConfigV2"]),
        "chart": yaml.safe_load(chart["spec"]["serveConfigV2"]),
    }


def test_every_serve_config_is_valid_by_rays_schema(helm4: Helm, schema: Any) -> None:
    for name, config in serve_configs(helm4).items():
        (application,) = schema.model_validate(config).applications
        assert application.import_path == "router.serve_app:build", name
        assert application.route_prefix == "/"


def test_the_application_takes_the_arguments_that_it_is_given(helm4: Helm, tmp_path: Path) -> None:
    objects = helm4.example("rayservice", "--set=model.source=demo,router.drain.timeoutSeconds=33")
    path = tmp_path / "cluster.toml"
    path.write_text(of_kind(objects, "ConfigMap")["demo-pd-cluster"]["data"]["cluster.toml"])
    chart = yaml.safe_load(of_kind(objects, "RayService")["demo-pd-cluster"]["spec"]["serveConfigV2"])
    args = chart["applications"][0]["args"]
    assert args["config"] == "/etc/pd-cluster/cluster.toml"
    config, options = read_args({**args, "config": str(path)})
    assert (config.prefill.instances, config.prefill.tensor_parallel, config.decode.data_parallel) == (2, 4, 8)
    assert (config.launch.launcher, config.security.allow_insecure) == ("ray", True)
    assert (options.num_replicas, options.max_ongoing_requests, options.drain_s) == (2, 256, 33.0)
    for name in ("serve.yaml", "rayservice.yaml"):
        read_args(serve_configs(helm4)[name]["applications"][0]["args"])


def test_rays_schema_notices_a_misspelt_key(helm4: Helm, schema: Any) -> None:
    config = serve_configs(helm4)["serve.yaml"]
    config["applications"][0]["import_pth"] = config["applications"][0].pop("import_path")
    with pytest.raises(ValueError, match="import_p"):
        schema.model_validate(config)


def test_the_manifest_is_a_rayservice_with_valid_pods() -> None:
    manifest = yaml.safe_load((RAY / "rayservice.yaml").read_text())
    check(manifest)
    for name, pod in pod_templates([manifest]).items():
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod["spec"]}
        kubernetes_validate.validate(whole, "1.34", strict=True)


def test_no_rank_is_placed_on_the_head(helm4: Helm) -> None:
    for service in (
        yaml.safe_load((RAY / "rayservice.yaml").read_text()),
        of_kind(helm4.example("rayservice"), "RayService")["demo-pd-cluster"],
    ):
        assert service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
        assert service["spec"]["excludeHeadPodFromServeSvc"] is True


def test_the_chart_runs_ray_in_the_version_that_the_image_has(helm4: Helm) -> None:
    import ray

    chart = of_kind(helm4.template("--set=mode=rayservice"), "RayService")["demo-pd-cluster"]
    manifest = yaml.safe_load((RAY / "rayservice.yaml").read_text())
    for found in (chart, manifest):
        assert found["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__
