"""Rows exchanged by one-sided writes: no collective, no rank waits for another's call, any rank may be gone.

    dispatch: pack a message for each rank | write them | wait for one of each | unpack
    combine:  results for each rank        | write them | wait for one of each | add up

`wire.py` says what a message is and when it counts, `posts.py` writes them. Every pair of live ranks exchanges one
message each way and phase, also without rows: it is the acknowledgement that frees buffers.

A peer that is masked, that has gone on, whose connection broke, or that stays silent for longer than a step may wait is
*missing*: the step goes on to its end with its rows taken as zero. Whether that cost this rank rows of its own tokens
is said by `take_void`: experts that were missing to others spoil others' tokens alone, who are told so by the reply.
"""

# T tokens, K experts per token, H hidden size, R received rows, D ranks

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable
from typing import Literal, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from pd_cluster.errors import EngineError
from pd_cluster.ids import Rank
from pd_cluster.parallel.codec import RAW, Codec
from pd_cluster.parallel.dispatch import Arrived
from pd_cluster.parallel.native_wire import wire_for
from pd_cluster.parallel.posts import Posts, decode_endpoint
from pd_cluster.parallel.wire import (
    ARRIVED,
    AWAITED,
    COMBINE,
    DISPATCH,
    MISSING,
    Buffers,
    Bytes,
    Ints,
    Phase,
    Shape,
    first_of,
    tag_of,
)

log = logging.getLogger(__name__)

SUSPECT_S = 0.5
"""Whoever is waited for longer is named by `suspects`."""

FORGOTTEN_S = 1.0
"""Without an exchange for so long, what did not come in the last one says nothing any more."""

STEP_DEADLINE_S = 10.0
NEAR_LOOK_S, FAR_LOOK_S = 1e-3, 30e-6
"""How long to look at memory between two polls of NIXL: where writes land by themselves, and where polling helps."""

YIELD_S = 300e-6
"""A wait yields the core for so long, then it sleeps between looks."""

LATE_LOOK_S = 50e-6
"""How long it sleeps then, where it waits for writes of its own to end."""

AT_ONCE = 2
"""Exchanges that may be under way together: a step's two halves."""


