"""Values that cannot be meant are refused, by the schema or by name in a template."""

import json
from typing import Any

import pytest
from helm_tool import CHART, Helm, HelmError

SCHEMA = [
    "decode.engin.dataParallel=2",
    "decode.engine.dataParalel=2",
    "router.apiKey.exisingSecret=x",
    "modle.source=demo",
    "mode=serverless",
    "kv.blockSize=20",
    "kv.memoryFraction=1",
    "kv.memoryFraction=0",
    "router.httpPort=70000",
    "router.httpPort=http",
    "decode.replicas=-1",
    "decode.podsPerEngine=0",
    "decode.engine.tensorParallel=0",
    "decode.autoscaling.targetKvUsage=1.5",
    "decode.workload=DaemonSet",
    "prefill.resources.limits.memory=lots",
    "prefill.rdma.hugepages=some",
    "image.digest=sha256:abc",
    "image.pullPolicy=Sometimes",
    "model.cache.mountPath=models",
    "monitoring.podMonitor.interval=15",
    "podSecurity.runAsUser=0",
    "router.service.type=ExternalName",
    "rayService.workers[0].name=Pool",
    "security.tls.existingSecret=Not_A_Name",
]

TEMPLATES = [
    ("decode.terminationGracePeriodSeconds=60", "must be larger than drain.delaySeconds"),
    ("router.terminationGracePeriodSeconds=125", "must be larger than drain.delaySeconds"),
    ("decode.podsPerEngine=3", "cannot be dealt out evenly over podsPerEngine=3"),
    (
        "decode.podsPerEngine=3,decode.engine.dataParallel=2,decode.engine.tensorParallel=6",
        "neither hold whole workers of 6 ranks nor divide one",
    ),
    ("model.cache.enabled=true,model.cache.accessModes={ReadWriteOnce}", "ReadWriteMany"),
    ("networkPolicy.enabled=false", "security.tls.existingSecret"),
    ("decode.hostNetwork=true", "outside every NetworkPolicy"),
    (
        "networkPolicy.enabled=false,security.tls.existingSecret=x,decode.podsPerEngine=2,decode.engine.dataParallel=2",
        "the ports by which pods of an engine meet are open to the cluster",
    ),
    ("security.tls.existingSecret=x,security.tls.mutual=false", "anybody may open a control stream"),
    ("security.token.existingSecret=x", "in the clear"),
    ("router.grpcRoute.enabled=true", "needs router.grpcRoute.gateway"),
    (
        "decode.gpus.count=2,decode.engine.dataParallel=4",
        "decode.gpus.count=2: each of the 4 ranks of a pod needs a GPU of its own",
    ),
    ("decode.autoscaling.enabled=true", "needs a target"),
    (
        "decode.autoscaling.enabled=true,decode.autoscaling.targetKvUsage=0.5,decode.podsPerEngine=2,"
        "decode.engine.dataParallel=2",
        "needs podsPerEngine=1",
    ),
    ("router.autoscaling.minReplicas=9", "minReplicas is larger than maxReplicas"),
    (
        "mode=rayservice,rayService.workers[0].name=a,rayService.workers[0].replicas=2,rayService.workers[0].gpus=0,"
        "rayService.workers[0].minReplicas=1,rayService.workers[0].maxReplicas=1,"
        "rayService.workers[0].resources.limits.memory=1Gi",
        "between minReplicas and maxReplicas",
    ),
    ("mode=rayservice,rayService.gcsFaultTolerance.enabled=true", "redisAddress"),
]


@pytest.mark.parametrize("value", SCHEMA)
def test_a_misspelt_or_impossible_value_fails_by_its_name(helm: Helm, value: str) -> None:
    with pytest.raises(HelmError, match="don't meet the specifications of the schema") as error:
        helm.template(f"--set={value}")
    key = value.partition("=")[0].replace("[0]", "")
    assert any(part in str(error.value) for part in key.split(".")[-2:])


@pytest.mark.parametrize(("value", "reason"), TEMPLATES)
def test_values_that_contradict_each_other_fail_with_what_to_do(helm4: Helm, value: str, reason: str) -> None:
    with pytest.raises(HelmError) as error:
        helm4.template(f"--set={value}")
    assert reason in str(error.value)


def objects_of(schema: Any) -> list[dict[str, Any]]:
    """Every object of a JSON schema that lists its properties."""
    if isinstance(schema, list):
        return [found for part in schema for found in objects_of(part)]
    if not isinstance(schema, dict):
        return []
    below = [found for part in schema.values() for found in objects_of(part)]
    return [schema, *below] if isinstance(schema.get("properties"), dict) else below


def test_every_object_of_the_schema_is_closed() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = objects_of(schema)
    assert len(found) > 40
    assert all(part["additionalProperties"] is False for part in found)


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    import yaml

    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(part: dict[str, Any], value: Any, path: str) -> None:
        if "$ref" in part:
            part = schema["definitions"][part["$ref"].rpartition("/")[2]]
        if "properties" not in part:
            return
        assert set(part["properties"]) - {"global"} == set(value), path
        for key, inner in part["properties"].items():
            if key != "global":
                compare(inner, value[key], f"{path}.{key}")

    compare(schema, values, "values")
