"""A rank killed while it exchanges tokens, over shared memory and over TCP: the others end their step and go on."""

import logging
import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection

import pytest

NUM_RANKS, PER_RANK, K, H, TOKENS = 3, 2, 2, 256, 24
VICTIM = 2
PATIENCE_S = 100.0


def _rank(rank: int, transports: str, pipe: Connection) -> None:
    """Exchange until a step is void; then begin anew with the other survivor, and be exact again."""
    os.environ["UCX_TLS"] = transports
    import torch

    from pd_cluster.ids import Rank
    from pd_cluster.parallel.dispatch import combine
    from pd_cluster.parallel.local import LocalDispatcher
    from pd_cluster.parallel.one_sided import NixlDispatcher

    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    dispatcher = NixlDispatcher(
        Rank(rank),
        NUM_RANKS,
        PER_RANK,
        max_tokens=TOKENS,
        num_chosen=K,
        hidden_size=H,
        dtype=torch.float32,
        step_deadline_s=PATIENCE_S,
    )
    pipe.send(dispatcher.endpoint())
    for other, endpoint in enumerate(pipe.recv()):
        if other != rank:
            dispatcher.connect(Rank(other), endpoint)
    pipe.send("connected")
    pipe.recv()
    dispatcher.begin(0, [Rank(other) for other in range(NUM_RANKS)])
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(TOKENS, H, generator=generator)
    weights = torch.rand(TOKENS, K, generator=generator)

    def is_exact(num_ranks: int) -> bool:
        slots = torch.rand(TOKENS, num_ranks * PER_RANK, generator=generator).topk(K).indices
        results = []
        for by in (dispatcher, LocalDispatcher(NUM_RANKS, PER_RANK)):
            combining = by.dispatch(0, hidden, slots, weights)
            results.append(combine(combining, [arrived.hidden_RH * 2 for arrived in combining.arrived()]))
        return torch.equal(*results)

    def obey_masks() -> None:
        while (command := pipe.recv()) is not None:
            dispatcher.mask(Rank(command))

    masks = threading.Thread(target=obey_masks)
    masks.start()
    num_steps = 0
    while is_exact(NUM_RANKS) and not dispatcher.take_void():
        num_steps += 1
        if num_steps == 50:
            pipe.send("steps")
    pipe.send(("void", dispatcher.take_void()))
    masks.join()
    dispatcher.begin(1, [Rank(other) for other in range(NUM_RANKS - 1)])
    pipe.send([(is_exact(NUM_RANKS - 1), dispatcher.take_void()) for _ in range(50)])
    pipe.recv()
    os._exit(0)


def receive(pipe: Connection) -> object:
    assert pipe.poll(PATIENCE_S), "waited in vain"
    return pipe.recv()


@pytest.mark.processes
@pytest.mark.parametrize("transports", ["shm,self,tcp", "tcp,self"])
def test_survivors_of_a_killed_rank_end_their_step_void_and_go_on_exactly(transports: str) -> None:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(NUM_RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, transports, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        endpoints = [receive(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(endpoints)
        assert [receive(pipe) for pipe in pipes] == ["connected"] * NUM_RANKS
        for pipe in pipes:
            pipe.send("begin")
        assert [receive(pipe) for pipe in pipes] == ["steps"] * NUM_RANKS
        processes[VICTIM].kill()
        processes[VICTIM].join()
        killed_s = time.monotonic()
        survivors = pipes[:VICTIM]
        for pipe in survivors:
            pipe.send(VICTIM)
        for pipe in survivors:
            kind, _ = receive(pipe)  # type: ignore[misc]
            assert kind == "void"
        assert time.monotonic() - killed_s < 5.0
        for pipe in survivors:
            pipe.send(None)
        for pipe in survivors:
            assert receive(pipe) == [(True, False)] * 50
            pipe.send("end")
        for process in processes[:VICTIM]:
            process.join(10)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
