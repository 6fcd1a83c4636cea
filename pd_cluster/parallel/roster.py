"""A roster: which DP ranks of an engine compute together from now on, one immutable value for each generation.

Only the engine's supervisor issues rosters, because only it knows whose processes live. A DP rank, with all of its
tensor-parallel ranks, is a member or is not; each member has a life of its own, so that a replaced one is never taken
for the one before.
"""

from msgspec import Struct

from pd_cluster.errors import ConfigError
from pd_cluster.ids import EngineEpoch, Rank


class Roster(Struct, frozen=True, kw_only=True):
    """Generation 0 is the engine as it starts. `lives[dp_rank]` is None where nobody computes.

    `leaving`: DP ranks that still compute and take no new requests; their experts and requests are to move elsewhere.
    """

    generation: int
    tensor_parallel: int
    lives: tuple[EngineEpoch | None, ...]
    leaving: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not any(life is not None for life in self.lives):
            raise ConfigError(f"roster {self.generation} has no member")
        if any(not 0 <= dp_rank < len(self.lives) or self.lives[dp_rank] is None for dp_rank in self.leaving):
            raise ConfigError(f"roster {self.generation} says of DP ranks that are not in it that they leave")

    @property
    def members(self) -> list[int]:
        """DP ranks that compute, ascending."""
        return [dp_rank for dp_rank, life in enumerate(self.lives) if life is not None]

    @property
    def hub(self) -> int:
        """The DP rank whose lead says Go."""
        return self.members[0]

    @property
    def live(self) -> frozenset[Rank]:
        """All ranks of the members."""
        return self._ranks(self.members)

    @property
    def staying(self) -> frozenset[Rank]:
        """Live ranks that experts may be placed on."""
        return self._ranks([dp_rank for dp_rank in self.members if dp_rank not in self.leaving])

    def _ranks(self, dp_ranks: list[int]) -> frozenset[Rank]:
        size = self.tensor_parallel
        return frozenset(Rank(dp_rank * size + tp_rank) for dp_rank in dp_ranks for tp_rank in range(size))
