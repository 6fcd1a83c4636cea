"""A GGUF file: its metadata and its table of tensors, read in one pass over the head of the mapped file. No torch.

    "GGUF", u32 version, u64 tensors, u64 keys | key, u32 type, value ... | name, u32 dims, u64 extents, u32 type, u64
    offset ... | data

Strings are a u64 length and bytes; everything is little-endian. A vocabulary of 100,000 tokens takes a fraction of a
second.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from msgspec import Struct
from numpy.typing import NDArray

from pd_cluster.errors import ModelError

T = TypeVar("T")
SUPPORTED_VERSIONS = (2, 3)
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", _FLOAT32: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


class GgufTensor(Struct, frozen=True):
    """One tensor. `shape` is in torch's order, rows first; `start` is its first byte in the file."""

    qtype: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class GgufFile:
    """Raises ModelError that names the file when it is no GGUF file, truncated, or of a type that is unknown."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        self._at = 0
        try:
            self._read_head()
        except (struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
            raise ModelError(f"{path} has a truncated or damaged GGUF head: {error}; download it again") from error

    def get(self, kind: type[T], key: str) -> T | None:
        """The value of a metadata key; None when it is absent. Raises ModelError when it has another type."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            raise ModelError(f"{self.path}: {key} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def need(self, kind: type[T], key: str) -> T:
        value = self.get(kind, key)
        if value is None:
            raise ModelError(f"{self.path}: metadata lacks {key}")
        return value

    def raw(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The tensor's bytes in the mapped file, [..., bytes of a row]."""
        flat = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)
        return flat.reshape(*tensor.shape[:-1], -1)

    def sample(self, tensor: GgufTensor, num_bytes: int) -> bytes:
        """A few bytes from the middle of the tensor."""
        middle = tensor.start + tensor.num_bytes // 2
        return self._data[middle : min(middle + num_bytes, tensor.start + tensor.num_bytes)]

    def _read_head(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file; a Git LFS pointer has to be pulled first")
        self._at = 4
        version = self._scalar("I")
        if version not in SUPPORTED_VERSIONS:
            raise ModelError(f"{self.path} is GGUF version {version}; supported: 2 and 3, little-endian")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.get(int, "general.alignment") or 32
        start = -(-self._at // alignment) * alignment
        for name, qtype, shape, offset in infos:
            tensor = GgufTensor(qtype, shape, start + offset, _num_bytes(self.path, name, qtype, shape))
            if tensor.start + tensor.num_bytes > len(self._data):
                end = tensor.start + tensor.num_bytes
                raise ModelError(
                    f"{self.path} is truncated: tensor {name} ends at byte {end}, the file has {len(self._data)}; "
                    "download it again"
                )
            self.tensors[name] = tensor

    def _tensor_info(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._string()
        num_dims = self._scalar("I")
        extents = tuple(self._scalar("Q") for _ in range(num_dims))
        number, offset = self._scalar("I"), self._scalar("Q")
        try:
            return name, GGMLQuantizationType(number), extents[::-1], offset
        except ValueError as error:
            raise ModelError(f"{self.path}: tensor {name} has unknown type {number}") from error

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            if item in _SCALARS:
                return list(self._unpack(f"<{count}{_SCALARS[item]}"))
            return [self._value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: metadata value of unknown type {kind}")
        value = self._scalar(_SCALARS[kind])
        return float(str(np.float32(value))) if kind == _FLOAT32 else value  # 1e-05, not 9.99999974e-06

    def _string(self) -> str:
        length = self._scalar("Q")
        text = self._data[self._at : self._at + length]
        if len(text) < length:
            raise struct.error("a string runs past the end")
        self._at += length
        return text.decode("utf-8")

    def _scalar(self, code: str) -> Any:
        return self._unpack(f"<{code}")[0]

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values


def _num_bytes(path: Path, name: str, qtype: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
    block, block_bytes = GGML_QUANT_SIZES[qtype]
    if not shape or shape[-1] % block:
        raise ModelError(f"{path}: tensor {name} of shape {list(shape)} does not divide into {qtype.name} blocks")
    num_values = 1
    for extent in shape:
        num_values *= extent
    return num_values // block * block_bytes
