"""Every dispatcher sends the same tokens to the same experts: over gloo, by one-sided writes, permuted, added up."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pd_cluster.errors import EngineError
from pd_cluster.ids import Rank
from pd_cluster.model.moe import ExpertSlots
from pd_cluster.parallel.collective import CollectiveDispatcher
from pd_cluster.parallel.dispatch import Dispatcher, combine
from pd_cluster.parallel.groups import Groups, share
from pd_cluster.parallel.local import LocalDispatcher
from pd_cluster.parallel.one_sided import NixlDispatcher
from pd_cluster.parallel.replicated import ReplicatedDispatcher, single_rank

H, INNER, RANKS, PER_RANK, K = 8, 4, 4, 3, 3


def make(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, ExpertSlots]:
    generator = torch.Generator().manual_seed(num_tokens)
    num_slots = RANKS * PER_RANK
    hidden_TH = torch.randn(num_tokens, H, generator=generator).to(dtype)
    slots_TK = torch.rand(num_tokens, num_slots, generator=generator).topk(K).indices
    weights_TK = torch.rand(num_tokens, K, generator=generator)
    gate_up = torch.randn(num_slots, 2 * INNER, H, generator=generator).to(dtype)
    down = torch.randn(num_slots, H, INNER, generator=generator).to(dtype)
    return hidden_TH, slots_TK, weights_TK, ExpertSlots(gate_up, down)


def part(experts: ExpertSlots, rank: int) -> ExpertSlots:
    run = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
    return ExpertSlots(experts.gate_up_SNH[run].clone(), experts.down_SHI[run].clone())


def compute(
    dispatcher: Dispatcher, experts: dict[Rank, ExpertSlots], hidden: Tensor, slots: Tensor, w: Tensor
) -> Tensor:
    combining = dispatcher.dispatch(0, hidden, slots, w)
    return combine(combining, [experts[arrived.rank](arrived) for arrived in combining.arrived()])


@contextlib.contextmanager
def dispatchers(kind: str, dtype: torch.dtype, pool: ThreadPoolExecutor) -> Iterator[list[Dispatcher]]:
    """One of each rank, met and ready."""
    if kind == "collective":
        store = dist.HashStore()

        def meet(rank: int) -> Dispatcher:
            groups = Groups.connect(store, rank=Rank(rank), tensor_parallel=1, data_parallel=RANKS, timeout_s=20)
            return CollectiveDispatcher(groups, PER_RANK)

        yield list(pool.map(meet, range(RANKS)))
        return
    ranks = [Rank(rank) for rank in range(RANKS)]
    made = [
        NixlDispatcher(rank, RANKS, PER_RANK, max_tokens=32, num_chosen=K, hidden_size=H, dtype=dtype) for rank in ranks
    ]
    for one in made:
        for other in made:
            if one is not other:
                one.connect(other.ranks[0], other.endpoint())
    for one in made:
        one.begin(0, ranks)
    yield list(made)
    for one in made:
        one.close()


def whole(hidden: Tensor, slots: Tensor, weights: Tensor, experts: ExpertSlots) -> Tensor:
    return compute(single_rank(RANKS * PER_RANK), {Rank(0): experts}, hidden, slots, weights)


def test_the_whole_form_is_a_loop_over_experts() -> None:
    hidden, slots, weights, experts = make(9)
    out = torch.zeros(9, H)
    for t in range(9):
        for slot, weight in zip(slots[t].tolist(), weights[t].tolist(), strict=True):
            gate, up = (experts.gate_up_SNH[slot] @ hidden[t]).chunk(2)
            out[t] += weight * (experts.down_SHI[slot] @ (torch.nn.functional.silu(gate) * up))
    assert torch.allclose(whole(hidden, slots, weights, experts), out, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 50])
def test_virtual_ranks_equal_the_whole(num_tokens: int) -> None:
    hidden, slots, weights, experts = make(num_tokens)
    parts = {Rank(rank): part(experts, rank) for rank in range(RANKS)}
    result = compute(LocalDispatcher(RANKS, PER_RANK), parts, hidden, slots, weights)
    assert torch.allclose(result, whole(hidden, slots, weights, experts), atol=1e-5)


@pytest.mark.parametrize("kind", ["collective", "nixl"])
@pytest.mark.parametrize("one_expert", [False, True])
@pytest.mark.parametrize("counts", [[5, 0, 17, 1], [0, 0, 0, 3], [0, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_with_uneven_tokens_equal_the_whole(
    counts: list[int], dtype: torch.dtype, one_expert: bool, kind: str
) -> None:
    hidden, slots, weights, experts = make(sum(counts), dtype)
    if one_expert:
        slots = torch.full_like(slots[:, :1], 7)
        weights = weights[:, :1]
    bounds = torch.tensor([0, *counts]).cumsum(0).tolist()

    def run(dispatcher: Dispatcher) -> Tensor:
        (rank,) = dispatcher.ranks
        own = slice(bounds[rank], bounds[rank + 1])
        return compute(dispatcher, {rank: part(experts, rank)}, hidden[own], slots[own], weights[own])

    with ThreadPoolExecutor(RANKS) as pool, dispatchers(kind, dtype, pool) as of_ranks:
        result = torch.cat(list(pool.map(run, of_ranks)))
    assert result.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.2
    assert torch.allclose(result, whole(hidden, slots, weights, experts), atol=tolerance)


@pytest.mark.parametrize("kind", ["collective", "nixl"])
def test_exchanging_and_permuting_give_equal_bits(kind: str) -> None:
    """The same packing, counting and adding: which wire carries the rows makes no difference at all."""
    hidden, slots, weights, experts = make(22)
    parts = {Rank(rank): part(experts, rank) for rank in range(RANKS)}
    local = compute(LocalDispatcher(RANKS, PER_RANK), parts, hidden, slots, weights)

    def run(dispatcher: Dispatcher) -> Tensor:
        (rank,) = dispatcher.ranks
        own = slice(*share(22, rank, RANKS))
        return compute(dispatcher, {rank: parts[rank]}, hidden[own], slots[own], weights[own])

    with ThreadPoolExecutor(RANKS) as pool, dispatchers(kind, torch.float32, pool) as of_ranks:
        assert torch.equal(torch.cat(list(pool.map(run, of_ranks))), local)


@pytest.mark.parametrize("slot", [-1, RANKS * PER_RANK])
def test_a_slot_that_does_not_exist_is_refused_by_number(slot: int) -> None:
    hidden, slots, weights, experts = make(4)
    slots[2, 1] = slot
    one_rank = CollectiveDispatcher(Groups(), RANKS * PER_RANK)
    for dispatcher in (LocalDispatcher(RANKS, PER_RANK), one_rank):
        with pytest.raises(EngineError, match=f"slot {slot}, but there are only slots 0 to 11"):
            compute(dispatcher, {Rank(0): experts}, hidden, slots, weights)


def test_replicated_ranks_add_up_to_the_whole() -> None:
    hidden, slots, weights, experts = make(13)
    store = dist.HashStore()

    def run(rank: int) -> Tensor:
        groups = Groups.connect(store, rank=Rank(rank), tensor_parallel=RANKS, data_parallel=1, timeout_s=20)
        dispatcher = ReplicatedDispatcher(groups, PER_RANK)
        return compute(dispatcher, {Rank(rank): part(experts, rank)}, hidden, slots, weights)

    with ThreadPoolExecutor(RANKS) as pool:
        results = list(pool.map(run, range(RANKS)))
    for result in results:
        assert torch.equal(result, results[0])
        assert torch.allclose(result, whole(hidden, slots, weights, experts), atol=1e-5)
