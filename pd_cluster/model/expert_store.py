"""Experts from the checkpoint, one at a time, in the form that the kernels read: at the start, and whenever an expert
is to be where it was not and no other rank can give it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pd_cluster.ids import ExpertId, Rank
from pd_cluster.model.config import ModelConfig
from pd_cluster.model.expert_arena import ExpertArena, ExpertForm, seal
from pd_cluster.model.tensors import expert_names, moe_block
from pd_cluster.model.weights import WeightSource
from pd_cluster.parallel.placement import Placement


class Experts(NamedTuple):
    """Of the ranks in this process."""

    store: "ExpertStore"
    arenas: dict[Rank, ExpertArena]


class ExpertStore:
    """`layer` counts MoE layers."""

    def __init__(self, source: WeightSource, config: ModelConfig, dtype: torch.dtype, form: ExpertForm) -> None:
        moe = config.moe
        assert moe is not None
        self.form = form
        self._source = source
        self._dtype = dtype
        self._blocks = [moe_block(moe, layer) for layer in config.moe_layers]
        self._names = dict(zip(("gate", "up", "down"), expert_names(moe), strict=True))
        inner, outer = (moe.intermediate_size, config.hidden_size), (config.hidden_size, moe.intermediate_size)
        self._shapes = {"gate": inner, "up": inner, "down": outer}

    def fill(self, record: Tensor, layer: int, expert: ExpertId) -> Iterator[None]:
        """Lay an expert down in `record`, uint8 in host memory, a piece at a time and without its checksum. Raises
        ModelError.
        """
        prefix = f"{self._blocks[layer]}.experts.{expert}"

        def read(name: str, first: int, end: int) -> Tensor:
            tensor = f"{prefix}.{self._names[name]}.weight"
            return self._source.read(tensor, self._shapes[name], self._dtype, rows=(first, end))

        return self.form.fill(record, read)

    def load(self, arena: ExpertArena, layer: int, slot: int, expert: ExpertId, *, sealed: bool) -> None:
        """One expert into its slot at once; with its checksum when others may ever copy it."""
        record = arena.record(layer, slot)
        on_host = record if record.device.type == "cpu" else torch.zeros(len(record), dtype=torch.uint8)
        for _ in self.fill(on_host, layer, expert):
            pass
        if sealed:
            seal(on_host, layer, expert)
        if on_host is not record:
            record.copy_(on_host)

    def load_layer(self, arena: ExpertArena, layer: int, placement: Placement, rank: int) -> None:
        """What `placement` puts on one rank in one layer."""
        first = rank * placement.slots_per_rank
        for slot in range(placement.slots_per_rank):
            expert = placement.layers[layer].slots[first + slot]
            if expert is not None:
                self.load(arena, layer, slot, expert, sealed=placement.num_ranks > 1)
