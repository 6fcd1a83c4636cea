"""Whole handoffs in one process: pushes, fills and reservations over faulty memory copies, in any order of news.

Real bytes move. A source block is overwritten as soon as the source may reuse it, a target block as soon as it is
freed, so a write that comes when it must not, or reads what it must not, is seen in the bytes.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.reservations import Filled, Freed, Grant, Refused, Reservations
from decode_worker.reservations import Notice as TargetNotice
from pd_cluster.clock import FakeClock
from pd_cluster.ids import BlockId, EngineEpoch, EngineId, Rank, RequestId, TransferId, WorkerId
from pd_cluster.kv.layout import KvFingerprint, KvLayout
from pd_cluster.messages import Push
from pd_cluster.request import UNIT_TOKENS, Request, SamplingParams
from pd_cluster.transfer.checksum import checksum, host_reader
from pd_cluster.transfer.contract import Arena, CommitRecord, CopyRange, Received, SourceRecord, WorkerEndpoint
from pd_cluster.transfer.faulty import Faults, FaultyBackend
from pd_cluster.transfer.fill import Fill, Fills, FillState
from pd_cluster.transfer.local import LocalBackend, LocalFabric
from pd_cluster.transfer.plan import units_of, written_ranges
from prefill_worker.push_group import GroupFailed, GroupPushed, GroupStopped, PushGroup
from prefill_worker.push_outputs import Cancel, Connect, Disconnect, Output, Post
from prefill_worker.pushes import Pushes

TARGET, TARGET_EPOCH, SOURCE_EPOCH = WorkerId("d/0"), EngineEpoch("d-life"), EngineEpoch("p-life")
FINGERPRINT = KvFingerprint(
    weights="w", kind="gqa", num_layers=1, num_kv_heads=4, token_values=1, dtype="bfloat16", rope="r"
)
NUM_BLOCKS = 24
GARBAGE, FREE = 0xEE, 0xFF


def shard(num_ranks: int, block_size: int) -> list[KvLayout]:
    heads = [tuple(range(rank * 4 // num_ranks, (rank + 1) * 4 // num_ranks)) for rank in range(num_ranks)]
    return [
        KvLayout(kind="gqa", num_layers=1, head_ids=h, token_values=1, dtype="bfloat16", block_size=block_size)
        for h in heads
    ]


class Memory:
    """The arena of one rank and its backend."""

    def __init__(self, fabric: LocalFabric, epoch: EngineEpoch, rank: int, layout: KvLayout, faults: Faults, seed: int):
        self.layout = layout
        self.bytes = np.full(NUM_BLOCKS * layout.block_bytes, FREE, np.uint8)
        self.arena = Arena(base_address=self.bytes.ctypes.data, num_bytes=self.bytes.size)
        self.backend = FaultyBackend(LocalBackend(fabric, epoch, Rank(rank), layout, self.arena), faults, seed)

    def unit(self, blocks: Sequence[BlockId], unit: int) -> slice:
        block, index = divmod(unit, self.layout.units_per_block)
        start = blocks[block] * self.layout.block_bytes + index * self.layout.unit_bytes
        return slice(start, start + self.layout.unit_bytes)

    def overwrite(self, blocks: Sequence[BlockId], byte: int) -> None:
        for block in blocks:
            self.bytes[block * self.layout.block_bytes : (block + 1) * self.layout.block_bytes] = byte

    def kv(self, seed: int, unit: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The bytes of one unit of a request: each head has its own."""
        rows = [
            np.random.default_rng([seed, unit, head]).integers(0, 200, self.layout.head_bytes)
            for head in self.layout.head_ids
        ]
        return np.concatenate(rows).astype(np.uint8)


class Handoff:
    """What the test knows about one transfer."""

    def __init__(self, number: int, num_tokens: int, chunk: int, source_blocks: list[BlockId], num_ranks: int) -> None:
        self.number = number
        self.transfer_id = TransferId(f"t{number}")
        self.num_tokens = num_tokens
        self.chunk = chunk
        self.num_computed = 0
        self.source_blocks = source_blocks
        self.group = PushGroup(num_ranks)
        self.source_over = False
        self.grant: Grant | None = None


