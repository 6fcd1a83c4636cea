"""Which worker speaks through which control stream, and what has been said to it once and for all."""

from collections.abc import Iterable
from typing import Protocol

from pd_cluster import messages as m
from pd_cluster.ids import EngineEpoch
from router.attempt import Leg

MAX_DEAD_EPOCHS = 1_000


class Conversation(Protocol):
    """A worker's stream, as `pd_cluster.rpc.client.ControlClient` has it."""

    def send(self, messages: Iterable[m.ToWorkerMessage]) -> bool: ...


class Conversations:
    """A worker in one life is a `Leg`; its stream may break and come back, and another stream may take its place."""

    def __init__(self) -> None:
        self._legs: dict[Conversation, Leg] = {}
        self._open: dict[Leg, Conversation] = {}
        self._introduced: set[tuple[Leg, Leg]] = set()  # (source, target): the source has the target's endpoint
        self._dead: dict[EngineEpoch, None] = {}

    def begin(self, client: Conversation, leg: Leg) -> None:
        """A worker was welcomed; it is told who has died so far."""
        self._legs[client] = leg
        self._open[leg] = client
        self._introduced = {pair for pair in self._introduced if leg not in pair}
        client.send([m.EngineDead(dead=dead) for dead in self._dead if dead != leg.epoch])

    def leg_of(self, client: Conversation) -> Leg | None:
        """Who speaks, or last spoke, through this stream."""
        return self._legs.get(client)

    def is_current(self, client: Conversation, leg: Leg) -> bool:
        """Whether no other stream has taken the place of this one."""
        return self._open.get(leg, client) is client

    def is_open(self, leg: Leg) -> bool:
        return leg in self._open

    def end(self, leg: Leg) -> None:
        """Its stream broke."""
        self._open.pop(leg, None)

    def forget(self, client: Conversation) -> None:
        self._legs.pop(client, None)

    def forget_leg(self, leg: Leg) -> None:
        self.end(leg)
        self._legs = {client: known for client, known in self._legs.items() if known != leg}

    def send(self, leg: Leg, message: m.ToWorkerMessage) -> None:
        """Send to a worker in that life; dropped when it is not reachable, for then it gives up what it has of ours."""
        client = self._open.get(leg)
        if client is not None:
            client.send([message])

    def bury(self, epoch: EngineEpoch) -> None:
        """An engine is dead: all others are told, and those that come later will be."""
        self._dead[epoch] = None
        while len(self._dead) > MAX_DEAD_EPOCHS:
            del self._dead[next(iter(self._dead))]
        for leg, client in self._open.items():
            if leg.epoch != epoch:
                client.send([m.EngineDead(dead=epoch)])

    def is_dead(self, epoch: EngineEpoch) -> bool:
        return epoch in self._dead

    def introduce(self, source: Leg, target: Leg) -> bool:
        """True the first time: then the target's endpoint has to be sent along."""
        first = (source, target) not in self._introduced
        self._introduced.add((source, target))
        return first
