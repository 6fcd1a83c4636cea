"""`pd-cluster config`: what a file, --set and flags add up to, as a file that says the same."""

import sys

import msgspec

from pd_cluster.cli import options
from pd_cluster.config import ClusterConfig, load_config


def config(
    config: options.ConfigFile = None,
    set_: options.Sets = None,
    json: options.AsJson = False,
) -> None:
    """Print the resolved configuration."""
    resolved = load_config(config, set_)
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(resolved)).decode() + "\n" if json else to_toml(resolved))


def to_toml(config: ClusterConfig) -> str:
    """A cluster file that loads as `config`; keys without a value stand as comments."""
    builtins = msgspec.to_builtins(config)
    tables = {key: value for key, value in builtins.items() if isinstance(value, dict)}
    lines = [_line(key, value) for key, value in builtins.items() if key not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(_line(key, value) for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _line(key: str, value: object) -> str:
    if value is None:
        return f"# {key} ="
    return f"{key} = {msgspec.json.encode(value).decode()}"  # of our scalars, JSON's notation is TOML's
