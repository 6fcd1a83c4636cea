"""Messages of the gRPC API into requests: defaults, bounds, and the name of the field that is wrong."""

import asyncio
import re
import secrets
from typing import Any

from msgspec import Struct

from pd_cluster.errors import InvalidRequest, UnknownModel
from pd_cluster.ids import RequestId
from pd_cluster.model.tokenizer import LONG_TEXT
from pd_cluster.pb.v1 import inference_pb2 as pb
from pd_cluster.request import MAX_SEED, Request, SamplingParams
from router.choices import TextOptions
from router.serving import Serving

MAX_STOPS = 16
MAX_TEXT = 32 << 20
"""Characters of one text."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SAMPLING = [field.name for field in pb.Sampling.DESCRIPTOR.fields]
_COPIED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class Order(Struct, frozen=True, kw_only=True):
    """What a GenerateRequest asks for."""

    name: str  # the request's, as its client knows it
    request: Request
    options: TextOptions
    interval_s: float  # at least this long between two messages of a stream


def check_model(serving: Serving, model: str) -> None:
    if model not in ("", serving.model_name):
        raise UnknownModel(
            f"the model {model[:200]!r} does not exist; this server has {serving.model_name!r}", param="model"
        )


async def read_order(serving: Serving, message: pb.GenerateRequest) -> Order:
    """Raises RequestError that names the field by its path in the message."""
    check_model(serving, message.model)
    if message.request_id and not _REQUEST_ID.fullmatch(message.request_id):
        raise InvalidRequest("request_id takes 1 to 128 printable ASCII characters", param="request_id")
    prompt = await _read_input(serving, message)
    output = list(message.output_token_ids)
    sampling = message.sampling
    greedy = sampling.HasField("temperature") and sampling.temperature == 0
    if output and not greedy and not sampling.HasField("seed"):
        raise InvalidRequest("a sampled request that continues needs the seed it began with", param="sampling.seed")
    name = message.request_id or f"gen-{secrets.token_hex(12)}"
    request = Request(
        # several routers may be asked for one name, and a worker must not take one for the other
        id=RequestId(f"{name}.{secrets.token_hex(4)}"),
        token_ids=prompt + output,
        num_prompt_tokens=len(prompt),
        sampling=read_sampling(sampling, max(1, serving.max_model_len - len(prompt)), serving.vocab_size),
        cache_salt=message.cache_salt,
    )
    return Order(
        name=name,
        request=request,
        options=_read_options(sampling),
        interval_s=message.stream_interval_ms / 1000,
    )


def read_sampling(message: pb.Sampling, room: int, vocab_size: int) -> SamplingParams:
    """`room`: output tokens when the client does not limit them. Raises InvalidRequest."""
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields() if field.name in _COPIED}
    values.setdefault("seed", secrets.randbelow(MAX_SEED))
    sampling = SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else room,
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        **values,
    )
    try:
        sampling.validate(vocab_size)
    except InvalidRequest as error:
        field = next((name for name in _SAMPLING if (error.param or "").startswith(name)), None)
        raise InvalidRequest(error.message, param=f"sampling.{field}" if field else "sampling") from None
    return sampling


def _read_options(message: pb.Sampling) -> TextOptions:
    if len(message.stop) > MAX_STOPS:
        raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings, got {len(message.stop)}", param="sampling.stop")
    if not all(message.stop):
        raise InvalidRequest("stop must not hold an empty string", param="sampling.stop")
    return TextOptions(
        stops=tuple(message.stop),
        include_stop=message.include_stop,
        skip_special_tokens=not message.HasField("skip_special_tokens") or message.skip_special_tokens,
    )


async def _read_input(serving: Serving, message: pb.GenerateRequest) -> list[int]:
    match message.WhichOneof("input"):
        case "prompt":
            token_ids = await encode(serving, message.prompt, param="prompt")
            field = "prompt"
        case "prompt_token_ids":
            token_ids = list(message.prompt_token_ids.ids)
            field = "prompt_token_ids"
        case "chat":
            return await encode_chat(serving, message.chat)
        case _:
            raise InvalidRequest("send one of prompt, prompt_token_ids and chat", param="prompt")
    if not token_ids:
        raise InvalidRequest("the prompt is empty: send at least one token", param=field)
    return token_ids


async def encode_chat(serving: Serving, chat: pb.Chat, param: str = "chat") -> list[int]:
    """A conversation up to where the assistant speaks. Raises InvalidRequest."""
    if not chat.messages:
        raise InvalidRequest("messages must not be empty", param=f"{param}.messages")
    messages = []
    for message in chat.messages:
        named = {"name": message.name} if message.name else {}
        messages.append({"role": message.role, "content": message.content} | named)
    return await encode(serving, serving.render_chat(messages), param=param, add_special_tokens=False)


async def encode(serving: Serving, text: str, *, param: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids; a long text does not hold up the others. Raises InvalidRequest."""
    if len(text) > MAX_TEXT:
        raise InvalidRequest(f"the text has {len(text)} characters; at most {MAX_TEXT} are accepted", param=param)
    if len(text) <= LONG_TEXT:
        return serving.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(serving.encode, text, add_special_tokens=add_special_tokens)
