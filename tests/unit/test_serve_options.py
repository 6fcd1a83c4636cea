"""What users may say to `serve run router.serve_app:build`, from a command line and from YAML."""

from pathlib import Path

import pytest

from pd_cluster.errors import ConfigError
from pd_cluster.launch.serve_options import ServeOptions, read_args


def test_a_command_line_names_the_model_keys_of_the_cluster_file_and_the_routers(tmp_path: Path) -> None:
    config, options = read_args(
        {
            "model": str(tmp_path),
            "decode.data_parallel": "2",
            "model.dtype": "float32",
            "colocated": "true",
            "num_replicas": "3",
            "num_cpus": "0.5",
        }
    )
    assert config.model.path == str(tmp_path)
    assert (config.decode.data_parallel, config.model.dtype, config.colocated) == (2, "float32", True)
    assert config.launch.launcher == "ray"
    assert options == ServeOptions(num_replicas=3, num_cpus=0.5)
    assert options.autoscaling is None
    assert options.num_at_start == 3


def test_yaml_may_nest_sections_and_a_cluster_file_gives_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[model]\npath = "somebody/model"\n[decode]\ntensor_parallel = 2\n[launch]\nlauncher = "process"\n')
    config, options = read_args(
        {"config": str(file), "decode": {"data_parallel": 4}, "kv.block_size": 32, "max_ongoing_requests": 50}
    )
    assert config.model.path == "somebody/model"
    assert (config.decode.tensor_parallel, config.decode.data_parallel, config.kv.block_size) == (2, 4, 32)
    assert config.launch.launcher == "ray", "there is no other way under Serve"
    assert options.max_ongoing_requests == 50


def test_a_relative_path_is_made_absolute_for_processes_that_start_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert read_args({"model": "model"})[0].model.path == str(tmp_path / "model")
    assert read_args({"model": "some/hub-id"})[0].model.path == "some/hub-id"
    assert read_args({})[0].model.path == "demo"


def test_autoscaling_is_what_serve_calls_it() -> None:
    _, options = read_args({"min_replicas": "2", "max_replicas": "8", "target_ongoing_requests": "32"})
    assert options.autoscaling == {"min_replicas": 2, "max_replicas": 8, "target_ongoing_requests": 32.0}
    assert options.num_at_start == 2
    _, options = read_args({"num_replicas": "auto", "downscale_delay_s": "5"})
    assert options.num_replicas == "auto"
    assert options.autoscaling == {"downscale_delay_s": 5.0}


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"modle": "demo"}, "unknown argument modle; known: model, config"),
        ({"decode.data_paralel": "2"}, "unknown key decode.data_paralel"),
        ({"num_replicas": "many"}, "num_replicas"),
        ({"num_replicas": "0"}, "num_replicas must be at least 1"),
        ({"num_replicas": "2", "max_replicas": "4"}, "leave it out"),
        ({"min_replicas": "2"}, "say max_replicas=N"),
        ({"config": "/nowhere/cluster.toml"}, "cannot read the configuration /nowhere/cluster.toml"),
        ({"config": {"model": "demo"}}, "config is the path of a cluster file"),
        ({"decode.data_parallel": "0"}, "decode.data_parallel must be at least 1"),
    ],
)
def test_a_mistake_is_named(args: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_args(args)
