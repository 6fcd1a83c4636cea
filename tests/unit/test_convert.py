"""Models written as Hugging Face directories: read back by this engine and by transformers, and never half written."""

import errno
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf_files import CHECKPOINTS, edited, write
from safetensors.torch import load_file
from typer.testing import CliRunner

from pd_cluster.cli.main import app
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.model import hf_export
from pd_cluster.model.hf_export import export
from pd_cluster.model.source import LoadedModel, open_model
from pd_cluster.model.tensors import tensor_shapes

QUANTISED = {"_proj.weight": Q.Q4_1, "_exps.weight": Q.Q4_1, "embed_tokens.weight": Q.Q8_0, "lm_head.weight": Q.Q8_0}
TEXTS = [
    "the 12 hello",
    "it's  12,345!\n\n\tthe",
    "naïve 日本 ½ 👩‍👧",
    "   ",
    "",
    " the",
    "x=3.14;the",
    "\r\n a",
    "ſ's HELLO'S",
    "<|user|>the<tool> hello<|end|>",
    "a<tool>b",
    "hell ohello\thello",
    "0123456789",
]


def same_tensors(left: LoadedModel, right: LoadedModel, dtype: torch.dtype) -> None:
    for name, shape in tensor_shapes(left.config):
        assert torch.equal(left.source.read(name, shape, dtype), right.source.read(name, shape, dtype)), name


@pytest.mark.parametrize("name", ["llama", "llama_tied_llama3rope", "mixtral"])
def test_a_gguf_file_becomes_a_directory_with_the_same_config_and_weights(tmp_path: Path, name: str) -> None:
    model = open_model(str(write(tmp_path / "model.gguf", name, QUANTISED, freqs="llama3" in name)))
    written = export(model, tmp_path / "hf")
    read = open_model(str(tmp_path / "hf"))
    assert read.config == model.config
    assert written.dtype == model.config.dtype == "bfloat16"
    assert written.num_tensors == len(list(tensor_shapes(model.config)))
    same_tensors(model, read, torch.bfloat16)
    assert read.eos_token_ids == model.eos_token_ids
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "model.gguf"]


def test_transformers_reads_the_same_tokenizer_and_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = open_model(str(write(tmp_path / "model.gguf", "llama")))
    export(model, tmp_path / "hf")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "hf"), model.tokenizer
    assert ours is not None
    assert model.chat_template is not None
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids), text
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text, add_special_tokens=False)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_token_id, ours.eos_token_id)
    conversation = [{"role": "user", "content": "the 12"}]
    rendered = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert rendered == model.chat_template.render(conversation)


def test_named_templates_a_leading_bos_and_several_ends_survive(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    def edit(writer: gguf.GGUFWriter) -> None:
        edited("tokenizer.ggml.pre", "llama-bpe")(writer)
        edited("tokenizer.ggml.eot_token_id", 1)(writer)
        edited("tokenizer.chat_template.tool_use", "tools: {{ messages[0].content }}")(writer)

    model = open_model(str(write(tmp_path / "model.gguf", "llama", edit=edit)))
    export(model, tmp_path / "hf")
    read = open_model(str(tmp_path / "hf"))
    assert read.eos_token_ids == (0, 1)
    assert read.chat_template is not None
    assert read.chat_template.render([{"role": "user", "content": "x"}], tools=[{"a": 1}]) == "tools: x"
    assert read.tokenizer is not None
    assert read.tokenizer.encode("12")[0] == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("12")["input_ids"] == read.tokenizer.encode("12")


def test_routers_keep_float32_so_that_the_same_experts_are_chosen(tmp_path: Path) -> None:
    model = open_model(str(write(tmp_path / "model.gguf", "mixtral")))
    export(model, tmp_path / "hf", dtype="bfloat16")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    gates = {name for name in types if name.endswith("block_sparse_moe.gate.weight")}
    assert len(gates) == model.config.num_layers
    assert all((dtype == torch.float32) == (name in gates) for name, dtype in types.items())


@pytest.mark.parametrize("name", ["deepseek_v3_fp8", "deepseek_v3_bf16_mtp", "qwen3_moe", "llama"])
def test_a_directory_becomes_one_in_another_type_without_quantisation(tmp_path: Path, name: str) -> None:
    model = open_model(str(CHECKPOINTS / name))
    export(model, tmp_path / "hf", dtype="float32")
    read = open_model(str(tmp_path / "hf"))
    assert (read.config.dtype, read.config.fp8_block) == ("float32", None)
    same_tensors(model, read, torch.float32)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert set(stored) == {name for name, _ in tensor_shapes(model.config)}


def test_the_demo_model_keeps_its_tokenizer_files(tmp_path: Path) -> None:
    model = open_model("demo")
    export(model, tmp_path / "hf")
    read = open_model(str(tmp_path / "hf"))
    assert read.config == model.config
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "hf" / file).read_bytes() == (model.path / file).read_bytes()


