"""A checksum over the ranges of a write, the same on both sides when the bytes are.

It depends on the bytes in order and not on where ranges are cut, so two sides with other block sizes agree.
"""

import ctypes
import zlib
from collections.abc import Callable, Iterable

from pd_cluster.transfer.contract import Arena

Read = Callable[[int, int], "memoryview | bytes"]
"""(offset, num_bytes) of an arena to its bytes."""


def host_reader(arena: Arena) -> Read:
    """Reads an arena in host memory without a copy."""
    assert arena.memory == "DRAM", arena
    view = memoryview((ctypes.c_char * arena.num_bytes).from_address(arena.base_address)).cast("B")
    return lambda offset, num_bytes: view[offset : offset + num_bytes]


def checksum(read: Read, ranges: Iterable[tuple[int, int]]) -> int:
    """CRC-32 of the ranges' bytes, one after the other."""
    crc = 0
    for offset, num_bytes in ranges:
        crc = zlib.crc32(read(offset, num_bytes), crc)
    return crc
