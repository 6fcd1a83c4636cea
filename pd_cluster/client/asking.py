"""What a user asks for, as messages: prompts, chats, and how to sample."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from pd_cluster.errors import InvalidRequest
from pd_cluster.pb.v1 import inference_pb2 as pb
from pd_cluster.request import MAX_SEED

Prompt = str | Sequence[int]
"""A text or its token ids."""

Messages = Sequence[Mapping[str, str]]
"""`{"role": ..., "content": ...}` each, and maybe a `name`."""


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen; what is left out has the router's default (see proto/pd_cluster/v1/inference.proto)."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    stop: str | Sequence[str]
    include_stop: bool
    logprobs: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    skip_special_tokens: bool


class Options(SamplingOptions, total=False):
    """What else may be said about a generation."""

    model: str  # the only one when left out
    request_id: str  # for logs; unique among the requests in flight
    cache_salt: str  # requests share cached prefixes only with the same salt
    timeout_s: float  # for the whole answer


def prompt_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Raises InvalidRequest for a value of the wrong type, TypeError for an option that does not exist."""
    request = _request(options)
    if isinstance(prompt, str):
        request.prompt = _text(prompt, "prompt")
    else:
        try:
            request.prompt_token_ids.ids.extend(prompt)
            request.prompt_token_ids.SetInParent()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"a prompt is a text or token ids: {error}", param="prompt") from None
    return request


def chat_request(messages: Messages, options: Options) -> pb.GenerateRequest:
    """Raises as `prompt_request`."""
    request = _request(options)
    request.chat.CopyFrom(chat_message(messages))
    return request


def chat_message(messages: Messages) -> pb.Chat:
    chat = pb.Chat()
    for index, message in enumerate(messages):
        unknown = set(message) - {"role", "content", "name"}
        if unknown:
            raise InvalidRequest(f"messages[{index}] has an unknown key {sorted(unknown)[0]!r}", param="messages")
        try:
            chat.messages.add(**message)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"messages[{index}]: {error}", param="messages") from None
    return chat


def _request(options: Options) -> pb.GenerateRequest:
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    values.pop("timeout_s", None)
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    # drawn here, so that a stream can go on at a router that has never heard of it
    values.setdefault("seed", secrets.randbelow(MAX_SEED))
    request = pb.GenerateRequest()
    for name, value in values.items():
        sampling = name in pb.Sampling.DESCRIPTOR.fields_by_name
        if not sampling and name not in ("model", "request_id", "cache_salt"):
            raise TypeError(f"there is no option {name!r}")
        try:
            if sampling:
                request.sampling.MergeFrom(pb.Sampling(**{name: value}))
            else:
                setattr(request, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name}: {error}", param=name) from None
    return request


def _text(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not valid Unicode: {error}", param=param) from None
    return text
