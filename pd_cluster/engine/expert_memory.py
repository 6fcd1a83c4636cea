"""One rank's expert slots as others change them: experts come from peers or from the checkpoint, beside the steps.

    order --> from a peer: pieces by NIXL READ --> slot --> checksum of the slot = the peer's? --> intact, or damaged
          \\-> from the store: pieces read and packed --> slot --> sealed with its checksum

A thread of its own does all of it, a piece of about a megabyte at a time, and then rests: while steps run it uses a
small share of a core, so that they stay as fast as they were. It polls only while a change of placement is on, which is
also when peers read here. An expert that cannot be had from its source in time is reported, and whoever ordered it
tries the next source.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

import torch
from msgspec import Struct
from torch import Tensor

from pd_cluster.errors import ChecksumMismatch, PdClusterError, TransferFailed
from pd_cluster.ids import Rank
from pd_cluster.log import get_log
from pd_cluster.model.expert_arena import CHECKSUM_BYTES, Checksum, ExpertArena
from pd_cluster.model.expert_store import ExpertStore
from pd_cluster.parallel.stages import Load
from pd_cluster.transfer.reads import NUM_BUFFERS, PIECE_BYTES, Reader

log = get_log(__name__)

MakeReader = Callable[[Tensor], Reader]
"""From the buffers to read into, uint8 in host memory."""

OnDone = Callable[[Load, PdClusterError | None], None]
"""Called on the memory's thread when a load has ended."""


class LoadBudget(Struct, frozen=True, kw_only=True):
    """How much loading may take from steps that run meanwhile."""

    share_of_core: float = 0.04
    bytes_per_s: float = 2e9
    poll_s: float = 2e-3  # while a read is under way
    serve_s: float = 10e-3  # while peers may read here; many transports do without
    read_timeout_s: float = 2.0  # of one piece


class _Reading:
    """A posted read: whether it has ended and how, and whether its rank is gone. Given up, its buffer is free only once
    it has ended.
    """

    def __init__(self, rank: Rank, buffer: Tensor) -> None:
        self.rank = rank
        self.buffer = buffer
        self.has_ended = False
        self.error: str | None = None
        self.is_hopeless = False
        self.is_given_up = False


