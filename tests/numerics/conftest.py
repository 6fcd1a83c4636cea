"""Engines are built once for each shape and shared."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from golden import Cluster


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Callable[..., Cluster]]:
    """`cluster(name, dp=..., tp=..., ...)`: the engine of that shape, made on first use."""
    made: dict[Any, Cluster] = {}

    def get(name: str, **shape: Any) -> Cluster:
        key = (name, *sorted(shape.items()))
        if key not in made:
            made[key] = Cluster(name, **shape)
        return made[key]

    yield get
    for each in made.values():
        each.close()
