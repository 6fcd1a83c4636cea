"""What a cluster's start looks like on stderr: a bar for each rank on a terminal, a line for each engine elsewhere."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from pd_cluster.ids import EngineId, Rank, worker_id
from pd_cluster.launch.lifecycle import EngineEvent, EngineFailed, EngineLost, EngineUp
from pd_cluster.launch.spec import RankProgress


class StartDisplay:
    """Feed it the supervisor's progress and events while the cluster starts."""

    def __init__(self, title: str) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._title = title
        self._live = self._console.is_terminal
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._live,
        )
        self._tasks: dict[tuple[EngineId, Rank], TaskID] = {}

    def __enter__(self) -> Self:
        if self._live:
            self._bars.start()
            self._bars.add_task(self._title.partition("\n")[0], total=None, count="")
        else:
            self._console.print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def on_progress(self, engine_id: EngineId, rank: Rank, progress: RankProgress) -> None:
        key = (engine_id, rank)
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task("", total=progress.total, count="")
        self._bars.update(
            self._tasks[key],
            description=f"{engine_id}.{rank} {progress.stage}",
            completed=progress.done,
            total=progress.total,
            count=f"{progress.done}/{progress.total}",
        )

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case EngineUp(dp_rank=int(dp_rank)):
                self._console.print(f"{worker_id(event.engine_id, dp_rank)} is up")
            case EngineLost(expected=False, dp_rank=int(dp_rank)):
                self._console.print(f"{worker_id(event.engine_id, dp_rank)} failed")
            case EngineUp():
                num_workers = len(event.addresses)
                self._console.print(f"{event.engine_id} is up: {num_workers} worker{'s' if num_workers > 1 else ''}")
            case EngineLost(expected=False) | EngineFailed():
                self._console.print(f"{event.engine_id} failed")
            case _:
                pass


def is_interactive() -> bool:
    """Whether someone watches stdout."""
    return sys.stdout.isatty()
