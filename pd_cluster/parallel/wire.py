"""The messages of a one-sided exchange, and the memory in which they arrive.

Each rank registers one buffer. For each of two parities, each peer and each phase it has a region to send from and one
that only this peer writes to. A message is one contiguous write:

    header (64 bytes) | pairs: rows, slots, weights | payload: rows

    header: tag, life, seal, num_rows, num_pairs, missing

**When is a message there?** RDMA promises no order within a write nor between two of them, several lanes deliver them
in any order, and TCP delivers pieces. So nothing is concluded from the order of bytes: a message counts once its tag is
the awaited one, its life is the sender's, and its *seal*, a 64-bit polynomial over all of its words, fits. Until
then the bytes are polled again. A write of an older generation or of a former life has another tag or another life; one
that strikes while a message is being read changes the tag, which is looked at again behind the read.

**When is a region free?** Exchange s uses parity s % 2. A rank begins s + 2 after the combine of s: each peer has then
answered s, so it has read what it was sent for s, and what it answered has been read here. A peer that goes on without
an answer, because it took this rank for dead, leaves a tag ahead of the awaited one: the rows count as missing at once.
"""

# T tokens, K experts per token, H hidden size, R rows, P pairs (row, slot), D ranks

import functools
import time
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

from pd_cluster.parallel.codec import RAW, Codec
from pd_cluster.parallel.pack import Packed, pack, sum_rows

Phase = Literal[0, 1]
DISPATCH: Phase = 0
COMBINE: Phase = 1

AWAITED, ARRIVED, MISSING = 0, 1, 2
"""State of a peer's message, uint8."""

HEADER_BYTES = 64
PAIR_BYTES = 12
HEADER = np.dtype([("tag", "u8"), ("life", "u8"), ("seal", "u8"), ("num_rows", "u4"), ("num_pairs", "u4"),
                   ("missing", "u4"), ("rest", "u4", 7)])  # fmt: skip

PRIME, FOLD = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD
WORD = (1 << 64) - 1
SEQUENCE_BITS, INDEX_BITS = 44, 12

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


def tag_of(generation: int, sequence: int) -> int:
    """Ascends with the generation, then with the sequence; never 0, which memory holds before anything came."""
    return (generation + 1) << SEQUENCE_BITS | sequence


def first_of(step: int) -> int:
    """The sequence of a step's first exchange, even; its others follow, thousands at most."""
    return step << INDEX_BITS