class NixlDispatcher:
    """`dispatch` and what follows it belong to one thread; `mask`, `halt` and `suspects` to any. The rest may be called
    from any thread while no step runs.

    Until the first `begin` it is alone: a warm-up runs, with all other ranks missing.
    """

    replicated = False

    def __init__(
        self,
        rank: Rank,
        num_ranks: int,
        slots_per_rank: int,
        *,
        max_tokens: int,
        num_chosen: int,
        hidden_size: int,
        dtype: torch.dtype,
        codec: Codec = RAW,
        step_deadline_s: float = STEP_DEADLINE_S,
        name: str = "dispatch",
    ) -> None:
        """`max_tokens`: of one rank in one step. Raises TransferFailed when NIXL cannot start."""
        self.ranks = [rank]
        self.num_ranks = num_ranks
        self.shape = Shape(
            num_ranks=num_ranks,
            slots_per_rank=slots_per_rank,
            max_tokens=max_tokens,
            num_chosen=num_chosen,
            hidden_size=hidden_size,
            dtype=cast(Literal["float32", "bfloat16", "float16"], str(dtype).removeprefix("torch.")),
            fp8=codec.is_fp8,
        )
        self.step_deadline_s = step_deadline_s
        self.generation = -1
        self._step = 0
        self._sequence = 0
        self._num_exchanges = 0  # of this generation
        self.buffers = Buffers(self.shape, codec, rank, secrets.randbits(64) | 1)
        self.wire = wire_for(self.buffers)
        self.posts = Posts(self.buffers, name)
        self._live: frozenset[int] = frozenset()
        self._masked: set[int] = set()
        self._halted_before = -1
        self._membership = threading.Lock()
        self._far = False
        self._void = False
        self._missed: dict[int, str] = {}  # whose messages did not count in this step, and why
        self._waited_s = 0.0  # in this step
        self._waiting: tuple[float, Bytes] | None = None
        self._overdue: dict[int, float] = {}  # ranks whose last message did not come: since when
        self._waited_at_s = 0.0  # the last time

    # ---- membership

    def endpoint(self) -> bytes:
        """What other ranks need for `connect`."""
        return msgspec.msgpack.encode(self.posts.endpoint)

    def connect(self, rank: Rank, endpoint: bytes) -> None:
        """Make `rank` reachable; a new life of it is no longer masked. Raises ConfigError when it was sized otherwise,
        TransferFailed when it cannot be reached.
        """
        peer = decode_endpoint(endpoint)
        if peer.rank != rank:
            raise EngineError(f"the endpoint of rank {rank} is rank {peer.rank}'s")
        known = self.posts.peers.get(rank)
        self.posts.connect(peer)
        with self._membership:
            if known is None or known.life != peer.life:
                self._masked.discard(rank)

    def forget(self, rank: Rank) -> None:
        """Drop the connection and all writes to a rank that is gone."""
        self.buffers.ignored[rank] = 1
        self.posts.forget(rank)

    def begin(self, generation: int, live: Iterable[Rank]) -> None:
        """From now on exchange with `live`, which includes this rank. All of them begin the same generation, and none
        runs a step of an older one any more. Writes of older ones have ended when this returns, or their connection
        was cut. Raises EngineError when a live rank was never connected.
        """
        assert generation > self.generation, (generation, self.generation)
        others = frozenset(int(rank) for rank in live) - {int(self.ranks[0])}
        for rank in sorted(set(self.posts.peers) - others):
            self.forget(Rank(rank))
        strangers = sorted(rank for rank in others - self._masked if rank not in self.posts.peers)
        if strangers:
            raise EngineError(f"generation {generation} has ranks that were never connected: {strangers}")
        self.posts.quiesce()
        for rank in self.posts.broken & others:
            self.posts.reconnect(rank)
        with self._membership:
            self.generation, self._live = generation, others
            self._sequence = self._num_exchanges = 0
            is_over = generation < self._halted_before
            self.buffers.ignored[:] = [
                is_over or rank not in others or rank in self._masked for rank in range(self.shape.num_ranks)
            ]
        self._far = any(not self.posts.is_near(rank) for rank in others if rank in self.posts.peers)
        self._void = False
        self._missed = {}
        self._waited_s = 0.0
        self._overdue = {}

    def mask(self, rank: Rank) -> None:
        """Stop waiting for this life of `rank`, at once."""
        with self._membership:
            self._masked.add(rank)
            self.buffers.ignored[rank] = 1

    def halt(self, generation: int) -> None:
        """That generation is to follow: no step of an older one waits for anybody any more, at once. A step of which
        only some ranks were told ends by this too.
        """
        with self._membership:
            self._halted_before = max(self._halted_before, generation)
            if self.generation < generation:
                self.buffers.ignored[:] = 1

    def open_step(self, step: int) -> None:
        """At the start of a step, by the number that all ranks give it: whatever an earlier step was to a rank, its
        exchanges of this one meet those of the others.
        """
        self._step = step
        self._sequence = first_of(step)

    def take_void(self) -> bool:
        """At the end of a step: whether rows of its tokens were missing."""
        void, self._void = self._void, False
        self._waited_s = 0.0
        if self._missed:
            log.warning(
                "dispatch_missed rank=%s generation=%s step=%s void=%s missed=%s",
                self.ranks[0],
                self.generation,
                self._step,
                void,
                self._missed,
            )
            self._missed = {}
        for rank in self.posts.broken & self._live - self._masked:
            self.posts.reconnect(rank)
        return void

    def suspects(self) -> list[Rank]:
        """Ranks waited for longer than SUSPECT_S right now, or in one exchange after the other, and those to which the
        connection broke; none while nothing is exchanged, for the end of the next step mends connections.
        """
        suspected: set[int] = set()
        waiting, now_s = self._waiting, time.monotonic()
        if waiting is not None and now_s - waiting[0] >= SUSPECT_S:
            suspected.update(np.nonzero(waiting[1] == AWAITED)[0].tolist())
        if waiting is not None or now_s - self._waited_at_s <= FORGOTTEN_S:
            suspected |= self.posts.broken & self._live
            suspected.update(rank for rank, since_s in self._overdue.copy().items() if now_s - since_s >= SUSPECT_S)
        return [Rank(rank) for rank in sorted(suspected)]

    def close(self) -> None:
        """When no live peer writes here any more."""
        self.posts.close()

    # ---- exchanges

    def dispatch(self, layer: int, hidden_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> "OneSidedCombining":
        if len(hidden_TH) > self.shape.max_tokens or slots_TK.shape[1] > self.shape.num_chosen:
            raise EngineError(
                f"a step of {len(hidden_TH)} tokens with {slots_TK.shape[1]} experts each, but the dispatcher was "
                f"sized for {self.shape.max_tokens} with {self.shape.num_chosen}"
            )
        self.posts.enter()
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._num_exchanges += 1
        return OneSidedCombining(
            self, sequence % AT_ONCE, tag_of(self.generation, sequence), hidden_TH, slots_TK, weights_TK
        )

    def reserve(self, parity: int, phase: Phase) -> None:
        """Mark send regions that NIXL still reads from, after it had its time. Where that was not enough the connection
        is given up: nothing else would ever end such a write within its generation.
        """
        posts, busy, ignored = self.posts, self.buffers.busy, self.buffers.ignored
        started_s, waited_s = time.monotonic(), 0.0
        while late := [rank for rank in self._live if posts.is_busy(rank, parity, phase)]:
            if all(ignored[rank] for rank in late) or self._too_late(waited_s):
                break
            state = np.full(self.num_ranks, ARRIVED, np.uint8)
            state[late] = AWAITED
            self._waiting = started_s, state
            posts.progress()
            if waited_s > YIELD_S:
                time.sleep(LATE_LOOK_S)
            else:
                os.sched_yield()
            waited_s = time.monotonic() - started_s
        self._waiting = None
        self._waited_s += waited_s
        busy[:] = 0
        busy[late] = 1
        for rank in late:
            if not ignored[rank]:
                posts.give_up(rank, f"a write did not end within {waited_s:.1f} s")

    def write(self, parity: int, phase: Phase, num_bytes: Ints) -> None:
        """Post the messages, each rank beginning with its successor."""
        own, sizes = int(self.ranks[0]), num_bytes.tolist()
        for step in range(1, self.num_ranks):
            rank = (own + step) % self.num_ranks
            if rank in self._live and not self.buffers.ignored[rank] and not self.buffers.busy[rank]:
                self.posts.post(rank, parity, phase, sizes[rank])

    def wait(self, phase: Phase, parity: int, tag: int, state: Bytes, counts: Ints) -> None:
        """Until every rank's message is there or missing."""
        budget_s = FAR_LOOK_S if self._far or self._num_exchanges <= AT_ONCE else NEAR_LOOK_S
        started_s, waited_s = time.monotonic(), 0.0
        self._waiting = started_s, state
        while self.wire.look(phase, parity, tag, state, counts, budget_s, waited_s > YIELD_S):
            self.posts.progress()
            waited_s = time.monotonic() - started_s
            lost = self.posts.broken
            for rank in np.nonzero(state == AWAITED)[0].tolist() if lost or self._too_late(waited_s) else []:
                if rank in lost or self._too_late(waited_s):
                    self._missed.setdefault(rank, "its connection broke" if rank in lost else "nothing came in time")
                    state[rank] = MISSING
                    counts[rank] = 0
            os.sched_yield()
        self._waiting = None
        self._waited_s += waited_s
        if (state == MISSING).any():
            for rank in np.nonzero((state == MISSING) & (self.buffers.ignored == 0))[0].tolist():
                self._missed.setdefault(rank, "it has gone on")
        self._note_overdue(state, started_s)

    def _note_overdue(self, state: Bytes, started_s: float) -> None:
        """Remember since when messages do not come, over the ends of steps."""
        self._waited_at_s = time.monotonic()
        overdue = (state != ARRIVED) & (self.buffers.ignored == 0)
        if overdue.any() or self._overdue:
            before = self._overdue
            self._overdue = {rank: before.get(rank, started_s) for rank in np.nonzero(overdue)[0].tolist()}

    def _too_late(self, waited_s: float) -> bool:
        return self._waited_s + waited_s > self.step_deadline_s

    def lose_rows(self) -> None:
        """Rows of this rank's tokens are missing: the step is void."""
        self._void = True


class OneSidedCombining:
    def __init__(
        self,
        dispatcher: NixlDispatcher,
        parity: int,
        tag: int,
        hidden_TH: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
    ) -> None:
        self._dispatcher = dispatcher
        self._parity = parity
        self._tag = tag
        self._device = hidden_TH.device
        num_ranks = dispatcher.num_ranks
        self._state = np.zeros(num_ranks, np.uint8)
        self._counts = np.zeros((num_ranks, 2), np.int64)
        self._own_RH: Tensor | None = None
        dispatcher.reserve(parity, DISPATCH)
        self._sent = dispatcher.wire.pack(hidden_TH.cpu(), slots_TK.cpu(), weights_TK.cpu(), tag, parity)
        dispatcher.write(parity, DISPATCH, self._sent.num_bytes)

    def arrived(self) -> list[Arrived]:
        dispatcher = self._dispatcher
        dispatcher.wait(DISPATCH, self._parity, self._tag, self._state, self._counts)
        rows = dispatcher.wire.unpack(self._parity, self._tag, self._state, self._counts)
        return [
            Arrived(
                dispatcher.ranks[0],
                rows.hidden_RH.to(self._device),
                rows.pair_row_P.to(self._device),
                rows.pair_slot_P.to(self._device),
                rows.pair_weight_P.to(self._device),
                rows.slot_counts,
            )
        ]

    def reply(self, outputs: list[Tensor]) -> None:
        (output_RH,) = outputs
        output_RH = output_RH.cpu()
        dispatcher, parity, tag = self._dispatcher, self._parity, self._tag
        own = int(dispatcher.ranks[0])
        dispatcher.reserve(parity, COMBINE)
        num_bytes = dispatcher.wire.reply(parity, tag, self._state, self._counts, output_RH)
        dispatcher.write(parity, COMBINE, num_bytes)
        first = int(self._counts[:own, 0].sum())
        self._own_RH = output_RH[first : first + int(self._counts[own, 0])]

    def total(self) -> Tensor:
        assert self._own_RH is not None
        dispatcher, parity, tag = self._dispatcher, self._parity, self._tag
        state = np.zeros_like(self._state)
        state[int(dispatcher.ranks[0])] = ARRIVED
        dispatcher.wait(COMBINE, parity, tag, state, np.zeros_like(self._counts))
        dispatcher.posts.leave()
        out_TH, num_missing = dispatcher.wire.add(parity, tag, state, self._sent, self._own_RH)
        if num_missing:
            dispatcher.lose_rows()
        return out_TH.to(self._device)
