"""What a rank is told when it starts, and what it answers through the store once it serves or cannot.

    supervisor --RankSpec--> launcher --> rank process
    supervisor <--RankProgress, RankReport-- store <-- rank process

Keys of one life of an engine begin with its epoch, so that a new life never reads what an old one wrote. Where DP ranks
live and die one by one, what one rank says begins with the life of its DP rank, and what all share with the epoch.
"""

from typing import Literal

import msgspec
from msgspec import Struct

from pd_cluster.config import ClusterConfig, EngineSection
from pd_cluster.cpus import parse_sets
from pd_cluster.errors import ErrorInfo
from pd_cluster.ids import EngineEpoch, EngineId, Rank, WorkerId, worker_id
from pd_cluster.parallel.roster import Roster

Role = Literal["prefill", "decode", "colocated"]

LEASE_KEY = "lease"
"""The supervisor counts this key up every second; a rank that sees it stand still for LEASE_S ends itself."""

LEASE_S = 15.0


class RankSpec(Struct, frozen=True, kw_only=True):
    """One rank of one life of an engine. Equal on all ranks but for `rank`."""

    role: Role
    engine_id: EngineId
    epoch: EngineEpoch
    life: EngineEpoch | None = None  # of its DP rank, where these live and die one by one
    rank: Rank
    data_parallel: int
    tensor_parallel: int
    config: ClusterConfig
    store_host: str
    store_port: int
    bind_host: str = "127.0.0.1"  # where the rank listens, and what its peers dial
    control_host: str | None = None  # where a lead listens for routers; default: bind_host
    control_port: int = 0
    backend: Literal["nixl"] = "nixl"
    threads: int = 1
    ranks_on_host: int = 1  # they share the memory and cores of their host
    ranks_on_gpu: int = 1  # they share the memory of their GPU, if they have one

    @property
    def num_ranks(self) -> int:
        return self.data_parallel * self.tensor_parallel

    @property
    def worker_epoch(self) -> EngineEpoch:
        """What routers and prefill workers know this worker's life by."""
        return self.epoch if self.life is None else self.life

    @property
    def is_elastic(self) -> bool:
        """Whether its engine goes on without DP ranks that die, and takes new ones in."""
        return self.life is not None

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tensor_parallel

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tensor_parallel

    @property
    def is_lead(self) -> bool:
        """Whether this rank speaks for its worker."""
        return self.tp_rank == 0

    @property
    def worker_id(self) -> WorkerId:
        return worker_id(self.engine_id, self.dp_rank)

    @property
    def section(self) -> EngineSection:
        return self.config.prefill if self.role == "prefill" else self.config.decode

    @property
    def cpus(self) -> frozenset[int] | None:
        """Where this rank runs; None: wherever it is put."""
        if self.section.cpus is None:
            return None
        sets = parse_sets(self.section.cpus)
        instance = int(self.engine_id.rpartition("-")[2])
        return sets[(instance * self.num_ranks + self.rank) % len(sets)]

    @property
    def name(self) -> str:
        """For logs and file names: `decode-0.3` is rank 3 of decode-0."""
        return f"{self.engine_id}.{self.rank}"


class LoadedModel(Struct, frozen=True, array_like=True):
    """What a rank has loaded, and from where on its machine. `weights`: see `WeightSource.identity`; equal on all ranks
    that may compute together. `expert_slots`: of a rank and layer.
    """

    path: str
    weights: str
    num_experts: int = 0
    expert_slots: int = 0


class RankReport(Struct, frozen=True, kw_only=True):
    """A rank serves, or says why it cannot. Written once in a life."""

    rank: Rank
    pid: int
    control_address: str | None = None  # "host:port"; of leads only
    num_blocks: int = 0
    block_bytes: int = 0  # on this rank
    load_s: float = 0.0
    model: LoadedModel | None = None
    error: ErrorInfo | None = None


class RankProgress(Struct, frozen=True, array_like=True):
    """How far a start is: `done` of `total` units of `stage` (`weights`: tensors)."""

    stage: str
    done: int
    total: int


class Beat(Struct, frozen=True, array_like=True):
    """A rank of an elastic engine lives: `count` has grown since the last one. `suspects`: ranks whose rows it has been
    waiting for longer than it should. `awaited`: those that keep the next step from beginning, or wait for such
    a one themselves.
    """

    count: int
    suspects: list[Rank] = []
    awaited: list[Rank] = []


class Release(Struct, frozen=True, array_like=True):
    """What a group says of those that a roster told to leave: nothing of them is needed any more, or why it cannot do
    without them.
    """

    generation: int
    refused: str | None = None


encode_spec = msgspec.json.Encoder().encode
decode_spec = msgspec.json.Decoder(RankSpec).decode
encode_message = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(RankReport).decode
decode_progress = msgspec.msgpack.Decoder(RankProgress).decode
decode_roster = msgspec.msgpack.Decoder(Roster).decode
decode_beat = msgspec.msgpack.Decoder(Beat).decode
decode_release = msgspec.msgpack.Decoder(Release).decode


def report_key(epoch: EngineEpoch, rank: Rank) -> str:
    return f"{epoch}/report/{rank}"


def revoked_key(epoch: EngineEpoch) -> str:
    """Exists once the supervisor has given up a life: whoever of it still runs ends itself."""
    return f"{epoch}/revoked"


def progress_key(epoch: EngineEpoch, rank: Rank) -> str:
    return f"{epoch}/progress/{rank}"


def beat_key(life: EngineEpoch, rank: Rank) -> str:
    return f"{life}/beat/{rank}"


def roster_key(epoch: EngineEpoch, generation: int) -> str:
    return f"{epoch}/roster/{generation}"


def release_key(epoch: EngineEpoch, generation: int) -> str:
    return f"{epoch}/released/{generation}"


def end_key(epoch: EngineEpoch) -> str:
    """Written by a rank that knows why its whole engine cannot go on; the first reason stays."""
    return f"{epoch}/end"
