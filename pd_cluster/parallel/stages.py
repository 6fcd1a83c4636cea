"""From one placement to another through stages that each fit the empty slots, so that no live slot is ever written.

A stage loads experts into slots that are empty before it; slots that it empties are free for the next one. Whatever is
interrupted between two stages is a whole placement, with every expert somewhere. A large change with few shadow slots
takes several stages for a layer; small changes of many layers share one, as far as the budget for loading allows.
"""

from collections import Counter

from msgspec import Struct

from pd_cluster.errors import NotSupported
from pd_cluster.ids import ExpertId, Rank, SlotId
from pd_cluster.parallel.placement import LayerPlacement, Placement

Slots = tuple[ExpertId | None, ...]


class Load(Struct, frozen=True, kw_only=True):
    """One expert into one empty slot. `sources`: slots that hold it now, the one to try first at the front; when all
    fail, or with none, it comes from the expert store.
    """

    layer: int
    expert: ExpertId
    slot: SlotId
    sources: tuple[SlotId, ...]


def stages(
    current: Placement, wanted: Placement, *, max_loads_per_rank: int | None = None, live: frozenset[Rank] | None = None
) -> list[Placement]:
    """Placements to pass through after `current`; the last holds on every rank what `wanted` does, in slots of its own.

    Each stage loads at most `max_loads_per_rank` experts on a rank, over its layers, or one layer if that needs more.
    Epochs count on from `current`'s. Empty when there is nothing to do. Copies on ranks that are not `live` (default
    all) count for nothing: a stage in which `missing` finds experts cannot run steps yet.

    Raises NotSupported when the empty slots do not allow the change, or when it wants experts on a rank that is dead.
    """
    check_shapes(current, wanted)
    alive = frozenset(Rank(r) for r in range(current.num_ranks)) if live is None else live
    paths = [_layer_path(current, wanted, layer, alive) for layer in range(len(current.layers))]
    result: list[Placement] = []
    now = current
    while any(paths):
        layers = list(now.layers)
        loads_R: Counter[Rank] = Counter()
        for layer, path in enumerate(paths):
            if not path:
                continue
            more = Counter(
                now.owner(SlotId(slot))
                for slot, expert in enumerate(path[0].slots)
                if expert is not None and layers[layer].slots[slot] is None
            )
            both = loads_R + more
            if loads_R and max_loads_per_rank is not None and max(both.values(), default=0) > max_loads_per_rank:
                continue
            loads_R = both
            layers[layer] = path.pop(0)
        now = Placement(
            epoch=now.epoch + 1,
            num_ranks=now.num_ranks,
            num_experts=now.num_experts,
            slots_per_rank=now.slots_per_rank,
            layers=tuple(layers),
        )
        result.append(now)
    return result


def missing(placement: Placement, live: frozenset[Rank]) -> list[tuple[int, ExpertId]]:
    """(MoE layer, expert) without a copy on a live rank: no step may run before they are loaded."""
    return [
        (layer, ExpertId(expert))
        for layer in range(len(placement.layers))
        for expert, slots in enumerate(placement.copies(layer))
        if not any(placement.owner(slot) in live for slot in slots)
    ]


