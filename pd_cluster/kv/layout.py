"""How KV lies in a rank's memory, and what two engines must share to exchange it.

The arena of a rank is one contiguous range of `num_blocks` blocks. Inside it everything is built of *rows*:

    arena = [block][unit of 16 tokens][head][layer] -> row
    row   = GQA: [2 (k, v)][16 tokens][head_dim]        MLA: [16 tokens][kv_lora_rank + rope_dim]

so a block is one contiguous range over all layers, a 16-token unit is one contiguous range inside it, and a run of
heads is one contiguous range inside a unit. Ranks with other block sizes or other heads therefore exchange contiguous
ranges too. MLA has one "head", the latent, identical on all TP ranks.
"""

import hashlib
from typing import Literal

import msgspec
from msgspec import Struct

from pd_cluster.errors import ConfigError
from pd_cluster.request import UNIT_TOKENS

LAYOUT_VERSION = 1
HASH_VERSION = 1

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(Struct, frozen=True, kw_only=True):
    """The layout of one rank's arena. `head_ids` are global KV head ids in the order they lie; MLA: (0,)."""

    kind: Literal["gqa", "mla"]
    num_layers: int
    head_ids: tuple[int, ...]
    token_values: int  # values per token, head and layer: GQA 2 * head_dim, MLA kv_lora_rank + rope_dim
    dtype: Literal["float32", "bfloat16", "float16"]
    block_size: int  # tokens

    def __post_init__(self) -> None:
        if self.block_size <= 0 or self.block_size % UNIT_TOKENS:
            raise ConfigError(f"kv.block_size must be a multiple of {UNIT_TOKENS}, got {self.block_size}")

    @property
    def units_per_block(self) -> int:
        return self.block_size // UNIT_TOKENS

    @property
    def row_bytes(self) -> int:
        return UNIT_TOKENS * self.token_values * DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one unit over all layers: the finest contiguous range that a transfer names."""
        return self.num_layers * self.row_bytes

    @property
    def unit_bytes(self) -> int:
        return len(self.head_ids) * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.units_per_block * self.unit_bytes

    @property
    def token_bytes(self) -> int:
        return self.unit_bytes // UNIT_TOKENS

    @property
    def rows_per_block(self) -> int:
        return self.units_per_block * len(self.head_ids) * self.num_layers

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class KvFingerprint(Struct, frozen=True, kw_only=True):
    """What must be equal on both sides of a handoff; TP degree, heads held and block size may differ."""

    weights: str  # identity of the checkpoint: digest of its config and tensors, see `WeightSource`
    kind: str
    num_layers: int
    num_kv_heads: int
    token_values: int
    dtype: str
    rope: str  # digest of the rotary parameters
    layout_version: int = LAYOUT_VERSION
    hash_version: int = HASH_VERSION

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def difference(self, other: "KvFingerprint") -> str | None:
        """Say which fields differ, with both values; None when compatible."""
        parts = [
            f"{name} {getattr(self, name)!r} against {getattr(other, name)!r}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]
        return ", ".join(parts) or None
