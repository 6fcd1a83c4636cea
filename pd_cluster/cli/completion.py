"""One request through a router, collected: what the offline commands print and measure."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from pd_cluster.engine.plan import TokenLogprobs
from pd_cluster.errors import ErrorInfo, PdClusterError
from pd_cluster.model.tokenizer import Detokenizer, Tokenizer
from pd_cluster.request import FinishReason, Request
from router.attempt import Timings
from router.pipeline import Pipeline


class Completion(Struct, kw_only=True):
    """A request's output; `error` is set when it failed, after the tokens that came before."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    timings: Timings | None = None
    error: ErrorInfo | None = None

    def text(self, tokenizer: Tokenizer | None) -> str | None:
        """What follows the prompt: a leading space that belongs to it stays, as in a stream."""
        if tokenizer is None:
            return None
        stream = Detokenizer(tokenizer)
        return stream.push(self.token_ids) + stream.flush()

    def as_json(self, index: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """The line that `generate --json` prints."""
        line: dict[str, Any] = {
            "index": index,
            "num_prompt_tokens": self.request.num_prompt_tokens,
            "token_ids": self.token_ids,
            "text": self.text(tokenizer),
            "finish_reason": self.finish,
        }
        if self.request.sampling.logprobs is not None:
            line["logprobs"] = [
                {
                    "token_id": token_id,
                    "logprob": chosen.chosen,
                    "rank": chosen.rank,
                    "top": [
                        {"token_id": top_id, "logprob": logprob}
                        for top_id, logprob in zip(chosen.top_ids, chosen.top_logprobs, strict=True)
                    ],
                }
                for token_id, chosen in zip(self.token_ids, self.logprobs, strict=True)
            ]
        if self.error is not None:
            line["error"] = self.error
        line["timings"] = self.timings
        return line


async def complete(
    pipeline: Pipeline, request: Request, on_tokens: Callable[[list[int]], None] | None = None
) -> Completion:
    """Run `request` to its end; `on_tokens` hears of new tokens as they come. Its failure is in the result."""
    completion = Completion(request=request)
    try:
        async with pipeline.submit(request) as stream:
            async for delta in stream:
                completion.token_ids += delta.token_ids
                completion.logprobs += delta.logprobs or []
                completion.finish = delta.finish or completion.finish
                completion.timings = delta.timings or completion.timings
                if on_tokens is not None and delta.token_ids:
                    on_tokens(delta.token_ids)
    except PdClusterError as error:
        completion.error = error.info()
    return completion
