"""Tokens to text for one stream: whole characters only, and never a part of a stop string.

Text that may turn out to begin a stop string is held back until it is decided. The outcome does not depend on how the
tokens were grouped: a stop string counts at the character that completes it, and of two that end together the longer.
"""

from collections.abc import Sequence

from msgspec import Struct, field

from pd_cluster.engine.plan import TokenLogprobs
from pd_cluster.model.tokenizer import Detokenizer, Tokenizer


class StopMatcher:
    """Finds the first of several stop strings in a text that comes in pieces."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._held = ""
        self.is_off = not self._stops
        self.stopped = False

    def push(self, text: str) -> str:
        """What of the text so far is certain; `stopped` says that a stop string was met and nothing follows."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found: tuple[int, int] | None = None  # end, start
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found):
                found = start + len(stop), start
        if found is not None:
            self.stopped, self._held = True, ""
            return text[: found[0] if self._include else found[1]]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The stream ended without a stop: what was held back is text."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class PieceToken(Struct, frozen=True):
    """A token for the client's log probabilities; `offset` is where its text begins in the completion."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


class Piece(Struct):
    """New text, the tokens that it came from (only when log probabilities were asked for), and whether it is over."""

    text: str = ""
    tokens: list[PieceToken] = field(default_factory=list)
    stopped: bool = False


class TextStream:
    """The text of one completion. Without a tokenizer all text is empty: such a model speaks token ids only."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens) if tokenizer is not None else None
        )
        self._matcher = StopMatcher(stops, include_stop)
        self._min_tokens = min_tokens  # stop strings do not count before
        self._num_tokens = 0
        self._decoded = 0  # characters out of the detokenizer
        self._emitted = 0
        self._waiting: list[PieceToken] = []  # tokens whose text is held back

    @property
    def unmatched(self) -> bool:
        """Whether no text is ever held back for a stop string."""
        return self._matcher.is_off

    def push_unmatched(self, token_ids: Sequence[int]) -> str:
        """`push` of tokens without log probabilities into an `unmatched` stream, whose tokens never have any."""
        text = self._detokenizer.push(token_ids) if self._detokenizer is not None else ""
        self._num_tokens += len(token_ids)
        self._decoded += len(text)
        self._emitted += len(text)
        return text

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> Piece:
        """The text that `token_ids` make certain. After `stopped` the request is to be ended."""
        if logprobs is None and not self._matcher_off(len(token_ids)):
            self._num_tokens += len(token_ids)
            return self._emit(self._matcher.push(self._decode(token_ids)))
        piece = Piece()
        for i, token_id in enumerate(token_ids):
            offset = self._decoded
            if logprobs is not None:
                self._waiting.append(PieceToken(token_id, logprobs[i], offset))
            self._num_tokens += 1
            text = self._decode([token_id])
            certain = text if self._num_tokens <= self._min_tokens else self._matcher.push(text)
            part = self._emit(certain)
            piece.text += part.text
            piece.tokens += part.tokens
            if part.stopped:
                piece.stopped = True
                break
        return piece

    def finish(self) -> Piece:
        """The stream ended by itself: everything held back is text."""
        text = self._detokenizer.flush() if self._detokenizer is not None else ""
        self._decoded += len(text)
        piece = self._emit(self._matcher.push(text))
        if not piece.stopped:
            rest = self._matcher.flush()
            self._emitted += len(rest)
            piece.text += rest
            piece.tokens += self._waiting
            self._waiting = []
        return piece

    def _matcher_off(self, num_new: int) -> bool:
        return self._num_tokens < self._min_tokens and num_new > 0

    def _decode(self, token_ids: Sequence[int]) -> str:
        text = self._detokenizer.push(token_ids) if self._detokenizer is not None else ""
        self._decoded += len(text)
        return text

    def _emit(self, text: str) -> Piece:
        self._emitted += len(text)
        ready: list[PieceToken] = []
        if self._waiting:
            # a token without text of its own, or part of a character, goes with the next one that has some
            num_ready = 0
            for token in self._waiting:
                if token.offset >= self._emitted:
                    break
                num_ready += 1
            ready, self._waiting = self._waiting[:num_ready], self._waiting[num_ready:]
        return Piece(text, ready, self._matcher.stopped)
