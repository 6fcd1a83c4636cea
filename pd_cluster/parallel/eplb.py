"""DeepSeek's expert-parallel load balancer, as published: the baseline that the planner is measured against.

Replicate the expert with the highest load per copy until the slots are full, then pack copies in descending order
onto the lightest GPU that still has room. *Global* does this over all GPUs. *Hierarchical* first packs groups of
experts onto nodes and does the rest within each node, so that a token of few groups reaches few nodes.

Both may put two copies of an expert on one GPU, know nothing of the placement before, and split an expert's load
evenly over its copies.
"""

# L layers, E experts, P physical slots, R ranks

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def global_eplb(loads_LE: Floats, num_slots: int, num_ranks: int) -> Ints:
    """[L, P] the expert in every slot; slots of a rank are adjacent."""
    return hierarchical_eplb(loads_LE, num_slots, num_ranks, num_groups=1, num_nodes=1)


def hierarchical_eplb(loads_LE: Floats, num_slots: int, num_ranks: int, num_groups: int, num_nodes: int) -> Ints:
    """[L, P] the expert in every slot; nodes are runs of ranks. Every argument must divide as the scheme needs:
    experts by groups, groups by nodes, ranks by nodes, slots by ranks.
    """
    num_layers, num_experts = loads_LE.shape
    assert num_experts % num_groups == num_groups % num_nodes == 0
    assert num_ranks % num_nodes == num_slots % num_ranks == 0
    group_size, ranks_per_node = num_experts // num_groups, num_ranks // num_nodes
    slots_per_node, slots_per_rank = num_slots // num_nodes, num_slots // num_ranks
    slots_LP = np.empty((num_layers, num_slots), np.int64)
    for layer, load_E in enumerate(loads_LE):
        group_loads = load_E.reshape(num_groups, group_size).sum(1)
        for node, groups in enumerate(_pack(group_loads, num_nodes)):
            experts = np.concatenate([np.arange(g * group_size, (g + 1) * group_size) for g in groups])
            copies = _replicate(load_E[experts], slots_per_node)
            owners = np.repeat(np.arange(len(experts)), copies)
            for rank, held in enumerate(_pack((load_E[experts] / copies)[owners], ranks_per_node)):
                first = node * slots_per_node + rank * slots_per_rank
                slots_LP[layer, first : first + slots_per_rank] = experts[owners[held]]
    return slots_LP


def _replicate(load_E: Floats, num_slots: int) -> Ints:
    """[E] copies of each expert, adding up to `num_slots`."""
    copies_E = np.ones(len(load_E), np.int64)
    for _ in range(num_slots - len(load_E)):
        copies_E[np.argmax(load_E / copies_E)] += 1
    return copies_E


def _pack(loads: Floats, num_packs: int) -> list[list[int]]:
    """Items of each pack: equally many in all, each item to the lightest pack with room, heaviest item first."""
    room = len(loads) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs
    for item in np.argsort(-loads, kind="stable").tolist():
        pack = min((p for p in range(num_packs) if len(packs[p]) < room), key=totals.__getitem__)
        packs[pack].append(item)
        totals[pack] += float(loads[item])
    return packs
