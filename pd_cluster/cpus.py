"""Sets of CPUs as Linux writes them, `0-3,8`, and which of them a rank runs on.

A pool names one set, which all of its ranks share, or a list with one for each rank in turn. Threads that a rank makes
later stay on its set, and memory that it touches first is on the node of these CPUs.
"""

import os
import re
from collections.abc import Sequence

from pd_cluster.errors import ConfigError

_RANGE = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?", re.ASCII)

MOST_CPUS = 8192
"""Of a host, as many as Linux counts at most."""

CpuSets = str | int | list[str | int]


def parse_cpus(text: str) -> frozenset[int]:
    """`0-3,8` as numbers. Raises ConfigError."""
    cpus: set[int] = set()
    for part in text.split(","):
        numbers = _RANGE.fullmatch(part.strip())
        first, last = (int(number) for number in (numbers[1], numbers[2] or numbers[1])) if numbers else (1, 0)
        if last < first:
            raise ConfigError(f"a set of CPUs looks like '0-3' or '0,2,8-11', got {text!r}")
        if last >= MOST_CPUS:
            raise ConfigError(f"CPUs have numbers below {MOST_CPUS}, got {text!r}")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def parse_sets(sets: CpuSets) -> list[frozenset[int]]:
    """At least one set. Raises ConfigError."""
    parts: Sequence[str | int] = sets if isinstance(sets, list) else [sets]
    if not parts:
        raise ConfigError("a list of sets of CPUs must not be empty")
    return [parse_cpus(str(part)) for part in parts]


def bind(cpus: frozenset[int]) -> None:
    """Let this thread, and those it starts, run on `cpus` alone. Raises ConfigError when this host lacks one."""
    try:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus)
    except AttributeError:
        raise ConfigError("this system cannot bind processes to CPUs: leave out `cpus`") from None
    except (OSError, OverflowError):
        raise _lacking(cpus) from None
    lacking = cpus - os.sched_getaffinity(0)  # Linux leaves out what is not there, as long as something is
    if lacking:
        os.sched_setaffinity(0, before)
        raise _lacking(lacking)


def _lacking(cpus: frozenset[int]) -> ConfigError:
    return ConfigError(f"CPUs {_written(cpus)} are not on this host, which has {os.cpu_count()}, or not this process's")


def _written(cpus: frozenset[int]) -> str:
    """As Linux writes them."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)
