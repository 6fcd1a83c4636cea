"""Reservations against a model of their writers, in any order of news: nothing is lost or reused too early."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_worker.reservations import Filled, Freed, Grant, Notice, Refused, Reservations, ReservationState
from pd_cluster.clock import FakeClock
from pd_cluster.ids import BlockId, EngineEpoch, RequestId, TransferId
from pd_cluster.request import Request, SamplingParams

BLOCK_SIZE, NUM_BLOCKS, NUM_RANKS = 16, 12, 2
EPOCHS = [EngineEpoch("p0"), EngineEpoch("p1"), EngineEpoch("p2")]


class Writer:
    """What the sources of one granted transfer may do: write until all ranks are done, or they stop, or they die."""

    def __init__(self, epoch: EngineEpoch, blocks: set[BlockId]) -> None:
        self.epoch = epoch
        self.blocks = blocks
        self.done_ranks: set[int] = set()
        self.stopped_ranks: set[int] = set()

    @property
    def may_write(self) -> bool:
        return len(self.stopped_ranks | self.done_ranks) < NUM_RANKS and bool(self.blocks)

    def stop(self) -> None:
        self.stopped_ranks = set(range(NUM_RANKS))


class ReservationMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.free = [BlockId(i) for i in range(2, NUM_BLOCKS)]
        self.shared = {BlockId(0): 0, BlockId(1): 0}  # cached blocks and how many hold them
        self.num_cached_blocks = 2
        self.reservations = Reservations(NUM_RANKS, BLOCK_SIZE, 10.0, self.take, self.give_back, self.clock)
        self.writers: dict[TransferId, Writer] = {}
        self.sequences: list[list[BlockId]] = []
        self.granted: set[TransferId] = set()
        self.ended: set[TransferId] = set()
        self.num_transfers = 0

    def take(self, request: Request) -> tuple[list[BlockId], int] | None:
        """The cached prefix comes from the blocks others share already, the rest from the free list."""
        needed = len(request.token_ids) // BLOCK_SIZE
        cached = list(self.shared)[: min(self.num_cached_blocks, needed)]
        fresh = needed - len(cached)
        if fresh > len(self.free):
            return None
        for block in cached:
            self.shared[block] += 1
        taken, self.free = self.free[:fresh], self.free[fresh:]
        return cached + taken, len(cached) * BLOCK_SIZE

    def give_back(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            if block in self.shared:
                self.shared[block] -= 1
                assert self.shared[block] >= 0
            else:
                assert block not in self.free, "given back twice"
                assert not any(w.may_write and block in w.blocks for w in self.writers.values()), "a writer may write"
                self.free.append(block)

    def take_notices(self, notices: list[Notice]) -> None:
        for notice in notices:
            if isinstance(notice, Grant):
                assert notice.transfer_id not in self.granted | self.ended
                self.granted.add(notice.transfer_id)
                reservation = self.reservations.get(notice.transfer_id)
                assert reservation is not None
                written = set(notice.block_ids[notice.num_cached_tokens // BLOCK_SIZE :])
                self.writers[notice.transfer_id] = Writer(reservation.source_epoch, written)
            elif isinstance(notice, Freed):
                assert notice.transfer_id not in self.ended, "freed twice"
                self.ended.add(notice.transfer_id)
            else:
                assert isinstance(notice, Filled | Refused)

    def some_transfer(self, data: st.DataObject) -> TransferId:
        return TransferId(f"t{data.draw(st.integers(0, self.num_transfers))}")

    def some_writer(self, data: st.DataObject) -> tuple[TransferId, Writer]:
        return data.draw(st.sampled_from(sorted(self.writers.items(), key=lambda item: item[0])))

    @rule(num_blocks=st.integers(1, 8), epoch=st.sampled_from(EPOCHS), deadline_s=st.floats(1, 20))
    def reserve(self, num_blocks: int, epoch: EngineEpoch, deadline_s: float) -> None:
        self.num_transfers += 1
        name = f"t{self.num_transfers}"
        request = Request(
            id=RequestId(name), token_ids=[1] * num_blocks * BLOCK_SIZE, num_prompt_tokens=1, sampling=SamplingParams()
        )
        self.take_notices(self.reservations.reserve(TransferId(name), request, epoch, deadline_s))

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), tp_rank=st.integers(0, NUM_RANKS - 1))
    def a_rank_is_filled(self, data: st.DataObject, tp_rank: int) -> None:
        """Perhaps for a transfer that is over here, perhaps not for the first time."""
        transfer_id, writer = self.some_writer(data)
        if tp_rank not in writer.stopped_ranks:
            writer.done_ranks.add(tp_rank)
            self.take_notices(self.reservations.rank_filled(transfer_id, tp_rank))

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), by_router=st.booleans(), tp_rank=st.integers(0, NUM_RANKS - 1))
    def a_source_stops(self, data: st.DataObject, by_router: bool, tp_rank: int) -> None:
        transfer_id, writer = self.some_writer(data)
        if by_router:
            writer.stop()
            self.take_notices(self.reservations.source_stopped(transfer_id))
        else:
            writer.stopped_ranks.add(tp_rank)
            self.take_notices(self.reservations.rank_stopped(transfer_id, tp_rank))

    @rule(epoch=st.sampled_from(EPOCHS[:2]), chance=st.integers(0, 5))
    def an_engine_dies(self, epoch: EngineEpoch, chance: int) -> None:
        if chance == 0:
            for writer in self.writers.values():
                if writer.epoch == epoch:
                    writer.stop()
            self.take_notices(self.reservations.engine_dead(epoch))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.take_notices(self.reservations.abort(self.some_transfer(data)))

    @rule(data=st.data(), lease_s=st.floats(0, 20))
    def extend(self, data: st.DataObject, lease_s: float) -> None:
        self.reservations.extend([self.some_transfer(data)], lease_s)

    @rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.take_notices(self.reservations.tick())

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        transfer_id = self.some_transfer(data)
        adopted = self.reservations.adopt(transfer_id)
        if adopted is not None:
            writer = self.writers[transfer_id]
            assert len(writer.done_ranks) == NUM_RANKS, "adopted with KV missing"
            self.sequences.append(adopted.block_ids)
            self.ended.add(transfer_id)

    @precondition(lambda self: self.sequences)
    @rule(cache=st.booleans())
    def a_sequence_finishes(self, cache: bool) -> None:
        blocks = self.sequences.pop()
        if cache:  # its blocks stay as a prefix that later requests share
            for block in [block for block in blocks if block not in self.shared]:
                self.shared[block] = 1
        self.give_back(blocks)
        self.take_notices(self.reservations.grant())

    @rule(num_blocks=st.integers(0, 3))
    def requests_find_a_prefix(self, num_blocks: int) -> None:
        self.num_cached_blocks = num_blocks

    @invariant()
    def every_block_is_somewhere(self) -> None:
        held: list[BlockId] = [block for blocks in self.sequences for block in blocks]
        for n in range(1, self.num_transfers + 1):
            reservation = self.reservations.get(TransferId(f"t{n}"))
            held += reservation.block_ids if reservation is not None else []
        assert sorted({*held, *self.free, *self.shared}) == list(range(NUM_BLOCKS))
        private = [block for block in held if block not in self.shared]
        assert len(set(private)) == len(private), "one block for two"
        load = self.reservations.load()
        in_sequences = sum(len(blocks) for blocks in self.sequences)
        assert load.num_reserved_blocks + load.num_quarantined_blocks == len(held) - in_sequences

    def teardown(self) -> None:
        """Once all is aborted and every writer is known to have stopped, nothing is left."""
        for n in range(1, self.num_transfers + 1):
            transfer_id = TransferId(f"t{n}")
            reservation = self.reservations.get(transfer_id)
            if reservation is not None and reservation.state is not ReservationState.QUARANTINED:
                self.take_notices(self.reservations.abort(transfer_id))
        for n in range(1, self.num_transfers + 1):
            transfer_id = TransferId(f"t{n}")
            if transfer_id in self.writers:
                self.writers[transfer_id].stop()
            self.take_notices(self.reservations.abort(transfer_id))
            self.take_notices(self.reservations.source_stopped(transfer_id))
        while self.sequences:
            self.give_back(self.sequences.pop())
        assert len(self.reservations) == 0
        assert len(self.ended) == self.num_transfers
        assert sorted([*self.free, *self.shared]) == list(range(NUM_BLOCKS))
        assert not any(self.shared.values())


TestReservations = ReservationMachine.TestCase
TestReservations.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