def test_large_models_are_cut_into_shards_that_transformers_joins(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = open_model(str(CHECKPOINTS / "llama"))
    seen: list[tuple[int, int]] = []
    written = export(model, tmp_path / "hf", shard_bytes=100_000, progress=lambda *at: seen.append(at))
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) == written.num_files > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.num_bytes
    same_tensors(model, open_model(str(tmp_path / "hf")), torch.float32)
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters())
    shape = (512, 64)
    assert torch.equal(theirs["lm_head.weight"].float(), model.source.read("lm_head.weight", shape, torch.float32))
    assert seen[0] == (0, written.num_bytes)
    assert seen[-1] == (written.num_bytes, written.num_bytes)
    assert seen == sorted(seen)


def test_big_tensors_pass_through_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_export, "CHUNK_VALUES", 1000)
    model = open_model(str(write(tmp_path / "model.gguf", "llama", QUANTISED)))
    seen: list[int] = []
    export(model, tmp_path / "hf", progress=lambda done, _: seen.append(done))
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 2 * 1000
    same_tensors(model, open_model(str(tmp_path / "hf")), torch.bfloat16)


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    model = open_model(str(CHECKPOINTS / "llama"))
    (tmp_path / "hf").mkdir()
    export(model, tmp_path / "hf")  # an empty directory is no loss
    before = (tmp_path / "hf" / "config.json").read_bytes()
    for _ in range(2):
        with pytest.raises(ConfigError, match="hf exists already: remove it or name another directory"):
            export(model, tmp_path / "hf", dtype="float32")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="file exists already"):
        export(model, tmp_path / "file")
    assert (tmp_path / "hf" / "config.json").read_bytes() == before
    assert (tmp_path / "file").read_text() == "mine"


def test_a_disk_without_room_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ConfigError, match=r"take .* MB, but .* has 0\.001 MB free: free some, or name another disk"):
        export(open_model(str(CHECKPOINTS / "llama")), tmp_path / "hf")
    assert not any(tmp_path.iterdir())


class Limited:
    """A source that fails after some tensors, as a disk or a damaged file would."""

    def __init__(self, source: Any, num_left: int, error: Exception) -> None:
        self._source, self._num_left, self._error = source, num_left, error

    def read(self, *args: Any, **cut: Any) -> Any:
        self._num_left -= 1
        if self._num_left < 0:
            raise self._error
        return self._source.read(*args, **cut)


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            ConfigError,
            "No space left on device: .* need as much room",
        ),
        (ModelError("tensor x is damaged"), ModelError, "tensor x is damaged"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_failure_half_way_leaves_nothing_behind(
    tmp_path: Path, error: Exception, expected: type[BaseException], message: str | None
) -> None:
    model = open_model(str(CHECKPOINTS / "llama"))
    model.source = Limited(model.source, 5, error)  # type: ignore[assignment]
    with pytest.raises(expected, match=message):
        export(model, tmp_path / "hf")
    assert not any(tmp_path.iterdir())


def test_values_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.tensors[0]["output_norm.weight"].tensor[3] = 1e6

    model = open_model(str(write(tmp_path / "model.gguf", "llama", edit=edit)))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has values beyond float16: use --dtype bfloat16"):
        export(model, tmp_path / "hf", dtype="float16")


def test_biases_that_hugging_face_cannot_express_are_refused(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        for layer in range(3):
            for name, size in (("attn_q", 64), ("attn_k", 32), ("attn_v", 32)):
                writer.add_tensor(f"blk.{layer}.{name}.bias", np.zeros(size, np.float32))

    model = open_model(str(write(tmp_path / "model.gguf", "llama", edit=edit)))
    with pytest.raises(ModelError, match="biases on all four projections of a layer or on none"):
        export(model, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_the_command_says_what_it_wrote_and_what_to_do_otherwise(tmp_path: Path) -> None:
    source, target = str(write(tmp_path / "model.gguf", "llama", QUANTISED)), str(tmp_path / "made" / "hf")
    done = CliRunner().invoke(app, ["convert", source, target, "--dtype", "float16"])
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("GB of float16 in 1 file\n")
    assert open_model(target).config.dtype == "float16"
    for arguments, message in (
        ([source, target], "exists already: remove it or name another directory"),
        ([str(tmp_path / "nothing"), str(tmp_path / "other")], "there is no model at"),
        ([str(CHECKPOINTS / "llama" / "config.json"), str(tmp_path / "other")], "is a file; a model is a directory"),
    ):
        refused = CliRunner().invoke(app, ["convert", *arguments])
        assert refused.exit_code == 2
        assert message in refused.stderr
