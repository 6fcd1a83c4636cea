"""POST /v1/chat/completions."""

import time

import msgspec

from pd_cluster.errors import InvalidRequest
from router.choices import ChoicePiece, Choices
from router.completions import check_model, make_choices, usage
from router.events import TextEvent, collect, event, stream_events
from router.exchange import Exchange, while_connected
from router.logprobs import chat_logprobs
from router.openai_schema import (
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    chat_decoder,
    decode_body,
)
from router.serving import Serving


class ChatCompletions:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def handle(self, exchange: Exchange) -> None:
        body = decode_body(chat_decoder, await exchange.read_body())
        check_model(self._serving, body.model)
        body.check_supported()
        if not body.messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        messages = [message.for_template(i) for i, message in enumerate(body.messages)]
        token_ids = self._serving.encode_chat(messages)
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self._serving.max_model_len - len(token_ids))
        choices = make_choices(self._serving, body, [token_ids], max_tokens, body.num_logprobs, "chatcmpl")
        answer = _Answer(self._serving, body, choices)
        await while_connected(exchange, answer.stream(exchange) if body.stream else answer.whole(exchange))


class _Answer:
    """One chat request on its way back."""

    def __init__(self, serving: Serving, body: ChatBody, choices: Choices) -> None:
        self._tokenizer = serving.tokenizer
        self._model = serving.model_name
        self._body = body
        self._choices = choices
        self._id = str(choices.choices[0].request.id)
        self._created = int(time.time())
        self._include_usage = body.include_usage
        self._text_only = body.num_logprobs is None and not body.return_token_ids
        self._text_events: dict[int, TextEvent] = {}

    async def whole(self, exchange: Exchange) -> None:
        pieces = await collect(self._choices)
        completion = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=piece.index,
                    message=AssistantMessage(content=piece.text),
                    logprobs=self._logprobs(piece),
                    finish_reason=piece.finish,
                    token_ids=piece.token_ids if self._body.return_token_ids else msgspec.UNSET,
                )
                for piece in pieces
            ],
            usage=usage(self._choices),
        )
        if self._body.return_token_ids:
            completion.prompt_token_ids = self._choices.prompts[0]
        await exchange.answer(msgspec.json.encode(completion))

    async def stream(self, exchange: Exchange) -> None:
        await stream_events(exchange, self._choices, opening=self._opening, chunk=self._chunk, closing=self._closing)

    def _opening(self) -> bytes:
        return b"".join(
            self._event(ChatChunkChoice(index=choice.index, delta=ChatDelta(role="assistant", content="")))
            for choice in self._choices.choices
        )

    def _chunk(self, piece: ChoicePiece) -> bytes:
        if piece.finish is None and self._text_only:
            return self._text_event(piece.index).of(piece.text) if piece.text else b""
        out = b""
        if piece.text or piece.tokens or self._body.return_token_ids:
            choice = ChatChunkChoice(
                index=piece.index, delta=ChatDelta(content=piece.text), logprobs=self._logprobs(piece)
            )
            if self._body.return_token_ids:
                choice.token_ids = piece.token_ids
            out = self._event(choice)
        if piece.finish is not None:
            out += self._event(ChatChunkChoice(index=piece.index, delta=ChatDelta(), finish_reason=piece.finish))
        return out

    def _text_event(self, index: int) -> TextEvent:
        found = self._text_events.get(index)
        if found is None:
            marked = self._event(ChatChunkChoice(index=index, delta=ChatDelta(content=TextEvent.MARK)))
            found = self._text_events[index] = TextEvent(marked)
        return found

    def _closing(self) -> bytes:
        if not self._include_usage:
            return b""
        total = usage(self._choices)
        return event(ChatChunk(id=self._id, created=self._created, model=self._model, choices=[], usage=total))

    def _event(self, choice: ChatChunkChoice) -> bytes:
        chunk = ChatChunk(id=self._id, created=self._created, model=self._model, choices=[choice])
        if self._include_usage:
            chunk.usage = None
        return event(chunk)

    def _logprobs(self, piece: ChoicePiece) -> ChatLogprobs | None:
        num_top = self._body.num_logprobs
        return None if num_top is None else chat_logprobs(self._tokenizer, piece.tokens, num_top)
