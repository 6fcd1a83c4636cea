"""The KV memory of one rank: one page-aligned range of bytes, and the views through which the model uses it."""

# U units, L layers, K KV heads, W tokens of a unit, D head dim, C latent dim + rope dim

import mmap

import torch
from torch import Tensor

from pd_cluster.kernels.paged import GqaPages, MlaPages
from pd_cluster.kv.layout import KvLayout
from pd_cluster.request import UNIT_TOKENS
from pd_cluster.transfer.contract import Arena, Memory

Pages = GqaPages | MlaPages


class KvArena:
    """`num_blocks` blocks of `layout`, all zero at first. `bytes` is the range that transfers register and address."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device | None = None) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device or torch.device("cpu")
        self.num_bytes = num_blocks * layout.block_bytes
        self.bytes = _allocate(self.num_bytes, self.device)
        num_units = num_blocks * layout.units_per_block
        num_heads, num_layers, width = len(layout.head_ids), layout.num_layers, layout.token_values
        values = self.bytes.view(getattr(torch, layout.dtype))
        self.units_UV = values.view(num_units, num_heads * num_layers * UNIT_TOKENS * width)
        self.layers: list[Pages] = []
        for layer in range(num_layers):
            if layout.kind == "gqa":
                rows = values.view(num_units * num_heads, num_layers, 2, UNIT_TOKENS * width // 2)[:, layer]
                keys, row_values = rows[:, 0], rows[:, 1]
                shape = (num_units, num_heads, UNIT_TOKENS, width // 2)
                self.layers.append(GqaPages(keys.view(shape), row_values.view(shape), keys, row_values))
            else:
                latent = values.view(num_units, num_layers, UNIT_TOKENS * width)[:, layer]
                self.layers.append(MlaPages(latent.view(num_units, UNIT_TOKENS, width), latent))

    @property
    def base_address(self) -> int:
        return self.bytes.data_ptr()

    @property
    def registered(self) -> Arena:
        """What transfers register and address."""
        memory: Memory = "VRAM" if self.device.type == "cuda" else "DRAM"
        return Arena(
            base_address=self.base_address, num_bytes=self.num_bytes, memory=memory, device_id=self.device.index or 0
        )

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Some of its bytes: a view of host memory, or a copy of a GPU's."""
        return self.bytes[offset : offset + num_bytes].cpu().numpy().data

    def clear_units(self, units: Tensor) -> None:
        """Zero whole units (int64 indices, over all blocks)."""
        if len(units):
            self.units_UV.index_fill_(0, units, 0)


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # anonymous pages are zero and cost nothing until they are written
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
