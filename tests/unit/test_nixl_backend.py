"""The real NIXL between agents of this process."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from pd_cluster.errors import TransferFailed
from pd_cluster.ids import EngineEpoch, Rank, TransferId
from pd_cluster.kv.layout import KvLayout
from pd_cluster.transfer.contract import (
    Arena,
    CopyRange,
    Event,
    Received,
    SourceRecord,
    StoppedRecord,
    Write,
    WriteDone,
    WriteFailed,
)
from pd_cluster.transfer.nixl import NixlBackend

LAYOUT = KvLayout(kind="mla", num_layers=1, head_ids=(0,), token_values=64, dtype="bfloat16", block_size=16)
T = TransferId("t")


class Peer:
    """An arena with its backend."""

    def __init__(self, epoch: str, num_bytes: int = 1 << 20) -> None:
        self.bytes: npt.NDArray[np.uint8] = np.zeros(num_bytes, np.uint8)
        arena = Arena(base_address=self.bytes.ctypes.data, num_bytes=num_bytes)
        self.backend = NixlBackend(EngineEpoch(epoch), Rank(0), LAYOUT, arena)
        self.events: list[Event] = []

    @property
    def name(self) -> str:
        return self.backend.endpoint().agent_name


@pytest.fixture
def peers() -> Iterator[tuple[Peer, Peer]]:
    source, target = Peer("source"), Peer("target")
    source.bytes[:] = np.random.default_rng(0).integers(0, 256, source.bytes.size, np.uint8)
    source.backend.connect(target.backend.endpoint())
    yield source, target
    source.backend.close()
    target.backend.close()


def poll_until(condition: Callable[[], bool], *peers: Peer, limit_s: float = 5.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, [peer.events for peer in peers]
        for peer in peers:
            peer.events += peer.backend.poll()


def source_record(num_units: int = 1) -> SourceRecord:
    return SourceRecord(
        transfer_id=T,
        epoch=EngineEpoch("target"),
        source=0,
        num_sources=1,
        head_ids=(0,),
        first_unit=0,
        num_units=num_units,
        total_units=num_units,
        num_bytes=num_units * LAYOUT.unit_bytes,
        checksum=2**32 - 1,
    )


def write(peer: str, copies: list[CopyRange], write_id: int = 1) -> Write:
    return Write(write_id=write_id, transfer_id=T, peer=peer, copies=copies, record=source_record())


def test_a_write_lands_with_its_record_behind_it(peers: tuple[Peer, Peer]) -> None:
    source, target = peers
    copies = [CopyRange(i * 2048, (99 - i) * 4096, 2048) for i in range(100)]
    source.backend.post(write(target.name, copies))
    poll_until(lambda: bool(source.events and target.events), source, target)
    assert target.events == [Received(source_record())]
    (done,) = source.events
    assert isinstance(done, WriteDone)
    assert (done.write_id, done.transfer_id, done.num_bytes) == (1, T, 100 * 2048)
    for copy in copies:
        expected = source.bytes[copy.src_offset : copy.src_offset + copy.num_bytes]
        assert np.array_equal(target.bytes[copy.dst_offset : copy.dst_offset + copy.num_bytes], expected)
    assert not target.bytes[2048:4096].any(), "nothing between the ranges"


def test_a_record_travels_alone(peers: tuple[Peer, Peer]) -> None:
    source, target = peers
    record = StoppedRecord(transfer_id=T, epoch=EngineEpoch("target"), source=0, num_sources=1)
    source.backend.post(replace(write(target.name, []), record=record))
    poll_until(lambda: bool(source.events and target.events), source, target)
    assert target.events == [Received(record)]
    assert source.events == [WriteDone(1, T, 0, 0.0)]


def test_a_peer_never_met_fails_the_write_quietly(peers: tuple[Peer, Peer]) -> None:
    source, _ = peers
    source.backend.post(write("nobody", [CopyRange(0, 0, 16)]))
    (failed,) = source.backend.poll()
    assert isinstance(failed, WriteFailed)
    assert failed.quiet
    assert "nobody" in failed.reason


@pytest.mark.parametrize("copy", [CopyRange(1 << 20, 0, 16), CopyRange(0, (1 << 20) - 8, 16)])
def test_ranges_outside_the_arenas_are_refused(peers: tuple[Peer, Peer], copy: CopyRange) -> None:
    source, target = peers
    source.backend.post(write(target.name, [CopyRange(0, 0, 16), copy]))
    (failed,) = source.backend.poll()
    assert isinstance(failed, WriteFailed)
    assert failed.quiet
    assert "arena" in failed.reason
    assert not target.bytes.any()


def test_a_write_waits_for_its_target_and_survives_a_cancel(peers: tuple[Peer, Peer]) -> None:
    source, target = peers
    source.backend.post(write(target.name, [CopyRange(0, 0, 4096)]))
    source.backend.cancel(T)
    for _ in range(200):
        source.events += source.backend.poll()
    assert source.events == [], "its target does not poll, and what is posted cannot be recalled"
    poll_until(lambda: bool(source.events), source, target)
    assert isinstance(source.events[0], WriteDone)


def test_disconnecting_ends_a_write_that_no_one_answers(peers: tuple[Peer, Peer]) -> None:
    source, target = peers
    source.backend.post(write(target.name, [CopyRange(0, 0, 4096)]))
    source.events += source.backend.poll()
    source.backend.disconnect(target.name)
    source.backend.disconnect(target.name)
    source.events += source.backend.poll()
    (failed,) = source.events
    assert isinstance(failed, WriteFailed)
    assert not failed.quiet, "its bytes may be on their way"


def test_a_peer_that_closed_fails_writes_and_its_successor_is_met_anew(peers: tuple[Peer, Peer]) -> None:
    source, target = peers
    source.backend.post(write(target.name, [CopyRange(0, 0, 16)]))
    poll_until(lambda: bool(source.events and target.events), source, target)
    source.events.clear()
    target.backend.close()
    source.backend.post(write(target.name, [CopyRange(0, 0, 16)], write_id=2))
    source.backend.post(write(target.name, [CopyRange(0, 0, 16)], write_id=3))
    poll_until(lambda: len(source.events) == 2, source)
    assert all(isinstance(event, WriteFailed) for event in source.events)
    assert source.events[1].quiet, "the second was never posted"  # type: ignore[union-attr]

    successor = Peer("target-again")
    target.backend = successor.backend
    source.backend.connect(successor.backend.endpoint())
    source.events.clear()
    source.backend.post(write(successor.name, [CopyRange(0, 0, 16)], write_id=4))
    poll_until(lambda: bool(source.events and successor.events), source, successor)
    assert isinstance(source.events[0], WriteDone)
    assert np.array_equal(successor.bytes[:16], source.bytes[:16])


def test_garbage_from_a_peer_is_counted(peers: tuple[Peer, Peer]) -> None:
    source, target = peers
    source.backend._agent.send_notif(target.name, b"\xc1 not a record")
    poll_until(lambda: target.backend.num_undecodable == 1, source, target)
    assert target.events == []


def test_metadata_that_is_not_the_peers_is_refused(peers: tuple[Peer, Peer]) -> None:
    source, target = peers
    endpoint = target.backend.endpoint()
    with pytest.raises(TransferFailed, match="metadata"):
        source.backend.connect(replace(endpoint, agent_name="other", agent_metadata=b"junk"))
    third = Peer("third")
    with pytest.raises(TransferFailed, match="is third/0's"):
        source.backend.connect(replace(third.backend.endpoint(), agent_name="other"))
    third.backend.close()


def test_a_record_that_nixl_refuses_is_tried_again_until_cancelled(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nixl import _bindings

    source, target = peers
    send, refusals = source.backend._agent.send_notif, [2]

    def send_later(name: str, message: bytes) -> None:
        if refusals[0]:
            refusals[0] -= 1
            raise _bindings.nixlBackendError("busy")
        send(name, message)

    monkeypatch.setattr(source.backend._agent, "send_notif", send_later)
    source.backend.post(write(target.name, []))
    assert source.backend.poll() == []
    poll_until(lambda: bool(source.events and target.events), source, target)
    assert refusals == [0]

    source.events.clear()
    refusals[0] = 1000
    source.backend.post(write(target.name, [], write_id=2))
    source.backend.cancel(T)
    (failed,) = source.backend.poll()
    assert isinstance(failed, WriteFailed)
    assert failed.quiet
