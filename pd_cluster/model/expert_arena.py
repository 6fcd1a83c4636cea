"""One rank's experts in memory: an arena of [MoE layer][slot] records at equal strides, at addresses that never change.

A record is everything of one expert, as the kernels read it, and then a checksum over all of that. So an expert is one
contiguous range: to load, to copy from another rank of the same engine, to verify.
"""

# L MoE layers, S slots of a rank, N outputs, K inputs, H hidden size, I intermediate size

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from pd_cluster.ids import ExpertId
from pd_cluster.kernels.packed import PANEL_OUTPUTS, align, pack_rows, packed_bytes

CHECKSUM_BYTES = 16

READ_BYTES = 1 << 20
"""About as much is read and laid down in one go, and given to a checksum in one."""

ReadRows = Callable[[str, int, int], Tensor]
"""(`gate`, `up` or `down`, first row, end) of an expert's matrices: gate and up [I, H], down [H, I]."""


class ExpertForm(Protocol):
    """How an expert's matrices lie in its record; equal on all ranks of an engine."""

    num_bytes: int  # without the checksum

    def fill(self, record: Tensor, read: ReadRows) -> Iterator[None]:
        """Lay an expert down in `record`, uint8 in host memory, a piece at a time."""


class PlainForm:
    """gate and up rows [2 I, H], then down [H, I], as torch multiplies them."""

    def __init__(self, hidden: int, size: int, dtype: torch.dtype) -> None:
        self.hidden, self.size, self.dtype = hidden, size, dtype
        self.num_values = 3 * hidden * size
        self.num_bytes = self.num_values * dtype.itemsize

    def fill(self, record: Tensor, read: ReadRows) -> Iterator[None]:
        values = record[: self.num_bytes].view(self.dtype)
        at = 0
        for name, num_rows, width in (
            ("gate", self.size, self.hidden),
            ("up", self.size, self.hidden),
            ("down", self.hidden, self.size),
        ):
            for first, end in _pieces(num_rows, width * self.dtype.itemsize, 1):
                rows = read(name, first, end)
                values[at : at + rows.numel()].view(rows.shape).copy_(rows)
                at += rows.numel()
                yield

    def gate_up(self, layer: Tensor) -> Tensor:
        """[S, 2 I, H] of a layer's records, uint8 [S, stride]."""
        values = layer.view(self.dtype)[:, : 2 * self.size * self.hidden]
        return values.view(-1, 2 * self.size, self.hidden)

    def down(self, layer: Tensor) -> Tensor:
        """[S, H, I]."""
        values = layer.view(self.dtype)[:, 2 * self.size * self.hidden : self.num_values]
        return values.view(-1, self.hidden, self.size)


class PackedForm:
    """The gated matrix of gate and up, then down, both packed for the C kernels."""

    def __init__(self, library: ctypes.CDLL, hidden: int, size: int) -> None:
        self.hidden, self.size = hidden, size
        self._library = library
        self.down_at = align(packed_bytes(library, 2 * size, hidden, gated=True))
        self.num_bytes = align(self.down_at + packed_bytes(library, hidden, size))

    def fill(self, record: Tensor, read: ReadRows) -> Iterator[None]:
        for first, end in _pieces(self.size, 4 * self.hidden, PANEL_OUTPUTS // 2):
            rows = torch.cat([read("gate", first, end), read("up", first, end)])
            pack_rows(self._library, record, rows, 2 * first, gated=True)
            yield
        for first, end in _pieces(self.hidden, 2 * self.size, PANEL_OUTPUTS):
            pack_rows(self._library, record[self.down_at :], read("down", first, end), first)
            yield


def _pieces(num_rows: int, row_bytes: int, multiple: int) -> Iterator[tuple[int, int]]:
    """[first, end) of runs of about READ_BYTES, each but the last a multiple of `multiple` rows."""
    step = max(READ_BYTES // row_bytes // multiple, 1) * multiple
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)


class ExpertArena:
    """`records_LS` uint8 [L, S, stride]; a record's first `form.num_bytes` are the expert, the next 16 its checksum."""

    def __init__(self, form: ExpertForm, num_layers: int, num_slots: int, take: Callable[[int], Tensor]) -> None:
        """`take(num_bytes)` gives uint8 memory, aligned to 64."""
        self.form = form
        self.num_layers, self.num_slots = num_layers, num_slots
        self.record_bytes = form.num_bytes + CHECKSUM_BYTES
        self.stride = align(self.record_bytes)
        self.records_LS = take(num_layers * num_slots * self.stride).view(num_layers, num_slots, self.stride)

    @property
    def base_address(self) -> int:
        return self.records_LS.data_ptr()

    @property
    def num_bytes(self) -> int:
        return self.records_LS.numel()

    @property
    def device(self) -> torch.device:
        return self.records_LS.device

    def layer(self, layer: int) -> Tensor:
        """uint8 [S, stride]."""
        return self.records_LS[layer]

    def record(self, layer: int, slot: int) -> Tensor:
        """uint8 [record_bytes]."""
        return self.records_LS[layer, slot, : self.record_bytes]

    def offset(self, layer: int, slot: int) -> int:
        """Of a record, in bytes from the base address; the same on every rank of an engine."""
        return (layer * self.num_slots + slot) * self.stride


class Checksum:
    """Over an expert's bytes in order, however they are cut, and over which expert they are said to be: a slot that
    holds another one does not pass for it.
    """

    def __init__(self, layer: int, expert: ExpertId) -> None:
        person = layer.to_bytes(8, "little") + int(expert).to_bytes(8, "little")
        self._hash = hashlib.blake2b(digest_size=CHECKSUM_BYTES, person=person)

    def add(self, piece: Tensor) -> None:
        """uint8 in host memory, contiguous."""
        self._hash.update(piece.numpy().data)

    def digest(self) -> bytes:
        return self._hash.digest()


def seal(record: Tensor, layer: int, expert: ExpertId) -> None:
    """Write the checksum of a whole record in host memory."""
    checksum = Checksum(layer, expert)
    checksum.add(record[:-CHECKSUM_BYTES])
    record[-CHECKSUM_BYTES:] = torch.frombuffer(bytearray(checksum.digest()), dtype=torch.uint8)


def is_intact(record: Tensor, layer: int, expert: ExpertId) -> bool:
    """Whether a record in host memory holds this expert of this layer, undamaged."""
    checksum = Checksum(layer, expert)
    checksum.add(record[:-CHECKSUM_BYTES])
    return checksum.digest() == record[-CHECKSUM_BYTES:].numpy().tobytes()
