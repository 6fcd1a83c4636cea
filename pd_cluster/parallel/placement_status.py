"""What operators are told of an engine's experts: plain values that travel from a rank to whoever looks."""

from msgspec import Struct, field


class HotExpert(Struct, frozen=True, array_like=True):
    expert: int
    share: float  # of its layer's load
    copies: int


class LayerLoad(Struct, frozen=True, array_like=True):
    """One MoE layer over a window: the hottest rank's load over the mean, and the experts with the most load."""

    ratio: float
    hottest: list[HotExpert]


class PlacementStatus(Struct, frozen=True, kw_only=True):
    """Where the placement of an engine's experts stands, as one of its ranks knows it.

    What only the hub knows (`bytes_moved`, `imbalance`, `layers`) is zero or empty elsewhere. Counters since the start
    of that rank.
    """

    epoch: int
    num_swaps: int = 0  # placements that steps were switched to
    num_abandoned: int = 0
    bytes_moved: int = 0  # experts loaded, over all ranks
    imbalance: float = 0.0  # hottest rank over mean when there was last enough load to say; 0 before
    is_changing: bool = False
    last_reason: str = ""  # why a change was abandoned or refused, the last time
    layers: list[LayerLoad] = field(default_factory=list)
