"""The pushes of one source rank: what it writes to the target ranks of each transfer, chunk by chunk as prefill
computes.

    WAITING --push order--> PUSHING --all written, all done--> PUSHED --close--> (forgotten)
       |                       |                                 |
       | abort, deadline       | abort, deadline, a failed write | abort
       v                       v                                 v
    STOPPED <--------------- ABORTING: writes in flight run out <+

Every TP rank of a worker runs the same machine on the same inputs for the heads it sends; `push_group` joins their
notices on the lead. Units are written once they are complete; the last unit waits for the commit, which travels with
it to every target rank whose first source this rank is. Source blocks may be reused after RankPushed or RankStopped,
not before: a write in flight still reads them. A write whose connection broke may land late; only when the network
cannot deliver it any more is its push called stopped.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

from msgspec import Struct, field

from pd_cluster.clock import Clock
from pd_cluster.errors import DeadlineExceeded, DuplicateRequest, PdClusterError, PeerIncompatible, TransferFailed
from pd_cluster.ids import BlockId, EngineEpoch, TransferId, WorkerId
from pd_cluster.kv.layout import KvFingerprint, KvLayout
from pd_cluster.messages import Push
from pd_cluster.request import UNIT_TOKENS
from pd_cluster.transfer.contract import (
    CommitRecord,
    CopyRange,
    Record,
    SourceRecord,
    StoppedRecord,
    WorkerEndpoint,
    Write,
    WriteDone,
    WriteFailed,
)
from pd_cluster.transfer.plan import Route, copies, rotation, routes, units_of
from prefill_worker.push_outputs import Cancel, Connect, Disconnect, Output, Post, RankFailed, RankPushed, RankStopped

LATE_WRITE_S = 120.0
"""How long the network may go on to deliver what a broken connection carried. The kernel tries for up to 100 s to send
what a closed TCP socket still held; RDMA is done in milliseconds.
"""

FAREWELL_S = 5.0  # how long a StoppedRecord is tried: the router relays the same news


class PushState(StrEnum):
    WAITING = "waiting"
    PUSHING = "pushing"
    PUSHED = "pushed"
    ABORTING = "aborting"
    STOPPED = "stopped"


NEXT: dict[PushState, frozenset[PushState]] = {
    PushState.WAITING: frozenset({PushState.PUSHING, PushState.STOPPED}),
    PushState.PUSHING: frozenset({PushState.PUSHED, PushState.ABORTING}),
    PushState.PUSHED: frozenset({PushState.ABORTING}),
    PushState.ABORTING: frozenset({PushState.STOPPED}),
    PushState.STOPPED: frozenset(),
}


class PushLoad(Struct, frozen=True):
    """`num_pending`: neither pushed nor stopped. `num_unquiet`: failed, and bytes of them may still land."""

    num_pending: int
    num_unquiet: int
    oldest_s: float


class _Target(Struct, frozen=True):
    """One target rank of a push."""

    route: Route
    agent_name: str
    num_sources: int
    is_first_source: bool


class _Push(Struct, kw_only=True):
    """One transfer as this rank sees it; units count from the sequence's first token."""

    transfer_id: TransferId
    num_tokens: int
    opened_s: float
    deadline_s: float
    state: PushState = PushState.WAITING
    num_computed: int = 0
    source_blocks: Sequence[BlockId] = ()
    commit: CommitRecord | None = None
    # since the push order
    order: Push | None = None
    targets: list[_Target] = field(default_factory=list)
    first_unit: int = 0
    next_unit: int = 0
    is_written: bool = False  # everything is posted
    in_flight: set[int] = field(default_factory=set)
    quiet_at_s: float | None = None  # when what its broken connections carried can land no more
    num_bytes: int = 0
    first_post_s: float | None = None

    @property
    def end_unit(self) -> int:
        return max(units_of(self.num_tokens), self.first_unit)

    def go(self, state: PushState) -> None:
        assert state in NEXT[self.state], (self.transfer_id, self.state, state)
        self.state = state


