"""How long ranks need to exchange the tokens of one layer of experts: by one-sided writes, and by gloo's all-to-all.

Ranks are processes of this host, each with both dispatchers. They take turns, `rounds` times `exchanges` of each. An
exchange is dispatch and combine without experts between them; the slowest rank's median counts.
"""

# T tokens of a rank, K experts per token, H hidden size

import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from msgspec import Struct
from torch._C._distributed_c10d import TCPStore

from pd_cluster.errors import EngineError
from pd_cluster.ids import Rank
from pd_cluster.parallel.codec import CodecName, codec_of
from pd_cluster.parallel.collective import CollectiveDispatcher
from pd_cluster.parallel.dispatch import Dispatcher
from pd_cluster.parallel.groups import Groups
from pd_cluster.parallel.one_sided import NixlDispatcher

TIMEOUT_S = 120.0
"""For every rank to start, and for all turns of a load: a busy machine takes its time."""

TURNS = ("nixl", "gloo")


class Load(Struct, frozen=True, kw_only=True):
    """A decode step's share: `num_tokens` of each rank, `num_chosen` experts each of `num_experts`, chosen evenly."""

    num_ranks: int
    num_tokens: int
    hidden_size: int
    num_chosen: int
    num_experts: int
    codec: CodecName = "auto"


DEMO = {"hidden_size": 128, "num_chosen": 4, "num_experts": 32}
LARGER = {"hidden_size": 2048, "num_chosen": 8, "num_experts": 128}


def run(*, num_tokens: int = 32, exchanges: int = 100, rounds: int = 7) -> list[dict[str, Any]]:
    """The demo model's shapes and larger ones, between 2 and 4 ranks; and the larger ones as FP8."""
    kinds: list[tuple[dict[str, int], CodecName]] = [(DEMO, "auto"), (LARGER, "auto"), (LARGER, "fp8")]
    loads = [
        Load(num_ranks=num_ranks, num_tokens=num_tokens, codec=codec, **shape)
        for shape, codec in kinds
        for num_ranks in (2, 4)
    ]
    return [measure(load, exchanges=exchanges, rounds=rounds) for load in loads]


def measure(load: Load, *, exchanges: int, rounds: int) -> dict[str, Any]:
    """Raises EngineError when a rank dies or says nothing for TIMEOUT_S."""
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes: list[Connection] = []
    processes = []
    for rank in range(load.num_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, load, store.port, exchanges, rounds, theirs), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(ours)
    try:
        endpoints = [_receive(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(endpoints)
        medians = [_receive(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send("end")
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
    nixl_s, gloo_s = (max(of_rank[turn] for of_rank in medians) for turn in TURNS)
    return {
        "ranks": load.num_ranks,
        "tokens": load.num_tokens,
        "hidden_size": load.hidden_size,
        "experts_per_token": load.num_chosen,
        "dtype": "fp8" if load.codec == "fp8" else "bfloat16",
        "nixl_us": round(nixl_s * 1e6, 1),
        "gloo_us": round(gloo_s * 1e6, 1),
        "ratio": round(nixl_s / gloo_s, 3),
    }


def _receive(pipe: Connection) -> Any:
    try:
        if pipe.poll(TIMEOUT_S):
            return pipe.recv()
    except EOFError as error:
        raise EngineError("a rank of the measurement died") from error
    raise EngineError(f"a rank of the measurement said nothing for {TIMEOUT_S:g} s")


def _rank(rank: int, load: Load, port: int, exchanges: int, rounds: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    groups = Groups.connect(
        store, rank=Rank(rank), tensor_parallel=1, data_parallel=load.num_ranks, timeout_s=TIMEOUT_S
    )
    assert groups.engine is not None
    slots_per_rank, codec = load.num_experts // load.num_ranks, codec_of(load.codec)
    nixl = NixlDispatcher(
        Rank(rank),
        load.num_ranks,
        slots_per_rank,
        max_tokens=load.num_tokens,
        num_chosen=load.num_chosen,
        hidden_size=load.hidden_size,
        dtype=torch.bfloat16,
        codec=codec,
    )
    pipe.send(nixl.endpoint())
    for other, endpoint in enumerate(pipe.recv()):
        if other != rank:
            nixl.connect(Rank(other), endpoint)
    nixl.begin(0, [Rank(other) for other in range(load.num_ranks)])
    generator = torch.Generator().manual_seed(rank)
    hidden_TH = torch.randn(load.num_tokens, load.hidden_size, generator=generator).bfloat16()
    scores = torch.rand(load.num_tokens, load.num_experts, generator=generator)
    weights_TK, slots_TK = scores.topk(load.num_chosen)
    dispatchers: dict[str, Dispatcher] = {"nixl": nixl, "gloo": CollectiveDispatcher(groups, slots_per_rank, codec)}
    seconds: dict[str, list[float]] = {turn: [] for turn in TURNS}
    for round_number in range(rounds + 1):
        for turn in TURNS:
            groups.engine.minimum(0)
            took_s = []
            for _ in range(exchanges):
                started_s = time.perf_counter()
                combining = dispatchers[turn].dispatch(0, hidden_TH, slots_TK, weights_TK)
                combining.combine([arrived.hidden_RH for arrived in combining.arrived()])
                took_s.append(time.perf_counter() - started_s)
            if round_number:  # the first is for connections and pages
                seconds[turn].append(statistics.median(took_s))
    assert not nixl.take_void(), "an exchange lost rows"
    pipe.send({turn: statistics.median(of_turn) for turn, of_turn in seconds.items()})
    pipe.recv()
    os._exit(0)  # NIXL's connections to peers that are gone need no goodbye
