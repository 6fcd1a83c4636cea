"""The ranks of a measurement: processes of this host with a store to meet at and a pipe to each; none outlives it."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Concatenate, ParamSpec

from torch._C._distributed_c10d import TCPStore

from pd_cluster.errors import EngineError

LEAVE_S = 5.0

P = ParamSpec("P")


class RankProcesses:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def add(self, process: BaseProcess, pipe: Connection) -> None:
        self._processes.append(process)
        self._pipes.append(pipe)

    def send(self, value: Any) -> None:
        """To every rank."""
        for pipe in self._pipes:
            pipe.send(value)

    def receive(self, rank: int) -> Any:
        """What a rank says next. Raises EngineError when one of them dies before, or this one says nothing in time."""
        pipe = self._pipes[rank]
        ended = {process.sentinel: number for number, process in enumerate(self._processes)}
        ready = wait([pipe, *ended], self._timeout_s)
        if pipe in ready:
            with contextlib.suppress(EOFError):
                return pipe.recv()
        dead = next((number for sentinel, number in ended.items() if sentinel in ready), rank)
        if ready:
            raise EngineError(f"rank {dead} of the measurement died")
        raise EngineError(f"rank {rank} of the measurement said nothing for {self._timeout_s:g} s")

    def receive_all(self) -> list[Any]:
        return [self.receive(rank) for rank in range(len(self._pipes))]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(LEAVE_S)
        for pipe in self._pipes:
            pipe.close()


@contextlib.contextmanager
def rank_processes(
    num_ranks: int,
    timeout_s: float,
    target: Callable[Concatenate[int, int, Connection, P], None],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Iterator[RankProcesses]:
    """Run `target(rank, port of the store, pipe, ...)` in a process for each rank; they are killed at the end."""
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = RankProcesses(timeout_s)
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(rank, store.port, theirs, *args), kwargs=kwargs, daemon=True)
            process.start()
            theirs.close()  # so that the rank's end is the pipe's
            ranks.add(process, ours)
        yield ranks
    finally:
        ranks.kill()
