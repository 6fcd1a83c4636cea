"""The doctor looks at the real machine, and its failures say what to do."""

import json
import socket

import pytest
from typer.testing import CliRunner

from pd_cluster.cli import checkup
from pd_cluster.cli.main import app
from pd_cluster.config import ClusterConfig, load_config


def test_a_fit_machine_passes_and_json_lists_every_check() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ports = ["--set", f"router.http_port={port}", "--set", "router.grpc_port=0"]
    result = CliRunner().invoke(app, ["doctor", "--no-ray", "--json", *ports])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"]
    by_name = {check["check"]: check for check in report["checks"]}
    assert "bytes equal" in by_name["nixl transfer"]["detail"]
    assert "UCX" in by_name["nixl"]["detail"]
    assert "DeepseekV3ForCausalLM" in by_name["model"]["detail"]
    assert "ray starts" not in by_name


def test_a_taken_port_and_an_absent_model_fail_with_advice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        overrides = [f"router.http_port={port}", f"router.grpc_port={port}", "model.path=/no/model"]
        result = CliRunner().invoke(
            app, ["doctor", "--no-ray", *(part for override in overrides for part in ("--set", override))]
        )
    assert result.exit_code == 1
    assert result.stdout.count(f"127.0.0.1:{port}: Address already in use") == 2
    assert "choose another with --http-port" in result.stdout
    assert "choose another with router.grpc_port" in result.stdout
    assert "is a cluster running here already?" in result.stdout
    assert "there is no model at /no/model" in result.stdout
    assert "3 of 11 checks failed" in result.stdout


def test_more_ranks_than_cores_is_a_warning_only() -> None:
    finding = checkup.examine(checkup.cores_and_memory, load_config(overrides=["decode.data_parallel=4096"]))
    assert finding.status == "warn"
    assert "4097 ranks" in finding.detail


def test_a_library_that_is_missing_is_a_failure_not_a_crash() -> None:
    def broken(_: ClusterConfig) -> tuple[checkup.Status, str, str]:
        raise ImportError("No module named 'nixl'")

    finding = checkup.examine(broken, load_config())
    assert (finding.status, finding.detail) == ("fail", "No module named 'nixl'")
    assert "pip install" in finding.advice


def test_a_transfer_that_changes_bytes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from pd_cluster.transfer.nixl import NixlBackend

    post = NixlBackend.post

    def corrupt(self: NixlBackend, write: object) -> None:
        write.copies[0] = type(write.copies[0])(8, 0, checkup.TRANSFER_BYTES - 8)  # type: ignore[attr-defined]
        post(self, write)  # type: ignore[arg-type]

    monkeypatch.setattr(NixlBackend, "post", corrupt)
    assert checkup.examine(checkup.nixl_transfer, load_config()).status == "fail"


def test_a_machine_without_a_compiler_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    finding = checkup.examine(checkup.compiler, load_config())
    assert finding.status == "warn"
    assert "install gcc or clang" in finding.advice


def test_the_grpc_port_follows_http_and_is_not_looked_at_when_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        before = load_config(overrides=[f"router.http_port={taken.getsockname()[1] - 1}"])
        assert checkup.examine(checkup.grpc_port, before).status == "fail"
        off = load_config(overrides=[f"router.grpc_port={taken.getsockname()[1]}", "router.grpc=false"])
        assert checkup.examine(checkup.grpc_port, off).status == "ok"
