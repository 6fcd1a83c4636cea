"""Who serves behind routers that live in other processes than the supervisor.

The owner of the pools keeps the book (`Members`), and each router follows it by long polls (`Follower`): an answer
comes as soon as anything has changed since the version that the router knows, or after a while without news. An answer
holds all there is, so that nothing depends on an answer that was lost.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Struct

from pd_cluster.ids import EngineEpoch, WorkerId
from pd_cluster.launch.lifecycle import EngineDead, EngineEvent, EngineLost, EngineUp
from pd_cluster.log import get_log
from router.app import Router

log = get_log(__name__)

MAX_DEATHS = 256
POLL_S = 10.0
RETRY_S = 0.25


class Death(Struct, frozen=True):
    """Of an engine; `first`: those of its workers that died by themselves."""

    epoch: EngineEpoch
    first: list[WorkerId]


class Membership(Struct, frozen=True, kw_only=True):
    """What routers must know. `owner` names one life of whoever keeps it: versions of another one mean nothing."""

    owner: str
    version: int
    addresses: list[str]
    deaths: list[Death]  # the latest, in order
    node_id: str | None = None  # of the only machine that can reach the addresses, when they are on its loopback


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Membership).decode


class Members:
    """The owner's book."""

    def __init__(self, node_id: str | None = None) -> None:
        self._owner = secrets.token_hex(4)
        self._version = 0
        self._node_id = node_id
        self._addresses: dict[EngineEpoch, list[str]] = {}
        self._deaths: deque[Death] = deque(maxlen=MAX_DEATHS)
        self._changed = asyncio.Event()

    @property
    def addresses(self) -> list[str]:
        return [address for addresses in self._addresses.values() for address in addresses]

    def note(self, event: EngineEvent, first: frozenset[WorkerId] = frozenset()) -> None:
        """An engine has come or gone; `first`: see `Death`."""
        match event:
            case EngineUp():
                self._addresses[event.epoch] = event.addresses
            case EngineLost():
                self._addresses.pop(event.epoch, None)
            case EngineDead():
                self._deaths.append(Death(event.epoch, sorted(first)))
            case _:
                return
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def current(self) -> Membership:
        return Membership(
            owner=self._owner,
            version=self._version,
            addresses=self.addresses,
            deaths=list(self._deaths),
            node_id=self._node_id,
        )

    async def after(self, owner: str | None, version: int, timeout_s: float = POLL_S) -> Membership:
        """What there is once it is not what the caller knows, or when the time is over."""
        if (owner, version) == (self._owner, self._version):
            changed = self._changed
            try:
                async with asyncio.timeout(timeout_s):
                    await changed.wait()
            except TimeoutError:
                pass
        return self.current()


Ask = Callable[[str | None, int], Awaitable[bytes]]
"""Asks the owner for what is new after (owner, version); the answer is an encoded Membership."""


class Follower:
    """Keeps a router's workers equal to the membership. `unreachable`: exceptions that say that the owner is away."""

    def __init__(self, router: Router, ask: Ask, unreachable: tuple[type[Exception], ...]) -> None:
        self.known: Membership | None = None
        self._router = router
        self._ask = ask
        self._unreachable = unreachable
        self._told: dict[EngineEpoch, None] = {}

    async def run(self) -> None:
        """Follow until cancelled. While the owner is away its workers may well serve on."""
        reported = ""
        while True:
            known = self.known
            try:
                answer = await self._ask(known.owner if known else None, known.version if known else 0)
            except self._unreachable as error:
                reason = str(error).partition("\n")[0]
                if reason != reported:
                    log.warning("owner_of_pools_unreachable", reason=reason)
                reported = reason
                await asyncio.sleep(RETRY_S)
                continue
            reported = ""
            self.apply(decode(answer))

    def apply(self, membership: Membership) -> None:
        """Go from what was known to what is, in the order in which it may have happened."""
        before = self.known.addresses if self.known is not None else []
        self.known = membership
        for address in before:
            if address not in membership.addresses:
                self._router.remove_worker(address)
        for death in membership.deaths:
            if death.epoch not in self._told:
                self._router.pipeline.engine_dead(death.epoch, frozenset(death.first))
        self._told = dict.fromkeys(death.epoch for death in membership.deaths)
        for address in membership.addresses:
            self._router.add_worker(address)
