"""Messages waiting for their stream: what is queued within one turn of the event loop leaves as one frame."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

MAX_FRAME_BYTES = 64 << 20
"""The cap on a received frame, on both sides."""

FRAME_TARGET_BYTES = 16 << 20
"""A batch that encodes to more is split, so that no frame comes near the cap."""

M = TypeVar("M")


class OutboxFullError(Exception):
    """The peer reads more slowly than we produce."""


class Outbox(Generic[M]):
    """An unbounded-looking queue with a hard limit; closed once, then it ends its reader."""

    def __init__(self, max_messages: int = 200_000) -> None:
        self._messages: list[M] = []
        self._ready = asyncio.Event()
        self._max_messages = max_messages
        self.closed: str | None = None  # why

    def put(self, messages: Iterable[M]) -> None:
        """Queue messages; dropped when closed."""
        if self.closed is not None:
            return
        self._messages.extend(messages)
        if self._messages:
            self._ready.set()

    def close(self, reason: str) -> None:
        if self.closed is None:
            self.closed = reason
        self._ready.set()

    async def take(self) -> list[M]:
        """All queued messages, at least one; an empty list once closed and drained. Raises OutboxFullError."""
        await self._ready.wait()
        self._ready.clear()
        batch, self._messages = self._messages, []
        if self.closed is not None:
            self._ready.set()  # later calls return at once
        if len(batch) > self._max_messages:
            raise OutboxFullError(f"{len(batch)} messages wait for a peer that does not read")
        return batch


def frames(encode: Callable[[list[M]], bytes], messages: list[M]) -> list[bytes]:
    """Encode one batch, split until each frame is small; one message alone may be as large as it is."""
    frame = encode(messages)
    if len(frame) <= FRAME_TARGET_BYTES or len(messages) == 1:
        return [frame]
    half = len(messages) // 2
    return frames(encode, messages[:half]) + frames(encode, messages[half:])
