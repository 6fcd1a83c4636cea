"""A backend that misbehaves by seed, around one that does not: writes vanish, come late and out of order, repeat,
corrupt or break.

What it does to a write is drawn when it is posted, so the same seed and the same posts give the same faults.
"""

import random
from collections import Counter
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from pd_cluster.ids import EngineEpoch, TransferId
from pd_cluster.transfer.contract import Backend, Event, RankEndpoint, Received, Write, WriteDone, WriteFailed


class Faults(Struct, frozen=True, kw_only=True):
    """Probabilities for each write, tried in this order; the rest goes through unharmed."""

    drop: float = 0.0  # nothing happens, ever: only a cancel or a disconnect ends it
    fail: float = 0.0  # a prompt failure, nothing written
    tear: float = 0.0  # half of its ranges land, then it fails
    late: float = 0.0  # a prompt failure, not quiet: bytes and record land up to `max_delay_polls` polls later
    corrupt: float = 0.0  # one range is read from the wrong place
    repeat: float = 0.0  # its record arrives twice
    delay: float = 0.0  # posted after up to `max_delay_polls` polls, overtaken by others
    max_delay_polls: int = 20


class FaultyBackend:
    """`inner` with faults; `num_injected` counts them by name."""

    def __init__(self, inner: Backend, faults: Faults, seed: int) -> None:
        self.num_injected: Counter[str] = Counter()
        self._inner = inner
        self._faults = faults
        self._rng = random.Random(seed)
        self._num_polls = 0
        self._dropped: list[Write] = []
        self._delayed: list[tuple[int, Write]] = []
        self._torn: set[int] = set()
        self._repeats: dict[int, Write] = {}
        self._hidden: set[int] = set()  # write ids of our own, unknown to the owner
        self._next_hidden = -1
        self._events: list[Event] = []

    def endpoint(self) -> RankEndpoint:
        return self._inner.endpoint()

    def connect(self, peer: RankEndpoint) -> None:
        self._inner.connect(peer)

    def disconnect(self, agent_name: str) -> None:
        self._end(lambda write: write.peer == agent_name, f"disconnected from {agent_name}")
        self._inner.disconnect(agent_name)

    def post(self, write: Write) -> None:
        fault = self._draw()
        if fault == "corrupt" and (not write.copies or self.endpoint().num_bytes <= write.copies[0].num_bytes):
            fault = ""  # there is no wrong place to read from
        if fault == "tear" and not write.copies:
            fault = "fail"
        if fault:
            self.num_injected[fault] += 1
        if fault == "drop":
            self._dropped.append(write)
        elif fault == "fail":
            self._fail(write, "injected failure", quiet=True)
        elif fault == "tear":
            self._torn.add(write.write_id)
            record = replace(write.record, epoch=EngineEpoch("torn"))  # which no target takes for its own
            self._inner.post(replace(write, copies=write.copies[: -(-len(write.copies) // 2)], record=record))
        elif fault == "corrupt":
            self._inner.post(self._corrupted(write))
        elif fault == "late":
            self._fail(write, "injected failure before it landed", quiet=False)
            self._hidden.add(write.write_id)
            self._delayed.append((self._num_polls + self._rng.randint(1, self._faults.max_delay_polls), write))
        elif fault == "repeat":
            self._inner.post(write)
            self._repeats[write.write_id] = write
        elif fault == "delay":
            self._delayed.append((self._num_polls + self._rng.randint(1, self._faults.max_delay_polls), write))
        else:
            self._inner.post(write)

    def poll(self) -> list[Event]:
        self._num_polls += 1
        due = [write for when, write in self._delayed if when <= self._num_polls]
        self._delayed = [(when, write) for when, write in self._delayed if when > self._num_polls]
        self._rng.shuffle(due)
        for write in due:
            self._inner.post(write)
        for event in self._inner.poll():
            self._pass_on(event)
        events, self._events = self._events, []
        return events

    def cancel(self, transfer_id: TransferId) -> None:
        self._end(lambda write: write.transfer_id == transfer_id, "cancelled")
        self._inner.cancel(transfer_id)

    def close(self) -> None:
        self._inner.close()

    def _draw(self) -> str:
        roll = self._rng.random()
        for name in ("drop", "fail", "tear", "late", "corrupt", "repeat", "delay"):
            roll -= getattr(self._faults, name)
            if roll < 0:
                return name
        return ""

    def _corrupted(self, write: Write) -> Write:
        index = self._rng.randrange(len(write.copies))
        copy = write.copies[index]
        room = self.endpoint().num_bytes - copy.num_bytes
        wrong = copy.src_offset
        while wrong == copy.src_offset and room > 0:
            wrong = self._rng.randint(0, room)
        copies = [*write.copies[:index], replace(copy, src_offset=wrong), *write.copies[index + 1 :]]
        return replace(write, copies=copies)

    def _pass_on(self, event: Event) -> None:
        if isinstance(event, Received):
            self._events.append(event)
        elif event.write_id in self._hidden:
            self._hidden.remove(event.write_id)
        elif event.write_id in self._torn:
            self._torn.remove(event.write_id)
            self._events.append(WriteFailed(event.write_id, event.transfer_id, "injected tear", quiet=True))
        else:
            self._events.append(event)
            write = self._repeats.pop(event.write_id, None)
            if write is not None and isinstance(event, WriteDone):
                self._hidden.add(self._next_hidden)
                self._inner.post(replace(write, write_id=self._next_hidden, copies=[]))
                self._next_hidden -= 1

    def _end(self, gone: Callable[[Write], bool], reason: str) -> None:
        delayed = [write for _, write in self._delayed]
        for write in [w for w in self._dropped + delayed if gone(w) and w.write_id not in self._hidden]:
            self._fail(write, reason, quiet=True)
        self._dropped = [w for w in self._dropped if not gone(w)]
        # a write that failed late cannot be recalled
        self._delayed = [(when, w) for when, w in self._delayed if not gone(w) or w.write_id in self._hidden]

    def _fail(self, write: Write, reason: str, quiet: bool) -> None:
        self._events.append(WriteFailed(write.write_id, write.transfer_id, reason, quiet))
