"""Reads through the real NIXL, between agents of this process."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec import msgpack

from pd_cluster.errors import TransferFailed
from pd_cluster.ids import Rank
from pd_cluster.transfer.contract import Arena
from pd_cluster.transfer.reads import NixlReader, ReadEnded

OWNER = Rank(1)


class Peer:
    """A rank's memory and its reader."""

    def __init__(self, name: str) -> None:
        self.memory = torch.arange(4096, dtype=torch.int32).view(torch.uint8)
        self.buffers = torch.zeros(4096, dtype=torch.uint8)
        arena = Arena(base_address=self.memory.data_ptr(), num_bytes=self.memory.numel())
        self.reader = NixlReader(name, arena, self.buffers)


@pytest.fixture
def peers() -> Iterator[tuple[Peer, Peer]]:
    reading, owner = Peer("reading"), Peer("owner")
    yield reading, owner
    reading.reader.close()
    owner.reader.close()


def ended(*peers: Peer) -> ReadEnded:
    until_s = time.monotonic() + 5.0
    while time.monotonic() < until_s:
        for found in [peer.reader.poll() for peer in peers]:
            if found:
                return found[0]
    raise AssertionError("no read has ended")


def test_a_piece_of_a_peers_memory_arrives(peers: tuple[Peer, Peer]) -> None:
    reading, owner = peers
    reading.reader.connect(OWNER, owner.reader.endpoint())
    read_id = reading.reader.post(OWNER, 1024, reading.buffers[:512])
    assert ended(reading, owner) == ReadEnded(read_id, None)
    assert torch.equal(reading.buffers[:512], owner.memory[1024:1536])


def test_a_peer_under_a_wrong_name_is_refused_and_nothing_of_it_stays(peers: tuple[Peer, Peer]) -> None:
    reading, owner = peers
    _, metadata, *rest = msgpack.decode(owner.reader.endpoint())
    with pytest.raises(TransferFailed, match="is owner's"):
        reading.reader.connect(OWNER, msgpack.encode(["other", metadata, *rest]))
    piece = reading.reader._agent.get_xfer_descs([(owner.memory.data_ptr(), 1, 0)], "DRAM")
    assert not reading.reader._agent.check_remote_metadata("owner", piece)
    reading.reader.connect(OWNER, owner.reader.endpoint())
    assert reading.reader._agent.check_remote_metadata("owner", piece)


def test_a_read_that_nixl_refuses_keeps_no_transfer(peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    from nixl import _bindings

    reading, owner = peers
    handles: list[Any] = []

    def refuse(handle: Any) -> str:
        handles.append(handle)
        raise _bindings.nixlBackendError("busy")

    reading.reader.connect(OWNER, owner.reader.endpoint())
    monkeypatch.setattr(reading.reader._agent, "transfer", refuse)
    with pytest.raises(TransferFailed, match="busy"):
        reading.reader.post(OWNER, 0, reading.buffers[:512])
    assert "released=True" in repr(handles[0])
