"""Dashboards and rules ask only for what routers and workers really export, with labels that are really there."""

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import promql_parser
import pytest
import yaml
from harness import LocalCluster, config_of
from helm_tool import CHART, ROOT
from prometheus_client.parser import text_string_to_metric_families

from pd_cluster.ids import EngineId
from pd_cluster.launch.probes import NodeMetrics
from pd_cluster.metrics import RouterMetrics
from pd_cluster.parallel.placement_status import HotExpert, LayerLoad

DASHBOARD = ROOT / "deploy" / "grafana" / "pd-cluster.json"
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
BY_PROMETHEUS = {"namespace", "job", "instance", "pod", "le"}
VARIABLES = {"$__rate_interval": "5m", "$namespace": ".*"}
WANTED = {
    "stranded KV": "pd_cluster_stranded_kv_bytes",
    "queue depth of prefill": "pd_cluster_num_waiting_tokens",
    "queue depth of decode": "pd_cluster_pending_reservations",
    "KV usage": "pd_cluster_kv_cache_usage_ratio",
    "TTFT": "pd_cluster_time_to_first_token_seconds_bucket",
    "ITL": "pd_cluster_inter_token_latency_seconds_bucket",
    "transfer bytes": "pd_cluster_kv_transfer_bytes_total",
    "transfer seconds": "pd_cluster_kv_transfer_seconds_bucket",
    "transfer failures": "pd_cluster_kv_transfer_failures_total",
    "expert load": "pd_cluster_expert_load_imbalance_ratio",
    "rank load": "pd_cluster_expert_rank_imbalance_ratio",
    "layers of experts": "pd_cluster_expert_layer_imbalance_ratio",
    "moving experts": "pd_cluster_expert_moved_bytes_total",
}


def selectors(expression: Any) -> Iterator[Any]:
    """Every vector selector of a parsed expression."""
    match expression:
        case promql_parser.VectorSelector():
            yield expression
        case promql_parser.MatrixSelector():
            yield expression.vector_selector
        case promql_parser.Call():
            for argument in expression.args:
                yield from selectors(argument)
        case promql_parser.BinaryExpr():
            yield from selectors(expression.lhs)
            yield from selectors(expression.rhs)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr() | promql_parser.UnaryExpr():
            yield from selectors(expression.expr)
        case promql_parser.SubqueryExpr():
            yield from selectors(expression.expr)
        case _:
            pass


def labels_by(expression: Any) -> Iterator[tuple[list[str], Any]]:
    """Every `by (...)` with the expression under it."""
    for name in ("expr", "lhs", "rhs"):
        if (inner := getattr(expression, name, None)) is not None:
            yield from labels_by(inner)
    for argument in getattr(expression, "args", None) or []:
        yield from labels_by(argument)
    if isinstance(expression, promql_parser.AggregateExpr) and expression.modifier is not None:
        yield list(expression.modifier.labels), expression.expr


def dashboard_expressions() -> dict[str, str]:
    found = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            found[f"{panel['title']}/{target['refId']}"] = expression
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def rule_expressions() -> dict[str, str]:
    return {rule.get("record") or rule["alert"]: rule["expr"] for rule in rules()}


EXPRESSIONS = dashboard_expressions() | rule_expressions()


class OneNode:
    engine_id = EngineId("decode-0")
    started = True
    trouble = None
    draining = False
    num_starts = 1


async def scrape_after_a_request() -> str:
    async with LocalCluster(config_of("demo", decode__data_parallel=2)) as cluster:
        await cluster.greedy(list(range(3, 40)), max_tokens=4)
        # the hub has not looked at loads yet
        worker = next(w for w in cluster.router.directory.workers if w.load.placement is not None)
        seen = msgspec.structs.replace(worker.load.placement, layers=[LayerLoad(1.2, [HotExpert(3, 0.5, 1)])])
        worker.load = msgspec.structs.replace(worker.load, placement=seen)
        return cluster.router.metrics.render().decode()


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Every series name that a router and its workers' pods export after a request -> its labels."""
    series: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(asyncio.run(scrape_after_a_request())):
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    for metric in NodeMetrics(OneNode()).collect():
        for sample in metric.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    for counter in vars(RouterMetrics()).values():  # counters that nothing has raised yet have no series
        for metric in counter.collect() if hasattr(counter, "_labelnames") else []:
            suffixes = {"counter": ["_total"], "gauge": [""]}.get(metric.type, ["_bucket", "_count", "_sum"])
            for suffix in suffixes:
                series.setdefault(metric.name + suffix, set()).update(counter._labelnames)
    for record in (rule["record"] for rule in rules() if "record" in rule):
        (inner,) = [rule["expr"] for rule in rules() if rule.get("record") == record]
        series[record] = {label for labels, _ in labels_by(promql_parser.parse(inner)) for label in labels} - {"le"}
    return series


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_every_expression_asks_for_series_and_labels_that_exist(where: str, exported: dict[str, set[str]]) -> None:
    parsed = promql_parser.parse(EXPRESSIONS[where])
    found = list(selectors(parsed))
    assert found
    for selector in found:
        assert selector.name in exported, f"{selector.name} is not exported"
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched <= exported[selector.name] | BY_PROMETHEUS, f"{selector.name} has not all of {matched}"
    for labels, inner in labels_by(parsed):
        there = set.intersection(*(exported[selector.name] for selector in selectors(inner))) | BY_PROMETHEUS
        assert set(labels) <= there, f"{labels} of {inner}"


