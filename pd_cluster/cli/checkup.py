"""The checks of `pd-cluster doctor`, each really doing what it checks where that takes no harm."""

import errno
import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import Struct

from pd_cluster.config import ClusterConfig
from pd_cluster.devices import GpuHolder, deal_gpus, device_name, visible_gpus
from pd_cluster.errors import PdClusterError, TransferFailed
from pd_cluster.ids import EngineEpoch, Rank, TransferId, new_epoch

Status = Literal["ok", "warn", "fail"]
TRANSFER_BYTES = 4 << 20
TRANSFER_DEADLINE_S = 10.0


class Finding(Struct, frozen=True):
    """`advice` says what to do when the status is not ok."""

    check: str
    status: Status
    detail: str
    advice: str = ""


Check = Callable[[ClusterConfig], tuple[Status, str, str]]


def examine(check: Check, config: ClusterConfig) -> Finding:
    try:
        status, detail, advice = check(config)
    except PdClusterError as error:
        status, detail, advice = "fail", error.message, ""
    except ImportError as error:
        status, detail, advice = "fail", str(error), f"{sys.executable} -m pip install pd-cluster"
    return Finding(check.__name__.replace("_", " "), status, detail, advice)


def python(_: ClusterConfig) -> tuple[Status, str, str]:
    import torch

    return "ok", f"Python {sys.version.split()[0]}, torch {torch.__version__}", ""


def cores_and_memory(config: ClusterConfig) -> tuple[Status, str, str]:
    from pd_cluster.launch.roles import engine_shapes

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    num_ranks = sum(shape.num_ranks for shape in engine_shapes(config))
    detail = f"{num_cores} cores, {memory_gb:.1f} GB memory, {num_ranks} ranks configured"
    if num_ranks > num_cores:
        return "warn", detail, "ranks share cores: fine for a try, slow for measurements"
    return "ok", detail, ""


def compiler(_: ClusterConfig) -> tuple[Status, str, str]:
    """Kernels for CPUs are compiled on first use."""
    from pd_cluster.kernels.native import find_compiler

    found = find_compiler()
    if found is None:
        advice = "install gcc or clang (Debian: apt install gcc), or name one by CC: CPU kernels are left out without"
        return "warn", "no C compiler: ranks on CPUs compute in plain torch, which is slower", advice
    return "ok", found, ""


def gpus(config: ClusterConfig) -> tuple[Status, str, str]:
    """What there is, and which rank would compute where."""
    import torch

    names = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    shown = visible_gpus()
    status, detail, advice = gpu_plan(config, names, shown)
    if not names and (shown or shutil.which("nvidia-smi")):
        what = f"the driver shows {len(shown)}" if shown else "the machine has NVIDIA tools"
        return (
            ("warn" if status == "ok" else status),
            f"{what}, but this torch sees none",
            "install a CUDA build of torch",
        )
    return status, detail, advice


def gpu_plan(config: ClusterConfig, names: list[str], shown: list[str]) -> tuple[Status, str, str]:
    """`names`: of the GPUs that torch sees; `shown`: of those, how the driver names them."""
    from pd_cluster.launch.roles import engine_shapes

    shapes = engine_shapes(config)
    sections = {shape.engine_id: config.prefill if shape.role == "prefill" else config.decode for shape in shapes}
    ranks = [
        GpuHolder(shape.engine_id, sections[shape.engine_id].device) for shape in shapes for _ in range(shape.num_ranks)
    ]
    if not names:
        for rank in ranks:
            device_name(rank.choice, 0, "prefill" if rank.engine.startswith("prefill") else "decode")
        return "ok", "none: everything runs on the CPU", ""
    dealt = deal_gpus(ranks, [], shown[: len(names)])
    places = [f"{rank.engine} on {'the CPU' if gpu is None else gpu}" for rank, gpu in zip(ranks, dealt, strict=True)]
    detail = f"{len(names)} x {names[0]}; {', '.join(dict.fromkeys(places))}"
    if len([gpu for gpu in dealt if gpu]) > len(names):
        return "warn", detail, "engines share GPUs: fine for a try, slow for measurements"
    return "ok", detail, ""


def nixl(_: ClusterConfig) -> tuple[Status, str, str]:
    version = importlib.metadata.version("nixl")
    plugins = sorted(
        {
            path.name.removeprefix("libplugin_").removesuffix(".so")
            for directory in map(Path, sys.path)
            for path in directory.glob(".nixl_*.mesonpy.libs/plugins/libplugin_*.so")
        }
    )
    detail = f"nixl {version}, plugins: {', '.join(plugins)}"
    return ("ok", detail, "") if "UCX" in plugins else ("fail", detail, "reinstall nixl: its UCX plugin is missing")


