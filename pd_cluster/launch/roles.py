"""The role table: which engines a configuration asks for, and the ranks of one life of an engine."""

from collections.abc import Mapping

from msgspec import Struct

from pd_cluster.config import ClusterConfig, EngineSection
from pd_cluster.ids import EngineEpoch, EngineId, Rank
from pd_cluster.launch.spec import RankSpec, Role


class EngineShape(Struct, frozen=True, kw_only=True):
    """An engine that shall run, whatever its epoch."""

    engine_id: EngineId
    role: Role
    data_parallel: int
    tensor_parallel: int
    threads: int
    elastic: bool = False  # its DP ranks live and die one by one

    @property
    def num_ranks(self) -> int:
        return self.data_parallel * self.tensor_parallel


def engine_shapes(config: ClusterConfig) -> list[EngineShape]:
    """Prefill instances first, then decode groups; colocated: only engines that do both, shaped by `decode`."""
    if config.colocated:
        return _pool("colocated", config.decode)
    return _pool("prefill", config.prefill) + _pool("decode", config.decode)


def _pool(role: Role, section: EngineSection) -> list[EngineShape]:
    return [_shape(role, section, index) for index in range(section.instances)]


def _shape(role: Role, section: EngineSection, index: int) -> EngineShape:
    return EngineShape(
        engine_id=EngineId(f"{role}-{index}"),
        role=role,
        data_parallel=section.data_parallel,
        tensor_parallel=section.tensor_parallel,
        threads=section.threads,
        elastic=section.elastic,
    )


def engine_shape(role: Role, index: int, config: ClusterConfig) -> EngineShape:
    """One engine of a role, whatever `instances` says: an autoscaler may have asked for more."""
    return _shape(role, config.prefill if role == "prefill" else config.decode, index)


def rank_specs(
    shape: EngineShape,
    epoch: EngineEpoch,
    config: ClusterConfig,
    store_address: tuple[str, int],
    ranks_on_host: int,
    lives: Mapping[int, EngineEpoch] | None = None,
) -> list[RankSpec]:
    """Every rank of a new life of the engine, in rank order; or of the DP ranks in `lives`, each with its own."""
    return [
        RankSpec(
            role=shape.role,
            engine_id=shape.engine_id,
            epoch=epoch,
            life=None if lives is None else lives[rank // shape.tensor_parallel],
            rank=Rank(rank),
            data_parallel=shape.data_parallel,
            tensor_parallel=shape.tensor_parallel,
            config=config,
            store_host=store_address[0],
            store_port=store_address[1],
            threads=shape.threads,
            ranks_on_host=ranks_on_host,
        )
        for rank in range(shape.num_ranks)
        if lives is None or rank // shape.tensor_parallel in lives
    ]
