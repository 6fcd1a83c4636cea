"""`pd-cluster config`: what a file, --set and flags add up to, as a file that says the same."""

import sys
from typing import Any

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
    return "\n".join(_table("", msgspec.to_builtins(config))) + "\n"


def _table(name: str, table: dict[str, Any]) -> list[str]:
    """Its own keys, then the tables in it, each under its dotted name."""
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines = ["", f"[{name}]"] if name else []
    lines += [_line(key, value) for key, value in table.items() if key not in inner]
    for key, value in inner.items():
        lines += _table(f"{name}.{key}" if name else key, value)
    return lines


def _line(key: str, value: object) -> str:
    if value is None:
        return f"# {key} ="
    return f"{key} = {msgspec.json.encode(value).decode()}"  # of our scalars, JSON's notation is TOML's
