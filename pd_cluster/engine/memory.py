"""How many KV blocks a rank gets: from what is free once weights are loaded and a step has run, or from the
configuration.
"""

import resource
from pathlib import Path

import torch

from pd_cluster.errors import ConfigError
from pd_cluster.kv.layout import KvLayout

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")


def free_bytes(device: torch.device) -> int:
    """What a rank may still allocate on `device`, the working memory of a step set aside; all ranks of a host share
    it.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device)
        return free - max(0, torch.cuda.max_memory_allocated(device) - held)
    meminfo = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    free = _kib(meminfo["MemAvailable"])
    limited = cgroup_free_bytes(CGROUP)
    if limited is not None:
        free = min(free, limited)
    status = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return free - max(0, peak - _kib(status["VmRSS"]))


def cgroup_free_bytes(root: Path) -> int | None:
    """What this container's memory limit leaves, page cache counted as free; None without a limit."""
    for directory, limit_name, used_name in (
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit = (directory / limit_name).read_text().strip()
            used = int((directory / used_name).read_text())
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit == "max" or int(limit) >= 1 << 60:
            return None
        cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        return int(limit) - max(0, used - cached)
    return None


def _kib(text: str) -> int:
    return int(text.removesuffix("kB")) * 1024


def num_blocks_within(layout: KvLayout, free: int, *, fraction: float, max_bytes: int, ranks_on_host: int) -> int:
    """Blocks of `layout` in this rank's part of `fraction` of `free` bytes, and in `max_bytes`.

    Raises ConfigError, which says what is free, when not one block fits.
    """
    num_bytes = min(max_bytes, int(free * fraction) // ranks_on_host)
    num_blocks = num_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"no KV block of {layout.block_bytes} bytes fits in {max(num_bytes, 0)} bytes "
            f"({max(free, 0)} free, kv.memory_fraction {fraction:g}, {ranks_on_host} ranks share it, "
            f"kv.max_bytes {max_bytes}): lower kv.block_size or free memory"
        )
    return num_blocks


def check_max_model_len(requested: int | None, max_position: int) -> None:
    """What can be told before there are blocks. Raises ConfigError."""
    if requested is None:
        return
    if requested < 1:
        raise ConfigError(f"model.max_model_len must be at least 1, got {requested}")
    if requested > max_position:
        raise ConfigError(f"model.max_model_len {requested} exceeds the model's context of {max_position} tokens")


def choose_max_model_len(requested: int | None, max_position: int, num_blocks: int, block_size: int) -> int:
    """The longest sequence that an engine takes: `requested`, or what the model and the blocks allow.

    Raises ConfigError with both numbers when `requested` exceeds one of them.
    """
    capacity = num_blocks * block_size
    if requested is None:
        return min(max_position, capacity)
    check_max_model_len(requested, max_position)
    if requested > capacity:
        raise ConfigError(
            f"model.max_model_len {requested} does not fit: a rank has room for {capacity} tokens of KV "
            f"({num_blocks} blocks of {block_size}); "
            f"lower it to at most {capacity}, or raise kv.num_blocks or kv.max_bytes"
        )
    return requested
