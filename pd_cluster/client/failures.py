"""Why a call failed, and whether another router or another try may help."""

import re

import grpc
from msgspec import Struct

from pd_cluster.errors import PdClusterError, Unavailable
from pd_cluster.rpc.status import error_of

_NOBODY = re.compile(r"(?:ipv[46]:)?(\S+): Failed to connect to remote host: (.+)$")
"""How gRPC ends a call for which no connection came about."""


class Cause(Struct, frozen=True):
    """`said`: the router itself gave the error; else gRPC or something on the way did."""

    error: PdClusterError
    code: grpc.StatusCode
    said: bool

    @property
    def lost(self) -> bool:
        """The router cannot serve now, or is gone."""
        return self.code is grpc.StatusCode.UNAVAILABLE or (not self.said and self.code is grpc.StatusCode.CANCELLED)

    @property
    def broken(self) -> bool:
        """Lost, or what proxies make of a stream whose other end is gone."""
        torn = self.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        return self.lost or (torn and not self.said)


def cause_of(failure: grpc.RpcError | PdClusterError | None) -> Cause:
    """None is a stream that ended without its end."""
    if failure is None:
        failure = Unavailable("the stream ended without its end")
    if isinstance(failure, PdClusterError):
        return Cause(failure, grpc.StatusCode[failure.grpc_status], False)
    error, said = error_of(failure)
    if error.param is not None:
        error.param = error.param.removeprefix("sampling.")  # as the user gave it
    nobody = None if said else _NOBODY.search(error.message)
    if nobody is not None:
        error = Unavailable(
            f"no router answers at {nobody[1]} ({nobody[2]}): is one running, and is this the address of its gRPC API?"
        )
    return Cause(error, failure.code(), said)
