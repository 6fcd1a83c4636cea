"""The store: a small key-value server in the supervisor's process on which the ranks of an engine meet.

Ranks build their process groups on it and report through it. It outlives every rank, so survivors and successors can
meet again. A connection's blocking calls exclude each other; whoever waits for a peer takes a connection of its own by
`connect`.
"""

import socket
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from pd_cluster.errors import ConfigError, Unavailable
from pd_cluster.ids import EngineEpoch, Rank
from pd_cluster.launch.spec import (
    LEASE_KEY,
    LEASE_S,
    Beat,
    RankProgress,
    RankReport,
    Release,
    beat_key,
    decode_beat,
    decode_progress,
    decode_release,
    decode_report,
    decode_roster,
    encode_message,
    end_key,
    progress_key,
    release_key,
    report_key,
    revoked_key,
    roster_key,
)
from pd_cluster.parallel.roster import Roster

TIMEOUT_S = 30.0
NO_BEAT = Beat(-1)


def connect(host: str, port: int, timeout_s: float = TIMEOUT_S) -> TCPStore:
    """A new connection; `timeout_s` bounds connecting and every wait for a key. Raises Unavailable."""
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except DistError as error:
        raise Unavailable(f"no store answers at {host}:{port}: the supervisor is gone, or out of reach") from error


def read(store: TCPStore, key: str) -> bytes | None:
    """The value of `key`, or None when nobody wrote it; never waits for a writer."""
    return bytes(store.get(key)) if store.check([key]) else None


def write(store: TCPStore, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # takes bytes, its annotation says str


class StoreServer:
    """The supervisor's side. Listens only on `host`; port 0 takes a free one. Thread-safe. Raises ConfigError."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
            except OSError as error:
                raise ConfigError(f"the store cannot listen on {host}:{port}: {error.strerror}") from error
            listener.listen(1024)
            self.host = host
            self.port: int = listener.getsockname()[1]
            self._store: TCPStore | None = TCPStore(
                host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=TIMEOUT_S),
                master_listen_fd=listener.detach(),
            )
        self._beats = 0

    @property
    def store(self) -> TCPStore:
        assert self._store is not None, "the store is closed"
        return self._store

    def beat(self) -> None:
        """Extend the lease of every rank."""
        self._beats += 1
        self.store.set(LEASE_KEY, str(self._beats))

    def revoke(self, epoch: EngineEpoch) -> None:
        """End the lease of one life, for ranks that nobody else may reach: over once this returns."""
        write(self.store, revoked_key(epoch), b"")
        self.store.check([revoked_key(epoch)])  # writes are not answered: only then has the server seen it

    def report(self, epoch: EngineEpoch, rank: Rank) -> RankReport | None:
        data = read(self.store, report_key(epoch, rank))
        return None if data is None else decode_report(data)

    def progress(self, epoch: EngineEpoch, rank: Rank) -> RankProgress | None:
        data = read(self.store, progress_key(epoch, rank))
        return None if data is None else decode_progress(data)

    # ---- of elastic engines; `life` is one of a DP rank, `epoch` their engine's

    def issue(self, epoch: EngineEpoch, roster: Roster) -> None:
        """Let a generation begin. Generations ascend from 0 without a gap."""
        write(self.store, roster_key(epoch, roster.generation), encode_message(roster))

    def beat_of(self, life: EngineEpoch, rank: Rank) -> Beat | None:
        data = read(self.store, beat_key(life, rank))
        return None if data is None else decode_beat(data)

    def expect_beats(self, lives: Mapping[Rank, EngineEpoch]) -> None:
        """Ranks are about to start; until they beat, `beats` tells NO_BEAT of them."""
        for rank, life in lives.items():
            write(self.store, beat_key(life, rank), encode_message(NO_BEAT))

    def beats(self, lives: Mapping[Rank, EngineEpoch]) -> dict[Rank, Beat]:
        """The latest heartbeats, in one round trip; of ranks that were expected."""
        if not lives:
            return {}
        found = self.store.multi_get([beat_key(life, rank) for rank, life in lives.items()])
        return {rank: decode_beat(bytes(data)) for rank, data in zip(lives, found, strict=True)}

    def release(self, epoch: EngineEpoch, generation: int) -> Release | None:
        """What the group said of those that left with that roster."""
        data = read(self.store, release_key(epoch, generation))
        return None if data is None else decode_release(data)

    def end(self, epoch: EngineEpoch) -> str | None:
        """Why the engine as a whole cannot go on, when one of its ranks said so."""
        data = read(self.store, end_key(epoch))
        return None if data is None else data.decode()

    def close(self) -> None:
        """Stop serving: ranks that still live lose their lease."""
        self._store = None


class RankStore:
    """A rank's side: a connection of its own for reports and the lease. `life` is its DP rank's, where these live and
    die one by one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        epoch: EngineEpoch,
        rank: Rank,
        life: EngineEpoch | None = None,
        wait_s: float = TIMEOUT_S,
    ) -> None:
        """`wait_s` bounds every wait for a key. Raises Unavailable."""
        self._store = connect(host, port)
        self._store.set_timeout(timedelta(seconds=wait_s))
        self._epoch = epoch
        self._life = life or epoch
        self._rank = rank
        self._lease: bytes | None = None
        self._lease_seen_s: float | None = None

    def report(self, report: RankReport) -> None:
        write(self._store, report_key(self._life, self._rank), encode_message(report))

    def progress(self, stage: str, done: int, total: int) -> None:
        write(self._store, progress_key(self._life, self._rank), encode_message(RankProgress(stage, done, total)))

    def beat(self, beat: Beat) -> None:
        """Raises Unavailable when the store is gone."""
        try:
            write(self._store, beat_key(self._life, self._rank), encode_message(beat))
        except DistError as error:
            raise Unavailable(f"the store is gone: {error}") from error

    def release(self, release: Release) -> None:
        write(self._store, release_key(self._epoch, release.generation), encode_message(release))

    def end(self, reason: str) -> None:
        """Raises Unavailable when the store is gone."""
        try:
            self._store.compare_set(end_key(self._epoch), "", reason)
        except DistError as error:
            raise Unavailable(f"the store is gone: {error}") from error

    def roster(self, generation: int) -> Roster:
        """Wait for a generation to be issued, for `wait_s` at most. Raises DistError."""
        return decode_roster(bytes(self._store.get(roster_key(self._epoch, generation))))

    def lease_held(self, now_s: float) -> bool:
        """Whether the supervisor gave a sign within LEASE_S and has not given this life up. Call it every second or so;
        False means: end yourself.
        """
        try:
            if any(self._store.check([revoked_key(epoch)]) for epoch in {self._epoch, self._life}):
                return False
            lease = read(self._store, LEASE_KEY)
        except DistError:
            return False
        if self._lease_seen_s is None or lease != self._lease:
            self._lease = lease
            self._lease_seen_s = now_s
        return now_s - self._lease_seen_s < LEASE_S
