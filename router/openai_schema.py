"""The bodies of the OpenAI API that this server understands, and what it does not.

Types are strict: a string where a number belongs is an error that names the parameter. Fields that change nothing
here (`user`, `metadata`, ...) are accepted and ignored; fields that would change the answer and are not supported are
refused by name. A few extras go by the names that other open servers use.
"""

import secrets
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from pd_cluster.errors import InvalidRequest
from pd_cluster.request import MAX_SEED, SamplingParams

MAX_STOPS = 4
MAX_N = 128


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """What both routes share. `None` is the default of each field."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # extras
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS:
            raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
        if any(not stop for stop in stops):
            raise InvalidRequest("stop must not hold an empty string", param="stop")
        return stops

    @property
    def num_choices(self) -> int:
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_N:
            raise InvalidRequest(f"n must be between 1 and {MAX_N}, got {n}", param="n")
        return n

    @property
    def include_usage(self) -> bool:
        if self.stream_options is None:
            return False
        if not self.stream:
            raise InvalidRequest("stream_options is only for stream=true", param="stream_options")
        return bool(self.stream_options.include_usage)

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """How to sample a first choice; further ones count the seed up."""
        seed = secrets.randbelow(MAX_SEED) if self.seed is None else self.seed % (MAX_SEED + 1)
        values: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
        }
        given = {name: value for name, value in values.items() if value is not None}
        if given.get("top_k") == -1:  # the name of "no limit" elsewhere
            given["top_k"] = 0
        return SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_token_ids(self.logit_bias or {}),
            **given,
        )


class CompletionBody(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]  # a list of ids is one prompt, a list of texts or of lists several
    logprobs: int | None = None
    echo: bool | None = None
    # refused unless they say what happens anyway
    best_of: int | None = None
    suffix: str | None = None

    def check_supported(self) -> None:
        """Raise InvalidRequest that names a field we cannot honour."""
        if self.best_of is not None and self.best_of != self.num_choices:
            raise InvalidRequest("best_of is not supported: leave it out, or equal to n", param="best_of")
        if self.suffix:
            raise InvalidRequest("suffix is not supported: this server does not fill in the middle", param="suffix")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo together with logprobs is not supported", param="echo")


class TextPart(Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def for_template(self, index: int) -> dict[str, Any]:
        """Plain values; text parts are joined by line breaks. Raises InvalidRequest for other parts."""
        message: dict[str, Any] = msgspec.to_builtins(self)
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text" or part.text is None:
                    raise InvalidRequest(
                        f"messages[{index}].content has a part of type {part.type!r}: only text is supported",
                        param=f"messages[{index}].content",
                    )
            message["content"] = "\n".join(part.text or "" for part in self.content)
        elif self.content is None:
            message["content"] = None if self.tool_calls else ""
        return message


class ResponseFormat(Struct, kw_only=True):
    type: str


class ChatBody(SamplingFields, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # refused unless they say what happens anyway
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None

    def check_supported(self) -> None:
        """Raise InvalidRequest that names a field we cannot honour."""
        if self.response_format is not None and self.response_format.type != "text":
            raise InvalidRequest(
                f"response_format {self.response_format.type!r} is not supported: only 'text'", param="response_format"
            )
        if self.tools and self.tool_choice != "none":
            raise InvalidRequest("tools are not supported: leave them out or set tool_choice to 'none'", param="tools")
        if self.functions and self.function_call != "none":
            raise InvalidRequest("functions are not supported", param="functions")
        if self.modalities not in (None, ["text"]):
            raise InvalidRequest("modalities other than text are not supported", param="modalities")
        for name in ("audio", "prediction", "web_search_options"):
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{name} is not supported", param=name)

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


B = TypeVar("B", bound=SamplingFields)


def decode_body(decoder: msgspec.json.Decoder[B], body: bytes) -> B:
    """Parse a request body. Raises InvalidRequest that names the parameter."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        param = path.strip("`.").partition("[...]")[0] or None
        if param is None and "`" in text and "field" in text:
            param = text.split("`")[1]
        where = f" at {param}" if path else ""
        raise InvalidRequest(f"{text}{where}", param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def _token_ids(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        raise InvalidRequest("the keys of logit_bias must be token ids", param="logit_bias") from None


completion_decoder = msgspec.json.Decoder(CompletionBody)
chat_decoder = msgspec.json.Decoder(ChatBody)


# ---- what we answer


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] = field(default_factory=dict)


class ErrorBody(Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class CompletionLogprobs(Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(Struct, kw_only=True):
    """A whole completion, or a chunk of a stream: the object has the same name for both."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class TopLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatDelta(Struct, kw_only=True):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
