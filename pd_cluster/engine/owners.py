"""Which router owns which request on this worker, and the way to tell it.

A request belongs to the router that sent it until it ends here; what is said about it goes to that router alone, and a
router that is gone takes its requests with it.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from pd_cluster import messages as m
from pd_cluster.errors import PdClusterError
from pd_cluster.ids import RequestId, RouterId, TransferId


class Outgoing(Protocol):
    """The worker's end of its control streams."""

    def send(self, router_id: RouterId, messages: Iterable[m.ToRouterMessage]) -> bool: ...

    def broadcast(self, messages: Sequence[m.ToRouterMessage]) -> None: ...


class Owners:
    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._router: dict[RequestId, RouterId] = {}

    def __len__(self) -> int:
        return len(self._router)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._router

    def add(self, request_id: RequestId, router_id: RouterId) -> None:
        self._router[request_id] = router_id

    def remove(self, request_id: RequestId) -> None:
        self._router.pop(request_id, None)

    def of(self, router_id: RouterId) -> list[RequestId]:
        return [request_id for request_id, owner in self._router.items() if owner == router_id]

    def tell(self, request_id: RequestId, message: m.ToRouterMessage) -> None:
        """Send to the request's router; nothing happens when nobody owns it any more."""
        router_id = self._router.get(request_id)
        if router_id is not None:
            self._outgoing.send(router_id, [message])

    def tell_tokens(self, deltas: list[m.TokenDelta]) -> None:
        """One step's tokens: one message for each router."""
        by_router: dict[RouterId, list[m.TokenDelta]] = {}
        for delta in deltas:
            router_id = self._router.get(delta.request_id)
            if router_id is not None:
                by_router.setdefault(router_id, []).append(delta)
        for router_id, own in by_router.items():
            self._outgoing.send(router_id, [m.Tokens(deltas=own)])

    def refuse(
        self, router_id: RouterId, request_id: RequestId, transfer_id: TransferId | None, error: PdClusterError
    ) -> None:
        """Answer a request that was never taken."""
        self._outgoing.send(router_id, [m.Failed(request_id=request_id, transfer_id=transfer_id, error=error.info())])
