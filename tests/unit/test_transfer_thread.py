import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pd_cluster.bench.transfer import run
from pd_cluster.ids import EngineEpoch, Rank, TransferId
from pd_cluster.kv.layout import KvLayout
from pd_cluster.transfer.contract import (
    Arena,
    CopyRange,
    Event,
    RankEndpoint,
    Received,
    StoppedRecord,
    Write,
    WriteDone,
    WriteFailed,
)
from pd_cluster.transfer.faulty import Faults, FaultyBackend
from pd_cluster.transfer.local import LocalBackend, LocalFabric
from pd_cluster.transfer.nixl import NixlBackend
from pd_cluster.transfer.thread import MAX_BUSY_PAUSE_S, MAX_IDLE_PAUSE_S, SPIN_S, TransferThread, next_pause_s

LAYOUT = KvLayout(kind="mla", num_layers=1, head_ids=(0,), token_values=64, dtype="bfloat16", block_size=16)
T = TransferId("t")


class Side:
    """An arena, a transfer thread, and what it said."""

    def __init__(self, fabric: LocalFabric, name: str, faults: Faults | None = None) -> None:
        self.bytes = np.zeros(1 << 16, np.uint8)
        arena = Arena(base_address=self.bytes.ctypes.data, num_bytes=self.bytes.size)
        local = LocalBackend(fabric, EngineEpoch(name), Rank(0), LAYOUT, arena)
        self.backend = FaultyBackend(local, faults, seed=0) if faults else local
        self.events: list[Event] = []
        self.failures: list[BaseException] = []
        self.changed = threading.Condition()
        self.thread = TransferThread(self.backend, self._on_events, self._on_failure)
        self.thread.start()

    def _on_events(self, events: list[Event]) -> None:
        with self.changed:
            self.events += events
            self.changed.notify_all()

    def _on_failure(self, error: BaseException) -> None:
        with self.changed:
            self.failures.append(error)
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=5.0), (self.events, self.failures)


@pytest.fixture
def fabric() -> Iterator[tuple[LocalFabric, list[Side]]]:
    sides: list[Side] = []
    yield LocalFabric(), sides
    for side in sides:
        side.thread.stop()
        assert not side.thread.is_alive


def write(peer: str, write_id: int = 1) -> Write:
    record = StoppedRecord(transfer_id=T, epoch=EngineEpoch("b"), source=0, num_sources=1)
    return Write(write_id=write_id, transfer_id=T, peer=peer, copies=[CopyRange(0, 0, 64)], record=record)


def test_writes_queued_from_another_thread_land(fabric: tuple[LocalFabric, list[Side]]) -> None:
    net, sides = fabric
    sides += [Side(net, "a"), Side(net, "b")]
    a, b = sides
    a.bytes[:64] = 7
    a.thread.connect(b.backend.endpoint())
    for write_id in range(5):
        a.thread.post(write("b/0", write_id))
    a.wait_for(lambda: len(a.events) == 5)
    b.wait_for(lambda: len(b.events) == 5)
    assert [event.write_id for event in a.events if isinstance(event, WriteDone)] == [0, 1, 2, 3, 4]
    assert all(isinstance(event, Received) for event in b.events)
    assert (b.bytes[:64] == 7).all()


def test_a_refused_connection_fails_each_write_with_its_reason(fabric: tuple[LocalFabric, list[Side]]) -> None:
    net, sides = fabric
    sides.append(Side(net, "a"))
    (a,) = sides
    gone = RankEndpoint(
        rank=Rank(0), agent_name="gone/0", agent_metadata=b"", base_address=0, num_bytes=0, device_id=0, layout=LAYOUT
    )
    a.thread.connect(gone)
    a.thread.post(write("gone/0"))
    a.wait_for(lambda: bool(a.events))
    (failed,) = a.events
    assert isinstance(failed, WriteFailed)
    assert "not on this fabric" in failed.reason
    assert a.thread.is_alive, "a peer's fault does not end the thread"


def test_a_write_that_never_ends_is_ended_by_cancel_and_by_disconnect(fabric: tuple[LocalFabric, list[Side]]) -> None:
    net, sides = fabric
    sides += [Side(net, "a", Faults(drop=1.0)), Side(net, "b")]
    a, b = sides
    a.thread.connect(b.backend.endpoint())
    for end in (lambda: a.thread.cancel(T), lambda: a.thread.disconnect("b/0")):
        a.events.clear()
        a.thread.post(write("b/0"))
        end()
        a.wait_for(lambda: bool(a.events))
        assert isinstance(a.events[0], WriteFailed)


