"""What people see of experts: the same numbers in the status, in `status` and `top`, and for Prometheus."""

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import msgspec
import numpy as np
import pytest
from fake_worker import FakeWorker
from prometheus_client.parser import text_string_to_metric_families
from rich.cells import cell_len
from rich.console import Console
from toy_router import System
from typer.testing import CliRunner

from pd_cluster.cli.experts_view import size
from pd_cluster.cli.main import app
from pd_cluster.cli.status_view import Moment, short, view
from pd_cluster.client import AsyncClient, ClusterStatus
from pd_cluster.ids import Rank
from pd_cluster.parallel.load_window import TriggerPolicy, layer_loads
from pd_cluster.parallel.placement import spread
from pd_cluster.parallel.placement_status import HotExpert, LayerLoad, PlacementStatus
from pd_cluster.parallel.planner import Question, answer

STATUS = PlacementStatus(
    epoch=12,
    num_swaps=11,
    num_abandoned=2,
    bytes_moved=13_400_000_000,
    imbalance=1.084,
    is_changing=True,
    last_reason="rank 3: 2 experts were not loaded in time on rank 3",
    layers=[
        LayerLoad(1.02, [HotExpert(7, 0.031, 2), HotExpert(200, 0.022, 1)]),
        LayerLoad(1.31, [HotExpert(9, 0.25, 16)]),
        LayerLoad(1.0, []),
    ],
)


def reports(worker: FakeWorker, status: PlacementStatus) -> None:
    plain = worker.load
    worker.load = lambda: msgspec.structs.replace(plain(), placement=status)  # type: ignore[method-assign]


@pytest.fixture
async def system():
    """A decode group whose hub has seen a load and whose other rank knows only its own epoch."""
    follower, hub = FakeWorker("decode-0", dp_rank=0), FakeWorker("decode-0", dp_rank=1)
    reports(follower, PlacementStatus(epoch=12, num_swaps=11))
    reports(hub, STATUS)
    async with System(FakeWorker("prefill-0"), follower, hub) as system:
        yield system


async def run(system: System, *args: str, columns: int = 80) -> str:
    def invoke() -> str:
        environment = {"PD_CLUSTER_ADDRESS": system.grpc_address, "COLUMNS": str(columns)}
        result = CliRunner().invoke(app, list(args), env=environment)
        assert result.exit_code == 0, result.output
        return result.stdout

    return await asyncio.to_thread(invoke)


async def test_the_status_carries_what_the_hub_knows(system: System) -> None:
    async with AsyncClient(system.grpc_address) as client:
        status = await client.status()
    (placement,) = status.placements
    assert placement.engine_id == "decode-0"
    for name in ("epoch", "num_swaps", "num_abandoned", "bytes_moved", "imbalance", "is_changing", "last_reason"):
        assert getattr(placement, name) == getattr(STATUS, name), name
    assert [layer.imbalance for layer in placement.layers] == [1.02, 1.31, 1.0]
    assert [(e.expert, e.share, e.copies) for e in placement.layers[0].hottest] == [(7, 0.031, 2), (200, 0.022, 1)]
    in_json = json.loads(await run(system, "status", "--json"))
    assert in_json["placements"][0]["layers"][1]["hottest"] == [{"expert": 9, "share": 0.25, "copies": 16}]


@pytest.mark.parametrize("command", [("status",), ("top", "--once", "--interval", "0.1")])
async def test_status_and_top_fit_80_columns_and_show_the_least_even_layer_first(
    system: System, command: tuple[str, ...]
) -> None:
    out = await run(system, *command)
    lines = out.splitlines()
    assert max(map(cell_len, lines)) <= 80
    workers = [line for line in lines if line.startswith(("prefill-0/", "decode-0/"))]
    assert len(workers) == 3  # none was folded
    assert all(" ready " in line for line in workers)
    engine = next(line for line in lines if line.startswith("decode-0 "))
    assert engine.split() == ["decode-0", "1.084", "12", "11", "2", "13.4", "GB", "changing"]
    layers = [line.split()[1:3] for line in lines if line.startswith("  layer ")]
    assert layers == [["1", "1.310"], ["0", "1.020"], ["2", "1.000"]]
    assert "9: 25.0% x16" in out
    assert "7: 3.1% x2, 200: 2.2%" in out
    assert "2 experts were not loaded in time" in out


async def test_top_shows_as_many_layers_as_asked_for(system: System) -> None:
    out = await run(system, "top", "--once", "--interval", "0.1", "--layers", "1", columns=160)
    assert out.count("  layer ") == 1


