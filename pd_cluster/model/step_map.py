"""A slot map that chooses copies by the counts of the step at hand (`parallel/step_choice.py`) instead of by hash.

On CPUs only: a GPU chooses within the kernel that routes, and captured steps cannot wait for the host.
"""

# T tokens, K experts per token

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pd_cluster.errors import ConfigError
from pd_cluster.model.moe import Moe, SlotMap
from pd_cluster.parallel.dispatch import Dispatcher
from pd_cluster.parallel.placement import Placement
from pd_cluster.parallel.step_choice import step_slots

ReplicaChoice = Literal["hash", "step"]


class StepMap(SlotMap):
    """Takes over the addresses of `plain`, which is not used any more. `turn` as in `step_slots`."""

    def __init__(self, plain: SlotMap, num_ranks: int, slots_per_rank: int, turn: int) -> None:
        self.slots_EC = plain.slots_EC
        self.thresholds_EC = plain.thresholds_EC
        self.width = plain.width
        self._num_ranks = num_ranks
        self._slots_per_rank = slots_per_rank
        self._turn = turn

    def __call__(self, experts_TK: Tensor, mix_T: Tensor) -> Tensor:
        """int64 [T, K] slots; the tokens' hashes `mix_T` say nothing here."""
        return torch.from_numpy(
            step_slots(
                experts_TK.numpy(),
                self.slots_EC.numpy(),
                self.width,
                num_ranks=self._num_ranks,
                slots_per_rank=self._slots_per_rank,
                turn=self._turn,
            )
        )


def choose_by_step(moe_layers: Sequence[Moe], dispatcher: Dispatcher, placement: Placement) -> None:
    """From now on these layers choose copies by the step's counts. Raises ConfigError on a GPU."""
    # where all ranks hold the same tokens they must choose alike
    turn = 0 if dispatcher.replicated else int(dispatcher.ranks[0])
    for moe in moe_layers:
        if moe.choice.slots_EC.device.type != "cpu":
            raise ConfigError('replica_choice = "step" needs device = "cpu": on a GPU copies are chosen by hash')
        moe.choice = StepMap(moe.choice, placement.num_ranks, placement.slots_per_rank, turn)
