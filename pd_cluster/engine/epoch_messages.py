"""What ranks and the hub of an engine say to each other about placement epochs, and what a rank counts of them."""

# L MoE layers, E experts

import msgspec
from msgspec import Struct

from pd_cluster.ids import Rank
from pd_cluster.parallel.placement_status import LayerLoad
from pd_cluster.parallel.planner import Stage
from pd_cluster.parallel.transition import EpochVote


class Prepare(Struct, frozen=True, kw_only=True, tag="prepare"):
    """From the hub to every rank. `attempt` tells it from an abandoned one of the same epoch."""

    attempt: int
    stage: Stage
    holders: list[Rank]  # who has the experts that the current placement puts there
    timeout_s: float
    hurry: bool  # no step has work before experts are where they are needed


class Voted(Struct, frozen=True, tag="voted"):
    """From a rank to the hub."""

    attempt: int
    vote: EpochVote
    bytes_loaded: int = 0  # in this stage


class Loads(Struct, frozen=True, tag="loads"):
    """From a rank to the hub: `counts` int64 [L, E], tokens that it has routed since its start."""

    rank: Rank
    life: str
    counts: bytes


Report = Voted | Loads
encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Prepare).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


class EpochStats(Struct, kw_only=True):
    """Of one rank, and of the whole engine where that says so. Counters since the start."""

    epoch: int = 0
    num_swaps: int = 0
    num_abandoned: int = 0
    bytes_loaded: int = 0  # into this rank's slots
    bytes_moved: int = 0  # over all ranks; at the hub
    imbalance: float = 0.0  # hottest rank over mean as last looked at, 0 before; at the hub
    predicted: float = 0.0  # what the last rebalance was to make of it; at the hub
    layers: list[LayerLoad] = msgspec.field(default_factory=list)  # at that look, whatever the ratio; at the hub
    is_changing: bool = False
    last_reason: str = ""  # of the last stage that was abandoned, or change that was refused


class Standing(Struct, frozen=True, array_like=True):
    """Where a rank stands when a generation forms. `is_empty`: it has joined, and none of its slots holds anything,
    whatever its placement says.
    """

    stage: Stage
    is_empty: bool
    attempt: int


decode_standing = msgspec.msgpack.Decoder(Standing).decode
decode_stage = msgspec.msgpack.Decoder(Stage).decode
