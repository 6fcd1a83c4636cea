"""Which members of an engine give no sign of life: a pure reading of their heartbeats.

Every rank counts a heartbeat up a few times a second, and says of which ranks it waits in vain. A heartbeat that stands
still is a death, sooner when a peer has noticed too, within a step or between two. A member that beats but whose rows
are waited for all the time hangs, or the network between it and its peers is cut: the group cannot go on with it
either. When nobody is heard at all, the store or this process is the likelier cause, and only the end of the lease is
proof.

How long is too long is measured: where all beat late because their machines are busy, more patience is right. Time in
which nobody looked does not count: beats may have come meanwhile, and what a late look finds may be older than itself.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from pd_cluster.ids import Rank
from pd_cluster.launch.spec import LEASE_S, Beat

SUSPECTED_STILL_S = 0.5
"""A heartbeat that stood still for so long is a death when a peer waits for that rank: at least, and
SUSPECTED_STILL_GAPS times as long as beats lately took to come."""

SUSPECTED_STILL_GAPS = 2.5
SLOWEST = 1.25
"""Beyond STILL_S a little more than what beats lately took is enough: while a peer waits its whole engine does."""

STILL_S = 3.0
"""And for so long, or STILL_GAPS times as long, when nobody does."""

STILL_GAPS = 6.0
MAX_SUSPECTED_STILL_S = 2 * STILL_S
"""However slow beats are: the streams of all members stand still for the sake of one that may be dead."""

LATELY_S = 10.0
"""What was longer ago than once to twice this is forgotten."""

FIRST_BEAT_S = LEASE_S
"""A rank that has reported may take so long until its first heartbeat."""

WAITED_FOR_S = 15.0
"""A member that others wait for over and over is lost after so long, although it beats."""


LOOK_S = 0.25
"""Of the time between two looks no more than this counts, so that no single look finds a death."""


class _Pulse(Struct):
    """Times are of looks, see `Heartbeats._time_s`."""

    count: int
    since_s: float  # when the count was first seen at this value
    is_first: bool = True
    suspects: frozenset[Rank] = frozenset()
    awaited: frozenset[Rank] = frozenset()


class Heartbeats:
    """Of the ranks of the members that compute together."""

    def __init__(self, tensor_parallel: int) -> None:
        self._tensor_parallel = tensor_parallel
        self._pulses: dict[Rank, _Pulse] = {}
        self._waited_since_s: dict[int, float] = {}  # by DP rank
        self._looked_s: float | None = None
        self._unseen_s = 0.0  # of all time: in which nobody looked
        self._longest_s = 0.0  # between two beats, or two looks, in the present window
        self._longest_before_s = 0.0  # and in the last one
        self._window_s = 0.0  # when the present one began

    def expect(self, ranks: Iterable[Rank], now_s: float) -> None:
        """These ranks shall beat from now on."""
        for rank in ranks:
            self._pulses[rank] = _Pulse(-1, self._time_s(now_s))

    def forget(self, ranks: Iterable[Rank]) -> None:
        """These shall not any more; whoever waits for them will hear so."""
        for rank in ranks:
            self._pulses.pop(rank, None)
            self._waited_since_s.pop(rank // self._tensor_parallel, None)

    def clear(self) -> None:
        self._pulses.clear()
        self._waited_since_s.clear()
        self._looked_s = None

    def observe(self, beats: Mapping[Rank, Beat], now_s: float) -> None:
        """What one look found."""
        if now_s - self._window_s >= LATELY_S:
            self._window_s, self._longest_before_s, self._longest_s = now_s, self._longest_s, 0.0
        since_look_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        self._unseen_s += max(0.0, since_look_s - LOOK_S)
        since_look_s = min(since_look_s, LOOK_S)
        now_s = self._time_s(now_s)
        self._longest_s = max(self._longest_s, since_look_s)
        for rank, beat in beats.items():
            pulse = self._pulses.get(rank)
            if pulse is not None and beat.count != pulse.count:
                if not pulse.is_first:  # it beat at some time since the last look: at least so long it took
                    gap_s = (now_s - since_look_s - pulse.since_s) / max(1, beat.count - pulse.count)
                    self._longest_s = max(self._longest_s, gap_s)
                self._pulses[rank] = _Pulse(beat.count, now_s, False, frozenset(beat.suspects), frozenset(beat.awaited))
        waited_for = {dp_rank for dp_rank, peers in self._suspected(now_s).items() if peers}
        for dp_rank in waited_for:
            self._waited_since_s.setdefault(dp_rank, now_s)
        for dp_rank in set(self._waited_since_s) - waited_for:
            del self._waited_since_s[dp_rank]

    def lost(self, now_s: float) -> dict[int, str]:
        """DP ranks that are taken for dead, and why; of the same look."""
        now_s = self._time_s(now_s)
        ages = {rank: now_s - pulse.since_s for rank, pulse in self._pulses.items()}
        limit_s = min(LEASE_S, max(STILL_S, STILL_GAPS * self._gap_s))
        if all(age_s >= limit_s for age_s in ages.values()):
            still = dict.fromkeys(ages, LEASE_S)
        else:
            suspected = self._suspected(now_s, between_steps=True)
            still = {
                rank: min(limit_s, self._sooner_s)
                if suspected[self._member(rank)]
                else FIRST_BEAT_S
                if pulse.is_first
                else limit_s
                for rank, pulse in self._pulses.items()
            }
        found: dict[int, str] = {}
        for rank, age_s in sorted(ages.items()):
            if age_s >= still[rank]:
                found.setdefault(self._member(rank), f"rank {rank} gave no heartbeat for {age_s:.1f} s")
        return found or self._hung(now_s)

    def _time_s(self, now_s: float) -> float:
        return now_s - self._unseen_s

    @property
    def _gap_s(self) -> float:
        """The longest of late between two beats of a rank, or two looks, which count for LOOK_S at most."""
        return max(self._longest_s, self._longest_before_s)

    @property
    def _sooner_s(self) -> float:
        gap_s = self._gap_s
        patience_s = min(SUSPECTED_STILL_GAPS * gap_s, max(STILL_S, SLOWEST * gap_s), MAX_SUSPECTED_STILL_S)
        return max(SUSPECTED_STILL_S, patience_s)

    def _hung(self, now_s: float) -> dict[int, str]:
        """The member that most others have waited for too long; one at a time, for its loss may cure the others."""
        suspected = self._suspected(now_s)
        late = [
            dp_rank
            for dp_rank, since_s in self._waited_since_s.items()
            if now_s - since_s >= WAITED_FOR_S and suspected.get(dp_rank)
        ]
        if not late:
            return {}
        worst = max(late, key=lambda dp_rank: (len(suspected[dp_rank]), dp_rank))
        peers = ", ".join(map(str, sorted(suspected[worst])))
        return {worst: f"DP ranks {peers} waited for DP rank {worst} for {now_s - self._waited_since_s[worst]:.1f} s"}

    def _suspected(self, now_s: float, *, between_steps: bool = False) -> dict[int, set[int]]:
        """DP rank -> the others that wait for it, as far as these are alive themselves. `between_steps` too a member
        may hold others up that is well, as the hub does while experts are brought back.
        """
        found: dict[int, set[int]] = {self._member(rank): set() for rank in self._pulses}
        for rank, pulse in self._pulses.items():
            if now_s - pulse.since_s >= self._sooner_s:
                continue
            for suspect in pulse.suspects | pulse.awaited if between_steps else pulse.suspects:
                peer = self._member(suspect)
                if peer in found and peer != self._member(rank):
                    found[peer].add(self._member(rank))
        return found

    def _member(self, rank: Rank) -> int:
        return rank // self._tensor_parallel
