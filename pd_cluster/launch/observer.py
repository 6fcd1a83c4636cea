"""Looks at the workers of one pod as one more router does: whether they are there, how busy they are, and drains them.

It sends no request, so its only part in their work is a heartbeat four times a second.
"""

import asyncio
import secrets
from collections.abc import Iterable

from pd_cluster import messages as m
from pd_cluster.ids import EngineEpoch, RouterId, WorkerId
from pd_cluster.rpc.client import ControlClient
from pd_cluster.rpc.security import Security
from router.directory import Directory, Health

POLL_S = 0.1


class Observer:
    """Attached to the control ports at `addresses`, as a `ControlListener`."""

    def __init__(self, addresses: Iterable[str], security: Security) -> None:
        self.directory = Directory()
        self.draining = False
        router_id = RouterId(f"observer-{secrets.token_hex(4)}")
        self._clients = [ControlClient(address, router_id, self, security=security) for address in addresses]
        self._drained: dict[WorkerId, EngineEpoch] = {}

    def start(self) -> None:
        for client in self._clients:
            client.start()

    async def stop(self) -> None:
        await asyncio.gather(*(client.stop() for client in self._clients))

    @property
    def attached(self) -> bool:
        """Whether every worker of this pod answers."""
        return all(client.attached for client in self._clients)

    async def drain(self, timeout_s: float) -> bool:
        """Let the workers finish what they have and take nothing new; whether they did within `timeout_s`.

        A worker that cannot be reached has nothing to finish.
        """
        self.draining = True
        for client in self._clients:
            client.send([m.Drain()])
        try:
            async with asyncio.timeout(timeout_s):
                while not all(self._is_drained(client) for client in self._clients):  # noqa: ASYNC110 (of many workers)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return False
        return True

    def _is_drained(self, client: ControlClient) -> bool:
        if not client.attached or client.info is None:
            return True
        return self._drained.get(client.info.worker_id) == client.epoch

    # ---- from the control streams

    def on_welcome(self, client: ControlClient, info: m.WorkerInfo, epoch: EngineEpoch) -> None:
        self.directory.welcome(info, epoch)
        if self.draining:
            client.send([m.Drain()])

    def on_messages(self, client: ControlClient, messages: list[m.ToRouterMessage]) -> None:
        assert client.info is not None
        assert client.epoch is not None
        for message in messages:
            match message:
                case m.Heartbeat():
                    worker = self.directory.get(client.info.worker_id)
                    if worker is not None:
                        worker.observe_load(message.load)
                case m.Drained():
                    self._drained[client.info.worker_id] = client.epoch
                case _:
                    pass

    def on_lost(self, client: ControlClient, reason: str) -> None:
        if client.info is not None:
            self.directory.lose(client.info.worker_id, reason)

    @property
    def num_ready(self) -> int:
        return sum(worker.health is Health.READY for worker in self.directory.workers)
