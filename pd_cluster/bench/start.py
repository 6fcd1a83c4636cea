"""From `pd-cluster serve` to the first streamed token: the bundled model, one prefill and one decode rank, by stages.

    command      the process starts, reads its configuration and says what it will start
    engines      the launcher is up, ranks have started, loaded their model and met (of which `load`: the slowest
                 rank's own work once its libraries are imported)
    attach       the router has reached every worker and HTTP listens
    first_token  a streamed completion, its prefill and its handoff among it

Each round is a server of its own, ended before the next begins; medians of each stage and of the whole.
"""

import asyncio
import contextlib
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pd_cluster.bench.completions import streamed
from pd_cluster.errors import Unavailable

TIMEOUT_S = 180.0
STOP_S = 20.0
_SERVED = re.compile(r"served at (http://[\w.:]+)")


def command_line(launcher: str, model: str, extra: Sequence[str] = ()) -> list[str]:
    serve = [sys.executable, "-m", "pd_cluster.cli.main", "serve", model, "--launcher", launcher, "--http-port", "0"]
    return [*serve, "--max-model-len", "512", "--set", "kv.max_bytes=33554432", *extra]


async def first_token(url: str, model: str) -> None:
    """Open a streamed completion and wait for its first token. Raises Unavailable."""
    asked = {"model": model, "prompt": [1, 403, 407], "max_tokens": 8, "temperature": 0}
    heard = b""
    async with streamed(url, asked) as reader:
        while b'"choices"' not in heard:
            data = await reader.read(1 << 16)
            if not data:
                raise Unavailable(
                    f"the server ended the stream before a token: {heard[-300:].decode(errors='replace')}"
                )
            heard += data


async def measure(command: list[str], model: str) -> dict[str, float]:
    """Seconds of each stage of one start; the server is gone after. Raises Unavailable."""
    with tempfile.TemporaryDirectory(prefix="pd-cluster-start-") as logs:
        started_s = time.monotonic()
        server = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"PD_CLUSTER_LOG_DIR": logs},
        )
        assert server.stderr is not None
        lines: list[str] = []
        marks: dict[str, float] = {}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                url = None
                while url is None:
                    line = (await server.stderr.readline()).decode(errors="replace")
                    if not line:
                        raise Unavailable("the server did not start: " + "".join(lines[-5:]).strip())
                    lines.append(line)
                    marks.setdefault("command", time.monotonic())
                    if " is up: " in line:
                        marks["engines"] = time.monotonic()
                    if found := _SERVED.search(line):
                        url = found[1]
                marks["attach"] = time.monotonic()
                await first_token(url, model)
                marks["first_token"] = time.monotonic()
        except TimeoutError as error:
            raise Unavailable(f"no token in {TIMEOUT_S:g} s: " + "".join(lines[-5:]).strip()) from error
        finally:
            await _stop(server)
        loads = _loads(logs)
    stages: dict[str, float] = {}
    before_s = started_s
    for name, at_s in marks.items():
        stages[f"{name}_s"], before_s = at_s - before_s, at_s
    if loads:  # Ray keeps its actors' logs itself
        stages["load_s"] = max(loads)
    return stages | {"total_s": before_s - started_s}


def _loads(logs: str) -> list[float]:
    """What each rank says its own load took."""
    texts = [file.read_text(errors="replace") for file in Path(logs).glob("*.log")]
    return [float(found) for text in texts for found in re.findall(r"rank_serves\b.*?\bload_s=([\d.]+)", text)]


async def _stop(server: asyncio.subprocess.Process) -> None:
    """End the server; whoever of its session is left after a while is killed."""
    with contextlib.suppress(ProcessLookupError):
        server.send_signal(signal.SIGTERM)
    draining = asyncio.create_task(server.communicate())
    try:
        async with asyncio.timeout(STOP_S):
            await asyncio.shield(draining)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        await draining


def run(
    *, launchers: Sequence[str] = ("process", "ray"), rounds: int = 3, model: str = "demo", extra: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Median seconds of each stage, by launcher."""
    results: dict[str, dict[str, Any]] = {}
    for launcher in launchers:
        command = command_line(launcher, model, extra)
        starts = [asyncio.run(measure(command, Path(model).stem)) for _ in range(rounds)]
        stages = starts[0].keys()
        results[launcher] = {name: statistics.median(start[name] for start in starts) for name in stages}
        results[launcher]["slowest_s"] = max(start["total_s"] for start in starts)
    return results
