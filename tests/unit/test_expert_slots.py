"""How many expert slots let an engine lose a DP rank, and that the change then fits."""

import pytest
from msgspec.structs import replace

from pd_cluster.ids import ExpertId, Rank
from pd_cluster.parallel.placement import LayerPlacement, slots_to_lose_one, spread
from pd_cluster.parallel.stages import loads, missing


@pytest.mark.parametrize(("num_experts", "data_parallel", "tensor_parallel"), [(32, 4, 1), (256, 3, 2), (64, 16, 4)])
def test_the_others_have_room_for_the_experts_of_any_dp_rank_and_no_slot_more(
    num_experts: int, data_parallel: int, tensor_parallel: int
) -> None:
    size = slots_to_lose_one(num_experts, data_parallel, tensor_parallel)
    assert size is not None
    survivors = (data_parallel - 1) * tensor_parallel
    assert (size - 1) * survivors < num_experts <= size * survivors
    num_ranks = data_parallel * tensor_parallel
    before = spread(num_experts, num_ranks, 1, 0, size)
    for dp_rank in range(data_parallel):
        dead = {Rank(dp_rank * tensor_parallel + tp_rank) for tp_rank in range(tensor_parallel)}
        live = frozenset(map(Rank, range(num_ranks))) - dead
        lost = [expert for _, expert in missing(before, live)]
        slots = [None if before.owner(slot) in dead else e for slot, e in enumerate(before.layers[0].slots)]
        empty = [slot for slot, e in enumerate(slots) if e is None and before.owner(slot) in live]
        for slot, expert in zip(empty, lost, strict=False):
            slots[slot] = ExpertId(expert)
        after = replace(before, epoch=1, layers=(LayerPlacement(tuple(slots)),))  # refused if an expert were left out
        assert sum(len(loads(before, after, rank, live)) for rank in live) == len(lost)


def test_with_two_dp_ranks_nobody_is_asked_to_hold_every_expert_unasked() -> None:
    assert slots_to_lose_one(256, 2, 8) is None