def up(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


class Shape(Struct, frozen=True, kw_only=True):
    """What all ranks of an exchange must agree on; capacity follows from it."""

    num_ranks: int
    slots_per_rank: int
    max_tokens: int  # of one rank in one exchange
    num_chosen: int
    hidden_size: int
    dtype: Literal["float32", "bfloat16", "float16"]
    fp8: bool

    def row_bytes(self, phase: Phase, codec: Codec) -> int:
        return (RAW if phase == COMBINE else codec).row_bytes(self.hidden_size, getattr(torch, self.dtype))

    def message_bytes(self, phase: Phase, codec: Codec, num_rows: int, num_pairs: int) -> int:
        return HEADER_BYTES + up(PAIR_BYTES * num_pairs) + up(num_rows * self.row_bytes(phase, codec))

    def room(self, phase: Phase, codec: Codec) -> int:
        """Bytes of a region: every token of one rank with all its experts on another."""
        num_pairs = self.max_tokens * self.num_chosen if phase == DISPATCH else 0
        return self.message_bytes(phase, codec, self.max_tokens, num_pairs)


class Buffers:
    """The regions of a rank in one zeroed range: those that it sends from, then those that peers write to.

    `lives` [D]: whose messages count; `ignored` [D]: ranks not waited for, changed by any thread; `busy` [D]: a write
    from their send region may still be running.
    """

    def __init__(self, shape: Shape, codec: Codec, rank: int, life: int) -> None:
        self.shape = shape
        self.codec = codec
        self.rank = rank
        self.life = life
        self.room = shape.room(DISPATCH, codec), shape.room(COMBINE, codec)
        self.half = 2 * shape.num_ranks * sum(self.room)
        self._memory = np.zeros(2 * self.half + 4096, np.uint8)
        start = -self._memory.ctypes.data % 4096
        self.bytes: Bytes = self._memory[start : start + 2 * self.half]
        self.address: int = self.bytes.ctypes.data
        self.lives = np.zeros(shape.num_ranks, np.uint64)
        self.lives[rank] = life
        self.ignored = np.ones(shape.num_ranks, np.uint8)
        self.busy = np.zeros(shape.num_ranks, np.uint8)

    def send_offset(self, parity: int, phase: Phase, peer: int) -> int:
        return (parity * self.shape.num_ranks + peer) * sum(self.room) + phase * self.room[0]

    def receive_offset(self, parity: int, phase: Phase, peer: int) -> int:
        """In this rank's buffer, or in that of any other: all have the same shape."""
        return self.half + self.send_offset(parity, phase, peer)

    def sent(self, parity: int, phase: Phase, peer: int) -> Bytes:
        first = self.send_offset(parity, phase, peer)
        return self.bytes[first : first + self.room[phase]]

    def received(self, parity: int, phase: Phase, peer: int) -> Bytes:
        first = self.receive_offset(parity, phase, peer)
        return self.bytes[first : first + self.room[phase]]


class Sent(Struct, eq=False):
    """A dispatch that is packed: `num_bytes` [D] of the messages; the rest is for `add`."""

    num_bytes: Ints
    copy_counts: Ints  # [D]
    num_tokens: int
    packed: Packed | None = None
    copies: Ints | None = None
    num_copies: Ints | None = None


class Rows(Struct, eq=False):
    """What arrived, as `dispatch.Arrived` wants it."""

    hidden_RH: Tensor
    pair_row_P: Tensor
    pair_slot_P: Tensor
    pair_weight_P: Tensor
    slot_counts: list[int]


class Wire(Protocol):
    """Messages of one rank into and out of its buffers. `counts` [D, 2]: rows and pairs of what arrived."""

    def pack(self, hidden_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, tag: int, parity: int) -> Sent:
        """Write the messages to all ranks that are not busy; the own one where it is read."""

    def look(
        self, phase: Phase, parity: int, tag: int, state: Bytes, counts: Ints, budget_s: float, asleep: bool
    ) -> int:
        """Bring `state` [D] forward for at most `budget_s`; how many ranks are still awaited."""

    def unpack(self, parity: int, tag: int, state: Bytes, counts: Ints) -> Rows: ...

    def reply(self, parity: int, tag: int, state: Bytes, counts: Ints, outputs_RH: Tensor) -> Ints:
        """Write the messages home; their bytes [D]."""

    def add(self, parity: int, tag: int, state: Bytes, sent: Sent, own_RH: Tensor) -> tuple[Tensor, int]:
        """[T, H], and how many ranks that were sent copies gave none back. `own_RH`: results that stayed here."""


class PlainWire:
    """In torch and numpy: the reference of `native_wire`, and what serves without a C compiler."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._shape = buffers.shape
        self._dtype: torch.dtype = getattr(torch, buffers.shape.dtype)

    def pack(self, hidden_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, tag: int, parity: int) -> Sent:
        buffers, shape = self._buffers, self._shape
        packed = pack(slots_TK, weights_TK, shape.num_ranks, shape.slots_per_rank)
        rows_CB = buffers.codec.encode(hidden_TH)[packed.token_C]
        num_bytes = np.zeros(shape.num_ranks, np.int64)
        row = pair = 0
        for peer, (copies, pairs) in enumerate(zip(packed.copy_counts, packed.pair_counts, strict=True)):
            num_bytes[peer] = shape.message_bytes(DISPATCH, buffers.codec, copies, pairs)
            if not buffers.busy[peer]:
                of_pairs = slice(pair, pair + pairs)
                room = (buffers.received if peer == buffers.rank else buffers.sent)(parity, DISPATCH, peer)
                words = [packed.pair_row_P[of_pairs].int(), packed.pair_slot_P[of_pairs].int()]
                words.append(packed.pair_weight_P[of_pairs].contiguous().view(torch.int32))
                body = torch.cat(words).numpy().view(np.uint8)
                payload = rows_CB[row : row + copies].reshape(-1).numpy()
                self._close(room, DISPATCH, tag, copies, pairs, 0, body, payload)
            row, pair = row + copies, pair + pairs
        return Sent(num_bytes, np.array(packed.copy_counts, np.int64), len(hidden_TH), packed)

    def _close(
        self,
        room: Bytes,
        phase: Phase,
        tag: int,
        num_rows: int,
        num_pairs: int,
        missing: int,
        body: Bytes,
        payload: Bytes,
    ) -> None:
        num_bytes = self._shape.message_bytes(phase, self._buffers.codec, num_rows, num_pairs)
        room[HEADER_BYTES:num_bytes] = 0
        room[HEADER_BYTES : HEADER_BYTES + len(body)] = body
        first = HEADER_BYTES + up(len(body))
        room[first : first + len(payload)] = payload
        header = room[:HEADER_BYTES].view(HEADER)
        header[0] = (tag, self._buffers.life, 0, num_rows, num_pairs, missing, 0)
        header["seal"] = seal_of(room[:num_bytes])

    def look(
        self, phase: Phase, parity: int, tag: int, state: Bytes, counts: Ints, budget_s: float, asleep: bool
    ) -> int:
        """See `Wire`; looks once."""
        buffers = self._buffers
        for peer in np.nonzero(state == AWAITED)[0].tolist():
            state[peer] = self._look_at(buffers.received(parity, phase, peer), phase, tag, peer, counts)
            if state[peer] == AWAITED and buffers.ignored[peer]:
                state[peer] = MISSING
            if state[peer] == MISSING:
                counts[peer] = 0
        awaited = int((state == AWAITED).sum())
        if awaited and asleep:
            time.sleep(50e-6)
        return awaited

    def _look_at(self, room: Bytes, phase: Phase, tag: int, peer: int, counts: Ints) -> int:
        header = room[:HEADER_BYTES].view(HEADER)[0].copy()
        num_rows, num_pairs = int(header["num_rows"]), int(header["num_pairs"])
        if header["tag"] < tag or header["life"] != self._buffers.lives[peer] or max(num_rows, num_pairs) > len(room):
            return AWAITED
        num_bytes = self._shape.message_bytes(phase, self._buffers.codec, num_rows, num_pairs)
        if num_bytes > len(room) or seal_of(room[:num_bytes]) != header["seal"]:
            return AWAITED
        if header["tag"] != tag:
            return MISSING
        counts[peer] = num_rows, num_pairs
        return ARRIVED

    def unpack(self, parity: int, tag: int, state: Bytes, counts: Ints) -> Rows:
        shape, buffers = self._shape, self._buffers
        size = shape.row_bytes(DISPATCH, buffers.codec)
        payloads, rows, slots, weights = [], [], [], []
        first_row = 0
        for peer, (num_rows, num_pairs) in enumerate(counts.tolist()):
            room = buffers.received(parity, DISPATCH, peer)
            end = HEADER_BYTES + PAIR_BYTES * num_pairs
            words = torch.from_numpy(room[HEADER_BYTES:end].view(np.int32).copy()).view(3, num_pairs)
            first = HEADER_BYTES + up(PAIR_BYTES * num_pairs)
            payload = torch.from_numpy(room[first : first + num_rows * size].copy()).view(num_rows, size)
            row_P, slot_P = words[0].long(), words[1].long()
            good = ((row_P >= 0) & (row_P < num_rows) & (slot_P >= 0) & (slot_P < shape.slots_per_rank)).all()
            if state[peer] == ARRIVED and (not good or room[:8].view(np.uint64)[0] != tag):
                state[peer] = MISSING
                row_P, slot_P, words = row_P * 0, slot_P * 0, words * 0
                payload = payload * 0
            payloads.append(payload)
            rows.append(row_P + first_row)
            slots.append(slot_P)
            weights.append(words[2].contiguous().view(torch.float32))
            first_row += num_rows
        hidden_RH = buffers.codec.decode(torch.cat(payloads), shape.hidden_size, self._dtype)
        slot_P = torch.cat(slots)
        by_slot = torch.argsort(slot_P, stable=True)
        return Rows(
            hidden_RH,
            torch.cat(rows)[by_slot],
            slot_P[by_slot],
            torch.cat(weights)[by_slot],
            torch.bincount(slot_P, minlength=shape.slots_per_rank).tolist(),
        )

    def reply(self, parity: int, tag: int, state: Bytes, counts: Ints, outputs_RH: Tensor) -> Ints:
        buffers = self._buffers
        num_bytes = np.zeros(self._shape.num_ranks, np.int64)
        row = 0
        for peer, num_rows in enumerate(counts[:, 0].tolist()):
            here = state[peer] == ARRIVED
            sent = outputs_RH[row : row + num_rows if here else row]
            row += num_rows
            num_bytes[peer] = self._shape.message_bytes(COMBINE, buffers.codec, len(sent), 0)
            if peer != buffers.rank and not buffers.busy[peer]:
                payload = sent.contiguous().view(torch.uint8).reshape(-1).numpy()
                room = buffers.sent(parity, COMBINE, peer)
                self._close(room, COMBINE, tag, len(sent), 0, int(not here), room[:0], payload)
        return num_bytes

    def add(self, parity: int, tag: int, state: Bytes, sent: Sent, own_RH: Tensor) -> tuple[Tensor, int]:
        assert sent.packed is not None
        buffers, shape = self._buffers, self._shape
        parts, num_missing = [], 0
        size = shape.row_bytes(COMBINE, buffers.codec)
        for peer, num_rows in enumerate(sent.copy_counts.tolist()):
            if peer == buffers.rank:
                parts.append(own_RH)
                continue
            room = buffers.received(parity, COMBINE, peer)
            payload = torch.from_numpy(room[HEADER_BYTES : HEADER_BYTES + num_rows * size].copy())
            header = room[:HEADER_BYTES].view(HEADER)[0]
            if state[peer] == ARRIVED and header["tag"] == tag and header["num_rows"] == num_rows:
                parts.append(RAW.decode(payload.view(num_rows, size), shape.hidden_size, self._dtype))
            else:
                parts.append(torch.zeros((num_rows, shape.hidden_size), dtype=self._dtype))
                num_missing += num_rows > 0
        token_C = sent.packed.token_C
        return sum_rows(torch.cat(parts), token_C, sent.num_tokens).to(self._dtype), num_missing


def seal_of(message: Bytes) -> int:
    """Over a message of a multiple of 64 bytes, its own field taken as 0: words in 32 interleaved lanes, each lane a
    polynomial modulo 2^64, folded into one. Any changed word changes it; several do but for one chance in 2^64.
    """
    words = message.view(np.uint64).reshape(-1, 8)
    seal = len(message)
    with np.errstate(over="ignore"):
        for lane in range(4):
            part = words[lane::4]
            if lane == 0:
                part = part.copy()
                part[0, 2] = 0
            sums = (part * _powers(len(part))[:, None]).sum(axis=0, dtype=np.uint64)
            for value in sums.tolist():
                seal = (seal * FOLD + value) & WORD
                seal ^= seal >> 29
    return seal


@functools.lru_cache(maxsize=64)
def _powers(count: int) -> npt.NDArray[np.uint64]:
    powers = np.full(count, PRIME, np.uint64)
    if count:
        powers[-1] = 1
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(np.multiply.accumulate(powers[::-1])[::-1])
