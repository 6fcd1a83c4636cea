"""A model written as a Hugging Face directory, which transformers and other engines load as this one does.

Weights are read by name from whatever source there is and written some rows at a time, so a model of any size passes
through a few megabytes of memory. The directory grows under a temporary name beside the target and is renamed when it
is whole: there is never half a model at the target.
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
from msgspec import Struct

from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.model.config import Dtype
from pd_cluster.model.hf_config import read_config
from pd_cluster.model.hf_json import changed_config, new_config, new_generation_config, new_tokenizer_config
from pd_cluster.model.shards import ELEMENT_BYTES, INDEX_NAME, SINGLE_NAME, read_shards
from pd_cluster.model.source import LoadedModel
from pd_cluster.model.tensors import tensor_shapes
from pd_cluster.model.weights import WeightSource

SHARD_BYTES = 5_000_000_000
CHUNK_VALUES = 16 << 20
"""Values of one tensor in memory at once."""

_NAMES: dict[Dtype, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "LICENSE*",
    "NOTICE*",
)


class Exported(Struct, frozen=True, kw_only=True):
    """What was written: `num_bytes` of weights in `num_files` files."""

    num_tensors: int
    num_bytes: int
    num_files: int
    dtype: Dtype


class _Tensor(Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[_NAMES[self.dtype]]


def export(
    model: LoadedModel,
    target: Path,
    *,
    dtype: Dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write `model` to `target`, which must not exist or be an empty directory.

    `dtype` defaults to the model's own. `progress` is called with (bytes written, bytes of all weights). Raises
    ConfigError when the target is taken or cannot be written, or the disk is full; ModelError when the source is
    damaged, or its values do not fit into `dtype`.
    """
    dtype = dtype or model.config.dtype
    tensors = [_Tensor(name, shape, _stored(name, dtype)) for name, shape in tensor_shapes(model.config)]
    shards = list(_shards(tensors, shard_bytes))
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    target = target.absolute()
    _check_target(target, num_bytes)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        _write_small_files(model, partial, dtype)
        _write_shards(model.source, partial, shards, progress)
        _check_written(model, partial, dtype)
        partial.rename(target)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what_to_do = (
            f": {_size(num_bytes)} of weights need as much room; free some, or name another disk" if full else ""
        )
        raise ConfigError(f"cannot write {target}: {error.strerror}{what_to_do}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(num_tensors=len(tensors), num_bytes=num_bytes, num_files=len(shards), dtype=dtype)


def _stored(name: str, dtype: Dtype) -> Dtype:
    """Routers stay in float32: a rounded score chooses other experts."""
    is_router = name.endswith((".gate.weight", ".e_score_correction_bias"))
    return "float32" if is_router else dtype


def _shards(tensors: list[_Tensor], shard_bytes: int) -> Iterator[list[_Tensor]]:
    shard: list[_Tensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.num_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.num_bytes
    yield shard


def _check_target(target: Path, num_bytes: int) -> None:
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise ConfigError(f"{target} exists already: remove it or name another directory")
    parent = next(parent for parent in target.parents if parent.exists())
    try:
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error
    if free < num_bytes:
        raise ConfigError(
            f"the weights take {_size(num_bytes)}, but {parent} has {_size(free)} free: free some, or name another disk"
        )


def _write_small_files(model: LoadedModel, directory: Path, dtype: Dtype) -> None:
    if model.directory is None:
        _write_json(directory / "config.json", new_config(model.config, dtype))
        if model.tokenizer is not None:
            (directory / "tokenizer.json").write_text(model.tokenizer.to_json(), encoding="utf-8")
            tokenizer_config = new_tokenizer_config(model.tokenizer.special, model.config.max_position_embeddings)
            _write_json(directory / "tokenizer_config.json", tokenizer_config)
        for name, template in model.chat_template_texts.items():
            file = directory / (
                "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            )
            file.parent.mkdir(exist_ok=True)
            file.write_text(template, encoding="utf-8")
    else:
        raw = json.loads((model.directory / "config.json").read_text(encoding="utf-8"))
        _write_json(directory / "config.json", changed_config(raw, dtype))
        for pattern in _COPIED:
            for file in model.directory.glob(pattern):
                copy = directory / file.relative_to(model.directory)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
    generation = directory / "generation_config.json"
    if not generation.exists():
        _write_json(generation, new_generation_config(model.config))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_shards(
    source: WeightSource, directory: Path, shards: list[list[_Tensor]], progress: Callable[[int, int], None]
) -> None:
    total = sum(tensor.num_bytes for shard in shards for tensor in shard)
    done = 0
    weight_map: dict[str, str] = {}
    progress(0, total)
    for number, shard in enumerate(shards, 1):
        name = SINGLE_NAME if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys((tensor.name for tensor in shard), name)
        ordered = sorted(shard, key=lambda tensor: tensor.dtype != "float32")  # wider values first keep all aligned
        with (directory / name).open("wb") as file:
            file.write(_header(ordered))
            for tensor in ordered:
                for num_bytes in _write_tensor(source, tensor, file):
                    done += num_bytes
                    progress(done, total)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        _write_json(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _header(shard: list[_Tensor]) -> bytes:
    """Of a safetensors file that holds these tensors one behind the other."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in shard:
        end = at + tensor.num_bytes
        fields[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(source: WeightSource, tensor: _Tensor, file: IO[bytes]) -> Iterator[int]:
    """Bytes written, some rows at a time."""
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    num_rows = tensor.shape[0]
    step = max(1, CHUNK_VALUES // max(1, math.prod(tensor.shape[1:])))
    for start in range(0, num_rows, step):
        part = source.read(tensor.name, tensor.shape, dtype, rows=(start, min(start + step, num_rows)))
        if dtype is torch.float16 and not bool(part.isfinite().all()):
            raise ModelError(f"tensor {tensor.name} has values beyond float16: use --dtype bfloat16")
        file.write(part.contiguous().view(torch.uint8).numpy().data)
        yield part.nbytes


def _check_written(model: LoadedModel, directory: Path, dtype: Dtype) -> None:
    """What was written must say what the source said."""
    expected = msgspec.structs.replace(model.config, dtype=dtype, fp8_block=None)
    found = read_config(directory)
    for field in expected.__struct_fields__:
        if getattr(found, field) != getattr(expected, field):
            raise ModelError(
                f"the config.json of a converted {model.name} would say {field} {getattr(found, field)!r} "
                f"instead of {getattr(expected, field)!r}"
            )
    read_shards(directory)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
