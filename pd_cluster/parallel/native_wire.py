"""The messages of a one-sided exchange by the C kernels: each side of a phase is one call, without the interpreter's
lock, also while it waits.
"""

# T tokens, K experts per token, H hidden size, R rows, P pairs (row, slot), D ranks

import ctypes
from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from pd_cluster.kernels import native
from pd_cluster.parallel.pack import unknown_slot
from pd_cluster.parallel.wire import Buffers, Bytes, Ints, Phase, PlainWire, Rows, Sent, Wire

DTYPES = {"float32": 0, "bfloat16": 1}


def wire_for(buffers: Buffers) -> Wire:
    """The C kernels where they can, else torch."""
    library = native.library() if buffers.shape.dtype in DTYPES else None
    return PlainWire(buffers) if library is None else NativeWire(library, buffers)


class NativeWire:
    """See `wire.Wire`."""

    def __init__(self, library: ctypes.CDLL, buffers: Buffers) -> None:
        self._buffers = buffers
        self._shape = shape = buffers.shape
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._library = library
        self._struct = native.Exchange(
            send=buffers.address,
            receive=buffers.address + buffers.half,
            lives=buffers.lives.ctypes.data,
            ignored=buffers.ignored.ctypes.data,
            life=buffers.life,
            rank=buffers.rank,
            num_ranks=shape.num_ranks,
            slots_per_rank=shape.slots_per_rank,
            hidden=shape.hidden_size,
            dtype=DTYPES[shape.dtype],
            fp8=shape.fp8,
            dispatch_bytes=buffers.room[0],
            combine_bytes=buffers.room[1],
        )
        self._exchange = byref(self._struct)
        self._busy = buffers.busy.ctypes.data

    def pack(self, hidden_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, tag: int, parity: int) -> Sent:
        shape = self._shape
        hidden_TH, slots_TK, weights_TK = hidden_TH.contiguous(), slots_TK.contiguous(), weights_TK.contiguous()
        assert (hidden_TH.dtype, slots_TK.dtype, weights_TK.dtype) == (self._dtype, torch.int64, torch.float32)
        T, K = slots_TK.shape
        D = shape.num_ranks
        numbers = np.empty(2 * D + T + 2 * T * K, np.int64)
        copy_counts, num_bytes, num_copies, copies = np.split(numbers, (D, 2 * D, 2 * D + T))
        bad = self._library.exchange_pack(
            self._exchange,
            hidden_TH.data_ptr(),
            T,
            slots_TK.data_ptr(),
            weights_TK.data_ptr(),
            K,
            tag,
            parity,
            self._busy,
            copies.ctypes.data,
            num_copies.ctypes.data,
            copy_counts.ctypes.data,
            num_bytes.ctypes.data,
        )
        if bad >= 0:
            raise unknown_slot(int(slots_TK.reshape(-1)[bad]), D * shape.slots_per_rank)
        return Sent(num_bytes, copy_counts, T, copies=copies, num_copies=num_copies)

    def look(
        self, phase: Phase, parity: int, tag: int, state: Bytes, counts: Ints, budget_s: float, asleep: bool
    ) -> int:
        return int(
            self._library.exchange_wait(
                self._exchange,
                phase,
                parity,
                tag,
                state.ctypes.data,
                counts.ctypes.data,
                int(budget_s * 1e9),
                asleep,
            )
        )

    def unpack(self, parity: int, tag: int, state: Bytes, counts: Ints) -> Rows:
        shape = self._shape
        R, P = counts.sum(axis=0).tolist()
        hidden_RH = torch.empty((R, shape.hidden_size), dtype=self._dtype)
        row_P, slot_P = torch.empty(P, dtype=torch.int64), torch.empty(P, dtype=torch.int64)
        weight_P = torch.empty(P)
        slot_counts = np.empty(shape.slots_per_rank, np.int64)
        self._library.exchange_unpack(
            self._exchange,
            parity,
            tag,
            state.ctypes.data,
            counts.ctypes.data,
            hidden_RH.data_ptr(),
            row_P.data_ptr(),
            slot_P.data_ptr(),
            weight_P.data_ptr(),
            slot_counts.ctypes.data,
        )
        return Rows(hidden_RH, row_P, slot_P, weight_P, slot_counts.tolist())

    def reply(self, parity: int, tag: int, state: Bytes, counts: Ints, outputs_RH: Tensor) -> Ints:
        outputs_RH = outputs_RH.contiguous()
        num_bytes = np.empty(self._shape.num_ranks, np.int64)
        self._library.exchange_reply(
            self._exchange,
            parity,
            tag,
            state.ctypes.data,
            counts.ctypes.data,
            outputs_RH.data_ptr(),
            self._busy,
            num_bytes.ctypes.data,
        )
        return num_bytes

    def add(self, parity: int, tag: int, state: Bytes, sent: Sent, own_RH: Tensor) -> tuple[Tensor, int]:
        assert sent.copies is not None
        assert sent.num_copies is not None
        own_RH = own_RH.contiguous()
        out_TH = torch.empty((sent.num_tokens, self._shape.hidden_size), dtype=self._dtype)
        num_missing = self._library.exchange_add(
            self._exchange,
            parity,
            tag,
            state.ctypes.data,
            own_RH.data_ptr(),
            sent.num_tokens,
            sent.copies.ctypes.data,
            sent.num_copies.ctypes.data,
            sent.copy_counts.ctypes.data,
            out_TH.data_ptr(),
        )
        return out_TH, num_missing
