"""A tokenizer from GGUF metadata: byte-level BPE (`gpt2`) with its merges, or sentencepiece BPE (`llama`) with
scores. No torch.

GGUF names how text is split into words before BPE (`tokenizer.ggml.pre`) and leaves the pattern to the reader.
"""

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pd_cluster.errors import ModelError
from pd_cluster.model.gguf_file import GgufFile
from pd_cluster.model.tokenizer import SpecialTokens, Tokenizer

SPACE = "\u2581"  # how sentencepiece writes a space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The patterns of each name, applied one after the other; every match and every rest is a word.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jina-es", "jina-de", "phi-2"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva"), (r"\p{N}", _GPT2)
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
}
ADDS_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
IGNORES_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Raises ModelError that names a vocabulary or a word pattern that is not supported, or what is inconsistent."""
    kind = file.need(str, "tokenizer.ggml.model")
    texts: list[str] = file.need(list, "tokenizer.ggml.tokens")
    types: list[int] = file.get(list, "tokenizer.ggml.token_type") or [NORMAL] * len(texts)
    try:
        if kind == "gpt2":
            backend, adds_bos = _byte_level(file, texts), file.get(str, "tokenizer.ggml.pre") in ADDS_BOS
        elif kind == "llama":
            backend, adds_bos = _sentencepiece(file, texts, types), True
        else:
            raise ModelError(f"{file.path}: tokenizer model {kind!r} is not supported; supported: gpt2, llama")
        for type_, is_special in ((CONTROL, True), (UNKNOWN, True), (USER_DEFINED, False)):
            added = [text for text, own in zip(texts, types, strict=True) if own == type_ and text]
            backend.add_tokens([AddedToken(text, special=is_special, normalized=False) for text in added])
        backend.post_processor = _post_processor(file, texts, adds_bos)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file.path} has an inconsistent tokenizer: {error}") from error
    roles = {role: _role(file, texts, role) for role in ("bos", "eos", "unknown", "padding")}
    others = {"unk_token": roles["unknown"], "pad_token": roles["padding"]}
    named = {name: text for name, text in others.items() if text is not None}
    return Tokenizer(backend, SpecialTokens(bos=roles["bos"], eos=roles["eos"], others=named))


def _byte_level(file: GgufFile, texts: list[str]) -> tokenizers.Tokenizer:
    pre = file.get(str, "tokenizer.ggml.pre") or "default"
    if pre not in SPLITS:
        raise ModelError(f"{file.path}: word pattern {pre!r} is not supported; supported: {', '.join(sorted(SPLITS))}")
    merges = [tuple(merge.split(" ", 1)) for merge in file.need(list, "tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(models.BPE(_vocab(texts), merges, ignore_merges=pre in IGNORES_MERGES))
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, texts: list[str], types: list[int]) -> tokenizers.Tokenizer:
    scores: list[float] = file.need(list, "tokenizer.ggml.scores")
    pieces = {
        text: (score, -id_)
        for id_, (text, type_, score) in enumerate(zip(texts, types, scores, strict=True))
        if type_ == NORMAL
    }
    has_bytes = BYTE in types
    unknown = _role(file, texts, "unknown")
    merges = _merges(pieces)
    model = models.BPE(_vocab(texts), merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    backend = tokenizers.Tokenizer(model)
    prefix = file.get(bool, "tokenizer.ggml.add_space_prefix") is not False
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace] if prefix else [replace])
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(pieces: dict[str, tuple[float, int]]) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours whose whole has the best score; as a list of merges: every way to make a
    piece of two others, best piece first."""
    ranked: list[tuple[tuple[float, int], tuple[str, str]]] = []
    for text, rank in pieces.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in pieces and right in pieces:
                ranked.append((rank, (left, right)))
    ranked.sort(key=lambda entry: entry[0], reverse=True)
    return [pair for _, pair in ranked]


def _post_processor(file: GgufFile, texts: list[str], adds_bos: bool) -> Any:
    """What `encode` puts around a text: BOS and EOS as the file or, failing that, the kind of vocabulary says."""
    stated = file.get(bool, "tokenizer.ggml.add_bos_token")
    bos = _role(file, texts, "bos") if (adds_bos if stated is None else stated) else None
    eos = _role(file, texts, "eos") if file.get(bool, "tokenizer.ggml.add_eos_token") else None
    around = [(text, texts.index(text)) for text in (bos, eos) if text is not None]
    template = " ".join(part for part in (bos and f"{bos}:0", "$A:0", eos and f"{eos}:0") if part)
    return processors.TemplateProcessing(single=template, pair=f"{template} $B:1", special_tokens=around)


def _role(file: GgufFile, texts: list[str], role: str) -> str | None:
    id_ = file.get(int, f"tokenizer.ggml.{role}_token_id")
    return texts[id_] if id_ is not None and 0 <= id_ < len(texts) else None


def _vocab(texts: list[str]) -> dict[str, int]:
    """Ids by text; of two equal texts the first is the one that text becomes."""
    vocab: dict[str, int] = {}
    for id_, text in enumerate(texts):
        vocab.setdefault(text, id_)
    return vocab
