"""Errors in the shape that OpenAI clients expect, with the headers by which they decide whether to retry."""

import msgspec

from pd_cluster.errors import PdClusterError
from router.openai_schema import ErrorBody

RETRY_AFTER_S = {429: "1", 503: "2"}


class BodyTooLargeError(PdClusterError):
    code = "request_too_large"
    http_status = 413


class NotFoundError(PdClusterError):
    code = "not_found"
    http_status = 404


class MethodNotAllowedError(PdClusterError):
    code = "method_not_allowed"
    http_status = 405


def error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_json(error: PdClusterError) -> bytes:
    body = ErrorBody(message=error.message, type=error_type(error.http_status), param=error.param, code=error.code)
    return msgspec.json.encode({"error": body})


def error_headers(error: PdClusterError) -> list[tuple[bytes, bytes]]:
    """Official clients retry every status from 500 on unless told otherwise; only some of ours deserve it."""
    headers = []
    if error.http_status in RETRY_AFTER_S:
        headers.append((b"retry-after", RETRY_AFTER_S[error.http_status].encode()))
    if error.http_status >= 500 or error.http_status == 409:
        headers.append((b"x-should-retry", b"true" if error.retryable else b"false"))
    return headers
