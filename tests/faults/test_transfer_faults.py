"""Faults of a handoff over the real NIXL: dead, stopped and restarted peers, and a backend that corrupts, drops and
repeats.
"""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from decode_worker.reservations import Freed, Grant, Reservations, ReservationState
from pd_cluster.clock import FakeClock
from pd_cluster.ids import BlockId, EngineEpoch, EngineId, Rank, RequestId, TransferId, WorkerId
from pd_cluster.kv.layout import KvFingerprint, KvLayout
from pd_cluster.messages import Push
from pd_cluster.request import Request, SamplingParams
from pd_cluster.transfer.checksum import checksum, host_reader
from pd_cluster.transfer.contract import (
    Arena,
    Backend,
    CommitRecord,
    CopyRange,
    RankEndpoint,
    Received,
    Record,
    SourceRecord,
    StoppedRecord,
    WorkerEndpoint,
    WriteDone,
    WriteFailed,
)
from pd_cluster.transfer.faulty import Faults, FaultyBackend
from pd_cluster.transfer.fill import Fill, Fills, FillState
from pd_cluster.transfer.nixl import NixlBackend
from pd_cluster.transfer.plan import written_ranges
from prefill_worker.push_outputs import Cancel, Connect, Disconnect, Output, Post, RankFailed, RankPushed, RankStopped
from prefill_worker.pushes import Pushes

LAYOUT = KvLayout(kind="mla", num_layers=4, head_ids=(0,), token_values=64, dtype="bfloat16", block_size=32)
FINGERPRINT = KvFingerprint(
    weights="w", kind="mla", num_layers=4, num_kv_heads=1, token_values=64, dtype="bfloat16", rope="r"
)
NUM_BLOCKS, NUM_TOKENS = 32, 32 * 8
T, TARGET = TransferId("t"), WorkerId("d/0")
COMMIT = CommitRecord(
    token_id=7,
    logprob=None,
    num_prompt_tokens=NUM_TOKENS,
    num_tokens=NUM_TOKENS,
    num_cached_tokens=0,
    seed=1,
    position=NUM_TOKENS,
)
BLOCKS = [BlockId(i) for i in range(8)]

Bytes = npt.NDArray[np.uint8]


def nixl(epoch: EngineEpoch, arena_bytes: Bytes) -> NixlBackend:
    arena = Arena(base_address=arena_bytes.ctypes.data, num_bytes=arena_bytes.size)
    return NixlBackend(epoch, Rank(0), LAYOUT, arena)


def kv(seed: int, num_blocks: int = NUM_BLOCKS) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_blocks * LAYOUT.block_bytes, np.uint8)


