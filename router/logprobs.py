"""Log probabilities as the two routes of the OpenAI API show them."""

from collections.abc import Sequence

from pd_cluster.model.tokenizer import Tokenizer
from router.openai_schema import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from router.text import PieceToken


def chat_logprobs(tokenizer: Tokenizer | None, tokens: Sequence[PieceToken], num_top: int) -> ChatLogprobs:
    """Each token with its bytes, so that a client can put split characters together again."""
    content = []
    for token in tokens:
        top = [
            TopLogprob(token=_text(tokenizer, id_), logprob=logprob, bytes=list(_bytes(tokenizer, id_)))
            for id_, logprob in zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
        ]
        content.append(
            TokenLogprob(
                token=_text(tokenizer, token.token_id),
                logprob=token.logprobs.chosen,
                bytes=list(_bytes(tokenizer, token.token_id)),
                top_logprobs=top[:num_top],
            )
        )
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[PieceToken], num_top: int, offset: int = 0
) -> CompletionLogprobs:
    """The older form: parallel lists; `offset` is the length of an echoed prompt."""
    top: list[dict[str, float]] | None = None
    if num_top:
        top = [
            {
                _key(tokenizer, id_): logprob
                for id_, logprob in zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
            }
            for token in tokens
        ]
    return CompletionLogprobs(
        tokens=[_key(tokenizer, token.token_id) for token in tokens],
        token_logprobs=[token.logprobs.chosen for token in tokens],
        top_logprobs=top,
        text_offset=[offset + token.offset for token in tokens],
    )


def _bytes(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    return tokenizer.token_bytes(token_id) if tokenizer is not None else b""


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    return tokenizer.token_text(token_id) if tokenizer is not None else f"token_id:{token_id}"


def _key(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A name that two tokens do not share: bytes that are not a whole character are spelt out."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
