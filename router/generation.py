"""One completion from tokens to text, cut where it ends, which may begin in the middle.

What has become certain after a token does not depend on how tokens were grouped into deltas, nor on which router saw
the earlier ones: a generation that takes in the tokens of an interrupted one continues its text to the character.
"""

from collections.abc import Collection, Sequence

from msgspec import Struct, structs

from pd_cluster.engine.plan import TokenLogprobs
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.request import FinishReason, Request
from router.attempt import Delta
from router.choices import TextOptions
from router.text import TextStream


class Part(Struct, frozen=True, kw_only=True):
    """What is new. With the last part comes `finish`, and in `tail` the text that was held back until then."""

    first_index: int  # of the first token in the whole output
    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    finish: FinishReason | None = None
    tail: str = ""


class Generation:
    def __init__(self, request: Request, tokenizer: Tokenizer | None, options: TextOptions) -> None:
        self.request = request
        self.num_tokens = 0  # of the output so far
        self._has_stops = bool(options.stops)
        self._text = TextStream(
            tokenizer,
            stops=options.stops,
            include_stop=options.include_stop,
            skip_special_tokens=options.skip_special_tokens,
            min_tokens=request.sampling.min_tokens,
        )

    def replay(self, eos_token_ids: Collection[int], max_model_len: int) -> Part | None:
        """Take in the output that the request came with; the last part when nothing is left to generate."""
        request, sampling = self.request, self.request.sampling
        output = request.token_ids[request.num_prompt_tokens :]
        ending = sampling.stop_token_ids if sampling.ignore_eos else {*sampling.stop_token_ids, *eos_token_ids}
        end = next((i for i, id_ in enumerate(output) if i >= sampling.min_tokens and id_ in ending), None)
        if end is not None:
            return self._replayed(Delta(output[: end + 1], finish=FinishReason.STOP))
        if output and (len(output) >= sampling.max_tokens or len(request.token_ids) >= max_model_len):
            return self._replayed(Delta(output, finish=FinishReason.LENGTH))
        return self._replayed(Delta(output))

    def _replayed(self, delta: Delta) -> Part | None:
        part = self.push(delta)
        if part.finish is None:
            return None
        return structs.replace(part, first_index=self.num_tokens, token_ids=(), text="", logprobs=())

    def push(self, delta: Delta) -> Part:
        """What `delta` makes certain. A `finish` that the delta did not have means that a stop string was met: the
        request is to be stopped."""
        first_index = self.num_tokens
        # the token that ended the request has no text
        num_shown = len(delta.token_ids) - (delta.finish is FinishReason.STOP and bool(delta.token_ids))
        text, num_taken, stopped = self._feed(delta.token_ids[:num_shown])
        finish, tail = delta.finish, ""
        if stopped:
            finish = FinishReason.STOP
        else:
            num_taken = len(delta.token_ids)
            if finish is not None:
                rest = self._text.finish()
                tail = rest.text
                finish = FinishReason.STOP if rest.stopped else finish
        self.num_tokens += num_taken
        return Part(
            first_index=first_index,
            token_ids=delta.token_ids[:num_taken],
            text=text,
            logprobs=(delta.logprobs or [])[:num_taken],
            finish=finish,
            tail=tail,
        )

    def _feed(self, token_ids: Sequence[int]) -> tuple[str, int, bool]:
        """The text that is certain, the tokens up to the one that met a stop string, and whether one did."""
        if not self._has_stops:
            return self._text.push_unmatched(token_ids), len(token_ids), False
        text = ""
        for num_taken, token_id in enumerate(token_ids, 1):
            piece = self._text.push([token_id], None)
            text += piece.text
            if piece.stopped:
                return text, num_taken, True
        return text, len(token_ids), False
