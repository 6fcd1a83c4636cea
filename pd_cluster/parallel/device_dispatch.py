"""Dispatchers of GPU clusters behind the same interface: DeepEP and nixl_ep, in their low-latency form.

Both take bfloat16 tokens and the numbers of physical slots, cast to FP8 on the way where asked to, and lay what arrives
as [slots of this rank][room for every rank's tokens][H] beside a count for each slot; on the way back they weigh and
add by themselves. Neither is required: a configuration that names one of them is refused where it cannot be imported.

They were written against the documented interfaces of `deep_ep.Buffer` and `nixl_ep.Buffer` and have not been run on
GPUs by this project's tests, which hold the translation to and from `Arrived` to a stand-in of that interface.
"""

# T tokens, K experts per token, H hidden size, S slots of a rank, C room of a slot, R received rows

import importlib
from types import ModuleType
from typing import Any, Literal, Protocol, cast

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from pd_cluster.errors import ConfigError
from pd_cluster.ids import Rank
from pd_cluster.parallel.codec import BLOCK
from pd_cluster.parallel.dispatch import Arrived
from pd_cluster.parallel.groups import Group

Library = Literal["deepep", "nixl_ep"]
MODULES: dict[Library, str] = {"deepep": "deep_ep", "nixl_ep": "nixl_ep"}


class Buffer(Protocol):
    """What both libraries offer."""

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, max_tokens: int, num_experts: int, *, use_fp8: bool
    ) -> tuple[Any, Tensor, Any, Any, Any]: ...

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any
    ) -> tuple[Tensor, Any, Any]: ...


class Sizes(Struct, frozen=True, kw_only=True):
    num_ranks: int
    slots_per_rank: int
    max_tokens: int
    hidden_size: int
    fp8: bool

    @property
    def num_slots(self) -> int:
        return self.num_ranks * self.slots_per_rank


