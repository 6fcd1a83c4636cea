"""What a streamed token costs an HTTP server's process: CPU time from the engine's output to the client's socket.

Opens streams of /v1/completions over plain sockets, so that the client costs little, and reads the server's CPU time
from /proc before and after. Without an address it serves the bundled model, colocated, in a process of its own; the
engine's ranks are other processes and do not count.
"""

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pd_cluster.errors import Unavailable

START_TIMEOUT_S = 120.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU time of a process and its threads so far, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


async def stream(host: str, port: int, model: str, prompt: list[int], num_tokens: int) -> int:
    """One streamed completion; the number of events with a choice. Raises Unavailable when the server refuses."""
    reader, writer = await asyncio.open_connection(host, port)
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    status = (await reader.readline()).split()
    if status[1:2] != [b"200"]:
        raise Unavailable(f"the server answered {b' '.join(status[1:]).decode()}: {(await reader.read(500)).decode()}")
    num_events = 0
    while data := await reader.read(1 << 16):
        num_events += data.count(b'"choices"')
    writer.close()
    return num_events


async def load(url: str, model: str, num_streams: int, num_tokens: int) -> float:
    """Run `num_streams` at once to their end; the seconds it took."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    started_s = time.monotonic()
    prompts = [[1, 400 + index % 40, 300 + index // 40] for index in range(num_streams)]
    await asyncio.gather(*(stream(host, port, model, prompt, num_tokens) for prompt in prompts))
    return time.monotonic() - started_s


def measure(url: str, pid: int, model: str, *, num_streams: int, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` runs after one to warm up."""
    asyncio.run(load(url, model, num_streams, num_tokens))
    costs, speeds = [], []
    for _ in range(repeats):
        before_s = cpu_s(pid)
        wall_s = asyncio.run(load(url, model, num_streams, num_tokens))
        costs.append((cpu_s(pid) - before_s) / (num_streams * num_tokens))
        speeds.append(num_streams * num_tokens / wall_s)
    return {
        "num_streams": num_streams,
        "num_tokens": num_tokens,
        "cpu_us_per_token": statistics.median(costs) * 1e6,
        "tok_s": statistics.median(speeds),
    }


class DemoServer:
    """`pd-cluster serve` of the bundled model on a free port, colocated; a context manager of its address."""

    def __enter__(self) -> "DemoServer":
        command = [sys.executable, "-m", "pd_cluster.cli.main", "serve", "--colocated", "--http-port", "0"]
        command += ["--set", "decode.max_num_seqs=1024", "--dtype", "float32", "--max-model-len", "1024"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + START_TIMEOUT_S
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if found := re.search(r"served at (http://[\w.:]+)", line):
                self.url = found.group(1)
                return self
            if time.monotonic() > deadline_s:
                break
        self.process.kill()
        raise Unavailable("the server did not start: " + "".join(lines[-5:]))

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)


def run(
    *,
    url: str | None = None,
    pid: int | None = None,
    model: str = "demo",
    streams: tuple[int, ...] = (32, 128, 512),
    num_tokens: int = 64,
    repeats: int = 3,
) -> dict[str, Any]:
    """One result for each number of streams. `url` and `pid` name a running server, ours or another's."""
    if url is None or pid is None:
        with DemoServer() as server:
            return run(
                url=server.url,
                pid=server.process.pid,
                model=model,
                streams=streams,
                num_tokens=num_tokens,
                repeats=repeats,
            )
    results = [measure(url, pid, model, num_streams=count, num_tokens=num_tokens, repeats=repeats) for count in streams]
    return {f"streams_{result['num_streams']}": result for result in results}
