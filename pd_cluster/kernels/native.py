"""The CPU kernels in C: compiled for this machine when first needed, kept in the user's cache, called through ctypes.

They compute bfloat16 layers; the torch code beside them is their reference and serves whatever they do not: other
dtypes, other devices, a host without a C compiler. `PD_CLUSTER_NATIVE=0` leaves them out.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from pd_cluster.env import native_kernels
from pd_cluster.log import get_log

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-O2", "-march=native", "-std=gnu11", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
BUILD_TIMEOUT_S = 300.0

log = get_log(__name__)


class Linear(Structure):
    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("num_outputs", c_int64),
        ("num_inputs", c_int64),
        ("gated", c_int64),
    )


class Norm(Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_double))


class GqaLayer(Structure):
    _fields_ = (
        ("norm", Norm),
        ("qk_norm", Norm),
        ("qkv", Linear),
        ("out", Linear),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("num_groups", c_int64),
        ("head_dim", c_int64),
        ("read", c_void_p),
        ("rope_dim", c_int64),
        ("interleaved", c_int64),
        ("scale", c_double),
    )


class MlaLayer(Structure):
    _fields_ = (
        ("norm", Norm),
        ("q_norm", Norm),
        ("kv_norm", Norm),
        ("compress", Linear),
        ("q_b", Linear),
        ("out", Linear),
        ("absorb", Linear),
        ("expand_keys", Linear),
        ("expand_values", Linear),
        ("absorb_stride", c_int64),
        ("expand_keys_stride", c_int64),
        ("expand_values_stride", c_int64),
        ("num_heads", c_int64),
        ("q_lora_rank", c_int64),
        ("kv_lora_rank", c_int64),
        ("nope_dim", c_int64),
        ("rope_dim", c_int64),
        ("value_dim", c_int64),
        ("interleaved", c_int64),
        ("scale", c_double),
    )


class MlpLayer(Structure):
    _fields_ = (("norm", Norm), ("gate_up", Linear), ("down", Linear))


class ExpertsLayer(Structure):
    _fields_ = (
        ("gate_up", Linear),
        ("down", Linear),
        ("stride", c_int64),
    )


class Gate(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("num_experts", c_int64),
        ("hidden", c_int64),
        ("num_chosen", c_int64),
        ("num_groups", c_int64),
        ("topk_groups", c_int64),
        ("sigmoid", c_int64),
        ("best_of_group", c_int64),
        ("normalise", c_int64),
        ("factor", c_double),
    )


class MoeLayer(Structure):
    _fields_ = (
        ("norm", Norm),
        ("gate", Gate),
        ("experts", ExpertsLayer),
        ("shared", MlpLayer),
        ("num_slots", c_int64),
        ("slot_of_expert", c_void_p),
        ("load", c_void_p),
    )


class Pages(Structure):
    _fields_ = (("base", c_void_p), ("unit_stride", c_int64), ("head_stride", c_int64))


class Step(Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("num_segments", c_int64),
        ("num_decodes", c_int64),
        ("num_threads", c_int64),
        ("segments", c_void_p),
        ("units", c_void_p),
        ("token_units", c_void_p),
        ("token_offsets", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class Exchange(Structure):
    _fields_ = (
        ("send", c_void_p),
        ("receive", c_void_p),
        ("lives", c_void_p),
        ("ignored", c_void_p),
        ("life", c_uint64),
        ("rank", c_int64),
        ("num_ranks", c_int64),
        ("slots_per_rank", c_int64),
        ("hidden", c_int64),
        ("dtype", c_int64),
        ("fp8", c_int64),
        ("dispatch_bytes", c_int64),
        ("combine_bytes", c_int64),
    )


SEGMENT_FIELDS = 5
"""int64 values of a segment: first token, number of tokens, tokens before them, first of its units, expanded."""

_int, _ptr = c_int64, c_void_p
FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "packed_size": (c_int64, (_int, _int, _int)),
    "pack": (None, (_ptr, _ptr, _int, _int, _int)),
    "linear_alone": (None, (POINTER(Linear), _ptr, _int, _int, _ptr, _int, _int, _int)),
    "step_choice": (c_int64, (_int, _ptr, *(_int,) * 3, _ptr, *(_int,) * 3, _ptr)),
    "slots_by_hash": (None, (_ptr, _ptr, _int, _int, _ptr, _ptr, _int, _int, _ptr)),
    "norm_layer": (None, (POINTER(Norm), _ptr, _int, _int, _ptr, _int)),
    "gqa_layer": (None, (POINTER(GqaLayer), POINTER(Step), POINTER(Pages), _ptr, _ptr)),
    "mla_layer": (None, (POINTER(MlaLayer), POINTER(Step), POINTER(Pages), _ptr, _ptr)),
    "mlp_layer": (None, (POINTER(MlpLayer), _int, _ptr, _ptr, _int)),
    "experts_layer": (None, (POINTER(ExpertsLayer), _int, _ptr, _ptr, _ptr, _ptr, _int, _ptr, _int)),
    "gate_layer": (None, (POINTER(Gate), _ptr, _int, _ptr, _ptr, _int)),
    "moe_layer": (None, (POINTER(MoeLayer), _int, _ptr, _int)),
    "head_layer": (None, (POINTER(Norm), POINTER(Linear), _ptr, _int, _ptr, _int)),
    "highest_of_rows": (None, (_ptr, _int, _int, _int, _ptr, _ptr, _int)),
    "sum_of_bytes": (c_float, (_ptr, _int, _int, _int)),
    "exchange_pack": (c_int64, (POINTER(Exchange), _ptr, _int, _ptr, _ptr, _int, c_uint64, _int, *(_ptr,) * 5)),
    "exchange_wait": (c_int64, (POINTER(Exchange), _int, _int, c_uint64, _ptr, _ptr, _int, _int)),
    "exchange_unpack": (None, (POINTER(Exchange), _int, c_uint64, *(_ptr,) * 7)),
    "exchange_reply": (None, (POINTER(Exchange), _int, c_uint64, *(_ptr,) * 5)),
    "exchange_add": (c_int64, (POINTER(Exchange), _int, c_uint64, _ptr, _ptr, _int, *(_ptr,) * 4)),
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they are switched off or cannot be built, which is logged once."""
    if not native_kernels():
        return None
    compiler = find_compiler()
    if compiler is None:
        log.info("native_kernels_left_out", reason="no C compiler")
        return None
    try:
        return load(_build(compiler))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("native_kernels_left_out", reason=str(reason)[-500:])
        return None


