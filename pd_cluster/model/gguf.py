"""Weights from a GGUF file under their Hugging Face names, dequantised row by row as a rank asks for them.

llama.cpp reorders the rows of each query and key head so that rope pairs lie side by side; here they are read back in
Hugging Face's order, first halves before second halves.
"""

import hashlib
import re
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from pd_cluster.errors import ModelError
from pd_cluster.model.config import GqaConfig
from pd_cluster.model.gguf_config import GgufModel
from pd_cluster.model.gguf_file import GgufTensor

Range = tuple[int, int]
ROWS_AT_ONCE = 2048  # of float32 in flight while a tensor is widened
SAMPLE_BYTES = 256

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_OF_EXPERT = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"block_sparse_moe\.experts\.(\d+)\.(w[123])")


class _Place(NamedTuple):
    """Where a Hugging Face tensor lies in the file: `expert` of a stacked tensor, `num_heads` whose rows are
    reordered."""

    name: str
    expert: int | None = None
    num_heads: int | None = None


class GgufSource:
    """A `WeightSource` over one GGUF file."""

    def __init__(self, model: GgufModel) -> None:
        self._file = model.file
        attention = model.config.attention
        assert isinstance(attention, GqaConfig)
        self._heads = {"self_attn.q_proj": attention.num_heads, "self_attn.k_proj": attention.num_kv_heads}
        self.identity = self._digest(msgspec.json.encode(model.config))

    def has(self, name: str) -> bool:
        place = self._place(name)
        return place is not None and place.name in self._file.tensors

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: Range | None = None,
        cols: Range | None = None,
    ) -> Tensor:
        """See `WeightSource.read`."""
        place = self._place(name)
        tensor = self._file.tensors.get(place.name) if place else None
        if place is None or tensor is None:
            raise ModelError(f"{self._file.path} lacks tensor {name}" + (f" ({place.name})" if place else ""))
        found = tensor.shape if place.expert is None else tensor.shape[1:]
        if found != shape:
            detail = f"has shape {list(found)}, but the metadata implies {list(shape)}"
            raise ModelError(f"tensor {place.name} in {self._file.path} {detail}")
        raw = self._file.raw(tensor)
        if len(shape) == 1:
            values = self._widen(place.name, tensor, raw[None])[0]
            order = np.arange(shape[0])[slice(*rows) if rows else slice(None)]
            return torch.from_numpy(values[_rows_in_file(order, shape[0], place.num_heads)]).to(dtype)
        raw_NB = raw if place.expert is None else raw[place.expert]
        start, end = rows or (0, shape[0])
        left, right = cols or (0, shape[1])
        block, block_bytes = GGML_QUANT_SIZES[tensor.qtype]
        first_block, last_block = left // block, -(-right // block)
        cut = slice(first_block * block_bytes, last_block * block_bytes)
        out_NK = torch.empty(end - start, right - left, dtype=dtype)
        for low in range(start, end if right > left else start, ROWS_AT_ONCE):
            high = min(end, low + ROWS_AT_ONCE)
            picked = raw_NB[_rows_in_file(np.arange(low, high), shape[0], place.num_heads), cut]
            values_NK = self._widen(place.name, tensor, picked)
            offset = first_block * block
            out_NK[low - start : high - start] = torch.from_numpy(values_NK[:, left - offset : right - offset])
        return out_NK

    def _widen(self, name: str, tensor: GgufTensor, raw_NB: NDArray[np.uint8]) -> NDArray[np.float32]:
        try:
            values: NDArray[np.float32] = dequantize(np.array(raw_NB), tensor.qtype)
        except NotImplementedError as error:
            raise ModelError(
                f"tensor {name} in {self._file.path}: {tensor.qtype.name} cannot be dequantised"
            ) from error
        return values

    def _place(self, name: str) -> _Place | None:
        stem, _, kind = name.rpartition(".")
        if stem in _TOP:
            return _Place(f"{_TOP[stem]}.{kind}")
        layer = _LAYER.fullmatch(stem)
        if layer is None:
            return None
        expert = _EXPERT.fullmatch(layer[2])
        if expert is not None:
            part = _OF_EXPERT[expert[2]]
            stacked = f"blk.{layer[1]}.{part}_exps.{kind}"
            if stacked in self._file.tensors:
                return _Place(stacked, expert=int(expert[1]))
            return _Place(f"blk.{layer[1]}.{part}.{expert[1]}.{kind}")  # files from before experts were stacked
        part = _IN_LAYER.get(layer[2], "")
        return _Place(f"blk.{layer[1]}.{part}.{kind}", num_heads=self._heads.get(layer[2])) if part else None

    def _digest(self, config: bytes) -> str:
        digest = hashlib.blake2b(config, digest_size=16)
        for name, tensor in sorted(self._file.tensors.items()):
            digest.update(f"{name}\0{tensor.qtype.name}\0{tensor.shape}\n".encode())
            digest.update(self._file.sample(tensor, SAMPLE_BYTES))
        return digest.hexdigest()


def _rows_in_file(rows: NDArray[np.int64], num_rows: int, num_heads: int | None) -> NDArray[np.int64]:
    """The file's rows that hold these rows of the Hugging Face tensor. Row (half, i) of a head lies at 2 i + half."""
    if num_heads is None:
        return rows
    head_dim = num_rows // num_heads
    head, within = rows // head_dim, rows % head_dim
    half, pair = within // (head_dim // 2), within % (head_dim // 2)
    return head * head_dim + 2 * pair + half
