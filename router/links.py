"""Transfers between a prefill and a decode worker, until it is known that nothing more is written.

A decode worker keeps the blocks of an aborted transfer in quarantine until somebody proves that their writer has
stopped. The router relays that proof: the source's own word, or the fact that no Push was ever sent. The death of an
engine is proved by the supervisor and told to workers directly.
"""

from collections import deque
from collections.abc import Callable

from pd_cluster import messages as m
from pd_cluster.ids import EngineEpoch, TransferId
from router.attempt import Leg, Link

MAX_CLOSED = 100_000
"""Links that wait for the word of a source that is not reachable; past that the oldest are given up."""

MAX_TOLD = 1_000
"""Proofs that are kept for each target in case that its stream breaks before they arrive."""


class Links:
    def __init__(self, send: Callable[[Leg, m.ToWorkerMessage], None]) -> None:
        self._send = send
        self._links: dict[TransferId, Link] = {}
        self._closed: dict[TransferId, Link] = {}  # of them, in the order they were closed
        self._told: dict[Leg, deque[TransferId]] = {}

    def __len__(self) -> int:
        return len(self._links)

    def open(self, link: Link) -> None:
        """A decode worker was asked for blocks."""
        self._links[link.transfer_id] = link

    def close(self, link: Link) -> None:
        """The transfer is off: tell the target at once, and that its source is quiet as soon as that is known."""
        self._send(link.target, m.Abort(request_id=link.wire_id))
        if link.quiet or not link.push_sent:
            self._end(link)
            return
        link.closed = True
        self._closed[link.transfer_id] = link
        if len(self._closed) > MAX_CLOSED:
            oldest = next(iter(self._closed))
            del self._links[oldest], self._closed[oldest]

    def settle(self, link: Link) -> None:
        """Decode has adopted the request: there is nothing left to relay."""
        self._links.pop(link.transfer_id, None)

    def quiet(self, source: Leg, transfer_id: TransferId) -> None:
        """The source said Pushed or Stopped."""
        link = self._links.get(transfer_id)
        if link is None or link.source != source:
            return
        link.quiet = True
        if link.closed:
            self._end(link)

    def orphan(self, target: Leg, quarantine: m.Quarantine) -> None:
        """A target keeps blocks of a transfer that is over, maybe of a router that is dead: ask the source about it."""
        link = self._links.get(quarantine.transfer_id)
        if link is None:
            link = Link(
                transfer_id=quarantine.transfer_id,
                source=Leg(quarantine.source, quarantine.source_epoch),
                target=target,
                wire_id=quarantine.request_id,
                push_sent=True,
                closed=True,
            )
            self._links[link.transfer_id] = self._closed[link.transfer_id] = link
        if link.closed:
            self._send(link.source, m.Abort(request_id=link.wire_id, transfer_id=link.transfer_id))

    def welcomed(self, leg: Leg) -> None:
        """A worker is there, maybe again: say once more what a broken stream may have swallowed, either way.

        No former life of it will ever answer, and none has blocks to free.
        """
        self._discard(lambda link: _is_former(link.source, leg) or _is_former(link.target, leg))
        self._told = {target: told for target, told in self._told.items() if not _is_former(target, leg)}
        for link in self._closed.values():
            if link.source == leg:
                self._send(leg, m.Abort(request_id=link.wire_id, transfer_id=link.transfer_id))
        for transfer_id in self._told.get(leg, ()):
            self._send(leg, m.SourceStopped(transfer_id=transfer_id))

    def gone(self, leg: Leg) -> None:
        """A worker was removed."""
        self._discard(lambda link: leg in (link.source, link.target))
        self._told.pop(leg, None)

    def dead(self, epoch: EngineEpoch) -> None:
        """The engine is dead: as a source its targets are told so by EngineDead, as a target it needs nothing."""
        self._discard(lambda link: epoch in (link.source.epoch, link.target.epoch))
        self._told = {target: told for target, told in self._told.items() if target.epoch != epoch}

    def extend(self, lease_s: float) -> None:
        """Renew the leases of all transfers that are still followed."""
        followed: dict[Leg, list[TransferId]] = {}
        for link in self._links.values():
            if link.push_sent and not link.closed:
                followed.setdefault(link.target, []).append(link.transfer_id)
        for target, transfer_ids in followed.items():
            self._send(target, m.ExtendLease(transfer_ids=transfer_ids, lease_s=lease_s))

    def _end(self, link: Link) -> None:
        self._told.setdefault(link.target, deque(maxlen=MAX_TOLD)).append(link.transfer_id)
        self._send(link.target, m.SourceStopped(transfer_id=link.transfer_id))
        if self._links.get(link.transfer_id) is link:
            del self._links[link.transfer_id]
        self._closed.pop(link.transfer_id, None)

    def _discard(self, over: Callable[[Link], bool]) -> None:
        for link in [link for link in self._links.values() if over(link)]:
            del self._links[link.transfer_id]
            self._closed.pop(link.transfer_id, None)


def _is_former(leg: Leg, now: Leg) -> bool:
    return leg.worker_id == now.worker_id and leg.epoch != now.epoch
