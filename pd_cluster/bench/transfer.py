"""How fast KV moves between two processes of this host, against what one thread copies by itself.

A source and a target process each have an arena, a NIXL backend and a transfer thread, as ranks have, and a CPU each
where there are two. The source writes `total_bytes` as blocks scattered over the target's arena and counts until every
write is done; the target counts records. In the same run one thread copies the same blocks with memcpy, and,
where the host permits it, `process_vm_readv` reads them from the source, which is the kernel's own way between two
processes and the bound of UCX's shared memory path.
"""

import ctypes
import multiprocessing
import os
import queue
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pd_cluster.cpus import bind
from pd_cluster.errors import TransferFailed
from pd_cluster.ids import EngineEpoch, Rank, TransferId
from pd_cluster.kv.layout import KvLayout
from pd_cluster.transfer.contract import (
    Arena,
    CopyRange,
    Event,
    RankEndpoint,
    Received,
    SourceRecord,
    Write,
    WriteDone,
    WriteFailed,
)
from pd_cluster.transfer.nixl import NixlBackend
from pd_cluster.transfer.thread import TransferThread

LAYOUT = KvLayout(kind="mla", num_layers=1, head_ids=(0,), token_values=128, dtype="bfloat16", block_size=16)
EPOCH = EngineEpoch("bench-target")
TIMEOUT_S = 60.0

Bytes = npt.NDArray[np.uint8]


def _rank(
    epoch: str, arena_bytes: Bytes
) -> tuple[NixlBackend, TransferThread, "queue.SimpleQueue[Event | BaseException]"]:
    """A started rank and the queue of what its thread says."""
    arena = Arena(base_address=arena_bytes.ctypes.data, num_bytes=arena_bytes.size)
    backend = NixlBackend(EngineEpoch(epoch), Rank(0), LAYOUT, arena)
    said: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()

    def on_events(events: list[Event]) -> None:
        for event in events:
            said.put(event)

    thread = TransferThread(backend, on_events, said.put)
    thread.start()
    return backend, thread, said


def _own_cpu(index: int) -> frozenset[int] | None:
    """A CPU for one of the two sides, so that neither takes the other's away; None where there is one for both."""
    cpus = sorted(os.sched_getaffinity(0))
    return frozenset({cpus[index]}) if len(cpus) > 1 else None


