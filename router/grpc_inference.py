"""pd_cluster.v1.Inference: completions whole and streamed, tokens and texts, models.

A call that is cancelled, or whose deadline passes, leaves its `async with` block, and that frees prefill and decode.
Handlers write their streams themselves: a cancellation then always reaches the code that holds the request.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from pd_cluster.engine.plan import TokenLogprobs
from pd_cluster.errors import DuplicateRequest, InvalidRequest
from pd_cluster.pb.v1 import inference_pb2 as pb
from pd_cluster.pb.v1 import inference_pb2_grpc
from pd_cluster.request import FinishReason
from router.answer import Answer
from router.attempt import Timings
from router.generation import Part
from router.grpc_edge import answering
from router.grpc_requests import MAX_TEXT, Order, check_model, encode, encode_chat, read_order
from router.serving import Serving

FINISH = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


class Inference(inference_pb2_grpc.InferenceServicer):
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._names: set[str] = set()  # of the requests in flight

    async def Generate(self, message: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:  # noqa: N802
        async with answering(context, "Generate", self._serving.metrics):
            order = await read_order(self._serving, message)
            response = pb.GenerateResponse(
                request_id=order.name, model=self._serving.model_name, seed=order.request.sampling.seed
            )
            with self._named(order):
                async with Answer(self._serving, order, context.time_remaining()) as answer:
                    while True:
                        part = await answer.next()
                        response.token_ids.extend(part.token_ids)
                        response.logprobs.extend(map(_logprobs, part.logprobs))
                        response.text += part.text + part.tail
                        if part.finish is not None:
                            break
                    response.finish_reason = FINISH[part.finish]
                    response.usage.CopyFrom(_usage(order, answer))
                    response.timings.CopyFrom(_timings(answer.timings))
            return response

    async def GenerateStream(self, message: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override] # noqa: N802
        async with answering(context, "GenerateStream", self._serving.metrics):
            order = await read_order(self._serving, message)
            with self._named(order):
                async with Answer(self._serving, order, context.time_remaining()) as answer:
                    await self._stream(order, answer, context)

    async def _stream(self, order: Order, answer: Answer, context: Any) -> None:
        sequence = itertools.count()

        async def write(**event: Any) -> None:
            await context.write(pb.GenerateStreamResponse(sequence=next(sequence), **event))

        begin = pb.GenerateStreamResponse.Begin(
            request_id=order.name,
            model=self._serving.model_name,
            seed=order.request.sampling.seed,
            num_prompt_tokens=order.request.num_prompt_tokens,
        )
        await write(begin=begin)
        while True:
            part = await answer.next()
            if part.token_ids:
                await write(delta=_delta(part))
            if part.finish is not None:
                break
        end = pb.GenerateStreamResponse.End(
            finish_reason=FINISH[part.finish],
            usage=_usage(order, answer),
            timings=_timings(answer.timings),
            text=part.tail,
        )
        await write(end=end)

    async def Tokenize(self, message: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        async with answering(context, "Tokenize", self._serving.metrics):
            check_model(self._serving, message.model)
            match message.WhichOneof("input"):
                case "text":
                    special = not message.HasField("add_special_tokens") or message.add_special_tokens
                    token_ids = await encode(self._serving, message.text, param="text", add_special_tokens=special)
                case "chat":
                    token_ids = await encode_chat(self._serving, message.chat)
                case _:
                    raise InvalidRequest("send text or chat", param="text")
            return pb.TokenizeResponse(token_ids=token_ids, max_model_len=self._serving.max_model_len)

    async def Detokenize(self, message: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        async with answering(context, "Detokenize", self._serving.metrics):
            check_model(self._serving, message.model)
            tokenizer = self._serving.tokenizer
            if tokenizer is None:
                raise InvalidRequest("this model has no tokenizer", param="token_ids")
            if len(message.token_ids) > MAX_TEXT // 8:
                raise InvalidRequest(f"at most {MAX_TEXT // 8} token ids are accepted", param="token_ids")
            if max(message.token_ids, default=0) >= self._serving.vocab_size:
                last = self._serving.vocab_size - 1
                raise InvalidRequest(f"token ids must be between 0 and {last}", param="token_ids")
            skip = not message.HasField("skip_special_tokens") or message.skip_special_tokens
            text = await asyncio.to_thread(tokenizer.decode, message.token_ids, skip)
            return pb.DetokenizeResponse(text=text)

    async def ListModels(self, message: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        async with answering(context, "ListModels", self._serving.metrics):
            serving = self._serving
            model = pb.Model(
                name=serving.model_name,
                max_model_len=serving.max_model_len,
                vocab_size=serving.vocab_size,
                has_tokenizer=serving.tokenizer is not None,
                has_chat_template=serving.has_chat_template,
                created_unix_s=serving.created,
            )
            return pb.ListModelsResponse(models=[model])

    @contextlib.contextmanager
    def _named(self, order: Order) -> Iterator[None]:
        if order.name in self._names:
            raise DuplicateRequest(f"request {order.name} is in flight already", param="request_id")
        self._names.add(order.name)
        try:
            yield
        finally:
            self._names.discard(order.name)


def _delta(part: Part) -> pb.GenerateStreamResponse.Delta:
    return pb.GenerateStreamResponse.Delta(
        first_index=part.first_index,
        token_ids=part.token_ids,
        text=part.text,
        logprobs=map(_logprobs, part.logprobs),
    )


def _logprobs(token: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        chosen=token.chosen, rank=token.rank, top_ids=token.top_ids, top_logprobs=token.top_logprobs
    )


def _usage(order: Order, answer: Answer) -> pb.Usage:
    return pb.Usage(
        num_prompt_tokens=order.request.num_prompt_tokens,
        num_cached_tokens=answer.timings.num_cached_tokens,
        num_output_tokens=answer.num_tokens,
    )


def _timings(timings: Timings) -> pb.Timings:
    return pb.Timings(
        queue_s=timings.queued_s,
        prefill_s=timings.prefill_s,
        kv_transfer_s=timings.transfer_s,
        kv_transfer_bytes=timings.transfer_bytes,
        ttft_s=timings.ttft_s,
        tpot_s=timings.tpot_s,
        decode_s=max(0.0, timings.e2e_s - timings.ttft_s) if timings.ttft_s else 0.0,
        e2e_s=timings.e2e_s,
        num_retries=timings.num_retries,
        num_preemptions=timings.num_preemptions,
        prefill_worker=timings.prefill_worker or "",
        decode_worker=timings.decode_worker or "",
    )
