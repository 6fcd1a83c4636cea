"""What a number of the cluster file may be: finite, and not under the bound that stands beside its type."""

import math
from typing import Annotated, Any, get_args, get_type_hints

from msgspec import Struct

from pd_cluster.errors import ConfigError


class AtLeast(Struct, frozen=True):
    """In `Annotated[int, AtLeast(1)]`."""

    number: float

    def holds(self, value: float) -> bool:
        return value >= self.number

    def __str__(self) -> str:
        return f"at least {self.number:g}"


class Above(Struct, frozen=True):
    """In `Annotated[float, Above(0)]`."""

    number: float

    def holds(self, value: float) -> bool:
        return value > self.number

    def __str__(self) -> str:
        return f"above {self.number:g}"


Count = Annotated[int, AtLeast(0)]
OneOrMore = Annotated[int, AtLeast(1)]
Seconds = Annotated[float, AtLeast(0)]
SomeSeconds = Annotated[float, Above(0)]


def check_numbers(section: Struct, path: str = "") -> None:
    """Look at every number of a section and of the sections within. Raises ConfigError that names the key."""
    for key, hint in get_type_hints(type(section), include_extras=True).items():
        value, name = getattr(section, key), f"{path}{key}"
        if isinstance(value, Struct):
            check_numbers(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ConfigError(f"{name} must be a finite number, got {value}")
            for bound in _bounds(hint):
                if not bound.holds(value):
                    raise ConfigError(f"{name} must be {bound}, got {value}")


def _bounds(hint: Any) -> list[AtLeast | Above]:
    """Those of a type, and of every type of a union."""
    found = [part for part in getattr(hint, "__metadata__", ()) if isinstance(part, AtLeast | Above)]
    return found + [bound for part in get_args(hint) for bound in _bounds(part)]
