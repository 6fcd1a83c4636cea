"""The push of a whole worker: its lead counts what each TP rank says and tells the router one thing."""

from msgspec import Struct

from pd_cluster.errors import ErrorInfo
from prefill_worker.push_outputs import RankFailed, RankNotice, RankPushed, RankStopped


class GroupPushed(Struct, frozen=True):
    """Every rank has pushed: tell the router, close the transfer on all ranks, free the source blocks."""

    num_bytes: int
    seconds: float


class GroupFailed(Struct, frozen=True):
    """A rank failed first: tell the router, abort the transfer on all ranks."""

    error: ErrorInfo


class GroupStopped(Struct, frozen=True):
    """No rank writes any more: tell the router, free the source blocks."""


class PushGroup:
    """Counts the notices of `num_ranks` ranks about one transfer; repeats change nothing."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pushed: dict[int, RankPushed] = {}
        self._stopped: set[int] = set()
        self._failed = False

    def report(self, tp_rank: int, notice: RankNotice) -> GroupPushed | GroupFailed | GroupStopped | None:
        """Take one rank's notice; what the worker as a whole has come to by it, each at most once."""
        if isinstance(notice, RankPushed):
            if tp_rank in self._pushed:
                return None
            self._pushed[tp_rank] = notice
            if len(self._pushed) < self._num_ranks or self._failed or self._stopped:
                return None
            num_bytes = sum(pushed.num_bytes for pushed in self._pushed.values())
            return GroupPushed(num_bytes, max(pushed.seconds for pushed in self._pushed.values()))
        if isinstance(notice, RankFailed):
            if self._failed or self._stopped:
                return None
            self._failed = True
            return GroupFailed(notice.error)
        assert isinstance(notice, RankStopped)
        if tp_rank in self._stopped:
            return None
        self._stopped.add(tp_rank)
        return GroupStopped() if len(self._stopped) == self._num_ranks else None
