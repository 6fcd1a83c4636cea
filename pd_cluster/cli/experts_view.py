"""The experts of every engine as people read them: how even the ranks are, and which experts have the most work."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pd_cluster.client import LayerStatus, PlacementStatus

EVEN, UNEVEN = 1.1, 1.3
"""A hottest rank below and above these shares of the mean is good and bad."""


def experts_table(placements: list[PlacementStatus], layers: int) -> RenderableType:
    """A row for each engine, and one for each of its `layers` least even layers, the worst first."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("experts", no_wrap=True)
    for heading in ("max/mean", "epoch", "swaps", "given up", "moved"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    reasons: list[RenderableType] = []
    for placement in sorted(placements, key=lambda p: p.engine_id):
        table.add_row(
            placement.engine_id,
            _ratio(placement.imbalance) if placement.imbalance else Text("-"),
            str(placement.epoch),
            str(placement.num_swaps),
            str(placement.num_abandoned),
            size(placement.bytes_moved),
            Text("changing", style="yellow") if placement.is_changing else Text(""),
        )
        if placement.last_reason:
            reasons.append(Text(f"{placement.engine_id}, last given up: {placement.last_reason}", style="dim"))
    parts: list[RenderableType] = [table]
    for placement in sorted(placements, key=lambda p: p.engine_id):
        worst = sorted(enumerate(placement.layers), key=lambda item: (-item[1].imbalance, item[0]))[:layers]
        if worst:
            parts.append(_layers(placement.engine_id, worst))
    return Group(*parts, *reasons)


def _layers(engine_id: str, layers: list[tuple[int, LayerStatus]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(f"  {engine_id}", no_wrap=True)
    table.add_column("max/mean", justify="right", no_wrap=True)
    table.add_column("hottest experts, their share and copies")
    for number, layer in layers:
        hottest = ", ".join(
            f"{expert.expert}: {expert.share:.1%}" + (f" x{expert.copies}" if expert.copies > 1 else "")
            for expert in layer.hottest
        )
        table.add_row(f"  layer {number}", _ratio(layer.imbalance), hottest)
    return table


def _ratio(value: float) -> Text:
    return Text(f"{value:.3f}", style="green" if value < EVEN else "yellow" if value < UNEVEN else "red")


def size(num_bytes: float) -> str:
    """`0 B`, `2.1 MB`, `13.0 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
