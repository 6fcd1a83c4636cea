"""The processes of a measurement: they talk over pipes, and a dead one is noticed whoever is listened to."""

import os
import time
from multiprocessing.connection import Connection

import pytest

from pd_cluster.bench.rank_processes import rank_processes
from pd_cluster.errors import EngineError

pytestmark = pytest.mark.processes


def echo(rank: int, port: int, pipe: Connection, dying: int | None) -> None:
    pipe.send((rank, os.getpid()))
    pipe.recv()  # until all have said so
    if rank == dying:
        os._exit(3)
    pipe.send(pipe.recv())
    pipe.recv()


def test_ranks_say_what_they_measured_and_are_gone_at_the_end() -> None:
    with rank_processes(2, 60.0, echo, None) as ranks:
        pids = [pid for _, pid in ranks.receive_all()]
        ranks.send("go on")
        ranks.send("so much")
        assert ranks.receive_all() == ["so much"] * 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_dies_is_noticed_while_another_is_listened_to() -> None:
    with rank_processes(2, 120.0, echo, 1) as ranks:
        pids = [pid for _, pid in ranks.receive_all()]
        ranks.send("go on")
        started_s = time.monotonic()
        with pytest.raises(EngineError, match="rank 1 of the measurement died"):
            ranks.receive(0)
        with pytest.raises(EngineError, match="rank 1 of the measurement died"):
            ranks.receive(1)
    assert time.monotonic() - started_s < 60
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
