"""Every environment variable that the cluster reads or sets, in one place.

- PD_CLUSTER_LOG_DIR: keep the ranks' log files here (default: a temporary directory, kept only after a failure)
- PD_CLUSTER_ADDRESS, PD_CLUSTER_API_KEY: where chat, status, top, drain and scale find a router, and the key they show
- PD_CLUSTER_DEBUG: 1 shows tracebacks instead of one line for an error
- PD_CLUSTER_NATIVE: 0 leaves out the C kernels for CPUs
- CC, XDG_CACHE_HOME: what compiles these kernels, and where they are kept (default: cc, ~/.cache)
- UCX_TLS, UCX_NET_DEVICES, NIXL_LOG_LEVEL: read by UCX and NIXL; where they are unset, what suits this host is set
- RAY_ADDRESS: the Ray cluster to use when `launch.ray_address` is unset
- OMP_NUM_THREADS and its kin: set in every rank from `threads` of its pool, since ranks share the cores of their host
"""

import os
from collections.abc import Mapping
from pathlib import Path

ADDRESS = "PD_CLUSTER_ADDRESS"
API_KEY = "PD_CLUSTER_API_KEY"

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # its new default; unset, every start prints a warning
}


def debug() -> bool:
    return os.environ.get("PD_CLUSTER_DEBUG", "") not in ("", "0")


def log_dir() -> Path | None:
    """Where rank logs are to be kept; None when the user named no place."""
    value = os.environ.get("PD_CLUSTER_LOG_DIR")
    return Path(value) if value else None


def native_kernels() -> bool:
    return os.environ.get("PD_CLUSTER_NATIVE", "1") not in ("", "0")


def rank_variables(threads: int, base: Mapping[str, str]) -> dict[str, str]:
    """What a rank's environment must hold beside `base`. A log level that the user has set stays."""
    variables = {name: str(threads) for name in THREAD_VARIABLES}
    variables["PYTHONUNBUFFERED"] = "1"
    variables["TORCH_CPP_LOG_LEVEL"] = base.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    return variables
