"""The completions that one HTTP request asks for: several prompts, several samples of each, one stream of pieces.

All samples of a prompt share one prefill: the first goes ahead, and the others follow to the same worker when its
first token shows that the prompt's KV is cached there. They are followed by one event, so that a step of many choices
costs one wake-up and one write.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from msgspec import Struct, field, structs

from pd_cluster.errors import PdClusterError
from pd_cluster.ids import RequestId
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.request import MAX_SEED, UNIT_TOKENS, FinishReason, Request, SamplingParams
from router.attempt import Timings
from router.pipeline import Pipeline
from router.stream import TokenStream
from router.text import PieceToken, TextStream
from router.wakeup import Wakeup


class TextOptions(Struct, frozen=True, kw_only=True):
    stops: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


class ChoicePiece(Struct, kw_only=True):
    """What is new of one choice."""

    index: int
    text: str
    tokens: list[PieceToken]
    token_ids: list[int]
    finish: str | None = None  # as OpenAI names it


class Choice(Struct, kw_only=True, eq=False):
    index: int
    prompt_index: int
    request: Request
    text: TextStream
    stream: TokenStream | None = None
    num_tokens: int = 0
    done: bool = False
    followers: "list[Choice]" = field(default_factory=list)  # start when this one has its first token


class Choices:
    """`async with Choices(...) as choices`, then `next()` until `done`; leaving cancels whatever still runs."""

    def __init__(
        self,
        pipeline: Pipeline,
        tokenizer: Tokenizer | None,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        request_id: str,
        num_samples: int = 1,
        options: TextOptions | None = None,
        cache_salt: str = "",
    ) -> None:
        self.prompts = prompts
        self.choices: list[Choice] = []
        self._pipeline = pipeline
        self._ready = Wakeup(pipeline.turn)
        options = options or TextOptions()
        for prompt_index, token_ids in enumerate(prompts):
            for sample in range(num_samples):
                index = len(self.choices)
                request = Request(
                    id=RequestId(request_id if index == 0 else f"{request_id}-{index}"),
                    token_ids=token_ids,
                    num_prompt_tokens=len(token_ids),
                    sampling=structs.replace(sampling, seed=(sampling.seed + sample) % (MAX_SEED + 1)),
                    cache_salt=cache_salt,
                )
                text = TextStream(
                    tokenizer,
                    stops=options.stops,
                    include_stop=options.include_stop,
                    skip_special_tokens=options.skip_special_tokens,
                    min_tokens=sampling.min_tokens,
                )
                choice = Choice(index=index, prompt_index=prompt_index, request=request, text=text)
                if sample and len(token_ids) >= UNIT_TOKENS:
                    self.choices[index - sample].followers.append(choice)
                self.choices.append(choice)
        self._num_left = len(self.choices)

    def submit(self) -> None:
        """Send off all first samples. Raises what `Pipeline.submit` raises, with nothing left running."""
        waiting = {id(follower) for choice in self.choices for follower in choice.followers}
        try:
            for choice in self.choices:
                if id(choice) not in waiting:
                    choice.stream = self._pipeline.submit(choice.request, ready=self._ready)
        except PdClusterError:
            self.cancel()
            raise

    def cancel(self) -> None:
        for choice in self.choices:
            if choice.stream is not None:
                choice.stream.cancel()

    async def __aenter__(self) -> Self:
        self.submit()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        self._ready.close()

    @property
    def done(self) -> bool:
        return not self._num_left

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(token_ids) for token_ids in self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts, by their first samples."""
        timings: dict[int, Timings] = {}
        for choice in self.choices:
            if choice.stream is not None:
                timings.setdefault(choice.prompt_index, choice.stream.timings)
        return sum(timing.num_cached_tokens for timing in timings.values())

    async def next(
        self, timeout_s: float | None = None, at_once: Callable[[], bool] | None = None
    ) -> list[ChoicePiece]:
        """What has come since the last call, at least one piece; an empty list after `timeout_s` without any, and when
        all is `done`. `at_once` may take what comes and say that it has dealt with it, which begins the time anew.

        Raises the error of the first choice that failed.
        """
        while True:
            self._ready.clear()
            pieces = self.take()
            if pieces or self.done:
                return pieces
            if not await self._ready.wait(timeout_s, at_once):
                return []

    def take(self) -> list[ChoicePiece]:
        """What has come since the last call. Raises the error of the first choice that failed."""
        return [piece for choice in self.choices if (piece := self._take(choice)) is not None]

    def _take(self, choice: Choice) -> ChoicePiece | None:
        if choice.done or choice.stream is None:
            return None
        delta = choice.stream.take()
        if delta is None:
            return None
        if choice.followers:
            for follower in choice.followers:
                prefer = choice.stream.timings.prefill_worker
                follower.stream = self._pipeline.submit(follower.request, prefer=prefer, ready=self._ready)
            choice.followers = []
        choice.num_tokens += len(delta.token_ids)
        if delta.finish is None and delta.logprobs is None and choice.text.unmatched:
            text = choice.text.push_unmatched(delta.token_ids)
            return ChoicePiece(index=choice.index, text=text, tokens=[], token_ids=delta.token_ids)
        # the token that ended the request is counted but not shown
        ended_by_token = delta.finish is FinishReason.STOP and bool(delta.token_ids)
        shown = delta.token_ids[:-1] if ended_by_token else delta.token_ids
        piece = choice.text.push(shown, delta.logprobs[: len(shown)] if delta.logprobs is not None else None)
        finish = delta.finish.value if delta.finish is not None else None
        if piece.stopped:
            finish = "stop"
            choice.stream.stop()
        elif finish is not None:
            rest = choice.text.finish()
            piece.text += rest.text
            piece.tokens += rest.tokens
            finish = "stop" if rest.stopped else finish
        if finish is not None:
            choice.done = True
            self._num_left -= 1
        return ChoicePiece(
            index=choice.index, text=piece.text, tokens=piece.tokens, token_ids=list(delta.token_ids), finish=finish
        )
