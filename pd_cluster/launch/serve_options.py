"""What `serve run router.serve_app:build key=value ...` and a Serve config's `args` may say.

model, config          the model, or a cluster file that names it
section.key            any key of the cluster file, as in decode.data_parallel=2; in YAML sections may be nested
num_replicas, ...      how many routers there are and how Serve treats them: `ServeOptions`
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, structs

from pd_cluster.config import ClusterConfig, load_config
from pd_cluster.errors import ConfigError

AUTOSCALING = (
    "min_replicas",
    "max_replicas",
    "initial_replicas",
    "target_ongoing_requests",
    "upscale_delay_s",
    "downscale_delay_s",
)


class ServeOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the router deployment. With `max_replicas`, Serve scales routers by their ongoing requests."""

    num_replicas: int | Literal["auto"] | None = None  # 1 by default
    min_replicas: int | None = None
    max_replicas: int | None = None
    initial_replicas: int | None = None
    target_ongoing_requests: float | None = None  # of one router, while Serve scales them
    upscale_delay_s: float | None = None
    downscale_delay_s: float | None = None
    max_ongoing_requests: int | None = None  # of one router; router.max_queue by default
    max_queued_requests: int = -1  # at each proxy when every router is full; -1: no bound
    num_cpus: float = 1.0  # that Ray sets aside for a router
    drain_s: float = 60.0  # what requests may take to finish when a router is to end

    @property
    def autoscaling(self) -> dict[str, Any] | None:
        """Serve's autoscaling_config; None for a fixed number of routers."""
        given = {name: value for name in AUTOSCALING if (value := getattr(self, name)) is not None}
        return given or None

    @property
    def num_at_start(self) -> int:
        """Routers that there will be at first."""
        if isinstance(self.num_replicas, int):
            return self.num_replicas
        return self.initial_replicas or self.min_replicas or 1


def read_args(args: Mapping[str, Any]) -> tuple[ClusterConfig, ServeOptions]:
    """Raises ConfigError that names the key."""
    options = {name: args[name] for name in args if name in ServeOptions.__struct_fields__}
    path = args.get("config")
    if path is not None and not isinstance(path, str):
        raise ConfigError(f"config is the path of a cluster file, got {path!r}")
    values: dict[str, Any] = {}
    overrides: list[str] = []
    for key, value in args.items():
        if key in options or key == "config":
            continue
        if key == "model" and isinstance(value, str):
            values["model.path"] = value
        elif isinstance(value, Mapping):
            values |= {f"{key}.{inner}": given for inner, given in value.items()}
        elif "." in key and isinstance(value, str):
            overrides.append(f"{key}={value}")  # from a command line: a number or a word
        elif "." in key or key == "colocated":
            values[key] = value if not isinstance(value, str) else value.lower() in ("1", "true", "yes")
        else:
            known = ", ".join(["model", "config", "colocated", "section.key", *ServeOptions.__struct_fields__])
            raise ConfigError(f"unknown argument {key}; known: {known}")
    config = load_config(Path(path) if path else None, overrides, values)
    try:
        serve_options = msgspec.convert(options, ServeOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"invalid argument: {error}") from error
    _validate(serve_options)
    return _with_ray(config), serve_options


def _validate(options: ServeOptions) -> None:
    if options.autoscaling is not None:
        if isinstance(options.num_replicas, int):
            raise ConfigError(
                "num_replicas is a fixed number of routers: leave it out, or say `auto`, to let Serve scale"
            )
        if options.max_replicas is None and options.num_replicas != "auto":
            raise ConfigError("to let Serve scale routers say max_replicas=N, or num_replicas=auto")
    if isinstance(options.num_replicas, int) and options.num_replicas < 1:
        raise ConfigError(f"num_replicas must be at least 1, got {options.num_replicas}")


def _with_ray(config: ClusterConfig) -> ClusterConfig:
    """Ranks become actors of the Ray cluster that runs Serve; a local model is named so that every process finds it."""
    path = config.model.path
    model = (
        structs.replace(config.model, path=str(Path(path).expanduser().resolve())) if _is_local(path) else config.model
    )
    launch = structs.replace(config.launch, launcher="ray", ray_address=None)
    return structs.replace(config, model=model, launch=launch)


def _is_local(path: str) -> bool:
    return path != "demo" and Path(path).expanduser().exists()
