"""What one layer's tokens need to know of a placement: the slots of each expert, and how a hash chooses among them.

Plain arrays of a width that is fixed when an engine starts, so that an epoch changes values and never an address.
"""

# E experts, C the most copies that an expert may have

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pd_cluster.parallel.placement import Placement
from pd_cluster.parallel.replicas import HASH_BITS, Ints, thresholds


class SlotTable(NamedTuple):
    """`slots_EC`: an expert's slots in ascending order, the first one repeated behind the last. `thresholds_EC`: see
    `replicas.thresholds`. `width`: the most copies that an expert has here.
    """

    slots_EC: Ints
    thresholds_EC: Ints
    width: int


def max_copies(placement: Placement) -> int:
    """The most copies that any placement of these shapes may give an expert: one on each rank, as far as slots go."""
    num_spare = placement.num_ranks * placement.slots_per_rank - placement.num_experts
    now = max(len(slots) for layer in range(len(placement.layers)) for slots in placement.copies(layer))
    return max(min(placement.num_ranks, 1 + num_spare), now)


def slot_table(
    placement: Placement, layer: int, num_columns: int, weights_E: Sequence[Sequence[float]] | None = None
) -> SlotTable:
    """The table of MoE layer `layer`. `weights_E` as `replicas.weights` gives them; even ones without."""
    copies = placement.copies(layer)
    width = max(len(slots) for slots in copies)
    assert width <= num_columns, f"{width} copies of an expert in a table of {num_columns}"
    slots_EC = np.array([[*slots, *slots[:1] * (num_columns - len(slots))] for slots in copies], np.int64)
    even = [[1.0 / len(slots)] * len(slots) for slots in copies]
    thresholds_EC = np.full((len(copies), num_columns), 1 << HASH_BITS, np.int64)
    thresholds_EC[:, :width] = thresholds([list(part) for part in weights_E or even])
    return SlotTable(slots_EC, thresholds_EC, width)


def slot_tables(
    placement: Placement, num_columns: int, weights_LE: Sequence[Sequence[Sequence[float]]] | None = None
) -> list[SlotTable]:
    """The tables of all layers; layers that are alike share one."""
    made: dict[int, SlotTable] = {}
    result = []
    for layer, slots in enumerate(placement.layers):
        if weights_LE is not None:
            result.append(slot_table(placement, layer, num_columns, weights_LE[layer]))
            continue
        if id(slots) not in made:
            made[id(slots)] = slot_table(placement, layer, num_columns)
        result.append(made[id(slots)])
    return result
