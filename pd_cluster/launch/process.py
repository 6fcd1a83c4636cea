"""The process launcher: every rank is a child process of this one, with its own session and log file.

A rank gets its spec on stdin, so that no secret stands in an environment or a command line, and stdin stays open for as
long as the parent lives. Call from a thread that lives as long as the ranks shall: see `child.py`.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from pd_cluster import env
from pd_cluster.devices import GpuHolder, deal_gpus, gpu_variables, ranks_per_gpu, visible_gpus
from pd_cluster.errors import Unavailable
from pd_cluster.launch.launcher import RankHandle
from pd_cluster.launch.spec import RankSpec, encode_spec

LOG_TAIL_BYTES = 16 << 10


class ProcessHandle:
    def __init__(self, spec: RankSpec, process: "subprocess.Popen[bytes]", log: Path, gpu: str | None) -> None:
        self.spec = spec
        self.gpu = gpu
        self._process = process
        self._log = log

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        if self._process.poll() is None:
            # the rank leads its process group, and is not reaped yet: the id cannot be another's
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def log_tail(self, num_lines: int = 20) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-num_lines:])

    def release(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()


class ProcessLauncher:
    """`command` is what a rank runs; it takes a RankSpec as a line of JSON on stdin. `gpus` says what there is to deal
    out."""

    def __init__(self, command: list[str] | None = None, gpus: Callable[[], list[str]] | None = None) -> None:
        self._command = command or [sys.executable, "-m", "pd_cluster.launch.rank"]
        self._gpus = gpus or _usable_gpus
        self._handles: list[ProcessHandle] = []
        self._keep_logs = env.log_dir() is not None
        self.logs = env.log_dir() or Path(tempfile.mkdtemp(prefix="pd-cluster-"))
        self.logs.mkdir(parents=True, exist_ok=True)

    @property
    def host(self) -> str:
        return "127.0.0.1"

    def start(self, specs: list[RankSpec]) -> list[RankHandle]:
        self._forget_ended()
        gpus = self._gpus()
        held = [GpuHolder(h.spec.engine_id, "auto", h.gpu) for h in self._handles if h.gpu and h.poll() is None]
        dealt = deal_gpus([GpuHolder(spec.engine_id, spec.section.device) for spec in specs], held, gpus)
        started: list[ProcessHandle] = []
        try:
            for spec, gpu in zip(specs, dealt, strict=True):
                share = ranks_per_gpu(spec.ranks_on_host, len(gpus))
                variables = gpu_variables(gpu, gpus)
                started.append(self._start(msgspec.structs.replace(spec, ranks_on_gpu=share), gpu, variables))
        except OSError as error:
            for handle in started:
                handle.kill()
            raise Unavailable(f"cannot start {specs[len(started)].name}: {error.strerror}") from error
        finally:
            self._handles += started
        return list(started)

    def _start(self, spec: RankSpec, gpu: str | None, variables: dict[str, str]) -> ProcessHandle:
        log = self.logs / f"{spec.name}-{spec.worker_epoch}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | env.rank_variables(spec.threads, os.environ) | variables,
            )
        assert process.stdin is not None
        try:
            process.stdin.write(encode_spec(spec) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died already: its exit code and log say why
        return ProcessHandle(spec, process, log, gpu)

    def _forget_ended(self) -> None:
        """Keep no file open for ranks that were replaced."""
        ended = [handle for handle in self._handles if handle.poll() is not None]
        self._handles = [handle for handle in self._handles if handle not in ended]
        for handle in ended:
            self._release(handle)

    def _release(self, handle: ProcessHandle) -> None:
        self._keep_logs |= handle.wait(10.0) not in (0, -signal.SIGTERM, -signal.SIGKILL)
        handle.release()

    def close(self) -> None:
        for handle in self._handles:
            handle.kill()
        for handle in self._handles:
            self._release(handle)
        self._handles.clear()
        if not self._keep_logs:
            shutil.rmtree(self.logs, ignore_errors=True)


def _usable_gpus() -> list[str]:
    """Of no use to a torch that was built without CUDA."""
    gpus = visible_gpus()
    if gpus:
        import torch

        if torch.version.cuda is None:
            return []
    return gpus
