"""What a rank computes on: a GPU of its own where its host has some, the CPU otherwise.

    auto    a GPU when there is one      cpu    never a GPU      cuda    a GPU, or the rank does not start

A launcher deals the GPUs of a host out over its ranks and shows each rank one alone (CUDA_VISIBLE_DEVICES), so a
rank's GPU is always `cuda:0` to itself. Ranks of one engine never share a GPU, for their collectives refuse that; ranks
of different engines do when there are fewer GPUs than ranks. No torch: counting asks the driver.
"""

import ctypes
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Literal, NamedTuple

from pd_cluster.errors import ConfigError

DeviceChoice = Literal["auto", "cpu", "cuda"]
VISIBLE = "CUDA_VISIBLE_DEVICES"
NVML = "libnvidia-ml.so.1"

CPU_MEMORY_FRACTION, GPU_MEMORY_FRACTION = 0.5, 0.9
CPU_MAX_KV_BYTES = 2 << 30


class GpuHolder(NamedTuple):
    """A rank that holds a GPU, or asks for one."""

    engine: str
    choice: DeviceChoice
    gpu: str | None = None


def count_gpus() -> int:
    """GPUs that the driver shows to this process, whatever CUDA_VISIBLE_DEVICES says; 0 without a driver."""
    try:
        nvml = ctypes.CDLL(NVML)
        if nvml.nvmlInit_v2() != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    count = ctypes.c_uint(0)
    try:
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()


def visible_gpus(environ: Mapping[str, str] = os.environ, count: Callable[[], int] = count_gpus) -> list[str]:
    """What CUDA would show a process with this environment, as it names them: indices or UUIDs."""
    shown = environ.get(VISIBLE)
    if shown is None:
        return [str(index) for index in range(count())]
    gpus: list[str] = []
    for part in shown.split(","):
        name = part.strip()
        if not name or name.startswith("-"):
            break  # as CUDA does: the first invalid name ends the list
        gpus.append(name)
    return gpus


def deal_gpus(asking: Sequence[GpuHolder], held: Sequence[GpuHolder], gpus: Sequence[str]) -> list[str | None]:
    """A GPU for each rank that asks, the least used one first; None: the CPU.

    `held`: ranks of this host that hold GPUs already. Without any GPU everybody gets None: a rank that must have one
    says so itself. Raises ConfigError when an engine has more ranks here than there are GPUs.
    """
    of_engine = Counter((holder.engine, holder.gpu) for holder in held)
    used = Counter(holder.gpu for holder in held)
    dealt: list[str | None] = []
    for rank in asking:
        if rank.choice == "cpu" or not gpus:
            dealt.append(None)
            continue
        gpu = min(gpus, key=lambda each: (of_engine[rank.engine, each], used[each], gpus.index(each)))
        if of_engine[rank.engine, gpu]:
            pool = rank.engine.partition("-")[0]
            raise ConfigError(
                f"{rank.engine} has more ranks on this host than the {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} "
                f'here, and each needs its own: lower its parallelism, or set device = "cpu" for {pool}'
            )
        of_engine[rank.engine, gpu] += 1
        used[gpu] += 1
        dealt.append(gpu)
    return dealt


def gpu_share(choice: DeviceChoice, num_ranks: int, largest_engine: int, num_gpus: int) -> float:
    """The part of a GPU that a scheduler is asked for, for each of `num_ranks` ranks of a cluster of `num_gpus`.

    Whole ones where there are enough. Equal parts of one where there are fewer and every engine is a single rank; the
    scheduler would put ranks of a larger engine on one GPU, so that is refused by ConfigError.
    """
    if choice == "cpu" or (choice == "auto" and num_gpus == 0):
        return 0.0
    if num_gpus == 0 or num_ranks <= num_gpus:
        return 1.0
    if largest_engine > 1:
        raise ConfigError(
            f"{num_ranks} ranks need a GPU each, for some share an engine, and the cluster has {num_gpus}: add nodes, "
            'lower the parallelism, or set device = "cpu" for a pool'
        )
    return 1.0 / ranks_per_gpu(num_ranks, num_gpus)


def ranks_per_gpu(num_ranks: int, num_gpus: int) -> int:
    """How many ranks share the memory of a GPU."""
    return max(1, math.ceil(num_ranks / num_gpus)) if num_gpus else 1


def gpu_variables(gpu: str | None, gpus: Sequence[str]) -> dict[str, str]:
    """What shows a rank its GPU alone, or none of those there are; nothing where there are none."""
    return {VISIBLE: gpu or ""} if gpus else {}


def narrow_to_one(choice: DeviceChoice, index: int, environ: MutableMapping[str, str]) -> None:
    """Show this process one GPU of those it may see, by its rank, unless a launcher has done so. Call before CUDA is
    initialised."""
    gpus = visible_gpus(environ) if choice != "cpu" else []
    if len(gpus) > 1:
        environ[VISIBLE] = gpus[index % len(gpus)]


def device_name(choice: DeviceChoice, num_seen: int, section: str) -> str:
    """`cpu` or `cuda:0`; `num_seen`: GPUs that torch sees here. Raises ConfigError."""
    if choice == "cuda" and num_seen == 0:
        raise ConfigError(
            f'{section}.device = "cuda", but torch sees no GPU here: install a driver and a CUDA build of torch, give '
            f'the process a GPU, or set {section}.device = "auto"'
        )
    return "cpu" if choice == "cpu" or num_seen == 0 else "cuda:0"
