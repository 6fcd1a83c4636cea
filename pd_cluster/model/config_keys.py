"""Typed access to the keys of one config.json; every error names the file and the key. No torch."""

from typing import Any, TypeVar

import msgspec

from pd_cluster.errors import ModelError

T = TypeVar("T")


class ConfigKeys:
    """Typed access to one config.json; every error names the file and the key."""

    def __init__(self, raw: dict[str, Any], origin: str) -> None:
        self.raw = raw
        self.origin = origin

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.origin}: {message}")

    def get(self, kind: type[T], *names: str, default: Any = None) -> T | None:
        """The first of `names` that is present and not null; `default` otherwise."""
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            try:
                return msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                raise self.error(f"{name} is {value!r}: {error}") from error
        return default  # type: ignore[no-any-return]

    def need(self, kind: type[T], *names: str) -> T:
        value = self.get(kind, *names)
        if value is None:
            raise self.error(f"{' or '.join(names)} is missing")
        return value

    def size(self, *names: str) -> int:
        value = self.need(int, *names)
        if value < 1:
            raise self.error(f"{names[0]} must be at least 1, got {value}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.get(bool, name, default=default))
