"""One strict TOML file describes a cluster; every key can be overridden with `--set section.key=value`."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct, field

from pd_cluster.bounds import AtLeast, Count, OneOrMore, Seconds, SomeSeconds, check_numbers
from pd_cluster.cpus import CpuSets, parse_sets
from pd_cluster.devices import DeviceChoice
from pd_cluster.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
BlockSize = Annotated[int, AtLeast(16)]
Ratio = Annotated[float, AtLeast(1)]


class ModelSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = "demo"  # a directory, a .gguf file, a hub id, or `demo` for the bundled model
    served_model_name: str | None = None  # defaults to the last part of `path`
    dtype: Dtype = "auto"
    max_model_len: OneOrMore | None = None  # defaults to what the model and memory allow
    load: Literal["weights", "random"] = "weights"


class KvSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    block_size: BlockSize = 64  # tokens; prefill and decode may override it
    num_blocks: OneOrMore | None = None  # for each rank; defaults from measured free memory
    memory_fraction: float | None = None  # of what is free on the host or GPU after loading; 0.5, and 0.9 on GPUs
    max_bytes: OneOrMore | None = None  # an upper bound for each rank when measured; 2 GiB, and none on GPUs
    prefix_cache: bool = True
    verify: bool = False  # checksum every transfer
    lease_s: SomeSeconds = 30.0
    transfer_deadline_s: SomeSeconds = 30.0
    late_write_s: Seconds = 120.0  # how long the network may deliver what a broken connection carried


class AutoscaleSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many DP ranks of an elastic engine serve, by its load: the share of sequences or KV blocks that is taken."""

    enabled: bool = False
    min_ranks: int | None = None  # at least so many, DP ranks times TP; defaults to one DP rank
    low: float = 0.3  # below this for `hold_s` it shrinks
    high: float = 0.75  # above this, or with requests that wait for room, it grows
    hold_s: SomeSeconds = 60.0


class EngineSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pool. `instances` engines of data_parallel x tensor_parallel ranks each."""

    instances: OneOrMore = 1
    tensor_parallel: OneOrMore = 1
    data_parallel: OneOrMore = 1
    max_num_seqs: OneOrMore = 64
    max_num_batched_tokens: OneOrMore = 512
    ttft_target_s: Seconds = 3.0  # who can still have a first token in time goes first; 0: first come, first served
    redundant_experts: Count = 0
    # between DP ranks that share experts; the last two on GPUs, where the library of that name is installed
    dispatcher: Literal["auto", "collective", "nixl", "deepep", "nixl_ep"] = "auto"
    dispatch_dtype: Literal["auto", "fp8"] = "auto"  # how tokens travel there: as they are, or in half the bytes
    micro_batches: Literal["auto", "off"] = "off"  # large steps in two halves: one's tokens travel, the other's compute
    replica_choice: Literal["hash", "step"] = "hash"  # among copies of an expert; step: by the counts of each step
    # in each layer; empty ones let experts move. Defaults to what is needed
    expert_slots_per_rank: OneOrMore | None = None
    rebalance: Literal["auto", "off"] = "auto"  # auto: experts move into empty slots, and copies take other shares
    rebalance_threshold: Ratio = 1.2  # from this ratio of the busiest rank's expert load to the mean on
    rebalance_sustain_s: Seconds = 10.0  # if it stays there so long
    rebalance_cooldown_s: Seconds = 60.0  # and not again for so long
    block_size: BlockSize | None = None
    num_blocks: OneOrMore | None = None
    threads: OneOrMore = 1  # torch threads of each rank
    device: DeviceChoice = "auto"  # a GPU for each rank where there is one
    cpus: CpuSets | None = None  # where its ranks run: "0-3", or a list with one such set for each rank in turn
    autoscale: AutoscaleSection = field(default_factory=AutoscaleSection)

    @property
    def elastic(self) -> bool:
        """Whether DP ranks live and die one by one: the others go on without one that is lost."""
        return self.data_parallel > 1 and self.dispatcher == "nixl"


class TlsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PEM files. With `client_roots` every client must show a certificate that these roots signed."""

    certificate: str
    private_key: str
    client_roots: str | None = None


class RouterSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc: bool = True
    grpc_port: int | None = None  # defaults to the one after http_port; 0: a free one
    grpc_tls: TlsSection | None = None
    max_queue: OneOrMore = 1024
    request_timeout_s: SomeSeconds = 600.0
    max_retries: Count = 3
    outage_patience_s: Seconds = 60.0  # how long a request that lost its worker waits for another to come back
    api_key: str | None = None  # what clients must show
    api_key_file: str | None = None  # or a file that holds it
    admin_key: str | None = None  # what drain and scale ask for; without one they must come from this machine
    admin_key_file: str | None = None

    @property
    def wanted_grpc_port(self) -> int:
        """0: a free one."""
        return self.grpc_port if self.grpc_port is not None else self.http_port and self.http_port + 1

    @property
    def client_key(self) -> str | None:
        """What clients must show. Raises ConfigError when its file cannot be read."""
        return self.api_key or read_secret(self.api_key_file)

    @property
    def operator_key(self) -> str | None:
        """What drain and scale ask for. Raises ConfigError when its file cannot be read."""
        return self.admin_key or read_secret(self.admin_key_file)


class SecuritySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the control streams between routers and workers, wherever they leave a machine; the files are PEM."""

    certificate: str | None = None
    private_key: str | None = None
    root_certificates: str | None = None  # with it both sides must show a certificate that these roots signed
    server_name: str | None = None  # what workers' certificates are issued to, when it is not the address dialled
    token_file: str | None = None  # what routers must show
    allow_insecure: bool = False  # the network is closed by other means


class LaunchSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    launcher: Literal["process", "ray"] = "process"
    start_timeout_s: SomeSeconds = 600.0
    max_restarts: Count = 3
    shrink_timeout_s: Seconds = 300.0  # what DP ranks that leave may take to move their experts and requests away
    ray_address: str | None = None


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelSection = field(default_factory=ModelSection)
    kv: KvSection = field(default_factory=KvSection)
    prefill: EngineSection = field(default_factory=EngineSection)
    decode: EngineSection = field(default_factory=EngineSection)
    router: RouterSection = field(default_factory=RouterSection)
    security: SecuritySection = field(default_factory=SecuritySection)
    launch: LaunchSection = field(default_factory=LaunchSection)
    colocated: bool = False  # no prefill pool: the decode engines do both


def read_secret(path: str | None) -> str | None:
    """The text of a file without the white space around it; None for no file. Raises ConfigError."""
    if path is None:
        return None
    try:
        text = Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if not text:
        raise ConfigError(f"{path} is empty: it must hold a secret")
    return text


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def load_config(
    path: Path | None = None, overrides: list[str] | None = None, values: dict[str, Any] | None = None
) -> ClusterConfig:
    """Read `path`, then apply `overrides` (`section.key=value`) and `values` (by dotted key; None is skipped).

    Raises ConfigError that names the file and the key.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    pairs: list[tuple[str, Any]] = []
    for override in overrides or []:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"--set wants section.key=value, got {override!r}")
        pairs.append((key.strip(), _parse_value(text.strip())))
    pairs += [(key, value) for key, value in (values or {}).items() if value is not None]
    for key, value in pairs:
        section = data
        *parents, last = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{key}: {parent} is not a section")
        section[last] = value
    defaults = msgspec.to_builtins(ClusterConfig())
    for name, section in data.items():
        if isinstance(section, dict) and isinstance(defaults.get(name), dict):
            unknown = set(section) - set(defaults[name])
            if unknown:
                raise ConfigError(
                    f"unknown key {name}.{sorted(unknown)[0]}; known: {', '.join(sorted(defaults[name]))}"
                )
            defaults[name] |= section
        else:
            defaults[name] = section
    try:
        config = msgspec.convert(defaults, ClusterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"invalid configuration: {error}") from error
    _validate(config)
    return config


def _validate(config: ClusterConfig) -> None:
    check_numbers(config)
    for name in ("prefill", "decode"):
        section: EngineSection = getattr(config, name)
        _validate_autoscale(name, section)
        if section.cpus is not None:
            try:
                parse_sets(section.cpus)
            except ConfigError as error:
                raise ConfigError(f"{name}.cpus: {error.message}") from error
        block_size = section.block_size or config.kv.block_size
        if block_size % 16:
            raise ConfigError(f"{name}: block_size must be a multiple of 16, got {block_size}")
    for key in ("http_port", "grpc_port"):
        port = getattr(config.router, key)
        if port is not None and not 0 <= port <= 65535:
            raise ConfigError(f"router.{key} must be between 0 (a free one) and 65535, got {port}")
    if config.kv.memory_fraction is not None and not 0 < config.kv.memory_fraction < 1:
        raise ConfigError(f"kv.memory_fraction must be between 0 and 1, got {config.kv.memory_fraction}")


def _validate_autoscale(name: str, section: EngineSection) -> None:
    autoscale, num_ranks = section.autoscale, section.data_parallel * section.tensor_parallel
    if not 0 <= autoscale.low < autoscale.high <= 1:
        raise ConfigError(
            f"{name}.autoscale: low and high must be shares between 0 and 1, low below high, got "
            f"{autoscale.low:g} and {autoscale.high:g}"
        )
    if autoscale.min_ranks is not None and not 1 <= autoscale.min_ranks <= num_ranks:
        raise ConfigError(f"{name}.autoscale.min_ranks must be between 1 and {num_ranks}, got {autoscale.min_ranks}")
    if autoscale.enabled and not section.elastic:
        raise ConfigError(
            f"{name}.autoscale needs ranks that come and go: set {name}.data_parallel above 1 and {name}.dispatcher = "
            '"nixl"'
        )
