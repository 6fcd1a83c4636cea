"""A placement: which physical slot on which rank holds which logical expert, one immutable value for a whole engine.

Slots of a layer are counted over all ranks, `slots_per_rank` each; a slot may be empty (None). An expert may have
several copies. The first copies are spread contiguously and evenly; the number of experts need not divide the number
of ranks.
"""

import hashlib

import msgspec
from msgspec import Struct

from pd_cluster.errors import ConfigError
from pd_cluster.ids import ExpertId, Rank, SlotId


class LayerPlacement(Struct, frozen=True):
    """One MoE layer: `slots[slot]` is the logical expert there, None when empty; length num_ranks * slots_per_rank."""

    slots: tuple[ExpertId | None, ...]


class Placement(Struct, frozen=True, kw_only=True):
    """The shape of one engine. `epoch` counts placements within one life of the engine."""

    epoch: int
    num_ranks: int
    num_experts: int
    slots_per_rank: int
    layers: tuple[LayerPlacement, ...]  # one for each MoE layer, in model order

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            if len(layer.slots) != self.num_ranks * self.slots_per_rank:
                raise ConfigError(
                    f"placement of MoE layer {index} has {len(layer.slots)} slots, expected "
                    f"{self.num_ranks} ranks x {self.slots_per_rank}"
                )
            missing = set(range(self.num_experts)) - {e for e in layer.slots if e is not None}
            if missing:
                raise ConfigError(f"placement of MoE layer {index} lacks experts {sorted(missing)[:8]}")

    def owner(self, slot: SlotId) -> Rank:
        return Rank(slot // self.slots_per_rank)

    def rank_slots(self, layer: int, rank: Rank) -> tuple[ExpertId | None, ...]:
        """What `rank` holds of MoE layer `layer`, by local slot."""
        start = rank * self.slots_per_rank
        return self.layers[layer].slots[start : start + self.slots_per_rank]

    def digest(self) -> bytes:
        """16 bytes that differ when anything of the placement does: what ranks compare before they act on a plan."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()

    def moved(self, old: "Placement") -> list[int]:
        """[MoE layers] experts that must be loaded to come here from `old`: copies on a rank that lacked the expert."""
        assert (self.num_ranks, len(self.layers)) == (old.num_ranks, len(old.layers)), "placements of different engines"
        return [
            sum(
                len(set(self.rank_slots(layer, Rank(rank))) - set(old.rank_slots(layer, Rank(rank))) - {None})
                for rank in range(self.num_ranks)
            )
            for layer in range(len(self.layers))
        ]

    def copies(self, layer: int) -> list[list[SlotId]]:
        """[num_experts] the slots that hold each expert, ascending."""
        result: list[list[SlotId]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.layers[layer].slots):
            if expert is not None:
                result[expert].append(SlotId(slot))
        return result


def spread(
    num_experts: int, num_ranks: int, num_layers: int, redundant: int = 0, slots_per_rank: int | None = None
) -> Placement:
    """Experts contiguously over ranks, sizes differing by at most one; `redundant` further copies follow round-robin.

    With redundancy the copies of expert 0, 1, ... go to the emptiest ranks, never twice to one rank while another has
    room. `slots_per_rank`: what a rank has memory for, default as many as are used; further ones stay empty. Raises
    ConfigError when that is too few.
    """
    if num_experts < 1 or num_ranks < 1:
        raise ConfigError(f"a placement needs experts and ranks, got {num_experts} and {num_ranks}")
    held: list[list[ExpertId]] = [
        [ExpertId(e) for e in range(rank * num_experts // num_ranks, (rank + 1) * num_experts // num_ranks)]
        for rank in range(num_ranks)
    ]
    for copy in range(redundant):
        expert = ExpertId(copy % num_experts)
        rank = min(range(num_ranks), key=lambda r: (expert in held[r], len(held[r]), r))
        held[rank].append(expert)
    needed = max(len(h) for h in held)
    per_rank = needed if slots_per_rank is None else slots_per_rank
    if per_rank < needed:
        raise ConfigError(
            f"expert_slots_per_rank must be at least {needed} for {num_experts} experts and {redundant} redundant "
            f"copies on {num_ranks} ranks, got {per_rank}"
        )
    slots: list[ExpertId | None] = []
    for experts in held:
        slots += [*experts, *([None] * (per_rank - len(experts)))]
    layer = LayerPlacement(tuple(slots))
    return Placement(
        epoch=0, num_ranks=num_ranks, num_experts=num_experts, slots_per_rank=per_rank, layers=(layer,) * num_layers
    )


def slots_to_lose_one(num_experts: int, data_parallel: int, tensor_parallel: int) -> int | None:
    """Slots of each rank and layer by which the others can take over the experts of any one DP rank; None where that
    would be more than half as many again as without it: with two DP ranks, each would hold every expert.
    """
    if data_parallel < 3:
        return None
    return -(-num_experts // ((data_parallel - 1) * tensor_parallel))
