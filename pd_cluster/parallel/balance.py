"""The planner of expert placements: how many copies of each expert, and which rank holds them.

For every layer at once: (1) give spare slots to the experts with the highest load per copy, which makes the hottest
copy as small as it can be; (2) pack copies, heaviest first, onto the least loaded rank with room that lacks the expert;
(3) swap pairs between the hottest rank and any other until nothing helps. Layers still far from their bound are then
searched one at a time. With two slots to a rank packing is only a matter of pairing heavy with light, so there it is
the numbers of copies that are searched; with one, step 1 is all there is.

A rank's time is its load over its speed, and no rank holds two copies of one expert: with too few ranks for that a slot
stays empty. Packing splits an expert's load evenly over its copies; `replicas.weights` then splits it better, which
can only lower the hottest rank. With nodes, each group of experts stays within one node, so that a token of
`topk_group` groups reaches at most that many nodes.

Given the same numbers every process plans the same placement, bit for bit.
"""

# L layers, E experts, R ranks, S slots of a rank, P copies in all; in arrays of slots an empty one holds E

from collections.abc import Sequence

import numpy as np

from pd_cluster.errors import ConfigError
from pd_cluster.ids import ExpertId
from pd_cluster.parallel.local_search import Floats, Ints, LayerSearch, shaken
from pd_cluster.parallel.placement import LayerPlacement, Placement

CLOSE = 1.0002
"""Swaps stop at this ratio of the hottest rank to its bound."""

FAR = 1.002
"""Above this ratio a layer is searched further."""

WORTHWHILE = 0.99
"""In a layer of many slots a search must bring the hottest rank below this share of what packing did."""

SMALL = 256
MAX_SHAKES = 24
"""A layer of few slots is searched from `SMALL` / slots more starts, at most so many."""

MAX_SWAPS = 400
MAX_SEARCH_STEPS = 60


