"""One request of the gRPC API through the pipeline: submitted on entry, gone on exit, its parts in between."""

import asyncio
from types import TracebackType
from typing import Self

from router.attempt import Delta, Timings
from router.generation import Generation, Part
from router.grpc_requests import Order
from router.serving import Serving
from router.stream import TokenStream, joined


class Answer:
    """`async with Answer(...) as answer`, then `await answer.next()` until a part has its finish."""

    def __init__(self, serving: Serving, order: Order, timeout_s: float | None) -> None:
        self._serving = serving
        self._order = order
        self._timeout_s = timeout_s
        self._generation = Generation(order.request, serving.tokenizer, order.options)
        self._stream: TokenStream | None = None
        self._last: Part | None = None
        self._next_s = 0.0  # the next part may leave

    async def __aenter__(self) -> Self:
        """Raises what `Pipeline.submit` raises."""
        serving, order = self._serving, self._order
        self._last = self._generation.replay(serving.eos_token_ids, serving.max_model_len)
        if self._last is None:
            self._stream = serving.pipeline.submit(order.request, timeout_s=self._timeout_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.cancel()

    @property
    def num_tokens(self) -> int:
        """Of the whole output."""
        return self._generation.num_tokens

    @property
    def timings(self) -> Timings:
        """Of this answer's own part of the work: nothing when all had been generated before."""
        return self._stream.timings if self._stream is not None else Timings()

    async def next(self) -> Part:
        """The next part; not sooner than the order's interval after the one before. Raises the request's error."""
        if self._stream is None:
            assert self._last is not None
            return self._last
        part = self._generation.push(await self._delta(self._stream))
        if part.finish is not None:
            self._stream.stop()  # if it was a stop string
        return part

    async def _delta(self, stream: TokenStream) -> Delta:
        delta = await anext(stream)
        if not self._order.interval_s:
            return delta
        clock = asyncio.get_running_loop().time
        waiting = [delta]
        while waiting[-1].finish is None and clock() < self._next_s:
            try:
                async with asyncio.timeout_at(self._next_s):
                    waiting.append(await anext(stream))
            except TimeoutError:
                break
        self._next_s = clock() + self._order.interval_s
        return joined(waiting)
