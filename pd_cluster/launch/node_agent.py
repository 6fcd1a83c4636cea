"""The agent of a node that is not its engine's first: makes what runs here equal to what node 0 wants.

It runs on a thread of its own, which starts the ranks and lives as long as they do. When the store is gone its ranks
are killed at once and it looks for the store again: node 0 may have been started anew.
"""

import secrets
import socket
import threading

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from pd_cluster.clock import Clock, SystemClock
from pd_cluster.errors import PdClusterError, Unavailable
from pd_cluster.ids import EngineEpoch, Rank
from pd_cluster.launch.launcher import Launcher, RankHandle
from pd_cluster.launch.nodes import Ended, Place, Seen, State, Wanted, decode_wanted, encode, seen_key, wanted_key
from pd_cluster.launch.spec import RankSpec
from pd_cluster.launch.store import connect, read, write
from pd_cluster.log import get_log
from pd_cluster.rpc.addresses import resolve_now

log = get_log(__name__)

LOOK_S = 0.1
BEAT_S = 1.0
RETRY_S = 1.0
CONNECT_TIMEOUT_S = 2.0
STORE_TIMEOUT_S = 10.0
COULD_NOT_START_CODE = 1


class NodeAgent:
    """`run` until `stop` is set. Its plain attributes may be read from any thread, its events set by any."""

    def __init__(
        self, place: Place, local: Launcher, head: str, store_port: int, *, clock: Clock | None = None
    ) -> None:
        self.ready = False  # the whole engine serves
        self.draining = False  # it shall finish what it has
        self.all_drained = False  # every node of it has
        self.num_starts = 0
        self.stop = threading.Event()
        self.told_to_drain = threading.Event()  # by this node's own end
        self.drained = threading.Event()  # this node's workers have finished what they had
        self._place = place
        self._local = local
        self._head = head
        self._store_port = store_port
        self._clock = clock or SystemClock()
        self._name = secrets.token_hex(4)
        self._beat = 0
        self._beat_s = float("-inf")
        self._handles: dict[EngineEpoch, dict[Rank, RankHandle]] = {}  # by life
        self._ended: dict[EngineEpoch, dict[Rank, Ended]] = {}
        self._asked: dict[EngineEpoch, State] = {}
        self._told: Seen | None = None

    def run(self) -> None:
        reported = ""
        try:
            while not self.stop.is_set():
                try:
                    self._follow(self._connect())
                except (Unavailable, DistError, OSError) as error:
                    self._end()
                    if str(error) != reported:
                        reported = str(error)
                        log.info("head_out_of_reach", head=self._head, reason=reported.partition("\n")[0])
                    self.stop.wait(RETRY_S)
        finally:
            self._end()
            self._local.close()

    def _connect(self) -> TCPStore:
        address = resolve_now(self._head)[0]
        socket.create_connection((address, self._store_port), CONNECT_TIMEOUT_S).close()  # the store's own try is slow
        return connect(address, self._store_port, STORE_TIMEOUT_S)

    def _follow(self, store: TCPStore) -> None:
        log.info("head_found", head=self._head, node=self._place.node)
        while not self.stop.is_set():
            data = read(store, wanted_key(self._place.node))
            if data is not None:
                self.reconcile(decode_wanted(data))
            self.look()
            self._tell(store)
            self.stop.wait(LOOK_S)
        self._end()
        self._tell(store)

    def reconcile(self, wanted: Wanted) -> None:
        """One step towards what is wanted. A life begins when those that are not wanted any more are dead."""
        self.ready = wanted.ready and any(life.state == "run" for life in wanted.lives.values())
        self.draining = wanted.drain
        self.all_drained = wanted.drained
        for epoch in self._handles.keys() - wanted.lives.keys():
            self._end_life(epoch)
            del self._handles[epoch], self._ended[epoch], self._asked[epoch]
        new = {epoch: life for epoch, life in wanted.lives.items() if epoch not in self._handles}
        for epoch, life in new.items():
            self._handles[epoch], self._asked[epoch] = {}, life.state
            self._ended[epoch] = {} if life.state == "run" else {spec.rank: Ended(0, "") for spec in life.specs}
        self._start([spec for life in new.values() if life.state == "run" for spec in life.specs])
        for epoch, life in wanted.lives.items():
            if life.state != self._asked[epoch]:
                self._asked[epoch] = life.state
                for handle in self._handles[epoch].values():
                    if life.state == "kill":
                        handle.kill()
                    else:
                        handle.terminate()

    def _start(self, wanted: list[RankSpec]) -> None:
        if not wanted:
            return
        self.num_starts += 1
        specs = self._place.complete(wanted)
        try:
            for handle in self._local.start(specs):
                self._handles[handle.spec.worker_epoch][handle.spec.rank] = handle
        except PdClusterError as error:
            log.error("ranks_not_started", epoch=specs[0].epoch, reason=error.message)
            for spec in specs:
                self._ended[spec.worker_epoch][spec.rank] = Ended(COULD_NOT_START_CODE, error.message)
        else:
            log.info("ranks_started", epoch=specs[0].epoch, num_ranks=len(specs))

    def look(self) -> None:
        """Note which ranks have ended."""
        for epoch, handles in self._handles.items():
            for rank, handle in list(handles.items()):
                if (code := handle.poll()) is not None:
                    self._ended[epoch][rank] = Ended(code, handle.log_tail())
                    del handles[rank]
                    log.info("rank_ended", rank=handle.spec.name, code=code)

    def _tell(self, store: TCPStore) -> None:
        now_s = self._clock.now_s()
        if now_s - self._beat_s >= BEAT_S:
            self._beat += 1
            self._beat_s = now_s
        seen = Seen(
            agent=self._name,
            beat=self._beat,
            ended={epoch: dict(ended) for epoch, ended in self._ended.items()},
            drain=self.told_to_drain.is_set(),
            drained=self.drained.is_set(),
        )
        if seen != self._told:
            write(store, seen_key(self._place.node), encode(seen))
            self._told = seen

    def _end(self) -> None:
        """Kill whatever runs here and see it dead."""
        self.ready = False
        for epoch in self._handles:
            self._end_life(epoch)
        self._told = None

    def _end_life(self, epoch: EngineEpoch) -> None:
        for handle in self._handles[epoch].values():
            handle.kill()
        for handle in self._handles[epoch].values():
            handle.wait(10.0)
        self.look()