class DeviceDispatcher:
    """Placement epochs need nothing here: slots are fixed, and what they hold is the placement's concern."""

    replicated = False

    def __init__(self, rank: Rank, buffer: Buffer, sizes: Sizes, index_dtype: torch.dtype = torch.int64) -> None:
        self.ranks = [rank]
        self.buffer = buffer
        self.sizes = sizes
        self.index_dtype = index_dtype

    def dispatch(self, layer: int, hidden_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> "DeviceCombining":
        return DeviceCombining(self, hidden_TH, slots_TK.to(self.index_dtype), weights_TK)


class DeviceCombining:
    def __init__(self, dispatcher: DeviceDispatcher, hidden_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> None:
        self._dispatcher = dispatcher
        self._slots_TK = slots_TK
        self._weights_TK = weights_TK
        sizes = dispatcher.sizes
        self._received, self._counts_S, self._handle, _, _ = dispatcher.buffer.low_latency_dispatch(
            hidden_TH, slots_TK, sizes.max_tokens, sizes.num_slots, use_fp8=sizes.fp8
        )
        self._out_SCH: Tensor | None = None

    def arrived(self) -> list[Arrived]:
        """Each received row is a token for one slot; weights are 1 here, for they are applied on the way back."""
        counts = self._counts_S.tolist()
        rows_RH = torch.cat([self._rows(slot, count) for slot, count in enumerate(counts)])
        numbers = torch.arange(len(counts), device=rows_RH.device)
        slot_R = numbers.repeat_interleave(self._counts_S.to(rows_RH.device, torch.int64))
        row_R = torch.arange(len(rows_RH), device=rows_RH.device)
        weight_R = torch.ones(len(rows_RH), device=rows_RH.device)
        return [Arrived(self._dispatcher.ranks[0], rows_RH, row_R, slot_R, weight_R, counts)]

    def _rows(self, slot: int, count: int) -> Tensor:
        if not self._dispatcher.sizes.fp8:
            return cast(Tensor, self._received[slot, :count])
        codes_SCH, scales_SCB = self._received
        scale_CH = scales_SCB[slot, :count].repeat_interleave(BLOCK, dim=1)
        return cast(Tensor, (codes_SCH[slot, :count].float() * scale_CH).bfloat16())

    def reply(self, outputs: list[Tensor]) -> None:
        (output_RH,) = outputs
        sizes = self._dispatcher.sizes
        room = sizes.num_ranks * sizes.max_tokens
        out_SCH = output_RH.new_zeros((sizes.slots_per_rank, room, sizes.hidden_size))
        first = 0
        for slot, count in enumerate(self._counts_S.tolist()):
            out_SCH[slot, :count] = output_RH[first : first + count]
            first += count
        self._out_SCH = out_SCH

    def total(self) -> Tensor:
        assert self._out_SCH is not None
        combined_TH, _, _ = self._dispatcher.buffer.low_latency_combine(
            self._out_SCH, self._slots_TK, self._weights_TK, self._handle
        )
        return combined_TH


class GroupComm:
    """The calls of a communicator that DeepEP makes when it starts, over a group of ours: small values, no pickle."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device

    def Get_rank(self) -> int:  # noqa: N802
        return self._group.rank

    def Get_size(self) -> int:  # noqa: N802
        return self._group.size

    def allgather(self, value: int | bytes | bytearray | None) -> list[Any]:
        """The values of all ranks, in their order."""
        payload = bytearray(msgspec.msgpack.encode(bytes(value) if isinstance(value, bytearray) else value))
        mine = torch.frombuffer(payload, dtype=torch.uint8).to(self._device)
        sizes = torch.tensor([len(mine)], dtype=torch.int64, device=self._device)
        counts = self._group.all_gather_rows(sizes, [1] * self._group.size).tolist()
        gathered = self._group.all_gather_rows(mine, counts).cpu()
        return [msgspec.msgpack.decode(bytes(part.tolist())) for part in torch.split(gathered, counts)]


def find_library(name: Library) -> ModuleType:
    """Raises ConfigError when it cannot be imported."""
    try:
        return importlib.import_module(MODULES[name])
    except ImportError as error:
        raise ConfigError(f'dispatcher = "{name}" needs the package {MODULES[name]}, which fails: {error}') from error


def open_device_dispatcher(
    name: Library, rank: Rank, group: Group | None, store: Store | None, sizes: Sizes, device: torch.device
) -> DeviceDispatcher:
    """All ranks of the engine call this together. Raises ConfigError where the library cannot serve."""
    library = find_library(name)
    if device.type != "cuda":
        raise ConfigError(f'dispatcher = "{name}" is for GPUs; this engine runs on {device.type}')
    if sizes.hidden_size % BLOCK:
        raise ConfigError(f'dispatcher = "{name}" needs a hidden size that {BLOCK} divides, got {sizes.hidden_size}')
    if group is None or store is None:
        raise ConfigError(f'dispatcher = "{name}" is for engines of several ranks')
    shape = sizes.max_tokens, sizes.hidden_size, sizes.num_ranks, sizes.num_slots
    if name == "deepep":
        buffer = library.Buffer(
            None,
            num_rdma_bytes=library.Buffer.get_low_latency_rdma_size_hint(*shape),
            low_latency_mode=True,
            num_qps_per_rank=sizes.slots_per_rank,
            comm=GroupComm(group, device),
        )
        return DeviceDispatcher(rank, buffer, sizes)
    buffer = library.Buffer(rank=int(rank), low_latency_mode=True, tcp_store_group=store)
    num_bytes = library.Buffer.get_rdma_size_hint(*shape)
    buffer.update_memory_buffers(sizes.num_ranks, sizes.slots_per_rank, num_bytes)
    buffer.connect_ranks(list(range(sizes.num_ranks)))
    return DeviceDispatcher(rank, buffer, sizes, getattr(library, "topk_idx_t", torch.int64))
