"""Transfers between a prefill and a decode worker, until it is known that nothing more is written.

A decode worker keeps the blocks of an aborted transfer in quarantine until somebody proves that their writer has
stopped. The router relays that proof: the source's own word, or the fact that no Push was ever sent. The death of an
engine is proved by the supervisor and told to workers directly.
"""

from collections.abc import Callable

from pd_cluster import messages as m
from pd_cluster.ids import EngineEpoch, TransferId
from router.attempt import Leg, Link

LINGER_S = 120.0
"""How long a closed link waits for its source's word; after that only the source's own record or its death helps."""


class Links:
    def __init__(self, send: Callable[[Leg, m.ToWorkerMessage], None]) -> None:
        self._send = send
        self._links: dict[TransferId, Link] = {}

    def __len__(self) -> int:
        return len(self._links)

    def open(self, link: Link) -> None:
        """A decode worker was asked for blocks."""
        self._links[link.transfer_id] = link

    def close(self, link: Link, now_s: float) -> None:
        """The transfer is off: tell the target at once, and that its source is quiet as soon as that is known."""
        self._send(link.target, m.Abort(request_id=link.wire_id))
        if link.quiet or not link.push_sent:
            self._end(link)
            return
        link.closed_s = now_s

    def settle(self, link: Link) -> None:
        """Decode has adopted the request: there is nothing left to relay."""
        self._links.pop(link.transfer_id, None)

    def quiet(self, source: Leg, transfer_id: TransferId) -> None:
        """The source said Pushed or Stopped."""
        link = self._links.get(transfer_id)
        if link is None or link.source != source:
            return
        link.quiet = True
        if link.closed_s is not None:
            self._end(link)

    def restarted(self, leg: Leg) -> None:
        """A worker was welcomed as `leg`: no former life of it will ever answer, and none has blocks to free."""
        self._discard(lambda link: _is_former(link.source, leg) or _is_former(link.target, leg))

    def gone(self, leg: Leg) -> None:
        """A worker was removed."""
        self._discard(lambda link: leg in (link.source, link.target))

    def dead(self, epoch: EngineEpoch) -> None:
        """The engine is dead: as a source its targets are told so by EngineDead, as a target it needs nothing."""
        self._discard(lambda link: epoch in (link.source.epoch, link.target.epoch))

    def extend(self, lease_s: float) -> None:
        """Renew the leases of all transfers that are still followed."""
        followed: dict[Leg, list[TransferId]] = {}
        for link in self._links.values():
            if link.push_sent and link.closed_s is None:
                followed.setdefault(link.target, []).append(link.transfer_id)
        for target, transfer_ids in followed.items():
            self._send(target, m.ExtendLease(transfer_ids=transfer_ids, lease_s=lease_s))

    def sweep(self, now_s: float) -> None:
        """Give up on sources that never answered."""
        self._discard(lambda link: link.closed_s is not None and now_s - link.closed_s > LINGER_S)

    def _end(self, link: Link) -> None:
        self._send(link.target, m.SourceStopped(transfer_id=link.transfer_id))
        if self._links.get(link.transfer_id) is link:
            del self._links[link.transfer_id]

    def _discard(self, over: Callable[[Link], bool]) -> None:
        for link in [link for link in self._links.values() if over(link)]:
            del self._links[link.transfer_id]


def _is_former(leg: Leg, now: Leg) -> bool:
    return leg.worker_id == now.worker_id and leg.epoch != now.epoch