def _target(pipe: Connection, total_bytes: int, cpus: frozenset[int] | None) -> None:
    """The target process: offer the arena, count records, and say when it has those of a round."""
    if cpus is not None:
        bind(cpus)
    arena_bytes = np.zeros(total_bytes, np.uint8)
    backend, thread, said = _rank(EPOCH, arena_bytes)
    thread.is_expecting = True
    pipe.send_bytes(msgspec.msgpack.encode(backend.endpoint()))
    while num_records := int.from_bytes(pipe.recv_bytes()):
        for _ in range(num_records):
            event = said.get(timeout=TIMEOUT_S)
            assert isinstance(event, Received), event
        pipe.send_bytes(b"received")
    pipe.send_bytes(arena_bytes[:: max(total_bytes // 4096, 1)].tobytes())
    thread.stop()


def run(
    total_bytes: int = 256 << 20, block_bytes: int = 1 << 20, write_bytes: int = 16 << 20, repeats: int = 15
) -> dict[str, Any]:
    """Move `total_bytes` in blocks of `block_bytes`, at most `write_bytes` to a write, `repeats` times; medians.

    GB/s are 1e9 bytes a second. `process_vm_gb_s` is None where the host forbids it.
    """
    num_blocks = total_bytes // block_bytes
    total_bytes = num_blocks * block_bytes
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, total_bytes, np.uint8)
    order = rng.permutation(num_blocks)
    copies = [CopyRange(i * block_bytes, int(order[i]) * block_bytes, block_bytes) for i in range(num_blocks)]

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_target, args=(theirs, total_bytes, _own_cpu(1)), daemon=True)
    process.start()
    before, ours_alone = os.sched_getaffinity(0), _own_cpu(0)
    if ours_alone is not None:
        bind(ours_alone)
    _, thread, said = _rank("bench-source", source)
    try:
        peer = msgspec.msgpack.decode(_receive(ours), type=RankEndpoint)
        thread.connect(peer)
        per_write = max(write_bytes // block_bytes, 1)
        writes = [copies[i : i + per_write] for i in range(0, num_blocks, per_write)]
        nixl_s, memcpy_s, readv_s = [], [], []
        destination = np.zeros_like(source)
        _push(thread, said, ours, peer.agent_name, writes)  # connections and page faults
        for _ in range(repeats):
            memcpy_s.append(_memcpy(source, destination, copies))
            nixl_s.append(_push(thread, said, ours, peer.agent_name, writes))
            readv_s.append(_process_vm_readv(process.pid or 0, peer.base_address, destination))
        ours.send_bytes((0).to_bytes(4))
        expected = np.empty_like(source)
        _memcpy(source, expected, copies)
        assert _receive(ours) == expected[:: max(total_bytes // 4096, 1)].tobytes(), "the target has other bytes"
    finally:
        os.sched_setaffinity(0, before)
        thread.stop()
        process.join(10.0)
        process.kill()
    nixl, memcpy = statistics.median(nixl_s), statistics.median(memcpy_s)
    readv = statistics.median([s for s in readv_s if s is not None] or [0.0])
    return {
        "total_bytes": total_bytes,
        "block_bytes": block_bytes,
        "num_writes": len(writes),
        "ucx_tls": os.environ.get("UCX_TLS"),
        "nixl_gb_s": round(total_bytes / nixl / 1e9, 2),
        "memcpy_gb_s": round(total_bytes / memcpy / 1e9, 2),
        "process_vm_gb_s": round(total_bytes / readv / 1e9, 2) if readv else None,
        "ratio": round(memcpy / nixl, 3),
        "process_vm_ratio": round(readv / nixl, 3) if readv else None,
    }


def _receive(pipe: Connection) -> bytes:
    if not pipe.poll(TIMEOUT_S):
        raise TransferFailed(f"the target process said nothing for {TIMEOUT_S:g} s")
    return pipe.recv_bytes()


def _push(
    thread: TransferThread,
    said: "queue.SimpleQueue[Event | BaseException]",
    pipe: Connection,
    peer: str,
    writes: list[list[CopyRange]],
) -> float:
    """Seconds from the first post until every write is done; then wait until the target has all records."""
    pipe.send_bytes(len(writes).to_bytes(4))
    start_s = time.perf_counter()
    for write_id, copies in enumerate(writes):
        num_bytes = sum(copy.num_bytes for copy in copies)
        num_units = num_bytes // LAYOUT.unit_bytes
        record = SourceRecord(
            transfer_id=TransferId("bench"),
            epoch=EPOCH,
            source=0,
            num_sources=1,
            head_ids=(0,),
            first_unit=write_id * num_units,
            num_units=num_units,
            total_units=num_units * len(writes),
            num_bytes=num_bytes,
        )
        thread.post(Write(write_id=write_id, transfer_id=record.transfer_id, peer=peer, copies=copies, record=record))
    for _ in writes:
        event = said.get(timeout=TIMEOUT_S)
        if isinstance(event, WriteFailed):
            raise TransferFailed(event.reason)
        assert isinstance(event, WriteDone), event
    seconds = time.perf_counter() - start_s
    _receive(pipe)
    return seconds


def _memcpy(source: Bytes, destination: Bytes, copies: list[CopyRange]) -> float:
    start_s = time.perf_counter()
    for copy in copies:
        ctypes.memmove(destination.ctypes.data + copy.dst_offset, source.ctypes.data + copy.src_offset, copy.num_bytes)
    return time.perf_counter() - start_s


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _process_vm_readv(pid: int, address: int, destination: Bytes) -> float | None:
    """Seconds to read the peer's whole arena in one call; None when that is not permitted here."""
    libc = ctypes.CDLL(None, use_errno=True)
    local, remote = _IoVec(destination.ctypes.data, destination.size), _IoVec(address, destination.size)
    start_s = time.perf_counter()
    num_read = libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    seconds = time.perf_counter() - start_s
    return seconds if num_read == destination.size else None


def main() -> None:
    for block_bytes in (4 << 20, 1 << 20, 256 << 10, 64 << 10, 16 << 10):
        print(msgspec.json.encode(run(block_bytes=block_bytes)).decode())
        sys.stdout.flush()


if __name__ == "__main__":
    main()
