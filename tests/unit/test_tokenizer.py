"""Streams of tokens become exactly the text of the whole, for sentencepiece pieces with byte fallback and for
byte-level BPE."""

import json
import shutil
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from pd_cluster.errors import InvalidRequest, ModelError
from pd_cluster.model.source import DEMO
from pd_cluster.model.tokenizer import Detokenizer, SpecialTokens, Tokenizer, byte_alphabet

TEXTS = [
    "Once upon a time there was a little girl.",
    "x = 3.14159; y = [1, 2]\n\tif x:\n        pass  \n",
    "naïve café, 日本語のテキスト, кириллица",
    "a family 👩‍👩‍👧 and a flag 🇩🇪",
    "   spaces <né>  and\u00a0more  ",
    "",
]


def byte_level() -> Tokenizer:
    """A small byte-level BPE, trained here, with a hole in its ids and special and plain added tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=byte_alphabet(), special_tokens=["<s>", "</s>"])
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False), AddedToken("<né>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend, SpecialTokens(bos="<s>", eos="</s>"))


DEMO_TOKENIZER = Tokenizer.from_directory(DEMO)
BYTE_LEVEL = byte_level()
BOTH = pytest.mark.parametrize("tokenizer", [DEMO_TOKENIZER, BYTE_LEVEL], ids=["demo", "byte-level"])


@BOTH
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pushes_and_flush_are_the_whole_text_for_any_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(-2, tokenizer.vocab_size + 40), max_size=60))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    skip = data.draw(st.booleans())
    continuation = data.draw(st.booleans())
    stream = Detokenizer(tokenizer, skip_special_tokens=skip, continuation=continuation)
    parts = [stream.push(ids[start:end]) for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    text = "".join([*parts, stream.flush()])
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert text == whole or (continuation and text == " " + whole)


@BOTH
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=40)))
@settings(max_examples=150, deadline=None)
def test_any_text_survives_encoding_and_is_never_cut_inside_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    stream = Detokenizer(tokenizer, continuation=False)
    pushes = [stream.push([id_]) for id_ in ids]
    for end in range(len(pushes)):
        assert text.startswith("".join(pushes[: end + 1]))
    assert "".join(pushes) == text == tokenizer.decode(ids)
    assert stream.flush() == ""


@BOTH
@given(text=st.text(min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_decoding_of_valid_text_is_that_of_the_library(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_byte_level_decoding_of_any_ids_is_that_of_the_library(data: st.DataObject) -> None:
    plain = st.integers(0, BYTE_LEVEL.vocab_size - 2)  # the added "<né>" is spelt in raw bytes there
    ids = data.draw(st.lists(plain, max_size=40))
    skip = data.draw(st.booleans())
    assert BYTE_LEVEL.decode(ids, skip) == BYTE_LEVEL._backend.decode(ids, skip_special_tokens=skip)


def test_an_emoji_of_byte_pieces_comes_out_whole() -> None:
    pieces = [DEMO_TOKENIZER.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    ids = [piece for piece in pieces if piece is not None]
    assert len(ids) == 4
    stream = Detokenizer(DEMO_TOKENIZER)
    assert [stream.push([id_]) for id_ in ids] == ["", "", "", "😀"]
    assert stream.push(ids[:2]) == ""
    assert stream.push([DEMO_TOKENIZER.encode("ba", False)[-1]]) == "\ufffda"
    assert stream.push(ids[:3]) == ""
    assert stream.flush() == "\ufffd"


def test_a_continuation_keeps_its_leading_space_and_a_whole_text_does_not() -> None:
    ids = DEMO_TOKENIZER.encode("there was", add_special_tokens=False)
    assert DEMO_TOKENIZER.decode(ids) == "there was"
    stream = Detokenizer(DEMO_TOKENIZER)
    assert stream.push(ids) + stream.flush() == " there was"
    assert DEMO_TOKENIZER.decode(DEMO_TOKENIZER.encode("  two")) == "  two"


def test_ids_without_a_token_are_empty() -> None:
    for id_ in (-1, DEMO_TOKENIZER.vocab_size, 129_279, 1 << 40):
        assert DEMO_TOKENIZER.token_bytes(id_) == b""
        assert DEMO_TOKENIZER.token_text(id_) == ""
    stream = Detokenizer(DEMO_TOKENIZER)
    assert stream.push([403, 5000, 407]) == " Once upon"


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = BYTE_LEVEL.encode("hi <tool></s>")
    assert BYTE_LEVEL.decode(ids) == "hi <tool>"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "<s>hi <tool></s>"
    assert BYTE_LEVEL.special_ids == {0, 1}


def test_token_bytes_are_the_bytes_of_the_text() -> None:
    for tokenizer in (DEMO_TOKENIZER, BYTE_LEVEL):
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            joined = b"".join(map(tokenizer.token_bytes, ids))
            assert joined.decode() == (f" {text}" if tokenizer.strip_start and text else text)
    assert DEMO_TOKENIZER.token_text(403) == " Once"


def test_the_post_processor_decides_about_bos() -> None:
    assert DEMO_TOKENIZER.encode("Once upon a time") == [1, 403, 407, 261, 378]
    assert DEMO_TOKENIZER.encode("<s>Once upon a time", add_special_tokens=False) == [1, 403, 407, 261, 378]
    assert (DEMO_TOKENIZER.bos_token_id, DEMO_TOKENIZER.eos_token_id) == (1, 2)
    cases = json.loads((DEMO / "reference.json").read_text())["cases"]
    assert all(DEMO_TOKENIZER.encode(case["prompt"]) == case["prompt_ids"] for case in cases)


def test_every_byte_has_one_character() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert (alphabet[ord(" ")], alphabet[ord("\n")], alphabet[ord("a")]) == ("Ġ", "Ċ", "a")


def test_a_long_stream_costs_the_same_per_token_at_its_end() -> None:
    invalid = [id_ for id_ in range(DEMO_TOKENIZER.vocab_size) if DEMO_TOKENIZER.token_bytes(id_) == b"\x80"]
    for ids in (DEMO_TOKENIZER.encode("once upon a time 😀 " * 2000, False), invalid * 40_000):
        stream = Detokenizer(DEMO_TOKENIZER)
        start = time.perf_counter()
        num_chars = sum(len(stream.push([id_])) for id_ in ids)
        assert num_chars > 10_000
        assert time.perf_counter() - start < 2.0  # a quadratic one takes minutes


def test_text_that_is_not_unicode_is_the_clients_mistake() -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        DEMO_TOKENIZER.encode("a\ud800b")


def test_a_truncating_tokenizer_file_does_not_truncate(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_directory(tmp_path).encode("Once upon a time there was")) > 6


def test_special_tokens_come_from_either_file(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<unk>"}))
    special = Tokenizer.from_directory(tmp_path).special
    assert special.by_name() == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}


def test_unusable_tokenizers_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json; convert"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.from_directory(tmp_path)
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a"))
    with pytest.raises(ModelError, match="has no decoder"):
        Tokenizer(backend, SpecialTokens())
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"WordPiece.* is not supported; supported: ByteLevel"):
        Tokenizer(backend, SpecialTokens())


def test_metaspace_decoders_are_read_too() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"▁a": 0, "b": 1, "▁": 2, "a": 3}, [("▁", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, SpecialTokens())
    assert tokenizer.decode([0, 0, 1]) == backend.decode([0, 0, 1]) == "a ab"
