"""Which DP ranks of an engine serve, a line for each: `decode-0: 4 DP ranks x TP2: 0-1 up, 3 leaving, 2 away`."""

from itertools import pairwise

from rich.text import Text

from pd_cluster.client import EngineStatus


def members(engine: EngineStatus) -> Text:
    degree = f" x TP{engine.tensor_parallel}" if engine.tensor_parallel > 1 else ""
    line = Text(f"{engine.engine_id}: {engine.data_parallel} DP ranks{degree}: ")
    parts = [("up", engine.up, "green"), ("leaving", engine.leaving, "yellow"), ("away", engine.away, "red")]
    return line + Text(", ").join(Text(f"{runs(ranks)} {word}", style=style) for word, ranks, style in parts if ranks)


def runs(numbers: list[int]) -> str:
    """`0-2, 5`; ascending numbers."""
    starts = [number for before, number in pairwise([-2, *numbers]) if number != before + 1]
    ends = [number for number, after in pairwise([*numbers, -2]) if after != number + 1]
    return ", ".join(
        f"{first}-{last}" if first != last else str(first) for first, last in zip(starts, ends, strict=True)
    )