def nixl_transfer(_: ClusterConfig) -> tuple[Status, str, str]:
    """Write from one agent's memory into another's, and look at the bytes."""
    from pd_cluster.kv.layout import KvLayout
    from pd_cluster.transfer.contract import Arena, CopyRange, Event, Received, StoppedRecord, Write, WriteFailed
    from pd_cluster.transfer.nixl import NixlBackend

    layout = KvLayout(kind="mla", num_layers=1, head_ids=(0,), token_values=64, dtype="bfloat16", block_size=16)
    source, target = np.random.default_rng(0).bytes(TRANSFER_BYTES), np.zeros(TRANSFER_BYTES, np.uint8)
    memories = [np.frombuffer(bytearray(source), np.uint8), target]
    arenas = [Arena(base_address=memory.ctypes.data, num_bytes=memory.nbytes) for memory in memories]
    sender, receiver = (NixlBackend(new_epoch(), Rank(0), layout, arena) for arena in arenas)
    try:
        sender.connect(receiver.endpoint())
        epoch, transfer = EngineEpoch("doctor"), TransferId("doctor")
        record = StoppedRecord(transfer_id=transfer, epoch=epoch, source=0, num_sources=1)
        copies = [CopyRange(0, 0, TRANSFER_BYTES)]
        start_s = time.monotonic()
        sender.post(
            Write(write_id=0, transfer_id=transfer, peer=receiver.endpoint().agent_name, copies=copies, record=record)
        )
        events: list[Event] = []
        while not any(isinstance(event, Received) for event in events):
            events += sender.poll() + receiver.poll()
            for event in events:
                if isinstance(event, WriteFailed):
                    raise TransferFailed(f"the write failed: {event.reason}")
            if time.monotonic() - start_s > TRANSFER_DEADLINE_S:
                raise TransferFailed(f"{TRANSFER_BYTES >> 20} MiB did not arrive in {TRANSFER_DEADLINE_S:g} s")
        seconds = time.monotonic() - start_s
    finally:
        sender.close()
        receiver.close()
    if target.tobytes() != source:
        return "fail", "the bytes that arrived are not those that were sent", "try another UCX_TLS"
    return "ok", f"{TRANSFER_BYTES >> 20} MiB between two agents in {seconds * 1e3:.1f} ms, bytes equal", ""


def ucx_transports(_: ClusterConfig) -> tuple[Status, str, str]:
    rdma = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    interfaces = [name for _, name in socket.if_nameindex()]
    shm = Path("/dev/shm")
    shm_gb = shutil.disk_usage(shm).free / 1e9 if shm.exists() else 0.0
    chosen = os.environ.get("UCX_TLS")
    detail = (
        f"RDMA devices: {', '.join(rdma) or 'none'}; interfaces: {', '.join(interfaces)}; "
        f"shared memory: {shm_gb:.1f} GB free; UCX_TLS: {chosen or 'unset'}"
    )
    if shm_gb < 0.1:
        return "warn", detail, "give /dev/shm some space (docker: --shm-size): transfers on one host use it"
    return "ok", detail, ""


def http_port(config: ClusterConfig) -> tuple[Status, str, str]:
    return _port(config.router.host, config.router.http_port, "choose another with --http-port or router.http_port")


def grpc_port(config: ClusterConfig) -> tuple[Status, str, str]:
    if not config.router.grpc:
        return "ok", "router.grpc is off", ""
    port = config.router.wanted_grpc_port
    return _port(config.router.host, port, "choose another with router.grpc_port, or another http_port")


def _port(host: str, port: int, advice: str) -> tuple[Status, str, str]:
    try:
        with socket.create_server((host, port)):
            return "ok", f"{host}:{port} is free", ""
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = f"is a cluster running here already? `pd-cluster status` says so. Else {advice}"
        reason = str(error.strerror).partition(" (")[0]  # Python appends the address
        return "fail", f"{host}:{port}: {reason}", advice


def model(config: ClusterConfig) -> tuple[Status, str, str]:
    from pd_cluster.model.source import open_model

    opened = open_model(config.model.path, config.model.load)
    about = opened.config
    experts = f", {about.moe.num_experts} experts" if about.moe else ""
    text = "" if opened.tokenizer else "; no tokenizer: it takes token ids only"
    return "ok", f"{config.model.path}: {about.architecture}, {about.num_layers} layers{experts}{text}", ""


def ray(_: ClusterConfig) -> tuple[Status, str, str]:
    return "ok", f"ray {importlib.metadata.version('ray')}", ""


def ray_starts(_: ClusterConfig) -> tuple[Status, str, str]:
    """In a process of its own, so that a Ray that hangs or dies harms nothing."""
    script = "from pd_cluster.launch.ray import RayLauncher; RayLauncher('local').close()"
    start_s = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "fail", "a local Ray cluster did not start within 60 s", "use `--launcher process`"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return "fail", f"a local Ray cluster did not start: {last}", "use `--launcher process`"
    return "ok", f"a local Ray cluster starts and ends in {time.monotonic() - start_s:.1f} s", ""


CHECKS: list[Check] = [
    python,
    cores_and_memory,
    compiler,
    gpus,
    nixl,
    nixl_transfer,
    ucx_transports,
    model,
    http_port,
    grpc_port,
    ray,
    ray_starts,
]