def test_an_error_in_the_thread_reaches_its_owner(fabric: tuple[LocalFabric, list[Side]]) -> None:
    net, sides = fabric
    sides.append(Side(net, "a"))
    (a,) = sides
    a.thread.post(None)  # type: ignore[arg-type]
    a.wait_for(lambda: bool(a.failures))
    assert isinstance(a.failures[0], AttributeError)
    assert net.ranks == {} or not a.thread.is_alive


def test_a_thread_that_never_started_stops(fabric: tuple[LocalFabric, list[Side]]) -> None:
    net, _ = fabric
    arena = Arena(base_address=0, num_bytes=0)
    backend = LocalBackend(net, EngineEpoch("idle"), Rank(0), LAYOUT, arena)
    TransferThread(backend, lambda events: None, lambda error: None).stop()
    assert net.ranks == {}


def test_an_idle_thread_polls_slowly_and_wakes_at_once_for_a_call(fabric: tuple[LocalFabric, list[Side]]) -> None:
    net, sides = fabric
    sides += [Side(net, "a"), Side(net, "b")]
    a, b = sides
    a.thread.connect(b.backend.endpoint())
    time.sleep(0.3)  # lets the pauses grow; not a wait for a state
    before, start_s = a.thread.num_polls, time.monotonic()
    time.sleep(0.2)
    rate = (a.thread.num_polls - before) / (time.monotonic() - start_s)
    assert rate < 100, rate
    a.thread.post(write("b/0"))
    a.wait_for(lambda: bool(a.events))


def test_what_is_expected_ends_an_idle_pause_at_once(fabric: tuple[LocalFabric, list[Side]]) -> None:
    net, sides = fabric
    sides += [Side(net, "a"), Side(net, "b")]
    a, b = sides
    time.sleep(1.2)  # lets the pauses grow to a tenth of a second
    before = b.thread.num_polls
    b.thread.is_expecting = True
    a.thread.connect(b.backend.endpoint())
    a.thread.post(write("b/0"))
    start_s = time.monotonic()
    b.wait_for(lambda: bool(b.events))
    assert time.monotonic() - start_s < 0.05
    assert b.thread.num_polls > before


def test_polls_follow_each_other_only_while_our_own_writes_are_young() -> None:
    assert next_pause_s(0.0, writing=True, expecting=False) == 0.0
    assert next_pause_s(SPIN_S / 2, writing=True, expecting=True) == 0.0
    assert 0.0 < next_pause_s(0.0, writing=False, expecting=True) < next_pause_s(0.1, writing=False, expecting=True)
    assert next_pause_s(60.0, writing=True, expecting=False) == MAX_BUSY_PAUSE_S
    assert next_pause_s(60.0, writing=False, expecting=False) == MAX_IDLE_PAUSE_S


def test_an_idle_thread_with_nixl_uses_little_of_a_core() -> None:
    bytes_ = np.zeros(1 << 16, np.uint8)
    arena = Arena(base_address=bytes_.ctypes.data, num_bytes=bytes_.size)
    thread = TransferThread(NixlBackend(EngineEpoch("idle"), Rank(0), LAYOUT, arena), lambda _: None, lambda _: None)
    thread.start()
    try:
        time.sleep(0.3)
        before_s, start_s = time.process_time(), time.monotonic()
        time.sleep(1.0)
        share = (time.process_time() - before_s) / (time.monotonic() - start_s)
    finally:
        thread.stop()
    print(f"idle share of a core: {share:.4f}")
    assert share < 0.04, share  # 0.005 measured; the rest is room for a busy machine


@pytest.mark.processes
def test_the_transfer_benchmark_moves_the_bytes_and_reports_a_ratio() -> None:
    report = run(total_bytes=4 << 20, block_bytes=64 << 10, write_bytes=1 << 20, repeats=3)
    assert (report["total_bytes"], report["num_writes"]) == (4 << 20, 4)
    assert 0 < report["ratio"] == pytest.approx(report["nixl_gb_s"] / report["memcpy_gb_s"], rel=0.05)
