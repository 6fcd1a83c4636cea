"""What placement epochs are made of on one rank: the memory that loads experts, the rank's part, and the hub's.

Without empty slots nothing can be loaded, so such an engine opens no memory to its peers: only the weights of copies
then follow the load. How a rank's experts are read is published under `experts/{its worker's epoch}/{rank}`, and looked
up when a first expert comes from there.
"""

import asyncio
import base64
from collections.abc import Callable

import torch

from pd_cluster.clock import Clock
from pd_cluster.config import EngineSection
from pd_cluster.engine.epoch_hub import EpochHub
from pd_cluster.engine.epoch_messages import EpochStats
from pd_cluster.engine.epochs import RankEpochs
from pd_cluster.engine.expert_memory import ExpertMemory
from pd_cluster.engine.step_sync import Meeting, StepSync
from pd_cluster.engine.torch_engine import TorchEngine
from pd_cluster.errors import EngineError, PdClusterError, TransferFailed
from pd_cluster.ids import EngineEpoch, Rank
from pd_cluster.launch.spec import RankSpec
from pd_cluster.parallel.load_window import TriggerPolicy
from pd_cluster.parallel.placement_status import PlacementStatus
from pd_cluster.parallel.stages import Load
from pd_cluster.transfer.contract import Arena
from pd_cluster.transfer.reads import NixlReader

LOAD_BYTES_S = {"cpu": 1e8, "cuda": 1e9}
"""About what loading reaches beside steps, by device: what it costs is weighed with it."""


def policy_of(section: EngineSection, device: torch.device) -> TriggerPolicy | None:
    if section.rebalance == "off":
        return None
    return TriggerPolicy(
        threshold=section.rebalance_threshold,
        sustain_s=section.rebalance_sustain_s,
        cooldown_s=section.rebalance_cooldown_s,
        load_bytes_s=LOAD_BYTES_S.get(device.type, 1e9),
    )


class Placements:
    """Of a rank of an engine whose ranks share experts. `on_failure`: this rank cannot go on; `on_end`: nor can any
    other.
    """

    def __init__(
        self,
        spec: RankSpec,
        engine: TorchEngine,
        sync: StepSync,
        clock: Clock,
        meeting: Meeting,
        on_failure: Callable[[EngineError], None],
        *,
        is_empty: bool = False,
        on_end: Callable[[EngineError], None] | None = None,
    ) -> None:
        experts = engine.model.experts
        assert experts is not None
        assert engine.placement is not None
        self.lives: dict[Rank, EngineEpoch] = (
            {} if spec.is_elastic else {Rank(rank): spec.epoch for rank in range(spec.num_ranks)}
        )
        """The ranks there are, with the epochs of their workers: of an elastic engine the members, as they are now."""
        self.hub: EpochHub | None = None
        self._spec = spec
        self._engine = engine
        self._sync = sync
        self._clock = clock
        self._meeting = meeting
        self._on_failure = on_failure
        self._on_end = on_end or on_failure
        self._loop = asyncio.get_running_loop()
        self._arena = experts.arenas[spec.rank]
        self._memory: ExpertMemory | None = None
        shapes = engine.placement
        if shapes.num_ranks * shapes.slots_per_rank > shapes.num_experts:
            self._memory = ExpertMemory(
                spec.rank,
                self._arena,
                experts.store,
                self._reader,
                on_done=self._on_done,
                on_failure=self._on_broken,
            )
        self.epochs = RankEpochs(
            spec.rank,
            spec.worker_epoch,
            engine,
            self._memory,
            clock=clock,
            report=sync.report,
            lookup=self._lookup,
            is_empty=is_empty,
        )
        sync.on_order = self.epochs.order
        if sync.is_hub:
            self.become_hub()

    @property
    def stats(self) -> EpochStats:
        return self.epochs.stats

    def status(self) -> PlacementStatus:
        """For whoever looks at the engine."""
        stats = self.stats
        return PlacementStatus(
            epoch=stats.epoch,
            num_swaps=stats.num_swaps,
            num_abandoned=stats.num_abandoned,
            bytes_moved=stats.bytes_moved,
            imbalance=stats.imbalance,
            is_changing=stats.is_changing,
            last_reason=stats.last_reason,
            layers=stats.layers,
        )

    def become_hub(self) -> EpochHub:
        """From now on the hub's part is here; `form` may follow."""
        if self.hub is None:
            section = self._spec.section
            self.hub = EpochHub(
                self.epochs.stage,
                tensor_parallel=self._spec.tensor_parallel,
                expert_bytes=self._arena.record_bytes,
                clock=self._clock,
                order=self._sync.order,
                nudge=self._sync.nudge,
                stats=self.stats,
                on_failure=self._on_end,
                policy=policy_of(section, self._arena.device),
            )
        self._sync.steer(self.hub.decide, self.hub.may_run)
        self._sync.on_report = self.hub.on_report
        return self.hub

    def leave_hub(self) -> None:
        """Another lead is hub."""
        if self.hub is not None:
            self.hub.close()
            self.hub = None

    async def start(self) -> None:
        """Open the memory to peers and say how it is read."""
        if self._memory is None:
            return
        self._memory.start()
        endpoint = await asyncio.to_thread(self._memory.endpoint)
        text = "" if endpoint is None else base64.b64encode(endpoint).decode()
        await self._meeting.publish(_key(self._spec.worker_epoch, self._spec.rank), text)

    async def close(self) -> None:
        self.leave_hub()
        self.epochs.close()
        if self._memory is not None:
            await asyncio.to_thread(self._memory.stop)

    async def _lookup(self, rank: Rank) -> bytes:
        life = self.lives.get(rank)
        if life is None:  # nobody would ever say how
            raise TransferFailed(f"rank {rank} is not there")
        text = await self._meeting.lookup(_key(life, rank))
        if not text:
            raise TransferFailed(f"rank {rank} cannot be read from")
        return base64.b64decode(text)

    def _reader(self, buffers: torch.Tensor) -> NixlReader:
        device = self._arena.device
        arena = Arena(
            base_address=self._arena.base_address,
            num_bytes=self._arena.num_bytes,
            memory="VRAM" if device.type == "cuda" else "DRAM",
            device_id=device.index or 0,
        )
        return NixlReader(f"{self._spec.worker_epoch}/{self._spec.rank}/experts", arena, buffers)

    def _on_done(self, load: Load, error: PdClusterError | None) -> None:
        self._call(lambda: self.epochs.on_done(load, error))

    def _on_broken(self, error: BaseException) -> None:
        self._call(lambda: self._on_failure(EngineError(f"the thread that loads experts failed: {error!r}")))

    def _call(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)


def _key(epoch: EngineEpoch, rank: Rank) -> str:
    return f"experts/{epoch}/{rank}"
