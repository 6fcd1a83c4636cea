"""What the router does about each error that a worker can answer with."""

import pytest

from pd_cluster import errors as e
from router.recovery import Remedy, remedy


def decide(
    error: e.PdClusterError, *, refused: bool = False, begun: bool = False, num_engine_errors: int = 0
) -> Remedy:
    return remedy(error, refused=refused, begun=begun, num_engine_errors=num_engine_errors)


@pytest.mark.parametrize(
    "kind", [e.WorkerLost, e.Unavailable, e.TransferFailed, e.ChecksumMismatch, e.DeadlineExceeded]
)
def test_what_another_worker_may_do_better_is_retried(kind):
    assert decide(kind("x")) is Remedy.RETRY
    assert decide(kind("x"), refused=True) is Remedy.ASK_ELSEWHERE


@pytest.mark.parametrize("kind", [e.InvalidRequest, e.ContextTooLong, e.UnknownModel, e.DuplicateRequest, e.ModelError])
@pytest.mark.parametrize("refused", [False, True])
def test_the_requests_own_fault_is_final(kind, refused):
    assert decide(kind("x"), refused=refused, begun=True) is Remedy.FAIL


def test_an_unknown_error_is_final():
    assert decide(e.from_info(e.ErrorInfo(code="from_the_future", message="x"))) is Remedy.FAIL


def test_a_full_worker_is_asked_later_and_a_stream_that_has_begun_waits_for_it():
    assert decide(e.Overloaded("x")) is Remedy.RETRY_LATER
    assert decide(e.Overloaded("x"), begun=True) is Remedy.RESUME_LATER
    assert decide(e.Overloaded("x"), refused=True) is Remedy.ASK_ELSEWHERE


def test_an_incompatible_pair_costs_no_retry():
    assert decide(e.PeerIncompatible("x")) is Remedy.RESUME
    assert decide(e.PeerIncompatible("x"), refused=True) is Remedy.ASK_ELSEWHERE


def test_a_second_broken_engine_is_one_too_many():
    assert decide(e.EngineError("x"), num_engine_errors=1) is Remedy.RETRY
    assert decide(e.EngineError("x"), num_engine_errors=2) is Remedy.FAIL
