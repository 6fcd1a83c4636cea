"""Which safetensors file of a directory holds which tensor, from their headers alone.

A directory is either sharded (`model.safetensors.index.json` names the file of each tensor) or one `model.safetensors`;
any other .safetensors beside them is not the model's. A header is a little-endian uint64 length, then JSON of
{name: {dtype, shape, data_offsets}}. No torch and no tensor data, so a router can fingerprint a checkpoint too.
"""

import contextlib
import hashlib
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct

from pd_cluster.errors import ModelError
from pd_cluster.model.config import Dtype

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100 << 20  # the format's own limit
MAX_SAMPLES = 1024
SAMPLE_BYTES = 256
ELEMENT_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


class TensorEntry(Struct, frozen=True):
    """Where one tensor lies: `start` is its first byte in `file`."""

    file: Path
    dtype: str  # as safetensors writes it: F32, BF16, F8_E4M3, ...
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_shards(directory: Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint in `directory`, by name.

    Raises ModelError that names the file when one is missing, truncated, not safetensors, or lacks a tensor that the
    index promises.
    """
    index = directory / INDEX_NAME
    if not index.is_file():
        single = directory / SINGLE_NAME
        if not single.is_file():
            raise ModelError(
                f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}; convert the weights to safetensors"
            )
        return read_header(single)
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names_by_file: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            names_by_file.setdefault(file, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
    entries: dict[str, TensorEntry] = {}
    for file, names in sorted(names_by_file.items()):
        path = directory / file
        if path.parent != directory or not path.is_file():
            raise ModelError(f"{index} names {file} for {len(names)} tensors, but {path} is missing; download it again")
        header = read_header(path)
        for name in names:
            if name not in header:
                raise ModelError(f"{index} promises tensor {name} in {file}, which does not hold it")
            entries[name] = header[name]
    return entries


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. Raises ModelError that names the file when it is damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if length == 0 or length > MAX_HEADER_BYTES:
                raise ModelError(
                    f"{path} is not a safetensors file ({size} bytes); a Git LFS pointer has to be pulled first"
                )
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if len(text) < length:
        raise ModelError(
            f"{path} is truncated: its header wants {8 + length} bytes, the file has {size}; download it again"
        )
    try:
        raw: dict[str, dict[str, Any]] = json.loads(text)
        raw.pop("__metadata__", None)
        entries = {name: _entry(path, 8 + length, value) for name, value in raw.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} has a damaged safetensors header: {error!r}") from error
    end = max((entry.start + entry.num_bytes for entry in entries.values()), default=8 + length)
    if size < end:
        raise ModelError(f"{path} is truncated: its tensors end at byte {end}, the file has {size}; download it again")
    return entries


def _entry(path: Path, data_start: int, value: dict[str, Any]) -> TensorEntry:
    start, end = value["data_offsets"]
    entry = TensorEntry(path, value["dtype"], tuple(value["shape"]), data_start + start, end - start)
    num_values = 1
    for extent in entry.shape:
        num_values *= extent
    if start < 0 or entry.num_bytes != num_values * ELEMENT_BYTES.get(entry.dtype, entry.num_bytes):
        raise ValueError(f"{entry.dtype} of shape {entry.shape} in {entry.num_bytes} bytes")
    return entry


def digest_shards(entries: dict[str, TensorEntry], *parts: bytes) -> str:
    """A digest of `parts` and of every tensor's name, type, shape and size, and of a few bytes from its middle.

    The bytes tell fine-tunes of one model, and most damaged files, from the model at the price of small reads: of
    `MAX_SAMPLES` tensors chosen by their names' hashes where there are more. Equal checkpoints give equal digests,
    however they are sharded.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    names = sorted(entries)
    for name in names:
        entry = entries[name]
        digest.update(f"{name}\0{entry.dtype}\0{entry.shape}\0{entry.num_bytes}\n".encode())
    sampled = names
    if len(names) > MAX_SAMPLES:
        sampled = sorted(names, key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())[:MAX_SAMPLES]
    with contextlib.ExitStack() as opened:
        files: dict[Path, BinaryIO] = {}
        for name in sampled:
            entry = entries[name]
            if entry.file not in files:
                files[entry.file] = opened.enter_context(entry.file.open("rb"))
            file = files[entry.file]
            file.seek(entry.start + entry.num_bytes // 2)
            digest.update(file.read(min(SAMPLE_BYTES, entry.num_bytes - entry.num_bytes // 2)))
    return digest.hexdigest()


def checkpoint_dtype(directory: Path) -> Dtype | None:
    """The type that most of the checkpoint's plain weights have, for a config that does not say; None when there is
    none."""
    names: dict[str, Dtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    counts: dict[str, int] = {}
    for entry in read_shards(directory).values():
        if entry.dtype in names:
            counts[entry.dtype] = counts.get(entry.dtype, 0) + entry.num_bytes
    return names[max(counts, key=lambda dtype: counts[dtype])] if counts else None
