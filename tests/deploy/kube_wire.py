"""How clients of Kubernetes write objects and changes: JSON, YAML, protobuf (of what Helm keeps), and three patches."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import yaml

Object = dict[str, Any]

PROTOBUF_MAGIC = b"k8s\x00"
MERGE_KEYS = ("name", "containerPort", "port", "mountPath", "topologyKey", "ip")


def decode(raw: bytes, content_type: str) -> Object:
    if raw.startswith(PROTOBUF_MAGIC):
        return _from_protobuf(raw[len(PROTOBUF_MAGIC) :])
    loaded = yaml.safe_load(raw) if "yaml" in content_type else json.loads(raw)
    return dict(loaded)


# ---- protobuf: https://protobuf.dev/programming-guides/encoding


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(field, bytes) of every length-delimited field; numbers are of no interest here."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(data, at)
                yield tag >> 3, data[at : at + size]
                at += size
            case 5:
                at += 4
            case other:
                raise ValueError(f"wire type {other}")


def _map(data: bytes, field: int) -> dict[str, bytes]:
    entries = [dict(_fields(entry)) for number, entry in _fields(data) if number == field]
    return {entry[1].decode(): entry.get(2, b"") for entry in entries}


def _from_protobuf(data: bytes) -> Object:
    """A Secret or ConfigMap: in these Helm keeps its releases, and its typed client writes protobuf."""
    envelope = dict(_fields(data))
    type_meta = dict(_fields(envelope[1]))
    api_version, kind = type_meta[1].decode(), type_meta[2].decode()
    body = envelope[2]
    fields = dict(_fields(body))
    meta = fields[1]
    metadata: Object = {"name": dict(_fields(meta))[1].decode()}
    for number, name in ((11, "labels"), (12, "annotations")):
        if found := _map(meta, number):
            metadata[name] = {key: value.decode() for key, value in found.items()}
    made: Object = {"apiVersion": api_version, "kind": kind, "metadata": metadata}
    values = _map(body, 2)
    if kind == "Secret":
        made["data"] = {key: base64.b64encode(value).decode() for key, value in values.items()}
        made["type"] = fields.get(3, b"Opaque").decode()
    elif kind == "ConfigMap":
        made["data"] = {key: value.decode() for key, value in values.items()}
    else:
        raise ValueError(f"protobuf of a {kind}")
    return made


# ---- patches


def merge_patch(old: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def strategic_merge_patch(old: Any, patch: Any) -> Any:
    """Kubernetes' own: lists of objects with a merge key are merged by it."""
    if isinstance(old, dict) and isinstance(patch, dict):
        merged = dict(old)
        for key, value in patch.items():
            if key.startswith("$"):
                continue
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = strategic_merge_patch(merged[key], value) if key in merged else _without_marks(value)
        return merged
    if isinstance(old, list) and isinstance(patch, list):
        key = _merge_key([*old, *patch])
        return patch if key is None else _merge_lists(old, patch, key)
    return patch


def _merge_key(items: list[Any]) -> str | None:
    if not items or not all(isinstance(item, dict) for item in items):
        return None
    return next((key for key in MERGE_KEYS if all(key in item for item in items)), None)


def _merge_lists(old: list[Object], patch: list[Object], key: str) -> list[Object]:
    merged = {item[key]: item for item in old}
    for item in patch:
        if item.get("$patch") == "delete":
            merged.pop(item[key], None)
        else:
            merged[item[key]] = strategic_merge_patch(merged.get(item[key], {}), item)
    return list(merged.values())


def _without_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_marks(inner) for key, inner in value.items() if not key.startswith("$")}
    return [_without_marks(inner) for inner in value] if isinstance(value, list) else value


def apply_patch(old: Object | None, patch: Object, content_type: str) -> Object:
    if "apply-patch" in content_type:  # server-side apply with one manager: what it says is all there is
        return patch
    assert old is not None
    merged = strategic_merge_patch(old, patch) if "strategic" in content_type else merge_patch(old, patch)
    return dict(merged)
