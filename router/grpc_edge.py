"""The edge of the gRPC API: who may call, how an error becomes a status, and what is counted."""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from pd_cluster.errors import InvalidRequest, PdClusterError, PermissionDenied, Unauthenticated
from pd_cluster.log import get_log
from pd_cluster.metrics import RouterMetrics
from pd_cluster.rpc.security import AUTHORIZATION, is_loopback
from pd_cluster.rpc.status import status_of

log = get_log(__name__)

OPEN = ("/grpc.health.v1.Health/",)
"""Probes have no keys."""


class ApiKeys(aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without one of `keys`, before their message is read. No keys: everybody may call."""

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if not self._keys or details.method.startswith(OPEN) or shows(details.invocation_metadata, self._keys):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_: Any, context: Any) -> None:
    message = "the API key is missing or wrong: send it as metadata 'authorization: Bearer KEY'"
    await abort(context, Unauthenticated(message))


class WellFormed(aio.ServerInterceptor):  # type: ignore[misc]
    """Answers bytes that are no message with INVALID_ARGUMENT."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        parse = handler.request_deserializer
        behave = handler.unary_stream if handler.response_streaming else handler.unary_unary

        def read(message: bytes) -> Any:
            try:
                return parse(message)
            except DecodeError as error:
                return error

        async def checked(message: Any, context: Any) -> Any:
            if isinstance(message, DecodeError):
                await abort(context, InvalidRequest(f"undecodable message: {message}"))
            return await behave(message, context)

        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        return handler._replace(request_deserializer=read, **{kind: checked})


def shows(metadata: Iterable[tuple[str, str | bytes]] | None, keys: Collection[str]) -> bool:
    """Whether a caller's metadata carries one of `keys`."""
    shown = next((value for key, value in metadata or () if key == AUTHORIZATION), b"")
    given = shown if isinstance(shown, bytes) else shown.encode()
    return any(hmac.compare_digest(given, f"Bearer {key}".encode()) for key in keys)


def require_admin(context: Any, admin_key: str | None) -> None:
    """Raise PermissionDenied unless the caller shows the admin key or, without one, is on this machine."""
    if admin_key is not None:
        if not shows(context.invocation_metadata(), [admin_key]):
            raise PermissionDenied("this needs the admin key (router.admin_key)")
    elif not is_local(context.peer()):
        raise PermissionDenied("set router.admin_key to allow this from other machines, and send it as the API key")


def is_local(peer: str) -> bool:
    """Whether gRPC's name of a peer, such as `ipv4:127.0.0.1:4711`, is on this machine."""
    kind, _, address = unquote(peer).partition(":")
    return kind == "unix" or is_loopback(address.rpartition(":")[0])


async def abort(context: Any, error: PdClusterError) -> None:
    """End the call with the error's status; does not return."""
    code, message, metadata = status_of(error)
    await context.abort(code, message, metadata)


@contextlib.asynccontextmanager
async def answering(context: Any, method: str, metrics: RouterMetrics) -> AsyncIterator[None]:
    """Around a handler: its errors become statuses, and its outcome is counted."""
    outcome = "OK"
    try:
        yield
    except PdClusterError as error:
        outcome = error.grpc_status
        await abort(context, error)
    except asyncio.CancelledError:
        remaining_s = context.time_remaining()
        outcome = "CANCELLED" if remaining_s is None or remaining_s > 0 else "DEADLINE_EXCEEDED"
        raise
    except Exception:  # the edge of the process: a bug in one answer must not reach the others
        outcome = "INTERNAL"
        log.exception("grpc_handler_failed", method=method)
        await abort(context, PdClusterError("internal error: see the router's log"))
    finally:
        metrics.grpc_requests.labels(method, outcome).inc()
