"""The cluster file: strict, overridable, and with errors that name the key."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import fields

from pd_cluster.cli.config import to_toml
from pd_cluster.config import ClusterConfig, load_config
from pd_cluster.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_defaults_need_no_file() -> None:
    assert load_config() == ClusterConfig()


def test_flags_win_over_sets_and_sets_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[decode]\ndata_parallel = 2\ntensor_parallel = 2\nmax_num_seqs = 2\n")
    config = load_config(
        path, ["decode.tensor_parallel=3", "decode.max_num_seqs=3"], {"decode.max_num_seqs": 4, "kv.block_size": None}
    )
    assert (config.decode.data_parallel, config.decode.tensor_parallel, config.decode.max_num_seqs) == (2, 3, 4)
    assert config.kv.block_size == ClusterConfig().kv.block_size


def test_a_section_given_in_part_keeps_the_other_defaults() -> None:
    config = load_config(overrides=["router.http_port=1"], values={"router.host": "::"})
    assert (config.router.http_port, config.router.host, config.router.max_queue) == (1, "::", 1024)


def test_values_of_set_are_toml_or_plain_text() -> None:
    config = load_config(
        overrides=["model.path=Qwen/Qwen3-0.6B", 'router.host="::1"', "kv.verify=true", "colocated=true"]
    )
    assert (config.model.path, config.router.host, config.kv.verify, config.colocated) == (
        "Qwen/Qwen3-0.6B",
        "::1",
        True,
        True,
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["decode.dataparallel=4"], r"unknown key decode\.dataparallel; known: .*data_parallel"),
        (["decoder.data_parallel=4"], "decoder"),
        (["decode.data_parallel=0"], r"decode\.data_parallel must be at least 1, got 0"),
        (["decode.data_parallel=two"], r"data_parallel"),
        (["kv.block_size=24"], "block_size must be a multiple of 16, got 24"),
        (["kv.memory_fraction=1.5"], r"kv\.memory_fraction must be between 0 and 1, got 1\.5"),
        (["kv.block_size"], "--set wants section.key=value, got 'kv.block_size'"),
        (["launch.launcher=slurm"], r"launch\.launcher"),
        (["model.path.x=1", "model.path=2"], "path"),
    ],
)
def test_a_wrong_key_or_value_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=overrides)


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*absent\.toml"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"cluster\.toml is not valid TOML.*line 1"):
        load_config(write(tmp_path, "[decode\n"))


def test_the_printed_configuration_loads_as_itself(tmp_path: Path) -> None:
    config = load_config(
        overrides=["router.api_key='a \"quoted\" \\ key'", "kv.num_blocks=7", "colocated=true", "kv.lease_s=2.5"]
    )
    assert load_config(write(tmp_path, to_toml(config))) == config


@pytest.mark.parametrize("key", ["router.http_port", "router.grpc_port"])
def test_a_port_that_cannot_be_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be between 0"):
        load_config(values={key: 99999})


def numbers(section: type[Struct] = ClusterConfig, path: str = "") -> Iterator[tuple[str, bool]]:
    """The key of every number of the file, and whether it is one with a point."""
    for field in fields(section):
        if isinstance(field.default_factory, type) and issubclass(field.default_factory, Struct):
            yield from numbers(field.default_factory, f"{path}{field.name}.")
        elif field.name != "cpus" and ("int" in str(field.type) or "float" in str(field.type)):
            yield f"{path}{field.name}", "float" in str(field.type)


NUMBERS = dict(numbers())


def test_every_section_has_its_numbers_looked_at() -> None:
    known = {"model.max_model_len", "kv.lease_s", "decode.autoscale.hold_s", "router.max_queue", "launch.max_restarts"}
    assert known <= NUMBERS.keys()
    assert len(NUMBERS) > 50


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_cannot_be_is_refused_by_its_key(key: str) -> None:
    name = key.rpartition(".")[2]
    for wrong in (-1, math.nan, math.inf) if NUMBERS[key] else (-1,):
        with pytest.raises(ConfigError, match=f"{name}|low and high"):
            load_config(overrides=[f"{key}={wrong}"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.max_model_len=0", r"model\.max_model_len must be at least 1, got 0"),
        ("router.request_timeout_s=0", r"router\.request_timeout_s must be above 0, got 0"),
        ("decode.redundant_experts=-3", r"decode\.redundant_experts must be at least 0, got -3"),
        ("prefill.ttft_target_s=nan", r"prefill\.ttft_target_s must be a finite number, got nan"),
        ("decode.autoscale.hold_s=0", r"decode\.autoscale\.hold_s must be above 0, got 0"),
        ("prefill.block_size=0", r"prefill\.block_size must be at least 16, got 0"),
    ],
)
def test_a_bound_is_said(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=[override])


@pytest.mark.parametrize("override", ["prefill.ttft_target_s=0", "launch.max_restarts=0", "decode.redundant_experts=0"])
def test_a_bound_itself_is_taken(override: str) -> None:
    load_config(overrides=[override])