class Pushes:
    """All pushes of TP rank `tp_rank`; every method returns what is to be done and said, in order.

    `layouts`: of all TP ranks of this worker. `checksum`: over ranges of this rank's arena, when transfers are
    verified. Writes are no smaller than `min_write_units` (but the last) and no larger than `max_write_bytes`; those
    of a broken connection may land for `late_write_s`.
    """

    def __init__(
        self,
        tp_rank: int,
        layouts: Sequence[KvLayout],
        fingerprint: KvFingerprint,
        clock: Clock,
        *,
        checksum: Callable[[Sequence[CopyRange]], int] | None = None,
        min_write_units: int = 8,
        max_write_bytes: int = 64 << 20,
        late_write_s: float = LATE_WRITE_S,
    ) -> None:
        self._tp_rank = tp_rank
        self._layouts = layouts
        self._fingerprint = fingerprint
        self._clock = clock
        self._checksum = checksum
        self._min_write_units = min_write_units
        self._max_write_bytes = max_write_bytes
        self._late_write_s = late_write_s
        self._pushes: dict[TransferId, _Push] = {}
        self._endpoints: dict[tuple[WorkerId, EngineEpoch], WorkerEndpoint] = {}
        self._farewells: dict[int, tuple[TransferId, float]] = {}  # StoppedRecords under way, and when to give up
        self._next_write_id = 0

    def __len__(self) -> int:
        return len(self._pushes)

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._pushes

    def state(self, transfer_id: TransferId) -> PushState | None:
        push = self._pushes.get(transfer_id)
        return None if push is None else push.state

    def load(self) -> PushLoad:
        pending = [push for push in self._pushes.values() if push.state is not PushState.PUSHED]
        oldest_s = max((self._clock.now_s() - push.opened_s for push in pending), default=0.0)
        return PushLoad(len(pending), sum(push.quiet_at_s is not None for push in pending), oldest_s)

    # ---- inputs

    def open(self, transfer_id: TransferId, num_tokens: int, deadline_s: float) -> None:
        """A request of `num_tokens` tokens begins; its push order must come within `deadline_s`.

        Raises DuplicateRequest when the transfer is already there.
        """
        if transfer_id in self._pushes:
            raise DuplicateRequest(f"transfer {transfer_id} is already under way")
        now_s = self._clock.now_s()
        self._pushes[transfer_id] = _Push(
            transfer_id=transfer_id, num_tokens=num_tokens, opened_s=now_s, deadline_s=now_s + deadline_s
        )

    def progress(self, transfer_id: TransferId, num_computed: int, source_blocks: Sequence[BlockId]) -> list[Output]:
        """The KV of the first `num_computed` tokens lies in `source_blocks`, all of the sequence's so far."""
        push = self._pushes.get(transfer_id)
        if push is None:
            return []
        push.num_computed = max(push.num_computed, num_computed)
        push.source_blocks = source_blocks
        return self._advance(push)

    def prefilled(
        self, transfer_id: TransferId, commit: CommitRecord, source_blocks: Sequence[BlockId]
    ) -> list[Output]:
        """Prefill is done: all KV and the next token are there."""
        push = self._pushes.get(transfer_id)
        if push is None:
            return []
        assert commit.num_tokens == push.num_tokens, (commit, push.num_tokens)
        push.commit = commit
        return self.progress(transfer_id, push.num_tokens, source_blocks)

    def push(self, order: Push) -> list[Output]:
        """The target has granted blocks. For a transfer that is unknown or over, the answer is RankStopped."""
        if order.endpoint is not None:
            self._endpoints[order.target, order.target_epoch] = order.endpoint
        push = self._pushes.get(order.transfer_id)
        if push is None:
            return [RankStopped(order.transfer_id)]
        if push.state is not PushState.WAITING:
            return []
        try:
            endpoint = self._accept(push, order)
        except PdClusterError as error:
            return self._fail(push, error)
        push.go(PushState.PUSHING)
        push.deadline_s = self._clock.now_s() + order.deadline_s
        connects = [Connect(endpoint.ranks[target.route.target]) for target in push.targets]
        return [*connects, *self._advance(push)]

    def event(self, event: WriteDone | WriteFailed) -> list[Output]:
        """A write of this machine ended; others are ignored."""
        push = self._pushes.get(event.transfer_id)
        if self._farewells.pop(event.write_id, None) or push is None or event.write_id not in push.in_flight:
            return []
        push.in_flight.remove(event.write_id)
        if isinstance(event, WriteDone):
            push.num_bytes += event.num_bytes
        else:
            if not event.quiet:
                push.quiet_at_s = self._clock.now_s() + self._late_write_s
            if push.state is PushState.PUSHING:
                return self._fail(push, TransferFailed(f"transfer {push.transfer_id}: {event.reason}"))
        return self._conclude(push)

    def abort(self, transfer_id: TransferId) -> list[Output]:
        """Write nothing more. RankStopped follows, at once when nothing is in flight; also for unknown transfers."""
        push = self._pushes.get(transfer_id)
        return [RankStopped(transfer_id)] if push is None else self._stop(push)

    def close(self, transfer_id: TransferId) -> None:
        """All ranks have pushed: nothing of this transfer will be asked again."""
        push = self._pushes.get(transfer_id)
        if push is not None and push.state is PushState.PUSHED:
            del self._pushes[transfer_id]

    def target_dead(self, epoch: EngineEpoch) -> list[Output]:
        """Every process of the target died: what was on its way there harms nobody."""
        outputs: list[Output] = []
        for push in [p for p in self._pushes.values() if p.order is not None and p.order.target_epoch == epoch]:
            if push.state is PushState.PUSHING:
                outputs.append(_failed(push, TransferFailed(f"transfer {push.transfer_id}: the target engine died")))
            if push.state is not PushState.ABORTING:
                push.go(PushState.ABORTING)
            push.go(PushState.STOPPED)
            del self._pushes[push.transfer_id]
            outputs.append(RankStopped(push.transfer_id))
        for key in [key for key in self._endpoints if key[1] == epoch]:
            outputs += [Disconnect(rank.agent_name) for rank in self._endpoints.pop(key).ranks]
        return outputs

    def tick(self) -> list[Output]:
        """Look at every deadline; call it a few times a second."""
        now_s = self._clock.now_s()
        outputs: list[Output] = []
        for push in list(self._pushes.values()):
            if now_s >= push.deadline_s and push.state in (PushState.WAITING, PushState.PUSHING):
                waited = "its push order" if push.state is PushState.WAITING else "its writes"
                outputs += self._fail(push, DeadlineExceeded(f"transfer {push.transfer_id}: {waited} took too long"))
            elif push.quiet_at_s is not None and now_s >= push.quiet_at_s:
                outputs += self._conclude(push)
        for write_id, (transfer_id, give_up_s) in list(self._farewells.items()):
            if now_s >= give_up_s:
                del self._farewells[write_id]
                outputs.append(Cancel(transfer_id))
        return outputs

    # ---- transitions

    def _accept(self, push: _Push, order: Push) -> WorkerEndpoint:
        """Check a push order and turn it into targets; raises what makes it impossible."""
        name = f"transfer {push.transfer_id}"
        endpoint = self._endpoints.get((order.target, order.target_epoch))
        if endpoint is None:
            raise TransferFailed(f"{name}: {order.target} in epoch {order.target_epoch} never told its endpoint")
        difference = self._fingerprint.difference(endpoint.fingerprint)
        if difference is not None:
            raise PeerIncompatible(f"{name}: {order.target} holds another KV: {difference}")
        layouts = [rank.layout for rank in endpoint.ranks]
        num_blocks = min((rank.num_bytes // rank.layout.block_bytes for rank in endpoint.ranks), default=0)
        if not all(0 <= block_id < num_blocks for block_id in order.block_ids):
            raise TransferFailed(f"{name}: {order.target} has {num_blocks} blocks, and the order names others")
        planned = routes(self._layouts, layouts, rotation(push.transfer_id))
        if order.num_cached_tokens % UNIT_TOKENS or not 0 <= order.num_cached_tokens <= push.num_tokens:
            raise TransferFailed(f"{name}: {order.num_cached_tokens} cached tokens of {push.num_tokens} at the target")
        if len(order.block_ids) < layouts[0].num_blocks_for(push.num_tokens):
            raise TransferFailed(f"{name}: {len(order.block_ids)} target blocks cannot hold {push.num_tokens} tokens")
        push.order = order
        push.first_unit = push.next_unit = order.num_cached_tokens // UNIT_TOKENS
        for route in planned.from_source(self._tp_rank):
            sources = planned.sources_of(route.target)
            agent_name = endpoint.ranks[route.target].agent_name
            push.targets.append(_Target(route, agent_name, len(sources), sources[0] == self._tp_rank))
        return endpoint

    def _advance(self, push: _Push) -> list[Output]:
        """Write the units that are complete and not written yet."""
        if push.state is not PushState.PUSHING or push.is_written:
            return []
        if push.commit is None:
            end = min(push.num_computed // UNIT_TOKENS, push.end_unit - 1)  # the last unit brings the commit
            if end - push.next_unit < self._min_write_units:
                return []
        else:
            end = push.end_unit
        outputs: list[Output] = []
        for target in push.targets:
            outputs += self._writes(push, target, end)
        push.next_unit = end
        push.is_written = push.commit is not None
        return outputs + self._conclude(push)

    def _writes(self, push: _Push, target: _Target, end: int) -> list[Output]:
        """Writes of units [next_unit, end) to one target, the last with the commit if this rank brings it."""
        commit = push.commit if target.is_first_source else None
        step = max(self._max_write_bytes // target.route.unit_bytes, 1)
        starts = list(range(push.next_unit, end, step))
        if not starts and commit is not None and push.first_unit == push.end_unit:
            starts = [end]  # nothing but the commit to send
        outputs: list[Output] = []
        for start in starts:
            num_units = min(step, end - start)
            assert push.order is not None
            ranges = copies(target.route, push.source_blocks, push.order.block_ids, start, num_units)
            record = SourceRecord(
                transfer_id=push.transfer_id,
                epoch=push.order.target_epoch,
                source=self._tp_rank,
                num_sources=target.num_sources,
                head_ids=target.route.head_ids,
                first_unit=start,
                num_units=num_units,
                total_units=push.end_unit - push.first_unit,
                num_bytes=num_units * target.route.unit_bytes,
                checksum=self._checksum(ranges) if self._checksum and ranges else None,
                commit=commit if start == starts[-1] else None,
            )
            outputs.append(Post(self._write(push, target, ranges, record)))
        return outputs

    def _write(self, push: _Push, target: _Target, ranges: list[CopyRange], record: Record) -> Write:
        write_id = self._next_write_id
        self._next_write_id += 1
        if isinstance(record, StoppedRecord):
            self._farewells[write_id] = push.transfer_id, self._clock.now_s() + FAREWELL_S
        else:
            push.in_flight.add(write_id)
        if push.first_post_s is None:
            push.first_post_s = self._clock.now_s()
        return Write(
            write_id=write_id, transfer_id=push.transfer_id, peer=target.agent_name, copies=ranges, record=record
        )

    def _fail(self, push: _Push, error: PdClusterError) -> list[Output]:
        return [_failed(push, error), *self._stop(push)]

    def _stop(self, push: _Push) -> list[Output]:
        """Begin to end a push, whatever its state."""
        if push.state is PushState.WAITING:
            push.go(PushState.STOPPED)
            del self._pushes[push.transfer_id]
            return [RankStopped(push.transfer_id)]
        if push.state is PushState.ABORTING:
            return []
        push.go(PushState.ABORTING)
        cancel: list[Output] = [Cancel(push.transfer_id)] if push.in_flight else []
        return cancel + self._conclude(push)

    def _conclude(self, push: _Push) -> list[Output]:
        """Go on to PUSHED or STOPPED once no write is in flight."""
        if push.in_flight:
            return []
        if push.state is PushState.PUSHING and push.is_written:
            push.go(PushState.PUSHED)
            now_s = self._clock.now_s()
            seconds = now_s - (now_s if push.first_post_s is None else push.first_post_s)
            return [RankPushed(push.transfer_id, push.num_bytes, seconds)]
        is_quiet = push.quiet_at_s is None or self._clock.now_s() >= push.quiet_at_s
        if push.state is PushState.ABORTING and is_quiet:
            push.go(PushState.STOPPED)
            del self._pushes[push.transfer_id]
            assert push.order is not None
            farewells: list[Output] = []
            for target in push.targets:
                record = StoppedRecord(
                    transfer_id=push.transfer_id,
                    epoch=push.order.target_epoch,
                    source=self._tp_rank,
                    num_sources=target.num_sources,
                )
                farewells.append(Post(self._write(push, target, [], record)))
            return [*farewells, RankStopped(push.transfer_id)]
        return []


def _failed(push: _Push, error: PdClusterError) -> RankFailed:
    return RankFailed(push.transfer_id, error.info())
