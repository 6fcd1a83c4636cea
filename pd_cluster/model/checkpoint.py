"""Weights from a Hugging Face directory of safetensors: each rank maps the files and copies out only its slices."""

import re
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pd_cluster.errors import ModelError
from pd_cluster.model.config import ModelConfig
from pd_cluster.model.fp8 import block_range, dequantize_blocks
from pd_cluster.model.shards import TensorEntry, digest_shards, read_shards

Range = tuple[int, int]
FLOATING = ("F64", "F32", "F16", "BF16")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class SafetensorsSource:
    """A `WeightSource` over `directory`. A file is mapped when it is first read, until `close`; one that was replaced
    before that, by another of other weights, is refused: they are not those that `identity` names.
    """

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self._directory = directory
        self._fp8_block = config.fp8_block
        self._config = config
        self._entries = self._read_entries()
        self._stamps = {file: _stamp(file) for file in {entry.file for entry in self._entries.values()}}
        self._files: dict[Path, Any] = {}
        self.identity = self._identify(self._entries)

    def has(self, name: str) -> bool:
        return name in self._entries

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: Range | None = None,
        cols: Range | None = None,
    ) -> Tensor:
        """See `WeightSource.read`."""
        entry = self._find(name, shape)
        if entry.dtype in FLOATING:
            return self._slice(name, entry, rows, cols).to(dtype, copy=True, memory_format=torch.contiguous_format)
        if entry.dtype != "F8_E4M3":
            raise ModelError(
                f"tensor {name} in {entry.file} is {entry.dtype}; weights must be F32, F16, BF16 or F8_E4M3"
            )
        if self._fp8_block is None:
            raise ModelError(
                f"tensor {name} in {entry.file} is F8_E4M3, but config.json has no fp8 quantization_config"
            )
        return self._read_fp8(name, entry, dtype, rows or (0, shape[0]), cols or (0, shape[1]), self._fp8_block)

    def close(self) -> None:
        """Unmap the files; the tensors read so far stay valid."""
        self._files.clear()

    def _read_entries(self) -> dict[str, TensorEntry]:
        # layers past the last one are multi-token-prediction modules, which plain decoding does not use
        num_layers = self._config.num_layers
        return {name: entry for name, entry in read_shards(self._directory).items() if _layer(name) < num_layers}

    def _identify(self, entries: dict[str, TensorEntry]) -> str:
        return digest_shards(entries, msgspec.json.encode(self._config))

    def _read_fp8(
        self, name: str, entry: TensorEntry, dtype: torch.dtype, rows: Range, cols: Range, block: tuple[int, int]
    ) -> Tensor:
        scale_shape = (-(-entry.shape[0] // block[0]), -(-entry.shape[1] // block[1]))
        scale_name = f"{name}_scale_inv"
        scale = self._find(scale_name, scale_shape)
        scale_BC = self._slice(scale_name, scale, block_range(*rows, block[0]), block_range(*cols, block[1]))
        q_NK = self._slice(name, entry, rows, cols)
        return dequantize_blocks(q_NK, scale_BC, rows[0], cols[0], block, dtype)

    def _find(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"{self._directory} lacks tensor {name}")
        if entry.shape != shape:
            raise ModelError(
                f"tensor {name} in {entry.file} has shape {list(entry.shape)}, but config.json implies {list(shape)}"
            )
        return entry

    def _slice(self, name: str, entry: TensorEntry, rows: Range | None, cols: Range | None) -> Tensor:
        """A view of the mapped file, in the file's type."""
        for bounds, dim in ((rows, 0), (cols, 1)):
            assert bounds is None or 0 <= bounds[0] <= bounds[1] <= entry.shape[dim], (name, bounds, entry.shape)
        cuts = (slice(*rows) if rows else slice(None), slice(*cols) if cols else slice(None))
        try:
            view: Tensor = self._open(entry.file).get_slice(name)[cuts[: len(entry.shape)] if entry.shape else ...]
        except SafetensorError as error:
            raise ModelError(f"cannot read tensor {name} from {entry.file}: {error}") from error
        return view

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                opened = safe_open(file, framework="pt", device="cpu")
                changed = _stamp(file) != self._stamps[file] and self._identify(self._read_entries()) != self.identity
            except OSError as error:
                raise ModelError(f"cannot read {file}: {error.strerror or error}") from error
            if changed:
                raise ModelError(
                    f"{file} was replaced or changed since this rank started: put back what was there, or restart the "
                    "engine for all of its ranks to load the new weights"
                )
            self._files[file] = opened
        return self._files[file]


def _stamp(file: Path) -> tuple[int, int, int]:
    """What changes when a file is replaced or written to."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _layer(name: str) -> int:
    match = _LAYER.match(name)
    return int(match.group(1)) if match else -1
