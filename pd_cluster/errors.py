"""Every error a user or a peer can meet, with what it becomes on each surface.

    PdClusterError
    |- ConfigError             400 INVALID_ARGUMENT     the configuration is wrong
    |- ModelError              400 FAILED_PRECONDITION  the checkpoint is unreadable or its architecture unknown
    |- RequestError            the client's request
    |  |- InvalidRequest       400 INVALID_ARGUMENT
    |  |- ContextTooLong       400 INVALID_ARGUMENT     (code context_length_exceeded)
    |  |- UnknownModel         404 NOT_FOUND
    |  |- UnknownWorker        404 NOT_FOUND
    |  |- DuplicateRequest     409 ALREADY_EXISTS
    |  |- PoisonRequest        400 INVALID_ARGUMENT     it took down two workers
    |- Unauthenticated         401 UNAUTHENTICATED      (code invalid_api_key)
    |- PermissionDenied        403 PERMISSION_DENIED
    |- NotSupported            501 UNIMPLEMENTED
    |- Overloaded              429 RESOURCE_EXHAUSTED   retry later
    |- Unavailable             503 UNAVAILABLE          retryable: no worker is ready, or it drains
    |  |- WorkerLost           503 UNAVAILABLE          retryable: a worker died under the request
    |- DeadlineExceeded        504 DEADLINE_EXCEEDED
    |- Cancelled               499 CANCELLED
    |- TransferError           the KV handoff
    |  |- TransferFailed       502 ABORTED              retryable: a write failed or its deadline passed
    |  |- PeerIncompatible     500 FAILED_PRECONDITION  layouts or weights differ; never retried on the same pair
    |  |- ChecksumMismatch     500 DATA_LOSS            retryable elsewhere
    |- EngineError             500 INTERNAL             the model step failed

Errors cross processes as `ErrorInfo` (code and message) and come back as the same class.
"""

from typing import ClassVar

from msgspec import Struct


class ErrorInfo(Struct, frozen=True):
    """An error on the wire: `code` names the class, `message` is for the user."""

    code: str
    message: str


class PdClusterError(Exception):
    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    retry_after_s: float | None = None  # what a server asked for

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def info(self) -> ErrorInfo:
        return ErrorInfo(code=self.code, message=self.message)


class ConfigError(PdClusterError):
    code = "invalid_config"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class ModelError(PdClusterError):
    code = "model_error"
    http_status = 400
    grpc_status = "FAILED_PRECONDITION"


class RequestError(PdClusterError):
    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class InvalidRequest(RequestError):
    pass


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class UnknownModel(RequestError):
    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class UnknownWorker(RequestError):
    code = "worker_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class DuplicateRequest(RequestError):
    code = "duplicate_request"
    http_status = 409
    grpc_status = "ALREADY_EXISTS"


class PoisonRequest(RequestError):
    code = "poison_request"


class Unauthenticated(PdClusterError):
    code = "invalid_api_key"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class PermissionDenied(PdClusterError):
    code = "permission_denied"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class NotSupported(PdClusterError):
    code = "not_supported"
    http_status = 501
    grpc_status = "UNIMPLEMENTED"


class Overloaded(PdClusterError):
    code = "overloaded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class Unavailable(PdClusterError):
    code = "unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True


class WorkerLost(Unavailable):
    code = "worker_lost"


class DeadlineExceeded(PdClusterError):
    code = "deadline_exceeded"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class Cancelled(PdClusterError):
    code = "cancelled"
    http_status = 499
    grpc_status = "CANCELLED"


class TransferError(PdClusterError):
    code = "transfer_error"
    http_status = 502
    grpc_status = "ABORTED"


class TransferFailed(TransferError):
    code = "transfer_failed"
    retryable = True


class PeerIncompatible(TransferError):
    code = "peer_incompatible"
    http_status = 500
    grpc_status = "FAILED_PRECONDITION"


class ChecksumMismatch(TransferError):
    code = "checksum_mismatch"
    http_status = 500
    grpc_status = "DATA_LOSS"
    retryable = True


class EngineError(PdClusterError):
    code = "engine_error"


def _tree(root: type[PdClusterError]) -> dict[str, type[PdClusterError]]:
    classes = {root.code: root}
    for child in root.__subclasses__():
        for code, cls in _tree(child).items():
            classes.setdefault(code, cls)
    return classes


def from_info(info: ErrorInfo) -> PdClusterError:
    """The error that `info` was made from; an unknown code becomes a plain PdClusterError."""
    cls = InvalidRequest if info.code == RequestError.code else _tree(PdClusterError).get(info.code, PdClusterError)
    return cls(info.message)
