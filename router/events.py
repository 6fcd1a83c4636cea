"""Server-sent events: a stream of choices as `data:` lines, one write for each step.

While its client keeps up, a stream is written in the turn of the loop in which its tokens came, past its task. The
task sees to the rest: the beginning, the end, errors, silence, and clients that are slower than their tokens.
"""

from collections.abc import Callable

import msgspec

from router.choices import ChoicePiece, Choices
from router.exchange import Exchange
from router.http_server import Socket

HEADERS_AFTER_S = 10.0
"""Until then an error still has a status of its own; a client that waits longer wants to see a sign of life."""

KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(value: msgspec.Struct) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


class TextEvent:
    """Events that differ in one text: what is around it is encoded once."""

    MARK = "\0text\0"

    def __init__(self, marked: bytes) -> None:
        """`marked`: such an event whose text is `MARK`, the last place where that stands."""
        self._before, found, self._after = marked.rpartition(_encode(self.MARK))
        assert found, marked

    def of(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


async def stream_events(
    exchange: Exchange,
    choices: Choices,
    *,
    opening: Callable[[], bytes],
    chunk: Callable[[ChoicePiece], bytes],
    closing: Callable[[], bytes],
) -> None:
    """Write `opening`, a `chunk` for each piece, `closing` and [DONE]. Raises the request's error."""
    last: list[ChoicePiece] = []
    socket: Socket | None = None

    def write_now() -> bool:
        if socket is None or not socket.writable:
            return False
        pieces = choices.take()
        if choices.done:
            last.extend(pieces)
            return False
        out = b"".join([chunk(piece) for piece in pieces])
        if out:
            socket.write(out)
        return True

    async with choices:
        pieces = await choices.next(HEADERS_AFTER_S)
        socket = await exchange.begin_events()
        at_once = write_now if socket is not None else None
        out = opening()
        while True:
            out += b"".join([chunk(piece) for piece in pieces])
            if choices.done:
                await exchange.write(out + closing() + DONE, more=False)
                return
            if out or not pieces:
                await exchange.write(out or KEEP_ALIVE)
            out = b""
            pieces = await choices.next(KEEP_ALIVE_S, at_once) or last


async def collect(choices: Choices) -> list[ChoicePiece]:
    """Every choice to its end, as one piece each. Raises the request's error."""
    whole = [
        ChoicePiece(index=choice.index, text="", tokens=[], token_ids=[], finish=None) for choice in choices.choices
    ]
    async with choices:
        while not choices.done:
            for piece in await choices.next():
                total = whole[piece.index]
                total.text += piece.text
                total.tokens += piece.tokens
                total.token_ids += piece.token_ids
                total.finish = piece.finish or total.finish
    return whole
