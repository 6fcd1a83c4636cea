"""The tokens of one request on their way to its client: an async iterator that joins what the client left waiting."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

from pd_cluster.engine.plan import TokenLogprobs
from pd_cluster.errors import Cancelled, PdClusterError
from pd_cluster.ids import RequestId
from router.attempt import Delta, Timings
from router.wakeup import Wakeup

if TYPE_CHECKING:
    from router.flight import Flight


class TokenStream:
    """Iterate for deltas; leaving the `async with` block cancels what is not finished.

    Iteration raises the request's error after the tokens that came before it. `take` is for those who follow several
    streams by one shared event.
    """

    def __init__(self, flight: "Flight", ready: Wakeup | None = None) -> None:
        self.last_token_s: float | None = None  # for metrics
        self._flight = flight
        self._waiting: list[Delta] = []
        self._error: PdClusterError | None = None
        self._ended = False  # nothing more will be put
        self._ready = ready or Wakeup()  # several streams may share one

    @property
    def request_id(self) -> RequestId:
        return self._flight.id

    @property
    def timings(self) -> Timings:
        return self._flight.timings

    def cancel(self) -> None:
        """The client went away: free both sides. Nothing happens when the request has ended."""
        self._flight.cancel(Cancelled("the client went away"))

    def stop(self) -> None:
        """The client has all it wanted: free both sides; the last delta comes with finish `stop`."""
        self._flight.stop()

    def put(self, delta: Delta) -> None:
        self._waiting.append(delta)
        self._ended = delta.finish is not None
        self._ready.set()

    def fail(self, error: PdClusterError) -> None:
        self._error, self._ended = error, True
        self._ready.set()

    @property
    def exhausted(self) -> bool:
        """Whether everything was taken, the error included."""
        return self._ended and not self._waiting and self._error is None

    def take(self) -> Delta | None:
        """What is waiting, as one delta; None when nothing is. Raises the request's error once, after its tokens."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            return joined(waiting)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while (delta := self.take()) is None:
            if self._ended:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def joined(deltas: list[Delta]) -> Delta:
    """Several deltas of one request as one; at least one."""
    if len(deltas) == 1:
        return deltas[0]
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for delta in deltas:
        token_ids += delta.token_ids
        logprobs += delta.logprobs or []
    return Delta(token_ids, logprobs or None, deltas[-1].finish, deltas[-1].timings)
