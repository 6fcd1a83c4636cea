"""Loads drift, ranks come and go, and a placement follows with few moves: it starts from the slots as they are.

A plan made afresh moves nearly every expert for loads that changed by a tenth. Here every layer is improved from where
it stands, and of the states that the search passes through the one is kept that minimises

    hottest rank's time / mean  +  move_price * experts that must be loaded

With two slots to a rank, where such a search is soon stuck, `pairing` finds whole rings of moves as well. A fresh plan,
its ranks renamed to overlap with what they hold, is one more candidate where the search stays far from the bound. First
of all come experts that lost their last copy with a rank: they are put into empty slots, or over spare copies.

`move_price` weighs a little more speed against the disturbance of loading: 0.001 means that an expert is worth loading
when it makes the layer a tenth of a percent faster.
"""

# L layers, E experts, R live ranks, S slots of a rank in use; in arrays of slots an empty one holds E

from collections.abc import Sequence

import numpy as np

from pd_cluster.errors import ConfigError
from pd_cluster.parallel.balance import from_slots, hottest_copy_bound, plan, to_slots
from pd_cluster.parallel.local_search import Floats, Ints, LayerSearch
from pd_cluster.parallel.pairing import follow_pairs, num_moves
from pd_cluster.parallel.placement import Placement

MOVE_PRICE = 0.0005
FAR = 1.03
"""Above this ratio to its bound a layer is also planned afresh."""

MAX_STEPS = 200


