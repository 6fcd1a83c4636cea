"""What to do when a worker answers a request with an error: a pure decision."""

from enum import StrEnum

from pd_cluster.errors import DeadlineExceeded, EngineError, Overloaded, PdClusterError, PeerIncompatible

MAX_ENGINE_ERRORS = 1
"""A request that broke an engine is tried once more, not on every engine of the cluster."""


class Remedy(StrEnum):
    ASK_ELSEWHERE = "ask_elsewhere"  # prefill goes on; another decode worker is asked for blocks
    RETRY = "retry"  # a new attempt, of which there are only so many
    RETRY_LATER = "retry_later"  # the same after a pause
    RESUME = "resume"  # a new attempt that counts for nothing
    RESUME_LATER = "resume_later"
    FAIL = "fail"  # the request's own fault, or beyond help


def remedy(error: PdClusterError, *, refused: bool, begun: bool, num_engine_errors: int) -> Remedy:
    """`refused`: by a decode worker to which nothing was pushed. `begun`: the client has tokens already.

    `num_engine_errors` counts those of this request so far, this one included.
    """
    if isinstance(error, PeerIncompatible):  # the pair is marked: it will not be chosen again
        return Remedy.ASK_ELSEWHERE if refused else Remedy.RESUME
    if isinstance(error, EngineError):
        return Remedy.RETRY if num_engine_errors <= MAX_ENGINE_ERRORS else Remedy.FAIL
    if not (error.retryable or isinstance(error, Overloaded | DeadlineExceeded)):
        return Remedy.FAIL
    if refused:
        return Remedy.ASK_ELSEWHERE
    if isinstance(error, Overloaded):  # a stream that has begun waits rather than break
        return Remedy.RESUME_LATER if begun else Remedy.RETRY_LATER
    return Remedy.RETRY
