"""POST /v1/completions."""

import secrets
import time

import msgspec

from pd_cluster.errors import InvalidRequest, UnknownModel
from router.choices import ChoicePiece, Choices, TextOptions
from router.events import TextEvent, collect, event, stream_events
from router.exchange import Exchange, while_connected
from router.logprobs import completion_logprobs
from router.openai_schema import (
    MAX_N,
    Completion,
    CompletionBody,
    CompletionChoice,
    SamplingFields,
    Usage,
    completion_decoder,
    decode_body,
)
from router.serving import Serving

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 8 * MAX_N


class Completions:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def handle(self, exchange: Exchange) -> None:
        body = decode_body(completion_decoder, await exchange.read_body())
        check_model(self._serving, body.model)
        body.check_supported()
        prompts = self._prompts(body)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        choices = make_choices(self._serving, body, prompts, max_tokens, body.logprobs, "cmpl")
        answer = _Answer(self._serving, body, choices)
        await while_connected(exchange, answer.stream(exchange) if body.stream else answer.whole(exchange))

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        prompt = body.prompt
        if isinstance(prompt, str):
            prompts = [self._serving.encode(prompt)]
        else:
            ids = [part for part in prompt if isinstance(part, int)]
            if ids and len(ids) < len(prompt):
                raise InvalidRequest("prompt mixes token ids with whole prompts", param="prompt")
            several = [part for part in prompt if not isinstance(part, int)]
            prompts = [ids] if ids else [self._serving.encode(p) if isinstance(p, str) else p for p in several]
        if not prompts or not all(prompts):
            raise InvalidRequest("the prompt is empty: send at least one token", param="prompt")
        if len(prompts) * body.num_choices > MAX_CHOICES:
            raise InvalidRequest(f"prompts times n must be at most {MAX_CHOICES}", param="prompt")
        return prompts


class _Answer:
    """One completion request on its way back."""

    def __init__(self, serving: Serving, body: CompletionBody, choices: Choices) -> None:
        self._tokenizer = serving.tokenizer
        self._model = serving.model_name
        self._body = body
        self._choices = choices
        self._id = str(choices.choices[0].request.id)
        self._created = int(time.time())
        self._include_usage = body.include_usage
        self._echoes = [self._echo(token_ids) for token_ids in choices.prompts]
        self._text_only = body.logprobs is None and not body.return_token_ids
        self._text_events: dict[int, TextEvent] = {}

    async def whole(self, exchange: Exchange) -> None:
        pieces = await collect(self._choices)
        completion = Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(piece, opens=True) for piece in pieces],
            usage=usage(self._choices),
        )
        await exchange.answer(msgspec.json.encode(completion))

    async def stream(self, exchange: Exchange) -> None:
        await stream_events(exchange, self._choices, opening=self._opening, chunk=self._chunk, closing=self._closing)

    def _opening(self) -> bytes:
        if not self._body.echo:
            return b""
        return b"".join(
            self._event(CompletionChoice(index=choice.index, text=self._echoes[choice.prompt_index]))
            for choice in self._choices.choices
        )

    def _chunk(self, piece: ChoicePiece) -> bytes:
        if piece.finish is None and self._text_only:
            return self._text_event(piece.index).of(piece.text) if piece.text else b""
        if not (piece.text or piece.tokens or piece.finish or self._body.return_token_ids):
            return b""
        return self._event(self._choice(piece, opens=False))

    def _text_event(self, index: int) -> TextEvent:
        found = self._text_events.get(index)
        if found is None:
            marked = self._event(CompletionChoice(index=index, text=TextEvent.MARK))
            found = self._text_events[index] = TextEvent(marked)
        return found

    def _closing(self) -> bytes:
        if not self._include_usage:
            return b""
        chunk = Completion(
            id=self._id, created=self._created, model=self._model, choices=[], usage=usage(self._choices)
        )
        return event(chunk)

    def _event(self, choice: CompletionChoice) -> bytes:
        chunk = Completion(id=self._id, created=self._created, model=self._model, choices=[choice])
        if self._include_usage:
            chunk.usage = None
        return event(chunk)

    def _choice(self, piece: ChoicePiece, *, opens: bool) -> CompletionChoice:
        prompt_index = self._choices.choices[piece.index].prompt_index
        echo = self._echoes[prompt_index]
        choice = CompletionChoice(
            index=piece.index, text=echo + piece.text if opens else piece.text, finish_reason=piece.finish
        )
        if self._body.logprobs is not None:
            choice.logprobs = completion_logprobs(self._tokenizer, piece.tokens, self._body.logprobs, len(echo))
        if self._body.return_token_ids:
            choice.token_ids = piece.token_ids
            if opens:
                choice.prompt_token_ids = self._choices.prompts[prompt_index]
        return choice

    def _echo(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids) if self._body.echo and self._tokenizer is not None else ""


def check_model(serving: Serving, model: str) -> None:
    if model != serving.model_name:
        raise UnknownModel(f"the model {model!r} does not exist; this server has {serving.model_name!r}", param="model")


def make_choices(
    serving: Serving,
    body: SamplingFields,
    prompts: list[list[int]],
    max_tokens: int,
    logprobs: int | None,
    prefix: str,
) -> Choices:
    """The choices that a body asks for, not sent off yet. Raises InvalidRequest for values out of bounds."""
    sampling = body.sampling(max_tokens, logprobs)
    sampling.validate(serving.vocab_size)
    options = TextOptions(
        stops=body.stops,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    return Choices(
        serving.pipeline,
        serving.tokenizer,
        prompts,
        sampling,
        request_id=f"{prefix}-{secrets.token_hex(12)}",
        num_samples=body.num_choices,
        options=options,
        cache_salt=body.cache_salt or "",
    )


def usage(choices: Choices) -> Usage:
    return Usage(
        prompt_tokens=choices.num_prompt_tokens,
        completion_tokens=choices.num_completion_tokens,
        total_tokens=choices.num_prompt_tokens + choices.num_completion_tokens,
        prompt_tokens_details={"cached_tokens": choices.num_cached_tokens},
    )
