"""GGUF files written here the way llama.cpp writes them, read back under Hugging Face names."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize
from gguf_files import CHECKPOINTS, edited, write
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from pd_cluster.errors import ModelError
from pd_cluster.model.config import ModelConfig
from pd_cluster.model.gguf_file import GgufFile
from pd_cluster.model.source import DEMO, LoadedModel, open_model
from pd_cluster.model.tensors import tensor_shapes


@pytest.mark.parametrize("name", ["llama", "llama_tied_llama3rope", "mixtral"])
def test_config_and_all_tensors_equal_the_checkpoint_s(tmp_path: Path, name: str) -> None:
    theirs = open_model(str(CHECKPOINTS / name))
    ours = open_model(str(write(tmp_path / "model.gguf", name, freqs="llama3" in name)))
    for key in ModelConfig.__struct_fields__:
        if key not in ("bos_token_id", "eos_token_ids", "rms_norm_eps"):
            assert getattr(ours.config, key) == getattr(theirs.config, key), key
    assert ours.config.rms_norm_eps == pytest.approx(theirs.config.rms_norm_eps)
    for key, shape in tensor_shapes(theirs.config):
        assert ours.source.has(key)
        assert torch.equal(ours.source.read(key, shape, torch.float32), theirs.source.read(key, shape, torch.float32))
    assert ours.source.has("lm_head.weight") != theirs.config.tie_word_embeddings


def test_experts_of_old_files_lie_apart(tmp_path: Path) -> None:
    theirs = open_model(str(CHECKPOINTS / "mixtral")).source
    ours = open_model(str(write(tmp_path / "model.gguf", "mixtral", stacked=False))).source
    key = "model.layers.2.block_sparse_moe.experts.5.w2.weight"
    assert torch.equal(ours.read(key, (64, 96), torch.float32), theirs.read(key, (64, 96), torch.float32))


@pytest.mark.parametrize("qtype", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.F16, Q.BF16])
def test_quantised_weights_are_what_the_quantiser_kept(tmp_path: Path, qtype: Q) -> None:
    path = write(tmp_path / "model.gguf", "llama", {"_proj.weight": qtype, "embed_tokens.weight": qtype})
    model = open_model(str(path))
    tensors = load_file(CHECKPOINTS / "llama" / "model.safetensors")
    for key in ("model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight"):
        whole = torch.from_numpy(dequantize(quantize(tensors[key], qtype), qtype).copy())
        assert torch.equal(model.source.read(key, tuple(whole.shape), torch.float32), whole)
        assert (whole - torch.from_numpy(tensors[key])).abs().max() < 0.15
    assert model.config.dtype == ("float16" if qtype == Q.F16 else "bfloat16")


SLICED = {"_proj.weight": Q.Q4_1, "lm_head.weight": Q.Q8_0, "embed_tokens.weight": Q.F16}


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return open_model(str(write(tmp_path_factory.mktemp("gguf") / "model.gguf", "llama", SLICED)))


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_slice_equals_that_part_of_the_whole_tensor(sliced: LoadedModel, data: st.DataObject) -> None:
    key, shape = data.draw(st.sampled_from(list(tensor_shapes(sliced.config))))
    whole = sliced.source.read(key, shape, torch.float32)
    bounds = []
    for extent in shape:
        start = data.draw(st.integers(0, extent))
        bounds.append((start, data.draw(st.integers(start, extent))))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    part = sliced.source.read(key, shape, dtype, *bounds)
    assert torch.equal(part, whole[tuple(slice(*pair) for pair in bounds)].to(dtype))


def test_identity_is_the_file_s(tmp_path: Path) -> None:
    first = open_model(str(write(tmp_path / "a.gguf", "llama"))).source.identity
    assert open_model(str(write(tmp_path / "b.gguf", "llama"))).source.identity == first
    assert open_model(str(write(tmp_path / "c.gguf", "llama", SLICED))).source.identity != first


def test_missing_and_misshapen_tensors_are_named(sliced: LoadedModel) -> None:
    with pytest.raises(
        ModelError, match=r"lacks tensor model\.layers\.9\.mlp\.up_proj\.weight \(blk\.9\.ffn_up\.weight"
    ):
        sliced.source.read("model.layers.9.mlp.up_proj.weight", (160, 64), torch.float32)
    with pytest.raises(ModelError, match=r"lacks tensor model\.layers\.0\.mtp\.weight$"):
        sliced.source.read("model.layers.0.mtp.weight", (1,), torch.float32)
    with pytest.raises(
        ModelError, match=r"tensor output\.weight in .* has shape \[512, 64\], but the metadata implies"
    ):
        sliced.source.read("lm_head.weight", (512, 65), torch.float32)


@pytest.mark.parametrize("keep", [0, 3, 30, 5000, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "model.gguf", "llama")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.gguf"):
        open_model(str(path))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "qwen2", "architecture 'qwen2' is not supported; supported in GGUF: llama"),
        ("split.count", 3, "one part of several; merge them"),
        ("llama.attention.head_count", [4, 4, 2], "differs from layer to layer"),
        ("llama.rope.dimension_count", 8, "rope over 8 dimensions are not supported together"),
        ("llama.attention.sliding_window", 64, "a sliding window of 64 is not supported"),
        (
            "llama.rope.scaling.type",
            "longrope",
            "rope scaling 'longrope' is not supported; supported: none, linear, yarn",
        ),
        ("llama.block_count", None, r"metadata lacks llama\.block_count"),
        ("llama.block_count", "three", r"llama\.block_count is a str, not a int"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_model(str(write(tmp_path / "model.gguf", "llama", edit=edited(key, value))))


def test_other_files_are_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelError, match="is not a GGUF file; a Git LFS pointer has to be pulled first"):
        GgufFile(tmp_path / "a.gguf")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ModelError, match=r"is a file; a model is a directory with config\.json, a \.gguf file"):
        open_model(str(tmp_path / "a.txt"))


def test_yarn_metadata_is_read(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    rope = open_model(str(write(tmp_path / "model.gguf", "llama", edit=edit))).config.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
    assert rope.attention_factor == pytest.approx(1.1386294361)


# --- tokenizers ---


def test_byte_level_tokenizer_splits_digits_one_by_one(sliced: LoadedModel) -> None:
    tokenizer = sliced.tokenizer
    assert tokenizer is not None
    file = GgufFile(sliced.path)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    reference = Backend(models.BPE({token: id_ for id_, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    reference.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    reference.decoder = decoders.ByteLevel()
    texts = [
        "the 12 hello",
        "it's  12,345!\n\n\tthe",
        "naïve 日本 ½ 👩‍👧",
        "   ",
        "x=3.14;the",
        "\r\n a",
        "ſ's HELLO'S",
    ]
    for text in texts:
        assert tokenizer.encode(text) == reference.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "12" in tokens
    assert tokens.index("12") not in tokenizer.encode("12 12")


def test_special_and_user_tokens_chat_template_and_eos_are_read(sliced: LoadedModel) -> None:
    tokenizer, template = sliced.tokenizer, sliced.chat_template
    assert tokenizer is not None
    assert template is not None
    assert tokenizer.encode("<|user|>the<tool><|end|>")[0] == 1
    assert tokenizer.decode(tokenizer.encode("<|user|>the<tool><|end|>")) == "the<tool>"
    assert template.render([{"role": "user", "content": "the"}]) == "<|user|>the"
    assert sliced.eos_token_ids == (0,)
    assert sliced.config.bos_token_id == 1


def test_other_word_patterns_group_digits_and_add_bos(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        edited("tokenizer.ggml.pre", "llama-bpe")(writer)

    tokenizer = open_model(str(write(tmp_path / "model.gguf", "llama", edit=edit))).tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("12")
    assert [tokenizer.token_text(id_) for id_ in ids] == ["<|user|>", "12"]


def test_unknown_vocabularies_and_patterns_are_refused_by_name(tmp_path: Path) -> None:
    model = open_model(str(write(tmp_path / "a.gguf", "llama", edit=edited("tokenizer.ggml.pre", "bloom"))))
    with pytest.raises(ModelError, match=r"word pattern 'bloom' is not supported; supported: .*llama-bpe"):
        _ = model.tokenizer
    model = open_model(str(write(tmp_path / "b.gguf", "llama", edit=edited("tokenizer.ggml.model", "t5"))))
    with pytest.raises(ModelError, match="tokenizer model 't5' is not supported; supported: gpt2, llama"):
        _ = model.tokenizer
    model = open_model(str(write(tmp_path / "c.gguf", "llama", edit=edited("tokenizer.ggml.merges", ["zz yy"]))))
    with pytest.raises(ModelError, match="has an inconsistent tokenizer"):
        _ = model.tokenizer


def test_sentencepiece_scores_give_the_same_ids_as_merges(tmp_path: Path) -> None:
    description = json.loads((DEMO / "tokenizer.json").read_text())
    vocab = sorted(description["model"]["vocab"], key=description["model"]["vocab"].__getitem__)
    first_merge: dict[str, int] = {}
    for rank, (left, right) in enumerate(description["model"]["merges"]):
        first_merge.setdefault(left + right, rank)

    def edit(writer: gguf.GGUFWriter) -> None:
        for key in [key for key in writer.kv_data[0] if key.startswith("tokenizer.")]:
            del writer.kv_data[0][key]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(vocab)
        writer.add_token_scores([-float(first_merge.get(text, 1000)) for text in vocab])
        is_byte = [len(text) == 6 and text.startswith("<0x") for text in vocab]
        writer.add_token_types([2, 3, 3, *(6 if byte else 1 for byte in is_byte[3:])])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    ours = open_model(str(write(tmp_path / "model.gguf", "llama", edit=edit))).tokenizer
    theirs = open_model("demo").tokenizer
    assert ours is not None
    assert theirs is not None
    for text in ["Once upon a time, there was a little girl.", "Tom  and\nTim 😀 é", "", " a", "She's ▁ <s>x</s>"]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.special == theirs.special
    assert ours.special_ids == theirs.special_ids
