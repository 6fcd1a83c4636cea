"""Errors as gRPC statuses and back: the code by class, and google.rpc details that a program can act on.

A status carries `google.rpc.ErrorInfo` (the error's code as its reason), `BadRequest` with the parameter that is
wrong, and `RetryInfo` where a retry makes sense. A status without ErrorInfo was made by gRPC itself: the connection, a
proxy, a deadline.
"""

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from pd_cluster.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    ErrorInfo,
    InvalidRequest,
    NotSupported,
    Overloaded,
    PdClusterError,
    PermissionDenied,
    RequestError,
    Unauthenticated,
    Unavailable,
    from_info,
)

DOMAIN = "pd-cluster"
DETAILS = "grpc-status-details-bin"
MAX_MESSAGE = 1000
"""Characters; statuses travel as headers, of which few kilobytes are accepted."""

RETRY_AFTER_S: dict[type[PdClusterError], float] = {Overloaded: 1.0, Unavailable: 2.0}

BY_CODE: dict[grpc.StatusCode, type[PdClusterError]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNIMPLEMENTED: NotSupported,
}
"""What a status of gRPC's own becomes."""

Metadata = tuple[tuple[str, bytes], ...]


def status_of(error: PdClusterError) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, message and trailing metadata: what `context.abort` takes."""
    code = grpc.StatusCode[error.grpc_status]
    message = error.message if len(error.message) <= MAX_MESSAGE else error.message[:MAX_MESSAGE] + "..."
    status = status_pb2.Status(code=code.value[0], message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=DOMAIN))
    if isinstance(error, RequestError) and error.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.param[:MAX_MESSAGE], description=message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    retry_after_s = next((s for cls, s in RETRY_AFTER_S.items() if isinstance(error, cls)), None)
    if retry_after_s is not None:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromMilliseconds(round(1000 * retry_after_s))
        status.details.add().Pack(info)
    return code, message, ((DETAILS, status.SerializeToString()),)


def error_of(failure: grpc.RpcError) -> tuple[PdClusterError, bool]:
    """The error that a call failed with, and whether the server itself said so: else gRPC or something between did."""
    code: grpc.StatusCode = failure.code()
    said = _details(failure.trailing_metadata() or ())
    message = str(failure.details() or code.name)
    if said is None:
        made = BY_CODE.get(code, PdClusterError)
        return made(message if made is not PdClusterError else f"{code.name}: {message}"), False
    reason, param, retry_after_s = said
    error = from_info(ErrorInfo(code=reason.lower(), message=message))
    error.param = param
    error.retry_after_s = retry_after_s
    return error, True


def _details(metadata: Iterable[Any]) -> tuple[str, str | None, float | None] | None:
    """Reason, parameter and delay out of our details; None when there are none."""
    packed = next((value for key, value in metadata if key == DETAILS), None)
    if packed is None:
        return None
    status = status_pb2.Status()
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    param: str | None = None
    retry_after_s: float | None = None
    try:
        status.ParseFromString(packed)
        for detail in status.details:
            if detail.Is(bad.DESCRIPTOR) and detail.Unpack(bad) and bad.field_violations:
                param = bad.field_violations[0].field
            elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
            elif detail.Is(info.DESCRIPTOR):
                detail.Unpack(info)
    except DecodeError:
        return None
    return (info.reason, param, retry_after_s) if info.domain == DOMAIN else None