def load(path: Path) -> ctypes.CDLL:
    """The kernels of a shared object, with their types."""
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def find_compiler() -> str | None:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    return None


def _build(compiler: str) -> Path:
    """The shared object, compiled unless the cache holds it. One process compiles, others wait for it."""
    directory = _cache_directory()
    target = directory / f"kernels-{_key(compiler)}.so"
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=directory) as temporary:
                os.replace(compile_to(Path(temporary) / target.name, compiler), target)
    return target


def compile_to(target: Path, compiler: str, flags: Sequence[str] = FLAGS) -> Path:
    """Each source by itself, as many at once as there are cores. Raises CalledProcessError with the compiler's words in
    `stderr`.
    """

    def run(*arguments: str) -> None:
        command = [compiler, *flags, *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)

    def compile_one(source: Path) -> str:
        made = f"{target}-{source.stem}.o"
        run("-c", "-o", made, str(source))
        return made

    largest_first = sorted(SOURCES.glob("*.c"), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, largest_first))
    run("-o", str(target), *objects, "-lm")
    return target


def _cache_directory() -> Path:
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pd-cluster"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "lock").touch()
    except OSError:
        directory = Path(tempfile.mkdtemp(prefix="pd-cluster-kernels-"))
    return directory


def _key(compiler: str) -> str:
    """What the object depends on: sources, flags, compiler and the processor that `-march=native` means."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=BUILD_TIMEOUT_S).stdout
    digest = hashlib.blake2b(repr((FLAGS, version, _processor())).encode(), digest_size=12)
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kept)))