def check_shapes(old: Placement, new: Placement) -> None:
    """Raises NotSupported when an engine cannot go from `old` to `new` at all: addresses are fixed at its start."""
    for name in ("num_ranks", "num_experts", "slots_per_rank"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            raise NotSupported(f"a placement epoch cannot change {name} from {before} to {after}: restart the engine")
    if len(old.layers) != len(new.layers):
        raise NotSupported(f"a placement of {len(new.layers)} MoE layers for a model of {len(old.layers)}")


def check_stage(old: Placement, new: Placement) -> None:
    """Raises NotSupported, by name, when going from `old` to `new` would write a live slot."""
    check_shapes(old, new)
    if new.epoch != old.epoch + 1:
        raise NotSupported(f"placement epoch {new.epoch} cannot follow epoch {old.epoch}")
    for layer, (before, after) in enumerate(zip(old.layers, new.layers, strict=True)):
        for slot, (was, becomes) in enumerate(zip(before.slots, after.slots, strict=True)):
            if was is not None and becomes is not None and was != becomes:
                raise NotSupported(
                    f"placement epoch {new.epoch} does not fit: it puts expert {becomes} of MoE layer {layer} into "
                    f"slot {slot} of rank {old.owner(SlotId(slot))}, where expert {was} is live"
                )


def loads(
    old: Placement, new: Placement, rank: Rank, live: frozenset[Rank] | None = None, preferred: int = 0
) -> list[Load]:
    """What `rank` must load for the stage from `old` to `new`, from copies on `live` ranks (default all).

    Ranks that load the same expert begin with different copies of it, as far as there are some.
    """
    result = []
    first, last = rank * old.slots_per_rank, (rank + 1) * old.slots_per_rank
    for layer, (before, after) in enumerate(zip(old.layers, new.layers, strict=True)):
        if before == after:
            continue
        holders = old.copies(layer)
        for slot in range(first, last):
            expert = after.slots[slot]
            if expert is None or before.slots[slot] is not None:
                continue
            sources = [s for s in holders[expert] if live is None or old.owner(s) in live]
            turn = (rank + preferred) % len(sources) if sources else 0
            ordered = tuple(sources[turn:] + sources[:turn])
            result.append(Load(layer=layer, expert=expert, slot=SlotId(slot), sources=ordered))
    return result


def _layer_path(current: Placement, wanted: Placement, layer: int, live: frozenset[Rank]) -> list[LayerPlacement]:
    """The stages of one layer by itself."""
    size, num_ranks = current.slots_per_rank, current.num_ranks
    want = [{e for e in wanted.rank_slots(layer, Rank(r)) if e is not None} for r in range(num_ranks)]
    dead = [r for r in range(num_ranks) if r not in live and want[r]]
    if dead:
        raise NotSupported(f"the change of MoE layer {layer} wants experts on rank {dead[0]}, which is not live")
    slots = list(current.layers[layer].slots)
    path: list[LayerPlacement] = []
    while True:
        have = [{e for e in slots[r * size : (r + 1) * size] if e is not None} for r in range(num_ranks)]
        if have == want:
            return path
        after = _fill(slots, have, want, size)
        _empty(after, want, size, live)
        if after == slots:
            rank = next(r for r in range(num_ranks) if want[r] - have[r])
            raise NotSupported(
                f"the change of MoE layer {layer} does not fit: rank {rank} has no empty slot for "
                f"{len(want[rank] - have[rank])} more experts, and none of its {size} slots can be given up first: "
                "raise expert_slots_per_rank"
            )
        slots = after
        path.append(LayerPlacement(tuple(slots)))


def _fill(
    slots: list[ExpertId | None], have: list[set[ExpertId]], want: list[set[ExpertId]], size: int
) -> list[ExpertId | None]:
    """Load into empty slots, first the experts whose old copy can only go once a new one is there."""
    after = list(slots)
    settled = {e for held, wanted in zip(have, want, strict=True) for e in held & wanted}
    leaving = {e for held, wanted in zip(have, want, strict=True) for e in held - wanted} - settled
    coming: set[ExpertId] = set()
    for rank, (held, wanted) in enumerate(zip(have, want, strict=True)):
        empty = [s for s in range(rank * size, (rank + 1) * size) if slots[s] is None]
        queue = sorted(wanted - held, key=lambda e: (e in coming or e not in leaving, e))
        for slot, expert in zip(empty, queue, strict=False):
            after[slot] = expert
            coming.add(expert)
    return after


def _empty(slots: list[ExpertId | None], want: list[set[ExpertId]], size: int, live: frozenset[Rank]) -> None:
    """Give up copies that are not wanted where they are, while one on a live rank remains."""
    copies = Counter(e for slot, e in enumerate(slots) if e is not None and slot // size in live)
    for slot, expert in enumerate(slots):
        if expert is None or expert in want[slot // size]:
            continue
        is_live = slot // size in live
        if copies[expert] > is_live:
            slots[slot] = None
            copies[expert] -= is_live