class Source:
    """One source rank: its arena, backend and push machine, on a fake clock."""

    def __init__(self, backend: Backend, arena_bytes: Bytes, verify: bool = False) -> None:
        self.clock = FakeClock()
        self.backend = backend
        read = host_reader(Arena(base_address=arena_bytes.ctypes.data, num_bytes=arena_bytes.size))

        def sum_of(ranges: "list[CopyRange] | object") -> int:
            return checksum(read, [(r.src_offset, r.num_bytes) for r in ranges])  # type: ignore[attr-defined]

        self.pushes = Pushes(
            0, [LAYOUT], FINGERPRINT, self.clock, checksum=sum_of if verify else None, min_write_units=1
        )
        self.said: list[RankPushed | RankFailed | RankStopped] = []

    def do(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Connect):
                self.backend.connect(output.peer)
            elif isinstance(output, Disconnect):
                self.backend.disconnect(output.agent_name)
            elif isinstance(output, Post):
                self.backend.post(output.write)
            elif isinstance(output, Cancel):
                self.backend.cancel(output.transfer_id)
            else:
                self.said.append(output)

    def poll(self) -> None:
        for event in self.backend.poll():
            assert isinstance(event, WriteDone | WriteFailed)
            self.do(self.pushes.event(event))

    def push(self, peer: RankEndpoint, epoch: EngineEpoch, blocks: list[BlockId], transfer_id: TransferId = T) -> None:
        """Half of the prompt is computed when the grant comes; `finish` computes the rest."""
        self.pushes.open(transfer_id, NUM_TOKENS, 100.0)
        self.do(self.pushes.progress(transfer_id, NUM_TOKENS // 2, BLOCKS))
        self.do(self.pushes.push(order(peer, epoch, blocks, transfer_id)))

    def finish(self, transfer_id: TransferId = T) -> None:
        self.do(self.pushes.prefilled(transfer_id, COMMIT, BLOCKS))


def order(peer: RankEndpoint, epoch: EngineEpoch, blocks: list[BlockId], transfer_id: TransferId) -> Push:
    endpoint = WorkerEndpoint(engine_id=EngineId("d"), epoch=epoch, dp_rank=0, fingerprint=FINGERPRINT, ranks=[peer])
    return Push(
        request_id=RequestId("r"),
        transfer_id=transfer_id,
        target=TARGET,
        target_epoch=epoch,
        endpoint=endpoint,
        block_ids=blocks,
        num_cached_tokens=0,
        deadline_s=10.0,
    )


def wait_for(condition: Callable[[], object], *polls: Callable[[], None], limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "waited too long"
        for poll in polls:
            poll()
        time.sleep(1e-4)  # lets the other process have the core


# ---- a target in another process


def target_process(pipe: Connection, epoch: EngineEpoch) -> None:
    """Offers an arena and polls; answers any message by the records that came and a digest of its bytes."""
    arena_bytes = np.zeros(NUM_BLOCKS * LAYOUT.block_bytes, np.uint8)
    backend = nixl(epoch, arena_bytes)
    pipe.send_bytes(msgspec.msgpack.encode(backend.endpoint()))
    records: list[Record] = []
    while True:
        records += [event.record for event in backend.poll() if isinstance(event, Received)]
        if pipe.poll(1e-3):
            pipe.recv_bytes()
            pipe.send_bytes(msgspec.msgpack.encode(records))
            pipe.send_bytes(arena_bytes.tobytes())


class RemoteTarget:
    def __init__(self, context: SpawnContext, epoch: str) -> None:
        self.epoch = EngineEpoch(epoch)
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=target_process, args=(theirs, self.epoch), daemon=True)
        self.process.start()
        assert self.pipe.poll(60.0)
        self.endpoint = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=RankEndpoint)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def look(self) -> tuple[list[Record], Bytes]:
        self.pipe.send_bytes(b"look")
        records = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=list[Record])
        return records, np.frombuffer(self.pipe.recv_bytes(), np.uint8)


@pytest.fixture
def start_target() -> Iterator[Callable[[str], RemoteTarget]]:
    context = multiprocessing.get_context("spawn")
    targets: list[RemoteTarget] = []

    def start(epoch: str) -> RemoteTarget:
        targets.append(RemoteTarget(context, epoch))
        return targets[-1]

    yield start
    for target in targets:
        target.process.kill()
        target.process.join(5.0)


@pytest.fixture
def source_bytes() -> Bytes:
    return kv(seed=1)


@pytest.fixture
def source(source_bytes: Bytes) -> Iterator[Source]:
    source = Source(nixl(EngineEpoch("p"), source_bytes), source_bytes)
    yield source
    source.backend.close()