def test_the_dashboard_shows_what_operators_of_such_clusters_look_at() -> None:
    parsed = map(promql_parser.parse, dashboard_expressions().values())
    shown = {selector.name for expression in parsed for selector in selectors(expression)}
    assert {what: name for what, name in WANTED.items() if name not in shown} == {}


def kept_labels(text: str) -> set[str]:
    """What the outermost aggregations of an expression leave; of a recorded series, what its rule leaves."""
    parsed = promql_parser.parse(text)
    recorded = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    kept = {label for labels, _ in labels_by(parsed) for label in labels}
    for selector in selectors(parsed):
        kept |= kept_labels(recorded[selector.name]) if selector.name in recorded else set()
    return kept


def test_legends_and_annotations_name_labels_that_their_expressions_keep() -> None:
    expressions = dashboard_expressions()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert named <= kept_labels(expressions[f"{panel['title']}/{target['refId']}"]), panel["title"]
    for rule in rules():
        named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule.get("annotations", {}))))
        assert named <= kept_labels(rule["expr"]), rule


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_chart_and_files_outside_it_are_the_same() -> None:
    assert DASHBOARD.resolve() == CHART / "files" / "dashboard.json"
    assert RULES.resolve() == CHART / "files" / "rules.yaml"


# ---- Prometheus' own tool


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    return found


def run_promtool(promtool: str, *args: str, cwd: Path, text: str | None = None) -> None:
    command = [promtool, *args]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, input=text, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_rules_and_configuration(promtool: str) -> None:
    run_promtool(promtool, "check", "config", "prometheus.yaml", cwd=RULES.parent)


def test_promtool_accepts_what_a_router_exports(promtool: str, tmp_path: Path) -> None:
    metrics = RouterMetrics()
    metrics.ttft.observe(0.1)
    run_promtool(promtool, "check", "metrics", cwd=tmp_path, text=metrics.render().decode())


def test_alerts_fire_when_they_should_and_not_before(promtool: str, tmp_path: Path) -> None:
    """By promtool's own evaluation of invented series, the same worker seen by two routers."""
    seen = [f'instance="router-{index}",namespace="llm"' for index in (0, 1)]
    series = []
    for by in seen:
        for role, up in (("prefill", "1+0x20"), ("decode", "1+0x4 0+0x16")):
            series.append((f'pd_cluster_worker_up{{{by},role="{role}",worker="{role}-0/0",health="ready"}}', up))
        decode = f'{by},role="decode",worker="decode-0/0"'
        series.append((f'pd_cluster_stranded_kv_blocks{{{decode},state="reserved"}}', "45+0x20"))
        series.append((f"pd_cluster_kv_blocks{{{decode}}}", "100+0x20"))
        series.append((f'pd_cluster_requests_total{{{by},outcome="stop"}}', "0+180x20"))
        series.append((f'pd_cluster_requests_total{{{by},outcome="transfer_failed"}}', "0+60x20"))
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": [
            {"expr": expr, "eval_time": "4m", "exp_samples": [{"labels": labels, "value": value}]}
            for expr, labels, value in (
                ('pd_cluster:workers_ready:sum{role="decode"}', _record("workers_ready:sum", "decode"), 1),
                ('pd_cluster:stranded_kv:ratio', _record("stranded_kv:ratio", "decode"), 0.45),
                ('pd_cluster:failed_requests:ratio', _record("failed_requests:ratio"), 0.25),
            )
        ],
        "alert_rule_test": [
            {"alertname": "PdClusterPoolGone", "eval_time": "4m", "exp_alerts": []},
            {"alertname": "PdClusterPoolGone", "eval_time": "8m", "exp_alerts": [_alert("PdClusterPoolGone")]},
            {"alertname": "PdClusterStrandedKv", "eval_time": "4m", "exp_alerts": []},
            {"alertname": "PdClusterStrandedKv", "eval_time": "6m", "exp_alerts": [_alert("PdClusterStrandedKv")]},
        ],
    }  # fmt: skip
    test = {"rule_files": [os.fspath(RULES.resolve())], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    run_promtool(promtool, "test", "rules", "test.yaml", cwd=tmp_path)


def _record(name: str, role: str | None = None) -> str:
    return f'pd_cluster:{name}{{namespace="llm"' + (f',role="{role}"}}' if role else "}")


def _alert(name: str) -> dict[str, Any]:
    """Firing for the decode pool, with the texts of the rule."""
    (rule,) = [rule for rule in rules() if rule.get("alert") == name]
    text = {key: value.replace("{{ $labels.role }}", "decode") for key, value in rule["annotations"].items()}
    text = {key: value.replace("{{ $value | humanizePercentage }}", "45%") for key, value in text.items()}
    return {"exp_labels": {"namespace": "llm", "role": "decode", **rule["labels"]}, "exp_annotations": text}
