"""The cluster file: strict, overridable, and with errors that name the key."""

from pathlib import Path

import pytest

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