def rebalance(
    current: Placement,
    loads_LE: Floats,
    *,
    live: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    slots_in_use: int | None = None,
    move_price: float = MOVE_PRICE,
    max_moves: int | None = None,
) -> Placement:
    """The next placement (epoch + 1) for `loads_LE`, tokens per MoE layer and expert.

    `live`: the ranks that still hold, or from now on may hold, experts; the others end empty. `slots_in_use`: how many
    slots of a rank may be filled, the rest staying free as shadows; default as many as the fullest rank fills, or
    as the experts need. `max_moves`: most experts loaded in a layer, beyond those that lost their last copy.

    What stays on a rank may be at another slot in the result: `transition.waves` lays it out. Raises ConfigError when
    the experts do not fit.
    """
    loads_LE = np.asarray(loads_LE, np.float64)
    num_experts, per_rank = current.num_experts, current.slots_per_rank
    ranks = np.arange(current.num_ranks) if live is None else np.array(sorted(set(live)), np.int64)
    speed_R = np.ones(current.num_ranks) if speeds is None else np.asarray(speeds, np.float64)
    is_uniform = bool((speed_R[ranks] == speed_R[ranks[0]]).all())
    slots_LRS = np.sort(to_slots(current)[:, ranks], axis=2)  # empty ones last
    fullest = int((slots_LRS < num_experts).sum(2).max())
    in_use = slots_in_use or min(max(fullest, -(-num_experts // len(ranks))), per_rank)
    if num_experts > in_use * len(ranks) or in_use > per_rank:
        raise ConfigError(f"{num_experts} experts do not fit {len(ranks)} ranks of {in_use} slots out of {per_rank}")
    loads_LE = loads_LE + np.maximum(loads_LE.mean(1, keepdims=True), 1e-6) * 1e-6
    spare = min(in_use * len(ranks), sum(e is not None for e in current.layers[0].slots)) - num_experts
    bound_L = np.maximum(hottest_copy_bound(loads_LE, spare) / loads_LE.sum(1) * speed_R[ranks].sum(), 1.0)
    found: list[tuple[Ints, float]] = []
    for slots_RS, load_E in zip(slots_LRS, loads_LE, strict=True):
        start = _complete(slots_RS, load_E, in_use)
        candidates = [_improve(start, load_E, speed_R[ranks], move_price, max_moves)]
        if in_use == 2 and is_uniform:
            candidates.append(follow_pairs(start, load_E, max_moves=max_moves, move_price=move_price))
        found.append(_cheapest(start, candidates, num_experts, move_price))
    far = [layer for layer, (_, hottest) in enumerate(found) if hottest > FAR * bound_L[layer]]
    if far and max_moves is None:
        fresh = to_slots(plan(loads_LE[far], len(ranks), redundant=spare, speeds=speed_R[ranks].tolist()))
        for layer, slots_RS in zip(far, fresh, strict=True):
            if slots_RS.shape[1] <= in_use:
                load_E, old_RS = loads_LE[layer], slots_LRS[layer]
                renamed_RS = _renamed(old_RS, slots_RS, num_experts) if is_uniform else slots_RS
                hottest = LayerSearch(renamed_RS.copy(), load_E, speed_R[ranks]).hottest()
                found[layer] = _cheapest(old_RS, [found[layer], (renamed_RS, hottest)], num_experts, move_price)
    result = np.full((len(loads_LE), current.num_ranks, per_rank), num_experts)
    for layer, (slots_RS, _) in enumerate(found):
        result[layer, ranks, : slots_RS.shape[1]] = np.sort(slots_RS, axis=1)
    return from_slots(result, num_experts, current.epoch + 1)


def _complete(slots_RS: Ints, load_E: Floats, in_use: int) -> Ints:
    """[R, in_use] every expert somewhere: copies beyond the slots in use are dropped, the lost are put back."""
    num_experts = len(load_E)
    copies_E = np.bincount(slots_RS.ravel(), minlength=num_experts + 1)
    result = np.full((len(slots_RS), in_use), num_experts)
    lost = [e for e in range(num_experts) if not copies_E[e]]
    for rank, row in enumerate(slots_RS):
        held = [int(e) for e in row if e < num_experts]
        # what other ranks hold goes first, the least loaded copy first
        held.sort(key=lambda e: (copies_E[e] == 1, load_E[e] / copies_E[e]), reverse=True)
        for expert in held[in_use:]:
            copies_E[expert] -= 1
            if not copies_E[expert]:
                lost.append(expert)
        kept = held[:in_use]
        result[rank, : len(kept)] = kept
    for expert in sorted(lost, key=lambda e: -load_E[e]):
        share_E = np.append(load_E, 0.0) / np.maximum(copies_E, 1)
        time_R = share_E[result].sum(1)
        is_empty = result == num_experts
        can_go = is_empty | (copies_E[result] > 1)
        # an empty slot of the coolest rank, else the spare copy of the coolest rank
        cost = np.where(can_go, time_R[:, None] - np.where(is_empty, 0.0, share_E[result]), np.inf)
        cost += np.where(is_empty, 0.0, time_R.sum()) if is_empty.any() else 0.0
        rank, slot = (int(i) for i in np.unravel_index(int(cost.argmin()), cost.shape))
        old = int(result[rank, slot])
        if old < num_experts:
            copies_E[old] -= 1
        result[rank, slot] = expert
        copies_E[expert] = 1
    return result


def _improve(
    start_RS: Ints, load_E: Floats, speed_R: Floats, move_price: float, max_moves: int | None
) -> tuple[Ints, float]:
    """The cheapest state on the way of a search, and its hottest rank over the mean."""
    search = LayerSearch(start_RS.copy(), load_E, speed_R)
    best, hottest = start_RS, search.hottest()
    least, moved = hottest, 0
    for _ in range(MAX_STEPS):
        # no further state can be cheaper once the moves alone cost what is left to gain
        if 1.0 + moved * move_price >= least:
            break
        change = search.step()
        if change is None:
            break
        moved = num_moves(start_RS, search.slots_RS, len(load_E))
        if max_moves is not None and moved > max_moves:
            break
        now = search.hottest()
        if now + moved * move_price < least:
            best, hottest, least = search.slots_RS.copy(), now, now + moved * move_price
    return best, hottest


def _cheapest(
    old_RS: Ints, candidates: list[tuple[Ints, float]], num_experts: int, move_price: float
) -> tuple[Ints, float]:
    """Of (slots, hottest rank over the mean) the first with the least cost."""
    return min(candidates, key=lambda found: found[1] + move_price * num_moves(old_RS, found[0], num_experts))


def _renamed(old_RS: Ints, fresh_RS: Ints, num_experts: int) -> Ints:
    """`fresh_RS` with its rows in an order that overlaps much with `old_RS`: the largest overlap is matched first."""
    num_ranks = len(old_RS)
    has_old, has_fresh = np.zeros((2, num_ranks, num_experts + 1))
    rows = np.arange(num_ranks)[:, None]
    has_old[rows, old_RS] = has_fresh[rows, fresh_RS] = 1.0
    overlap = has_old[:, :-1] @ has_fresh[:, :-1].T
    result = np.empty_like(fresh_RS)
    for _ in range(num_ranks):
        old, fresh = np.unravel_index(int(overlap.argmax()), overlap.shape)
        result[old] = fresh_RS[fresh]
        overlap[old, :] = overlap[:, fresh] = -1.0
    return result