async def test_top_on_a_terminal_goes_on_with_the_cluster_until_ctrl_c(system: System) -> None:
    def watch() -> int:
        terminal, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
        command = [sys.executable, "-m", "pd_cluster.cli.main", "top", "--interval", "0.1", "--address"]
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
        process = subprocess.Popen([*command, system.grpc_address], stdin=inner, stdout=inner, env=environment)
        os.close(inner)
        seen, deadline_s = "", time.monotonic() + 30
        waits_for = ["decode-0 +1.084 +12 +11 ", "decode-0 +1.084 +13 +12 "]
        while waits_for and time.monotonic() < deadline_s:
            seen += os.read(terminal, 65536).decode(errors="replace")
            if re.search(waits_for[0], re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)):
                waits_for.pop(0)
                for worker in system.workers[1:]:
                    reports(worker, msgspec.structs.replace(STATUS, epoch=13, num_swaps=12))
        process.send_signal(signal.SIGINT)
        while select.select([terminal], [], [], 0.1)[0] or process.poll() is None:
            try:
                os.read(terminal, 65536)
            except OSError:  # it is gone
                break
        os.close(terminal)
        assert not waits_for, seen[-2000:]
        return process.wait(10)

    assert await asyncio.to_thread(watch) == 130


async def test_prometheus_gets_a_series_for_each_engine_and_layer(system: System) -> None:
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(system.router.metrics.render().decode())
        for sample in family.samples
    }
    engine = ("engine", "decode-0")
    for expected, name, *labels in (
        (12, "placement_epoch"),
        (1.084, "rank_imbalance_ratio"),
        (1.31, "worst_layer_imbalance_ratio"),
        (11, "placement_changes_total", ("outcome", "made")),
        (2, "placement_changes_total", ("outcome", "abandoned")),
        (13_400_000_000, "moved_bytes_total"),
        (1.31, "layer_imbalance_ratio", ("layer", "1")),
        (0.031, "layer_hottest_share_ratio", ("layer", "0")),
        (0.0, "layer_hottest_share_ratio", ("layer", "2")),
    ):
        assert values[f"pd_cluster_expert_{name}", engine, *labels] == expected, name


async def test_wide_numbers_still_fit_80_columns(system: System) -> None:
    async with AsyncClient(system.grpc_address) as client:
        status = await client.status()
    kv = msgspec.structs.replace(
        status.workers[0].kv, num_blocks=1_234_567, num_free_blocks=1, num_reserved_blocks=123_456
    )
    workers = [
        msgspec.structs.replace(
            worker,
            kv=kv,
            num_running=256,
            num_waiting=9999,
            step_s=0.1234,
            prefill_tok_s=123_456.0,
            reason="the stream broke: connection reset by peer",
            worker_id=f"colocated-1{index}/319",
        )
        for index, worker in enumerate(status.workers)
    ]
    totals = msgspec.structs.replace(
        status.totals,
        num_requests=123_456,
        num_output_tokens=10**9,
        num_prompt_tokens=10**9,
        kv_transfer_bytes=10**13,
        ttft_count=1,
        ttft_sum_s=1.25,
        itl_count=1,
        itl_sum_s=0.02,
    )
    shown = printed(msgspec.structs.replace(status, workers=workers, totals=totals))
    assert any(re.match(r"  (KV moved .*; )?TTFT 1.25 s, TPOT 20.0 ms$", line) for line in shown), shown  # in one piece
    assert max(map(cell_len, shown)) <= 80
    assert sum(line.startswith("colocated-1") and "123k/s" in line for line in shown) == 3


def printed(status: ClusterStatus) -> list[str]:
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        console.print(view(Moment(status), 80))
    return capture.get().splitlines()


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (9999, "9999"), (12_345, "12k"), (3_400_000, "3.4M"), (2.5e9, "2.5G")]
)
def test_numbers_take_three_figures_or_so(number: float, text: str) -> None:
    assert short(number) == text


def test_sizes_are_in_units_of_a_thousand() -> None:
    assert [size(n) for n in (0, 999, 2_100_000, 1.3e10, 2e15)] == ["0 B", "999 B", "2.1 MB", "13.0 GB", "2000.0 TB"]


# ---- where the numbers come from


def test_a_look_names_the_hottest_experts_of_every_layer_with_their_copies() -> None:
    placement = spread(8, 4, 2, redundant=4)
    loads = np.array([[100, 1, 1, 1, 50, 1, 1, 1], [0] * 8])
    hot, idle = layer_loads(placement, loads, most=2)
    assert hot.hottest == [HotExpert(0, round(100 / 156, 4), 2), HotExpert(4, round(50 / 156, 4), 1)]
    assert hot.ratio > 1.2
    assert idle == LayerLoad(1.0, [])
    assert layer_loads(placement, np.zeros((2, 8))) == []


def test_the_planner_answers_a_look_with_every_layer_and_no_ratio_for_few_tokens() -> None:
    placement = spread(8, 4, 2, redundant=4)
    question = Question(
        kind="look",
        placement=placement,
        weights=[{}, {}],
        loads=np.arange(16).tobytes(),
        live=[Rank(rank) for rank in range(4)],
        staying=[Rank(rank) for rank in range(4)],
        expert_bytes=1,
        policy=TriggerPolicy(),
    )
    found = answer(question)
    assert found.ratio is None
    assert [layer.hottest[0].expert for layer in found.layers] == [7, 7]
    many = answer(msgspec.structs.replace(question, loads=(np.arange(16) * 10_000).tobytes()))
    assert many.ratio == pytest.approx(np.mean([layer.ratio for layer in many.layers]), abs=1e-4)
