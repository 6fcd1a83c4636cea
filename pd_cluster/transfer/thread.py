"""The thread that owns a backend: it posts and always polls, also while its process computes.

The owner's calls go into a queue and return at once; what happens comes back in lists to `on_events`, called in this
thread (a loop passes `lambda events: loop.call_soon_threadsafe(handle, events)`). Polling follows the traffic: the
pause between polls grows with the time since something last happened, to 2 ms while bytes are in flight or expected
and to 100 ms when not; a queued call or a new expectation ends it. Every poll after a pause runs on cold caches, some
50-100 us of CPU time on a virtual machine, which is what the pauses bound. Anything unexpected goes to `on_failure` and
ends the thread: its rank can neither send nor receive KV any more.
"""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from pd_cluster.errors import TransferFailed
from pd_cluster.ids import TransferId
from pd_cluster.transfer.contract import Backend, Event, RankEndpoint, Write, WriteDone, WriteFailed

SPIN_S = 2e-3
"""So long after a post, a completion or a record do polls follow each other while writes of our own are on their way:
through shared memory it is the polls that copy.
"""

MIN_PAUSE_S = 50e-6
MAX_BUSY_PAUSE_S = 2e-3
MAX_IDLE_PAUSE_S = 100e-3


class TransferThread:
    """Start with `start`, end with `stop`. All other methods may be called from any thread and never block."""

    def __init__(
        self,
        backend: Backend,
        on_events: Callable[[list[Event]], None],
        on_failure: Callable[[BaseException], None],
        name: str = "transfer",
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_start` is called first thing in the thread."""
        self._backend = backend
        self._on_events = on_events
        self._on_failure = on_failure
        self._on_start = on_start
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        self._in_flight: set[int] = set()
        self._refused: dict[str, str] = {}  # peers that `connect` could not reach, and why
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.num_polls = 0
        self._is_expecting = False

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close the backend and end the thread; raises TimeoutError when it does not end in time."""
        self._stopping = True
        self._calls.put(lambda: None)
        if self._thread.ident is None:
            self._backend.close()
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the transfer thread did not end within {timeout_s} s")

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_expecting(self) -> bool:
        """Set by the owner while granted blocks wait for a peer's writes: polls stay frequent."""
        return self._is_expecting

    @is_expecting.setter
    def is_expecting(self, value: bool) -> None:
        if value and not self._is_expecting:
            self._calls.put(lambda: None)
        self._is_expecting = value

    def connect(self, peer: RankEndpoint) -> None:
        """Make a peer reachable. When that fails, each write to it fails with the reason."""
        self._calls.put(lambda: self._connect(peer))

    def disconnect(self, agent_name: str) -> None:
        self._calls.put(lambda: self._backend.disconnect(agent_name))

    def post(self, write: Write) -> None:
        self._calls.put(lambda: self._post(write))

    def cancel(self, transfer_id: TransferId) -> None:
        self._calls.put(lambda: self._backend.cancel(transfer_id))

    def _connect(self, peer: RankEndpoint) -> None:
        self._refused.pop(peer.agent_name, None)
        try:
            self._backend.connect(peer)
        except TransferFailed as error:
            self._refused[peer.agent_name] = error.message

    def _post(self, write: Write) -> None:
        if write.peer in self._refused:
            reason = self._refused[write.peer]
            self._on_events([WriteFailed(write.write_id, write.transfer_id, reason, quiet=True)])
            return
        self._in_flight.add(write.write_id)
        self._backend.post(write)

    def _run(self) -> None:
        try:
            self._on_start()
            self._loop()
        except BaseException as error:  # the edge of the thread: its owner decides what dies with it
            self._on_failure(error)
        finally:
            self._backend.close()

    def _loop(self) -> None:
        last_s = time.monotonic()
        pause_s = 0.0
        while not self._stopping:
            num_calls = self._run_calls(pause_s)
            events = self._backend.poll()
            self.num_polls += 1
            if events:
                self._in_flight.difference_update(e.write_id for e in events if isinstance(e, WriteDone | WriteFailed))
                self._on_events(events)
            now_s = time.monotonic()
            if events or num_calls:
                last_s = now_s
            pause_s = next_pause_s(now_s - last_s, writing=bool(self._in_flight), expecting=self._is_expecting)

    def _run_calls(self, pause_s: float) -> int:
        """Wait up to `pause_s` for a call, then run all there are; how many."""
        num_calls = 0
        if not pause_s:
            time.sleep(0)  # others of this process may want the interpreter
        try:
            call = self._calls.get(timeout=pause_s)
            while True:
                call()
                num_calls += 1
                call = self._calls.get_nowait()
        except Empty:
            return num_calls


def next_pause_s(calm_s: float, *, writing: bool, expecting: bool) -> float:
    """Until the next poll, when nothing has happened for `calm_s`."""
    if writing and calm_s < SPIN_S:
        return 0.0
    growth, longest_s = (0.01, MAX_BUSY_PAUSE_S) if writing or expecting else (0.1, MAX_IDLE_PAUSE_S)
    return min(max(calm_s * growth, MIN_PAUSE_S), longest_s)