@pytest.mark.processes
def test_a_target_that_dies_fails_the_push_and_frees_the_source_when_its_death_is_known(
    source: Source, start_target: Callable[[str], RemoteTarget]
) -> None:
    target = start_target("d")
    source.push(target.endpoint, target.epoch, BLOCKS)
    wait_for(lambda: source.pushes.load().num_pending and target.look()[0], source.poll)
    target.signal(signal.SIGKILL)
    target.process.join(5.0)
    source.finish()
    wait_for(lambda: source.said, source.poll)
    failed = source.said[0]
    assert isinstance(failed, RankFailed)
    assert failed.error.code == "transfer_failed"
    source.do(source.pushes.target_dead(target.epoch))
    assert RankStopped(T) in source.said
    assert source.pushes.load().num_pending == 0

    again = start_target("d-again")  # the same engine in its next life
    source.said.clear()
    source.push(again.endpoint, again.epoch, BLOCKS, TransferId("second"))
    source.finish(TransferId("second"))
    wait_for(lambda: source.said, source.poll)
    assert isinstance(source.said[0], RankPushed)


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shm,self,tcp", "tcp,self"])
def test_a_stopped_target_meets_the_deadline_and_the_source_stops_when_it_wakes(
    transport: str,
    source_bytes: Bytes,
    start_target: Callable[[str], RemoteTarget],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", transport)
    source = Source(nixl(EngineEpoch("p"), source_bytes), source_bytes)
    target = start_target("d")
    source.push(target.endpoint, target.epoch, BLOCKS)
    wait_for(lambda: target.look()[0], source.poll)
    target.signal(signal.SIGSTOP)
    source.finish()
    for _ in range(100):
        source.poll()
    assert source.said == [], "no one says that the bytes have arrived"
    source.clock.advance(10.0)
    source.do(source.pushes.tick())
    assert [type(said) for said in source.said] == [RankFailed], "failed at the deadline, not stopped yet"
    for _ in range(100):
        source.poll()
    assert len(source.said) == 1
    target.signal(signal.SIGCONT)
    wait_for(lambda: RankStopped(T) in source.said, source.poll)
    wait_for(lambda: any(isinstance(r, StoppedRecord) for r in target.look()[0]), source.poll)
    _, landed = target.look()
    assert np.array_equal(landed[: 8 * LAYOUT.block_bytes], source_bytes[: 8 * LAYOUT.block_bytes])
    assert not landed[8 * LAYOUT.block_bytes :].any()
    source.backend.close()


# ---- a source in another process


def source_process(pipe: Connection) -> None:
    """A source that pushes into the endpoint it is given: half at once, the rest when told, then aborts when told."""
    arena_bytes = kv(seed=1)
    source = Source(nixl(EngineEpoch("p"), arena_bytes), arena_bytes)
    peer = msgspec.msgpack.decode(pipe.recv_bytes(), type=RankEndpoint)
    source.push(peer, EngineEpoch("d"), [BlockId(i) for i in range(8, 16)])
    while True:
        source.poll()
        if pipe.poll(1e-3):
            pipe.recv_bytes()
            if T in source.pushes:
                source.finish()
                source.do(source.pushes.abort(T))


@pytest.mark.processes
def test_a_stopped_source_that_wakes_writes_into_no_reused_block() -> None:
    """Its lease runs out, its blocks are wanted, and it still has half of the transfer to write."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=source_process, args=(theirs,), daemon=True)
    process.start()
    arena_bytes = np.zeros(NUM_BLOCKS * LAYOUT.block_bytes, np.uint8)
    backend = nixl(EngineEpoch("d"), arena_bytes)
    fills, clock = Fills(EngineEpoch("d")), FakeClock()
    free = [BlockId(i) for i in range(8, 24)]  # the first request takes 8-15, which the source is told too

    def take(request: Request) -> tuple[list[BlockId], int] | None:
        if len(free) < 8:
            return None
        taken = free[:8]
        del free[:8]
        return taken, 0

    reservations = Reservations(1, 32, 5.0, take, free.extend, clock)
    request = Request(id=RequestId("r"), token_ids=[1] * NUM_TOKENS, num_prompt_tokens=1, sampling=SamplingParams())
    try:
        (grant,) = reservations.reserve(T, request, EngineEpoch("p"), 100.0)
        assert isinstance(grant, Grant)
        fill = Fill(T, LAYOUT, NUM_TOKENS, 0)
        fills.open(fill)
        ours.send_bytes(msgspec.msgpack.encode(backend.endpoint()))

        def poll() -> None:
            for event in backend.poll():
                assert isinstance(event, Received)
                fills.add(event.record)

        wait_for(lambda: fill.num_bytes, poll, limit_s=60.0)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        clock.advance(5.0)
        reservations.tick()
        held = reservations.get(T)
        assert held is not None
        assert held.state is ReservationState.QUARANTINED

        (other,) = reservations.reserve(TransferId("other"), request, EngineEpoch("q"), 100.0)
        assert isinstance(other, Grant)
        for block in other.block_ids:
            arena_bytes[block * LAYOUT.block_bytes : (block + 1) * LAYOUT.block_bytes] = 0xAB
        assert reservations.reserve(TransferId("third"), request, EngineEpoch("q"), 100.0) == [], "no block is free"

        ours.send_bytes(b"finish and abort")
        os.kill(process.pid, signal.SIGCONT)
        wait_for(lambda: fill.is_stopped, poll)
        assert (arena_bytes[16 * LAYOUT.block_bytes : 24 * LAYOUT.block_bytes] == 0xAB).all()
        freed, granted = reservations.rank_stopped(T, 0)
        assert freed == Freed(T)
        assert isinstance(granted, Grant)
        assert set(granted.block_ids) == set(range(8, 16))
    finally:
        process.kill()
        process.join(5.0)
        backend.close()


# ---- faults by seed, over NIXL between two agents of this process


@pytest.mark.parametrize(
    "faults",
    [
        Faults(corrupt=0.5),
        Faults(delay=0.7, repeat=0.5),
        Faults(drop=0.2, fail=0.1, tear=0.1),
        Faults(drop=0.1, fail=0.1, tear=0.1, late=0.1, corrupt=0.1, repeat=0.2, delay=0.2),
    ],
)
def test_under_faults_a_verified_transfer_is_right_or_fails_by_name(faults: Faults, source_bytes: Bytes) -> None:
    target_bytes = np.zeros(NUM_BLOCKS * LAYOUT.block_bytes, np.uint8)
    target_arena = Arena(base_address=target_bytes.ctypes.data, num_bytes=target_bytes.size)
    target, epoch = nixl(EngineEpoch("d"), target_bytes), EngineEpoch("d")
    backend = FaultyBackend(nixl(EngineEpoch("p"), source_bytes), faults, seed=3)
    source = Source(backend, source_bytes, verify=True)
    rng = random.Random(0)
    outcomes: list[str] = []
    for number in range(12):
        transfer_id = TransferId(f"t{number}")
        blocks = [BlockId(i) for i in rng.sample(range(NUM_BLOCKS), 8)]
        target_bytes[:] = 0
        fills = Fills(epoch)

        def verify(record: SourceRecord, blocks: list[BlockId] = blocks) -> bool:
            ranges = written_ranges(LAYOUT, record.head_ids, blocks, record.first_unit, record.num_units)
            return checksum(host_reader(target_arena), ranges) == record.checksum

        fill = Fill(transfer_id, LAYOUT, NUM_TOKENS, 0, verify)
        fills.open(fill)
        source.said.clear()
        source.push(target.endpoint(), epoch, blocks, transfer_id)
        source.do(source.pushes.progress(transfer_id, NUM_TOKENS * 3 // 4, BLOCKS))
        source.finish(transfer_id)
        for _ in range(400):
            source.poll()
            for event in target.poll():
                assert isinstance(event, Received)
                fills.add(event.record)
        if fill.state is FillState.FILLED:
            for index, block in enumerate(blocks):
                landed = target_bytes[block * LAYOUT.block_bytes : (block + 1) * LAYOUT.block_bytes]
                assert np.array_equal(
                    landed, source_bytes[index * LAYOUT.block_bytes : (index + 1) * LAYOUT.block_bytes]
                )
            outcomes.append("filled")
        elif fill.error is not None:
            outcomes.append(fill.error.code)
        else:
            source.clock.advance(10.0)  # the deadline ends what no event ended
            source.do(source.pushes.tick())
            failed = [said for said in source.said if isinstance(said, RankFailed)]
            assert len(failed) == 1
            outcomes.append(failed[0].error.code)
        source.do(source.pushes.abort(transfer_id))
        source.do(source.pushes.target_dead(EngineEpoch("none")))
    backend.close()
    target.close()
    assert backend.num_injected, "some fault was injected"
    assert "filled" in outcomes or faults.corrupt >= 0.5
    assert set(outcomes) <= {"filled", "checksum_mismatch", "transfer_failed", "deadline_exceeded"}
    if not (faults.drop or faults.fail or faults.corrupt):
        assert set(outcomes) == {"filled"}, "late and repeated is not lost"
    if faults.corrupt:
        assert "checksum_mismatch" in outcomes
