"""Text to token ids and back. Every token stands for some bytes, so a stream of tokens is a stream of bytes.

`tokenizers` encodes. Decoding is ours: the decoder of tokenizer.json is read once into rules that give each token its
bytes (byte-level alphabets, or sentencepiece pieces with byte fallback), and text is those bytes as UTF-8. Then
decoding a stream needs no window of old tokens: an incremental UTF-8 decoder holds back an unfinished character and
nothing else, at constant cost for each token. Ids that no token has (a vocabulary is often padded) have no bytes. No
torch.
"""

import codecs
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from msgspec import Struct

from pd_cluster.errors import InvalidRequest, ModelError

LONG_TEXT = 32 << 10
"""Characters; longer texts are encoded without offsets, several times faster and with the GIL released."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SpecialTokens(Struct, frozen=True, kw_only=True):
    """The tokens that chat templates call by name; `others` are further ones such as pad_token."""

    bos: str | None = None
    eos: str | None = None
    others: dict[str, str] = {}

    def by_name(self) -> dict[str, str]:
        named = {"bos_token": self.bos, "eos_token": self.eos} | self.others
        return {name: text for name, text in named.items() if text is not None}


class DecodeRules(Struct, frozen=True, kw_only=True):
    """How a token's text becomes bytes."""

    byte_level: bool = False  # the text is spelt in the 256-character byte alphabet of GPT-2
    replacements: tuple[tuple[str, str], ...] = ()  # sentencepiece's visible space to a real one
    byte_fallback: bool = False  # pieces such as <0xE2> are single bytes
    strip_start: int = 0  # spaces that the encoder puts before a whole text and decoding takes away again


class Tokenizer:
    """A model's tokenizer. Immutable; one per process is enough."""

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens) -> None:
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._rules = _decode_rules(backend.decoder)
        self._added: dict[int, Any] = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self.special = special
        self.special_ids = frozenset(id_ for id_, token in self._added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_token_id = self.token_to_id(special.bos)
        self.eos_token_id = self.token_to_id(special.eos)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """The tokenizer.json of a Hugging Face directory. Raises ModelError that names the file."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{directory} has no tokenizer.json; convert the model's tokenizer to the fast format, e.g. by "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} is not a readable tokenizer: {error}") from error
        return cls(backend, read_special_tokens(directory))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. `add_special_tokens`: what the model's post-processor adds around a text, usually a
        leading BOS; a rendered chat template has its own and is encoded without. Raises InvalidRequest on text that
        is not valid Unicode.
        """
        try:
            if len(text) > LONG_TEXT:
                encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
            else:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(f"the text is not valid Unicode: {error}") from error
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        stream = Detokenizer(self, skip_special_tokens=skip_special_tokens, continuation=False)
        return stream.push(ids) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to a text; empty for an id that no token has."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """The token alone as text, for log probabilities; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_to_id(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self._backend.token_to_id(token)
        return found

    def to_json(self) -> str:
        """The contents of a tokenizer.json that reads back as this tokenizer."""
        text: str = self._backend.to_str(pretty=True)
        return text

    @property
    def strip_start(self) -> int:
        return self._rules.strip_start

    def _compute_bytes(self, token_id: int) -> bytes:
        rules = self._rules
        added = self._added.get(token_id)
        text: str | None = added.content if added is not None else self._id_to_token(token_id)
        if text is None:
            return b""
        if rules.byte_level:
            if added is not None:
                return text.encode()
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in text)
            except KeyError:
                return text.encode()
        for old, new in rules.replacements:
            text = text.replace(old, new)
        piece = _BYTE_PIECE.fullmatch(text) if rules.byte_fallback else None
        return bytes([int(piece[1], 16)]) if piece else text.encode()

    def _id_to_token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token


class Detokenizer:
    """The text of one stream of tokens, as far as it is certain.

    The pushes and the flush together are exactly `Tokenizer.decode` of all ids. `continuation`: the stream goes on
    after a prompt, so a first token's leading space is part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continuation: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_to_strip = 0 if continuation else tokenizer.strip_start

    def push(self, token_ids: Iterable[int]) -> str:
        """Whole characters that these tokens complete; an unfinished one waits for the next push."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        text = self._utf8.decode(b"".join([token_bytes(id_) for id_ in token_ids if id_ not in skipped]))
        return self._strip(text) if self._num_to_strip else text

    def flush(self) -> str:
        """End the stream: what was held back, as U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _strip(self, text: str) -> str:
        while text and self._num_to_strip:
            if text[0] != " ":
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text


def read_special_tokens(directory: Path) -> SpecialTokens:
    """The named tokens of tokenizer_config.json, or of special_tokens_map.json where it has none."""
    named: dict[str, str] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / file
        if not path.is_file():
            continue
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            items = list(values.items())
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        for name, value in items:
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                named.setdefault(name, text)
    return SpecialTokens(bos=named.pop("bos_token", None), eos=named.pop("eos_token", None), others=named)


def _decode_rules(decoder: Any) -> DecodeRules:
    """Read a `tokenizers` decoder. Raises ModelError that names a step without a rule here."""
    if decoder is None:
        raise ModelError("tokenizer.json has no decoder, so its tokens cannot become text")
    description = json.loads(decoder.__getstate__())
    steps = description["decoders"] if description["type"] == "Sequence" else [description]
    byte_level = byte_fallback = False
    replacements: list[tuple[str, str]] = []
    strip_start = 0
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                strip_start = start
            case {"type": "Metaspace", "replacement": str(space)}:
                replacements.append((space, " "))
                strip_start = 0 if step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False else 1
            case _:
                raise ModelError(
                    f"the tokenizer's decoder step {json.dumps(step)} is not supported; "
                    "supported: ByteLevel, Metaspace, Replace, ByteFallback, Fuse and Strip of leading spaces"
                )
    return DecodeRules(
        byte_level=byte_level, replacements=tuple(replacements), byte_fallback=byte_fallback, strip_start=strip_start
    )


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


_BYTE_OF_CHAR = {char: byte for byte, char in enumerate(byte_alphabet())}