class World:
    def __init__(
        self, num_sources: int, num_targets: int, sizes: tuple[int, int], faults: Faults, seed: int, verify: bool
    ) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        fabric = LocalFabric()
        sources, targets = shard(num_sources, sizes[0]), shard(num_targets, sizes[1])
        clean = Faults()
        self.sources = [Memory(fabric, SOURCE_EPOCH, i, lo, faults, seed + i) for i, lo in enumerate(sources)]
        self.targets = [Memory(fabric, TARGET_EPOCH, i, lo, clean, 0) for i, lo in enumerate(targets)]
        self.pushes = [
            Pushes(
                rank,
                sources,
                FINGERPRINT,
                self.clock,
                checksum=self.summer(memory) if verify else None,
                min_write_units=self.rng.choice([1, 3]),
                max_write_bytes=memory.layout.head_bytes * self.rng.choice([1, 5, 1000]),
            )
            for rank, memory in enumerate(self.sources)
        ]
        self.fills = [Fills(TARGET_EPOCH) for _ in targets]
        self.free_source = [BlockId(i) for i in range(NUM_BLOCKS)]
        self.free_target = [BlockId(i) for i in range(NUM_BLOCKS)]
        self.num_cached_units = 0
        self.reservations = Reservations(num_targets, sizes[1], 20.0, self.take, self.give_back, self.clock)
        self.endpoint = WorkerEndpoint(
            engine_id=EngineId("d"),
            epoch=TARGET_EPOCH,
            dp_rank=0,
            fingerprint=FINGERPRINT,
            ranks=[memory.backend.endpoint() for memory in self.targets],
        )
        self.requests: dict[TransferId, Handoff] = {}
        self.news: list[Callable[[], None]] = []  # messages under way by router, delivered in any order
        self.adopted: list[TransferId] = []
        self.freed: set[TransferId] = set()
        self.num_failed = 0
        self.adopt_chance = 0.8

    # ---- target

    def take(self, request: Request) -> tuple[list[BlockId], int] | None:
        layout = self.targets[0].layout
        needed = layout.num_blocks_for(len(request.token_ids))
        if needed > len(self.free_target):
            return None
        taken, self.free_target = self.free_target[:needed], self.free_target[needed:]
        cached_blocks = min(self.rng.choice([0, 0, 1, 2]), len(request.token_ids) // layout.block_size)
        for memory in self.targets:  # a block of its own stands for the shared one, with the right bytes in it
            for unit in range(cached_blocks * layout.units_per_block):
                memory.bytes[memory.unit(taken, unit)] = memory.kv(int(request.id[1:]), unit)
        return taken, cached_blocks * layout.block_size

    def give_back(self, blocks: Sequence[BlockId]) -> None:
        assert not set(blocks) & set(self.free_target)
        self.free_target += blocks
        for memory in self.targets:
            memory.overwrite(blocks, FREE)

    def target_says(self, notices: list[TargetNotice]) -> None:
        for notice in notices:
            if isinstance(notice, Grant):
                request = self.requests[notice.transfer_id]
                request.grant = notice
                self.news.append(lambda request=request, grant=notice: self.order(request, grant))  # type: ignore[misc]
                for rank, memory in enumerate(self.targets):  # a follower hears of it sooner or later
                    self.news.append(lambda r=rank, m=memory, g=notice: self.open_fill(r, m, g))  # type: ignore[misc]
            elif isinstance(notice, Filled):
                self.check_bytes(notice.transfer_id)
                if self.rng.random() < self.adopt_chance:
                    adopted = self.reservations.adopt(notice.transfer_id)
                    assert adopted is not None
                    self.adopted.append(notice.transfer_id)
                    self.close_fills(notice.transfer_id)
                    self.give_back(adopted.block_ids)
                    self.target_says(self.reservations.grant())
            elif isinstance(notice, Freed):
                assert notice.transfer_id not in self.freed
                self.freed.add(notice.transfer_id)
                self.close_fills(notice.transfer_id)
            else:
                assert isinstance(notice, Refused)
                self.num_failed += 1
                self.news.append(lambda t=notice.transfer_id: self.abort_source(t))  # type: ignore[misc]

    def open_fill(self, rank: int, memory: Memory, grant: Grant) -> None:
        if self.reservations.get(grant.transfer_id) is None:
            return

        def verify(record: SourceRecord) -> bool:
            ranges = written_ranges(
                memory.layout, record.head_ids, grant.block_ids, record.first_unit, record.num_units
            )
            return checksum(host_reader(memory.arena), ranges) == record.checksum

        fill = Fill(grant.transfer_id, memory.layout, len(grant.request.token_ids), grant.num_cached_tokens, verify)
        if self.fills[rank].open(fill):
            self.fill_changed(rank, fill)

    def close_fills(self, transfer_id: TransferId) -> None:
        for fills in self.fills:
            fills.close(transfer_id)

    def fill_changed(self, rank: int, fill: Fill) -> None:
        if fill.state is FillState.FILLED:
            assert fill.commit is not None
            assert fill.commit.token_id == int(fill.transfer_id[1:])
            self.target_says(self.reservations.rank_filled(fill.transfer_id, rank))
        elif fill.state is FillState.FAILED:
            assert fill.error is not None
            self.target_says(self.reservations.rank_failed(fill.transfer_id, fill.error))
        if fill.is_stopped:
            self.target_says(self.reservations.rank_stopped(fill.transfer_id, rank))

    def check_bytes(self, transfer_id: TransferId) -> None:
        request = self.requests[transfer_id]
        assert request.grant is not None
        for memory in self.targets:
            for unit in range(units_of(request.num_tokens)):
                landed = memory.bytes[memory.unit(request.grant.block_ids, unit)]
                assert np.array_equal(landed, memory.kv(request.number, unit)), f"{transfer_id}: unit {unit} is wrong"

    # ---- source

    @staticmethod
    def summer(memory: Memory) -> Callable[[Sequence[CopyRange]], int]:
        return lambda ranges: checksum(host_reader(memory.arena), [(r.src_offset, r.num_bytes) for r in ranges])

    def order(self, request: Handoff, grant: Grant) -> None:
        order = Push(
            request_id=RequestId("r"),
            transfer_id=request.transfer_id,
            target=TARGET,
            target_epoch=TARGET_EPOCH,
            endpoint=self.endpoint,
            block_ids=grant.block_ids,
            num_cached_tokens=grant.num_cached_tokens,
            deadline_s=15.0,
        )
        for rank, pushes in enumerate(self.pushes):
            self.do(rank, pushes.push(order))

    def do(self, rank: int, outputs: list[Output]) -> None:
        backend = self.sources[rank].backend
        for output in outputs:
            if isinstance(output, Connect):
                backend.connect(output.peer)
            elif isinstance(output, Disconnect):
                backend.disconnect(output.agent_name)
            elif isinstance(output, Post):
                backend.post(output.write)
            elif isinstance(output, Cancel):
                backend.cancel(output.transfer_id)
            else:
                self.source_says(rank, output.transfer_id, self.requests[output.transfer_id].group.report(rank, output))

    def source_says(
        self, rank: int, transfer_id: TransferId, notice: GroupPushed | GroupFailed | GroupStopped | None
    ) -> None:
        request = self.requests[transfer_id]
        if isinstance(notice, GroupFailed):
            for other, pushes in enumerate(self.pushes):
                self.do(other, pushes.abort(transfer_id))
            self.news.append(lambda: self.target_says(self.reservations.abort(transfer_id)))
        elif notice is not None:
            if isinstance(notice, GroupPushed):
                for pushes in self.pushes:
                    pushes.close(transfer_id)
            else:
                self.news.append(lambda: self.target_says(self.reservations.source_stopped(transfer_id)))
            self.end_source(request)

    def end_source(self, request: Handoff) -> None:
        if not request.source_over:
            request.source_over = True
            self.free_source += request.source_blocks
            for memory in self.sources:
                memory.overwrite(request.source_blocks, GARBAGE)

    # ---- what happens

    def begin(self) -> None:
        num_tokens = self.rng.randint(1, 150)
        needed = self.sources[0].layout.num_blocks_for(num_tokens)
        if needed > len(self.free_source):
            return
        blocks, self.free_source = self.free_source[:needed], self.free_source[needed:]
        number = len(self.requests)
        request = Handoff(number, num_tokens, self.rng.choice([16, 40, 200]), blocks, len(self.sources))
        self.requests[request.transfer_id] = request
        for pushes in self.pushes:
            pushes.open(request.transfer_id, num_tokens, 30.0)
        wanted = Request(
            id=RequestId(f"r{number}"), token_ids=[1] * num_tokens, num_prompt_tokens=1, sampling=SamplingParams()
        )
        self.target_says(self.reservations.reserve(request.transfer_id, wanted, SOURCE_EPOCH, 30.0))

    def compute(self) -> None:
        waiting = [r for r in self.requests.values() if r.num_computed < r.num_tokens and not r.source_over]
        if not waiting:
            return
        request = self.rng.choice(waiting)
        before, request.num_computed = (
            request.num_computed,
            min(request.num_computed + request.chunk, request.num_tokens),
        )
        for memory in self.sources:
            for unit in range(before // UNIT_TOKENS, units_of(request.num_computed)):
                memory.bytes[memory.unit(request.source_blocks, unit)] = memory.kv(request.number, unit)
        is_last = request.num_computed == request.num_tokens
        commit = CommitRecord(
            token_id=request.number,
            logprob=None,
            num_prompt_tokens=1,
            num_tokens=request.num_tokens,
            num_cached_tokens=0,
            seed=0,
            position=request.num_tokens,
        )
        for rank, pushes in enumerate(self.pushes):
            if is_last:
                self.do(rank, pushes.prefilled(request.transfer_id, commit, request.source_blocks))
            else:
                self.do(rank, pushes.progress(request.transfer_id, request.num_computed, request.source_blocks))

    def deliver(self) -> None:
        if self.news:
            self.news.pop(self.rng.randrange(len(self.news)))()

    def poll_source(self) -> None:
        rank = self.rng.randrange(len(self.sources))
        events = deque(self.sources[rank].backend.poll())
        while events:
            event = events.popleft()
            assert not isinstance(event, Received)
            self.do(rank, self.pushes[rank].event(event))

    def poll_target(self) -> None:
        rank = self.rng.randrange(len(self.targets))
        for event in self.targets[rank].backend.poll():
            assert isinstance(event, Received)
            fill = self.fills[rank].add(event.record)
            if fill is not None:
                self.fill_changed(rank, fill)

    def abort(self) -> None:
        if self.requests and self.rng.random() < 0.2:
            transfer_id = self.rng.choice(list(self.requests))
            self.news.append(lambda: self.target_says(self.reservations.abort(transfer_id)))
            self.news.append(lambda: self.abort_source(transfer_id))

    def abort_source(self, transfer_id: TransferId) -> None:
        for rank, pushes in enumerate(self.pushes):
            self.do(rank, pushes.abort(transfer_id))

    def time_passes(self) -> None:
        self.clock.advance(self.rng.choice([0.1, 1.0, 3.0]))
        for rank, pushes in enumerate(self.pushes):
            self.do(rank, pushes.tick())
        self.target_says(self.reservations.tick())

    def step(self) -> None:
        actions = [self.begin, self.compute, self.deliver, self.poll_source, self.poll_target, self.abort]
        weights = [2, 6, 6, 8, 8, 1]
        self.rng.choices([*actions, self.time_passes], [*weights, 1])[0]()
        self.check_free_blocks()

    def check_free_blocks(self) -> None:
        for memory in self.targets:
            for block in self.free_target:
                start = block * memory.layout.block_bytes
                assert (memory.bytes[start : start + memory.layout.block_bytes] == FREE).all(), "written after its time"

    def drain(self) -> None:
        """Let everything run out; whatever cannot end by itself ends with the source's engine."""
        for _ in range(300):
            self.deliver()
            self.poll_source()
            self.poll_target()
            self.compute()
        for _ in range(100):
            self.time_passes()
            for _ in range(10):
                self.deliver()
                self.poll_source()
                self.poll_target()
        self.check_free_blocks()


FAULTS = st.sampled_from(
    [
        Faults(),
        Faults(delay=0.6, repeat=0.3),
        Faults(drop=0.1, delay=0.2),
        Faults(fail=0.1, tear=0.1),
        Faults(late=0.1, delay=0.2, repeat=0.2),
        Faults(drop=0.05, fail=0.05, tear=0.05, late=0.05, repeat=0.2, delay=0.3),
    ]
)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.tuples(st.sampled_from([16, 32, 48]), st.sampled_from([16, 32, 48])),
    FAULTS,
    st.integers(0, 10**6),
)
def test_no_interleaving_loses_a_block_or_accepts_a_wrong_byte(
    num_sources: int, num_targets: int, sizes: tuple[int, int], faults: Faults, seed: int
) -> None:
    world = World(num_sources, num_targets, sizes, faults, seed, verify=False)
    for _ in range(150):
        world.step()
    world.drain()

    unquiet = {t for t in world.requests for pushes in world.pushes if t in pushes}
    assert faults.late or not unquiet, "only a write that may still land keeps a push open"
    for transfer_id, request in world.requests.items():
        assert request.source_over or transfer_id in unquiet
    quarantined = {t for t in world.requests if world.reservations.get(t) is not None}
    assert quarantined <= unquiet, "all others were adopted or freed"
    world.target_says(world.reservations.engine_dead(SOURCE_EPOCH))
    assert len(world.reservations) == 0
    assert sorted(world.free_target) == list(range(NUM_BLOCKS))
    assert all(len(fills) == 0 for fills in world.fills)
    assert world.freed | set(world.adopted) == set(world.requests)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.integers(0, 10**6))
def test_verified_transfers_never_adopt_corrupt_bytes(num_sources: int, num_targets: int, seed: int) -> None:
    world = World(num_sources, num_targets, (32, 16), Faults(corrupt=0.2, delay=0.3, repeat=0.1), seed, verify=True)
    for _ in range(150):
        world.step()
    world.drain()
    assert len(world.reservations) == 0, "after a failed fill the source is told to stop, and says that it has"


def test_without_faults_everything_is_adopted() -> None:
    world = World(2, 4, (32, 16), Faults(), seed=5, verify=True)
    world.adopt_chance = 1.0
    for _ in range(8):
        world.begin()
    world.drain()
    assert len(world.requests) >= 3
    assert set(world.adopted) == set(world.requests)
    assert world.num_failed == 0