def plan(
    loads_LE: Floats,
    num_ranks: int,
    *,
    redundant: int = 0,
    slots_per_rank: int | None = None,
    live: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    num_groups: int = 1,
    num_nodes: int = 1,
    weighted: bool = True,
    epoch: int = 0,
) -> Placement:
    """A placement for `loads_LE`, tokens per MoE layer and expert, made without regard to the one before.

    `redundant`: copies beyond one of each expert. `slots_per_rank`: what a rank has memory for, default as many as are
    used. `live`: the ranks that may hold experts, default all. `speeds`: relative, one for each rank. With `num_nodes`
    over 1 ranks are nodes in equal runs, and experts are `num_groups` equal runs that each stay on one node.
    `weighted`: tokens choose copies by `replicas.weights`; otherwise evenly, and then layers are not searched.

    Raises ConfigError when the copies do not fit the slots, or groups and nodes do not divide.
    """
    loads_LE = np.asarray(loads_LE, np.float64)
    num_layers, num_experts = loads_LE.shape
    ranks = np.arange(num_ranks) if live is None else np.array(sorted(set(live)), np.int64)
    if not len(ranks) or ranks[0] < 0 or ranks[-1] >= num_ranks:
        raise ConfigError(f"live ranks must be some of 0 to {num_ranks - 1}, got {list(live or [])}")
    speed_R = np.ones(num_ranks) if speeds is None else np.asarray(speeds, np.float64)
    if speed_R.shape != (num_ranks,) or not (speed_R > 0).all():
        raise ConfigError(f"speeds must be {num_ranks} positive numbers, one for each rank")
    used = -(-(num_experts + redundant) // len(ranks))
    room = used if slots_per_rank is None else slots_per_rank
    if used > room or redundant < 0:
        raise ConfigError(
            f"{num_experts} experts and {redundant} redundant copies do not fit {len(ranks)} ranks of {room} slots"
        )
    slots_LRS = np.full((num_layers, num_ranks, room), num_experts)
    # an unused layer is planned for even loads; a floor keeps experts that were never chosen apart
    loads_LE = loads_LE + np.maximum(loads_LE.mean(1, keepdims=True), 1e-6) * 1e-6
    if num_nodes == 1:
        slots_LRS[:, ranks, :used] = _balance(loads_LE, num_experts + redundant, used, speed_R[ranks], weighted)
    else:
        _balance_nodes(slots_LRS, loads_LE, ranks, used, redundant, speed_R, num_groups, num_nodes, weighted)
    return from_slots(slots_LRS, num_experts, epoch)


def with_shared_expert(loads_LE: Floats, top_k: int) -> Floats:
    """[L, E + 1]: the shared expert as one more, the last; every token visits it once."""
    loads_LE = np.asarray(loads_LE, np.float64)
    return np.concatenate([loads_LE, loads_LE.sum(1, keepdims=True) / top_k], axis=1)


def hottest_copy_bound(loads_LE: Floats, redundant: int) -> Floats:
    """[L] the least that the hottest copy can be when `redundant` copies are given out."""
    loads_LE = np.asarray(loads_LE, np.float64)
    num_experts = loads_LE.shape[1]
    bound: Floats = (loads_LE / _copies(loads_LE, num_experts + redundant, num_experts + redundant)).max(1)
    return bound


def from_slots(slots_LRS: Ints, num_experts: int, epoch: int) -> Placement:
    num_layers, num_ranks, slots_per_rank = slots_LRS.shape
    rows = np.where(slots_LRS < num_experts, slots_LRS, -1).reshape(num_layers, -1).tolist()
    layers = tuple(LayerPlacement(tuple(ExpertId(e) if e >= 0 else None for e in row)) for row in rows)
    return Placement(
        epoch=epoch, num_ranks=num_ranks, num_experts=num_experts, slots_per_rank=slots_per_rank, layers=layers
    )


def to_slots(placement: Placement) -> Ints:
    """[L, R, S], an empty slot holding `num_experts`."""
    empty = placement.num_experts
    rows = [[empty if e is None else e for e in layer.slots] for layer in placement.layers]
    return np.array(rows, np.int64).reshape(len(rows), placement.num_ranks, placement.slots_per_rank)


def _balance(loads_LE: Floats, num_copies: int, slots_per_rank: int, speed_R: Floats, weighted: bool) -> Ints:
    """[L, R, S] for ranks that may hold anything."""
    num_ranks = len(speed_R)
    copies_LE = _copies(loads_LE, num_copies, num_ranks)
    bound_L = np.maximum(1.0, _hottest_copies(loads_LE, copies_LE, speed_R))
    if slots_per_rank == 2:
        for load_E, copies_E in zip(loads_LE, copies_LE, strict=True):
            _exchange_copies(load_E, copies_E, num_ranks)
    slots_LRS, copies_LE = _pack(loads_LE, copies_LE, slots_per_rank, speed_R)
    hottest_L = _swap(slots_LRS, loads_LE / copies_LE, speed_R)
    worthwhile = WORTHWHILE if num_ranks * slots_per_rank > SMALL else 1.0
    for layer in np.flatnonzero(hottest_L * worthwhile > FAR * bound_L) if weighted and slots_per_rank > 1 else ():
        slots_LRS[layer] = _search(slots_LRS[layer], loads_LE[layer], speed_R, bound_L[layer] * FAR, worthwhile)
    return np.sort(slots_LRS, axis=2)


def _hottest_copies(loads_LE: Floats, copies_LE: Ints, speed_R: Floats) -> Floats:
    """[L] the hottest copy's time on the fastest rank, over the mean rank time."""
    times: Floats = (loads_LE / copies_LE).max(1) / speed_R.max() * speed_R.sum() / loads_LE.sum(1)
    return times


def _search(slots_RS: Ints, load_E: Floats, speed_R: Floats, enough: float, worthwhile: float) -> Ints:
    """The best slots that searches from `slots_RS` pass through, if that is worth it: what they find relies on weights,
    and where tokens are split evenly packing did better. Small layers are shaken and searched again.
    """
    search = LayerSearch(slots_RS.copy(), load_E, speed_R)
    best, least = slots_RS, search.hottest() * worthwhile
    for attempt in range(1 + min(MAX_SHAKES, SMALL // slots_RS.size)):
        if attempt:
            search = LayerSearch(shaken(best, len(load_E), np.random.default_rng(attempt)), load_E, speed_R)
        for _ in range(MAX_SEARCH_STEPS):
            hottest = search.hottest()
            if hottest < least:
                best, least = search.slots_RS.copy(), hottest
            if least <= enough or search.step() is None:
                break
    return best


def _copies(loads_LE: Floats, num_copies: int, most: int) -> Ints:
    """[L, E] copies of each expert, at most `most`, adding up to at most `num_copies`."""
    share_LE = loads_LE.copy()
    copies_LE = np.ones(loads_LE.shape, np.int64)
    layers = np.arange(len(loads_LE))
    if most == 1:
        return copies_LE
    for _ in range(min(num_copies, most * loads_LE.shape[1]) - loads_LE.shape[1]):
        expert_L = share_LE.argmax(1)
        count_L = copies_LE[layers, expert_L] + 1
        copies_LE[layers, expert_L] = count_L
        share_LE[layers, expert_L] = np.where(count_L < most, loads_LE[layers, expert_L] / count_L, -np.inf)
    return copies_LE


def _exchange_copies(load_E: Floats, copies_E: Ints, num_ranks: int) -> None:
    """Two slots to a rank: take a copy from one expert for one of the hottest pair while that makes the hottest pair
    lighter. The i-th heaviest copy is paired with the i-th lightest, which is the best pairing there is.
    """
    padding = np.zeros(2 * num_ranks - int(copies_E.sum()))

    def pairs(copies: Ints) -> tuple[Floats, Ints]:
        order = np.argsort(load_E / copies, kind="stable")
        owners = np.concatenate([np.full(len(padding), -1), np.repeat(order, copies[order])])
        share = np.where(owners >= 0, (load_E / copies)[owners], 0.0)
        return share + share[::-1], owners

    pair, owners = pairs(copies_E)
    while True:
        hot = int(pair.argmax())
        best = float(pair[hot]) * (1 - 1e-9)
        change: tuple[int, int] | None = None
        for gets in sorted({int(owners[hot]), int(owners[-1 - hot])} - {-1}):
            if copies_E[gets] == num_ranks:
                continue
            gives = np.flatnonzero((copies_E > 1) & (load_E / np.maximum(copies_E - 1, 1) < best))
            gives = gives[gives != gets]
            if not len(gives):
                continue
            share_CP = np.empty((len(gives), 2 * num_ranks))
            for row, expert in zip(share_CP, gives, strict=True):
                copies_E[[gets, expert]] += (1, -1)
                row[:] = np.concatenate([padding, np.repeat(load_E / copies_E, copies_E)])
                copies_E[[gets, expert]] -= (1, -1)
            share_CP.sort(axis=1)
            hottest_C = (share_CP + share_CP[:, ::-1]).max(1)
            if hottest_C.min() < best:
                best, change = float(hottest_C.min()), (gets, int(gives[hottest_C.argmin()]))
        if change is None:
            return
        copies_E[list(change)] += (1, -1)
        pair, owners = pairs(copies_E)


def _pack(loads_LE: Floats, copies_LE: Ints, slots_per_rank: int, speed_R: Floats) -> tuple[Ints, Ints]:
    """[L, R, S] slots and the copies that found a rank, heaviest first to the rank that would be done first.

    A copy for which every rank with room already holds the expert is given up.
    """
    num_layers, num_experts = loads_LE.shape
    num_ranks = len(speed_R)
    layers, all_ranks = np.arange(num_layers), np.arange(num_ranks)[None]
    share_LE = loads_LE / copies_LE
    order_LE = np.argsort(-share_LE, axis=1, kind="stable")
    num_copies = copies_LE.sum(1).max()
    expert_LP = np.full((num_layers, num_copies), num_experts)
    for row, order, copies in zip(expert_LP, order_LE, copies_LE, strict=True):
        row[: copies.sum()] = np.repeat(order, copies[order])
    share_LE = np.append(share_LE, np.zeros((num_layers, 1)), axis=1)
    slots_LRS = np.full((num_layers, num_ranks, slots_per_rank), num_experts)
    load_LR, used_LR = np.zeros((num_layers, num_ranks)), np.zeros((num_layers, num_ranks), np.int64)
    blocked_ELR = np.zeros((num_experts + 1, num_layers, num_ranks), bool)  # holds the expert
    full_LR = np.zeros((num_layers, num_ranks), bool)
    uniform = bool((speed_R == speed_R[0]).all())
    for expert_L in expert_LP.T:
        share_L = share_LE[layers, expert_L]
        time_LR = load_LR if uniform else (load_LR + share_L[:, None]) / speed_R
        blocked_LR = blocked_ELR[expert_L[:, None], layers[:, None], all_ranks] | full_LR
        rank_L = np.where(blocked_LR, np.inf, time_LR).argmin(1)
        fits_L = ~blocked_LR[layers, rank_L] & (expert_L < num_experts)
        layer, rank, expert = layers, rank_L, expert_L
        if not fits_L.all():
            layer, rank, expert, share_L = layers[fits_L], rank_L[fits_L], expert_L[fits_L], share_L[fits_L]
        slots_LRS[layer, rank, used_LR[layer, rank]] = expert
        used_LR[layer, rank] += 1
        load_LR[layer, rank] += share_L
        blocked_ELR[expert, layer, rank] = True
        full_LR[layer, rank] = used_LR[layer, rank] == slots_per_rank
    placed_LE = np.zeros((num_layers, num_experts + 1), np.int64)
    np.add.at(placed_LE, (layers[:, None], slots_LRS.reshape(num_layers, -1)), 1)
    return slots_LRS, placed_LE[:, :num_experts]


def _swap(slots_LRS: Ints, share_LE: Floats, speed_R: Floats) -> Floats:
    """Swap in place, in all layers at once, the pair that relieves the hottest rank most, while one does.

    Returns [L] the hottest rank's time over the mean.
    """
    num_layers, num_ranks, _ = slots_LRS.shape
    num_experts = share_LE.shape[1]
    share_LE = np.append(share_LE, np.zeros((num_layers, 1)), axis=1)
    weight_LRS = share_LE[np.arange(num_layers)[:, None, None], slots_LRS]
    load_LR = weight_LRS.sum(2)
    bound_L = np.maximum(load_LR.sum(1) / speed_R.sum(), share_LE.max(1) / speed_R.max())
    holds_LRE = np.zeros((num_layers, num_ranks, num_experts + 1), bool)
    holds_LRE[np.arange(num_layers)[:, None, None], np.arange(num_ranks)[None, :, None], slots_LRS] = True
    holds_LRE[:, :, num_experts] = False
    all_ranks = np.arange(num_ranks)[None, :, None]
    active = np.arange(num_layers)
    for _ in range(MAX_SWAPS):
        time_AR = load_LR[active] / speed_R
        hot_A = time_AR.argmax(1)
        open_A = time_AR.max(1) > bound_L[active] * CLOSE
        active, hot_A, time_AR = active[open_A], hot_A[open_A], time_AR[open_A]
        if not len(active):
            break
        rows, here = np.arange(len(active)), active[:, None, None]
        top_A = time_AR[rows, hot_A]
        mine_AS, others_ARS = slots_LRS[active, hot_A], slots_LRS[active]
        shift = (
            weight_LRS[active, hot_A][:, None, :, None] - weight_LRS[active][:, :, None, :]
        )  # slot s for t of rank r
        if speed_R.min() == speed_R.max() == 1.0:
            after = np.maximum(top_A[:, None, None, None] - shift, time_AR[:, :, None, None] + shift)
        else:
            mine = top_A[:, None, None, None] - shift / speed_R[hot_A][:, None, None, None]
            after = np.maximum(mine, time_AR[:, :, None, None] + shift / speed_R[None, :, None, None])
        after[holds_LRE[here, all_ranks, mine_AS[:, None, :]]] = np.inf
        after += np.where(holds_LRE[here, hot_A[:, None, None], others_ARS], np.inf, 0.0)[:, :, None, :]
        flat = after.reshape(len(active), -1)
        choice = flat.argmin(1)
        better = flat[rows, choice] < top_A * (1 - 1e-9)
        other, s, t = (index[better] for index in np.unravel_index(choice, after.shape[1:]))
        active, hot = active[better], hot_A[better]
        given, taken = slots_LRS[active, hot, s], slots_LRS[active, other, t]
        moved = weight_LRS[active, hot, s] - weight_LRS[active, other, t]
        slots_LRS[active, hot, s], slots_LRS[active, other, t] = taken, given
        weight_LRS[active, hot, s] -= moved
        weight_LRS[active, other, t] += moved
        load_LR[active, hot] -= moved
        load_LR[active, other] += moved
        holds_LRE[active, hot, given] = holds_LRE[active, other, taken] = False
        holds_LRE[active, other, given], holds_LRE[active, hot, taken] = given < num_experts, taken < num_experts
    hottest_L: Floats = (load_LR / speed_R).max(1) / (load_LR.sum(1) / speed_R.sum())
    return hottest_L


def _balance_nodes(
    slots_LRS: Ints,
    loads_LE: Floats,
    ranks: Ints,
    used: int,
    redundant: int,
    speed_R: Floats,
    num_groups: int,
    num_nodes: int,
    weighted: bool,
) -> None:
    """Fill `slots_LRS` node by node: groups of experts to nodes by the same packing, then each node by itself."""
    num_layers, num_ranks, _ = slots_LRS.shape
    num_experts = loads_LE.shape[1]
    if num_experts % num_groups or num_groups % num_nodes or num_ranks % num_nodes:
        raise ConfigError(
            f"{num_experts} experts in {num_groups} groups do not divide over {num_nodes} nodes of {num_ranks} ranks"
        )
    node_R = ranks // (num_ranks // num_nodes)
    group_size = num_experts // num_groups
    members = [ranks[node_R == node] for node in range(num_nodes)]
    per_node = num_experts // num_nodes
    spare = [used * len(m) - per_node for m in members]
    if min(spare) < 0:
        raise ConfigError(
            f"a node with {min(map(len, members))} live ranks of {used} slots cannot hold {per_node} experts"
        )
    # spare copies over nodes by their room, so that slots left over are spread as well
    total = sum(spare)
    give = np.diff(np.array([0, *np.cumsum(spare)]) * min(redundant, total) // max(total, 1))
    node_speed = np.array([speed_R[m].sum() for m in members])
    group_LG = loads_LE.reshape(num_layers, num_groups, group_size).sum(2)
    groups_LNS = _balance(group_LG, num_groups, num_groups // num_nodes, node_speed, weighted)
    for node, member in enumerate(members):
        expert_LE = (groups_LNS[:, node, :, None] * group_size + np.arange(group_size)).reshape(num_layers, -1)
        local_LE = np.take_along_axis(loads_LE, expert_LE, axis=1)
        local_LRS = _balance(local_LE, per_node + int(give[node]), used, speed_R[member], weighted)
        expert_LE = np.append(expert_LE, np.full((num_layers, 1), num_experts), axis=1)
        slots = np.take_along_axis(expert_LE, local_LRS.reshape(num_layers, -1), axis=1).reshape(local_LRS.shape)
        slots_LRS[:, member, :used] = np.sort(slots, axis=2)