class ExpertMemory:
    """`start` it, `stop` it; all other methods may be called from any thread and never block."""

    def __init__(
        self,
        rank: Rank,
        arena: ExpertArena,
        store: ExpertStore,
        make_reader: MakeReader,
        *,
        on_done: OnDone,
        on_failure: Callable[[BaseException], None],
        budget: LoadBudget | None = None,
    ) -> None:
        self.rank = rank
        self.arena = arena
        self.bytes_loaded = 0
        self._store = store
        self._make_reader = make_reader
        self._on_done = on_done
        self._on_failure = on_failure
        self._budget = budget or LoadBudget()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._jobs: deque[tuple[Load, Iterator[bool]]] = deque()
        self._is_serving = False
        self._is_hurried = False
        self._stopping = False
        self._buffers = torch.zeros((NUM_BUFFERS, PIECE_BYTES), dtype=torch.uint8)
        self._free = list(self._buffers)
        self._readings: dict[int, _Reading] = {}
        self._refused: dict[Rank, str] = {}
        self._endpoint: bytes | None = None
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"experts-{rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Also of one that was never started."""
        self._stopping = True
        self._calls.put(lambda: None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def endpoint(self, timeout_s: float = 60.0) -> bytes | None:
        """How peers read here, or None when they cannot; waits until that is known."""
        self._is_open.wait(timeout_s)
        return self._endpoint

    def connect(self, rank: Rank, endpoint: bytes) -> None:
        """Where to read what `rank` holds; when that cannot be, loads from it fail with the reason."""
        self._calls.put(lambda: self._connect(rank, endpoint))

    def forget(self, rank: Rank) -> None:
        self._calls.put(lambda: self._forget(rank))

    def begin(self, load: Load, source: tuple[Rank, int] | None, slot: int) -> None:
        """Load an expert into local `slot`, which nobody reads, from (rank, its local slot) or from the store."""
        self._calls.put(lambda: self._jobs.append((load, self._fetch(load, source, slot))))

    def serve(self, on: bool, *, hurry: bool = False) -> None:
        """While on, peers may read here. `hurry`: no steps run, nothing is spared."""

        def switch() -> None:
            self._is_serving, self._is_hurried = on, hurry

        self._calls.put(switch)

    # ---- the thread

    def _run(self) -> None:
        reader: Reader | None = None
        try:
            if self.arena.device.type == "cuda":
                torch.cuda.set_device(self.arena.device)
                stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                torch.cuda.set_stream(stream)  # copies wait for no step, and no step for them
            try:
                reader = self._make_reader(self._buffers.view(-1))
                self._endpoint = reader.endpoint()
            except TransferFailed as error:
                log.warning("expert_reads_left_out", rank=self.rank, reason=error.message)
            self._reader = reader
            self._is_open.set()
            with torch.inference_mode():
                while not self._stopping:
                    self._turn()
        except BaseException as error:  # the edge of the thread: its owner decides what dies with it
            self._on_failure(error)
        finally:
            self._is_open.set()
            if reader is not None:
                reader.close()

    def _turn(self) -> None:
        """Everything there is to do once, then rest."""
        started_s, started_cpu_s = time.monotonic(), time.thread_time()
        num_bytes, waits, reads = 0, True, bool(self._jobs)
        self._poll()
        for _ in range(len(self._jobs)):
            load, steps = self._jobs.popleft()
            try:
                worked = next(steps)
            except StopIteration:
                self.bytes_loaded += self.arena.record_bytes
                self._on_done(load, None)
                waits = False
            except PdClusterError as error:
                self._on_done(load, error)
                waits = False
            else:
                self._jobs.append((load, steps))
                if worked:
                    waits = False
                    num_bytes += PIECE_BYTES
        budget = self._budget
        pause_s = 0.0 if not waits else budget.poll_s if reads else budget.serve_s
        self._rest(started_s, time.thread_time() - started_cpu_s, num_bytes, pause_s)

    def _poll(self) -> None:
        if self._reader is not None:
            for ended in self._reader.poll():
                reading = self._readings.pop(ended.read_id)
                reading.has_ended, reading.error = True, ended.error
                if reading.is_given_up:
                    self._free.append(reading.buffer)

    def _rest(self, started_s: float, busy_s: float, num_bytes: int, pause_s: float) -> None:
        budget = self._budget
        if not self._jobs and not self._is_serving:
            self._run_calls(None)
            return
        if self._is_hurried:
            rest_s = pause_s / 10
        else:
            rest_s = max(busy_s * (1 / budget.share_of_core - 1), num_bytes / budget.bytes_per_s, pause_s)
        until_s = started_s + busy_s + rest_s
        while not self._stopping:
            left_s = until_s - time.monotonic()
            self._run_calls(max(left_s, 0.0))
            if left_s <= 0 or self._is_hurried:
                break

    def _run_calls(self, pause_s: float | None) -> None:
        with contextlib.suppress(Empty):
            call = self._calls.get() if pause_s is None else self._calls.get(pause_s > 0, pause_s or None)
            while True:
                call()
                call = self._calls.get_nowait()

    def _connect(self, rank: Rank, endpoint: bytes) -> None:
        self._refused.pop(rank, None)
        if self._reader is None:
            return
        try:
            self._reader.connect(rank, endpoint)
        except TransferFailed as error:
            self._refused[rank] = error.message

    def _forget(self, rank: Rank) -> None:
        self._refused.pop(rank, None)
        for reading in self._readings.values():
            reading.is_hopeless |= reading.rank == rank
        if self._reader is not None:
            self._reader.forget(rank)

    # ---- loads; each step of an iterator tells whether it worked (or only waited)

    def _fetch(self, load: Load, source: tuple[Rank, int] | None, slot: int) -> Iterator[bool]:
        record = self.arena.record(load.layer, slot)
        if source is None:
            return self._from_store(load, record)
        return self._from_peer(load, source[0], self.arena.offset(load.layer, source[1]), record)

    def _from_store(self, load: Load, record: Tensor) -> Iterator[bool]:
        on_host = record if record.device.type == "cpu" else torch.zeros(len(record), dtype=torch.uint8)
        for _ in self._store.fill(on_host, load.layer, load.expert):
            yield True
        checksum = Checksum(load.layer, load.expert)
        for piece in torch.split(on_host[:-CHECKSUM_BYTES], PIECE_BYTES):
            checksum.add(piece)
            yield True
        on_host[-CHECKSUM_BYTES:] = torch.frombuffer(bytearray(checksum.digest()), dtype=torch.uint8)
        if on_host is not record:
            for to, piece in zip(torch.split(record, PIECE_BYTES), torch.split(on_host, PIECE_BYTES), strict=True):
                self._copy(to, piece)
                yield True

    def _from_peer(self, load: Load, rank: Rank, offset: int, record: Tensor) -> Iterator[bool]:
        """One piece is on its way while the one before is copied and summed."""
        if rank in self._refused:
            raise TransferFailed(self._refused[rank])
        checksum = Checksum(load.layer, load.expert)
        runs = [(at, min(PIECE_BYTES, len(record) - at)) for at in range(0, len(record), PIECE_BYTES)]
        digest = bytearray()
        ahead = self._post(rank, offset, runs[0][1])
        for (at, size), following in zip(runs, [*runs[1:], None], strict=True):
            reading = ahead
            deadline_s = time.monotonic() + self._budget.read_timeout_s
            while not reading.has_ended:
                if reading.is_hopeless or time.monotonic() >= deadline_s:
                    reading.is_given_up = True
                    raise TransferFailed(f"rank {rank} is gone, or has not answered a read in time")
                yield False
            if reading.error is not None:
                self._free.append(reading.buffer)
                raise TransferFailed(reading.error)
            if following is not None:
                try:
                    ahead = self._post(rank, offset + following[0], following[1])
                except TransferFailed:
                    self._free.append(reading.buffer)
                    raise
            piece = reading.buffer[:size]
            self._copy(record[at : at + size], piece)
            on_host = record[at : at + size] if record.device.type == "cpu" else piece
            num_summed = max(min(size, len(record) - CHECKSUM_BYTES - at), 0)
            checksum.add(on_host[:num_summed])
            digest += on_host[num_summed:].numpy().tobytes()
            self._free.append(reading.buffer)
            yield True
        if bytes(digest) != checksum.digest():
            raise ChecksumMismatch(f"expert {load.expert} of MoE layer {load.layer} from rank {rank} arrived damaged")

    def _post(self, rank: Rank, offset: int, num_bytes: int) -> _Reading:
        if self._reader is None:
            raise TransferFailed("this rank cannot read from its peers")
        if not self._free:
            raise TransferFailed("every buffer waits for a read that does not end")
        reading = _Reading(rank, self._free.pop())
        try:
            read_id = self._reader.post(rank, offset, reading.buffer[:num_bytes])
        except TransferFailed:
            self._free.append(reading.buffer)
            raise
        self._readings[read_id] = reading
        self._poll()  # within one host it has ended already
        return reading

    def _copy(self, to: Tensor, piece: Tensor) -> None:
        to.copy_(piece)
        if to.device.type == "cuda":
            torch.cuda.current_stream(to.device).synchronize()
