"""How long ranks need to exchange the tokens of one layer of experts: by one-sided writes, and by gloo's all-to-all.

Ranks are processes of this host, each with both dispatchers. They take turns, `rounds` times `exchanges` of each. An
exchange is dispatch and combine without experts between them; the slowest rank's median counts.
"""

# T tokens of a rank, K experts per token, H hidden size

import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from msgspec import Struct
from torch._C._distributed_c10d import TCPStore

from pd_cluster.bench.rank_processes import rank_processes
from pd_cluster.ids import Rank
from pd_cluster.parallel.codec import CodecName, codec_of
from pd_cluster.parallel.collective import CollectiveDispatcher
from pd_cluster.parallel.dispatch import Dispatcher, combine
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


def run(*, num_tokens: int = 32, exchanges: int = 50, rounds: int = 5) -> Iterator[dict[str, Any]]:
    """The demo model's shapes and larger ones, between 2 and 4 ranks; the larger ones as FP8 too. Each as it comes."""
    kinds: list[tuple[dict[str, int], CodecName]] = [(DEMO, "auto"), (LARGER, "auto"), (LARGER, "fp8")]
    loads = [
        Load(num_ranks=num_ranks, num_tokens=num_tokens, codec=codec, **shape)
        for shape, codec in kinds
        for num_ranks in (2, 4)
    ]
    for load in loads:
        yield measure(load, exchanges=exchanges, rounds=rounds)


def measure(load: Load, *, exchanges: int, rounds: int) -> dict[str, Any]:
    """Raises EngineError when a rank dies or says nothing for TIMEOUT_S."""
    with rank_processes(load.num_ranks, TIMEOUT_S, _rank, load, exchanges, rounds) as ranks:
        ranks.send(ranks.receive_all())  # endpoints
        medians = ranks.receive_all()
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


def _rank(rank: int, port: int, pipe: Connection, load: Load, exchanges: int, rounds: int) -> None:
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
                combine(combining, [arrived.hidden_RH for arrived in combining.arrived()])
                took_s.append(time.perf_counter() - started_s)
            if round_number:  # the first is for connections and pages
                seconds[turn].append(statistics.median(took_s))
    assert not nixl.take_void(), "an exchange lost rows"
    pipe.send({turn: statistics.median(of_turn) for turn, of_turn in seconds.items()})
    pipe.recv()  # until it is killed: others may be in their last exchange
