"""Slices of safetensors checkpoints against whole tensors, FP8 blocks against widening by hand, damage against its
name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from pd_cluster.errors import ModelError
from pd_cluster.model.checkpoint import SafetensorsSource
from pd_cluster.model.fp8 import block_range, dequantize_blocks
from pd_cluster.model.hf_config import read_config
from pd_cluster.model.shards import checkpoint_dtype, read_header, read_shards
from pd_cluster.model.source import open_model
from pd_cluster.model.tensors import num_parameters, tensor_shapes

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
NAMES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json"))
DOWN = "model.layers.0.mlp.down_proj.weight"


def opened(directory: Path) -> SafetensorsSource:
    return SafetensorsSource(directory, read_config(directory))


def copied(name: str, to: Path) -> Path:
    target = to / name
    shutil.copytree(CHECKPOINTS / name, target)
    return target


def sharded(name: str, to: Path, num_shards: int = 3) -> Path:
    """The checkpoint as an index and several files."""
    target = copied(name, to)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: tensors[key] for i, key in enumerate(sorted(tensors)) if i % num_shards == shard}
        save_file(part, target / file)
        weight_map |= dict.fromkeys(part, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def widened(q_NK: Tensor, scale_BC: Tensor, block: tuple[int, int]) -> Tensor:
    scale_NK = scale_BC.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return q_NK.float() * scale_NK[: q_NK.shape[0], : q_NK.shape[1]]


@pytest.mark.parametrize("name", NAMES)
def test_the_config_implies_exactly_the_tensors_of_the_checkpoint(name: str) -> None:
    model = open_model(str(CHECKPOINTS / name))
    held = {key for key in load_file(CHECKPOINTS / name / "model.safetensors") if not key.endswith("_scale_inv")}
    shapes = dict(tensor_shapes(model.config))
    mtp = f"model.layers.{model.config.num_layers}."
    assert set(shapes) == {key for key in held if not key.startswith(mtp)}
    assert all(model.source.has(key) for key in shapes)
    total = sum(model.source.read(key, shape, torch.float32).numel() for key, shape in shapes.items())
    assert total == num_parameters(model.config)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_slice_equals_that_part_of_the_whole_tensor(data: st.DataObject) -> None:
    directory = CHECKPOINTS / data.draw(st.sampled_from(["deepseek_v3_fp8", "deepseek_v3_bf16_mtp", "llama"]))
    source, tensors = opened(directory), load_file(directory / "model.safetensors")
    key = data.draw(st.sampled_from(sorted(k for k in tensors if source.has(k) and not k.endswith("_scale_inv"))))
    whole = tensors[key]
    if whole.dtype == torch.float8_e4m3fn:
        whole = widened(whole, tensors[f"{key}_scale_inv"], (128, 128))
    bounds = []
    for extent in whole.shape:
        start = data.draw(st.integers(0, extent))
        bounds.append((start, data.draw(st.integers(start, extent))))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    part = source.read(key, tuple(whole.shape), dtype, *bounds)
    assert part.is_contiguous()
    assert torch.equal(part, whole[tuple(slice(*pair) for pair in bounds)].to(dtype))


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_fp8_slices_widen_as_the_whole_for_any_block_and_edge(data: st.DataObject) -> None:
    block = (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)))
    num_rows, num_cols = data.draw(st.integers(1, 17)), data.draw(st.integers(1, 17))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    q_NK = torch.randn(num_rows, num_cols, generator=generator).to(torch.float8_e4m3fn)
    scale_BC = torch.rand(-(-num_rows // block[0]), -(-num_cols // block[1]), generator=generator) + 0.5
    top = data.draw(st.integers(0, num_rows - 1))
    bottom = data.draw(st.integers(top + 1, num_rows))
    left = data.draw(st.integers(0, num_cols - 1))
    right = data.draw(st.integers(left + 1, num_cols))
    scales = scale_BC[slice(*block_range(top, bottom, block[0])), slice(*block_range(left, right, block[1]))]
    part = dequantize_blocks(q_NK[top:bottom, left:right], scales, top, left, block, torch.float32)
    assert torch.equal(part, widened(q_NK, scale_BC, block)[top:bottom, left:right])


def test_what_was_read_outlives_the_files(tmp_path: Path) -> None:
    directory = copied("llama", tmp_path)
    source = opened(directory)
    tensor = source.read(DOWN, (64, 160), torch.float32)
    before = tensor.clone()
    source.close()
    tensor += 1  # owned, so writing is allowed and changes nothing on disk
    assert torch.equal(opened(directory).read(DOWN, (64, 160), torch.float32), before)


def test_shards_read_as_one_file_and_have_its_identity(tmp_path: Path) -> None:
    for name in ("llama", "deepseek_v3_fp8"):
        one, many = opened(CHECKPOINTS / name), opened(sharded(name, tmp_path))
        assert one.identity == many.identity
        for key, shape in tensor_shapes(read_config(CHECKPOINTS / name)):
            assert torch.equal(one.read(key, shape, torch.float32), many.read(key, shape, torch.float32))


def test_identity_tells_models_and_fine_tunes_apart(tmp_path: Path) -> None:
    identities = {opened(CHECKPOINTS / name).identity for name in NAMES}
    assert len(identities) == len(NAMES)
    assert opened(copied("llama", tmp_path)).identity == opened(CHECKPOINTS / "llama").identity
    tuned = tmp_path / "llama" / "model.safetensors"
    save_file({key: value * 1.01 for key, value in load_file(tuned).items()}, tuned)
    assert opened(tmp_path / "llama").identity != opened(CHECKPOINTS / "llama").identity


def test_identity_tells_a_tensor_that_was_changed_whichever_it_is(tmp_path: Path) -> None:
    directory = copied("llama", tmp_path)
    path, identities = directory / "model.safetensors", set()
    whole = path.read_bytes()
    entries = read_header(path)
    for entry in entries.values():
        damaged = bytearray(whole)
        for at in range(entry.start, entry.start + entry.num_bytes, 97):
            damaged[at] ^= 0x55
        path.write_bytes(damaged)
        identities.add(opened(directory).identity)
    assert len(identities) == len(entries)


def test_a_file_that_was_replaced_since_its_header_was_read_is_not_read(tmp_path: Path) -> None:
    directory = copied("llama", tmp_path)
    path = directory / "model.safetensors"
    before, mapped, renewed = opened(directory), opened(directory), opened(directory)
    whole = mapped.read(DOWN, (64, 160), torch.float32)
    shutil.copy(path, tmp_path / "same.safetensors")
    (tmp_path / "same.safetensors").rename(path)
    assert torch.equal(renewed.read(DOWN, (64, 160), torch.float32), whole), "the same weights again"
    save_file({key: value * 1.01 for key, value in load_file(path).items()}, tmp_path / "other.safetensors")
    (tmp_path / "other.safetensors").rename(path)
    with pytest.raises(ModelError, match=r"model\.safetensors was replaced or changed since this rank started"):
        before.read(DOWN, (64, 160), torch.float32)
    assert torch.equal(mapped.read(DOWN, (64, 160), torch.float32), whole), "what is mapped stays"
    path.unlink()
    with pytest.raises(ModelError, match="cannot read"):
        before.read(DOWN, (64, 160), torch.float32)


def test_only_the_model_s_own_file_is_loaded() -> None:
    directory = CHECKPOINTS / "llama"
    assert (directory / "reference.safetensors").is_file()
    assert {entry.file.name for entry in read_shards(directory).values()} == {"model.safetensors"}


def test_mtp_layers_are_not_part_of_the_model() -> None:
    source = opened(CHECKPOINTS / "deepseek_v3_bf16_mtp")
    assert "model.layers.3.eh_proj.weight" in load_file(CHECKPOINTS / "deepseek_v3_bf16_mtp" / "model.safetensors")
    assert not source.has("model.layers.3.eh_proj.weight")
    assert source.has("model.layers.2.input_layernorm.weight")


def test_the_type_of_a_checkpoint_is_that_of_most_weights() -> None:
    assert checkpoint_dtype(CHECKPOINTS / "deepseek_v3_bf16_mtp") == "bfloat16"
    assert checkpoint_dtype(CHECKPOINTS / "llama") == "float32"


def test_missing_and_misshapen_tensors_are_named() -> None:
    source = opened(CHECKPOINTS / "llama")
    with pytest.raises(ModelError, match=r"lacks tensor model\.layers\.9\.x\.weight"):
        source.read("model.layers.9.x.weight", (1,), torch.float32)
    with pytest.raises(ModelError, match=rf"{DOWN} in .* has shape \[64, 160\], but config.json implies \[64, 161\]"):
        source.read(DOWN, (64, 161), torch.float32)


def test_fp8_without_scales_or_config_is_named(tmp_path: Path) -> None:
    directory = copied("deepseek_v3_fp8", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    del tensors[f"{DOWN}_scale_inv"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=rf"lacks tensor {DOWN}_scale_inv"):
        opened(directory).read(DOWN, (256, 320), torch.float32)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"{DOWN} in .* is F8_E4M3, but config.json has no fp8"):
        opened(directory).read(DOWN, (256, 320), torch.float32)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    directory = copied("llama", tmp_path)
    save_file({DOWN: torch.zeros(64, 160, dtype=torch.int32)}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{DOWN} in .* is I32; weights must be"):
        opened(directory).read(DOWN, (64, 160), torch.float32)


def test_an_index_that_names_a_missing_file_or_tensor_is_refused(tmp_path: Path) -> None:
    directory = sharded("llama", tmp_path)
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"extra.weight": "model-00001-of-00003.safetensors"}}))
    with pytest.raises(ModelError, match=r"promises tensor extra\.weight in model-00001"):
        read_shards(directory)
    index.write_text(json.dumps({"weight_map": weight_map | {"extra.weight": "../llama/model.safetensors"}}))
    with pytest.raises(ModelError, match="is missing"):
        read_shards(directory)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names model-00002-of-00003\.safetensors for \d+ tensors, but .* is missing"):
        read_shards(directory)
    index.write_text("{}")
    with pytest.raises(ModelError, match="is not a safetensors index"):
        read_shards(directory)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = copied("llama", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is (truncated|not a safetensors file)"):
        read_shards(path.parent)


def test_other_damage_is_named(tmp_path: Path) -> None:
    directory = copied("llama", tmp_path)
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8] = ord("x")
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors has a damaged safetensors header"):
        read_shards(directory)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelError, match="Git LFS pointer"):
        read_shards(directory)
    path.unlink()
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor"):
        read_shards(directory)


# --- open_model and random weights ---


@pytest.mark.parametrize("name", ["nope", "./nope/x", "/nope/x", "nope/x.gguf", "a/b/c"])
def test_a_path_without_a_model_says_what_to_give(name: str) -> None:
    with pytest.raises(ModelError, match=r"there is no model at .*; give a directory"):
        open_model(name)


def test_a_hub_id_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="someone/something is neither a local path nor in the hub's cache"):
        open_model("someone/something")


def test_a_directory_without_a_tokenizer_takes_ids_only() -> None:
    model = open_model(str(CHECKPOINTS / "llama"))
    assert (model.name, model.tokenizer, model.chat_template) == ("llama", None, None)
    assert model.eos_token_ids == (1,)


def test_random_weights_need_only_a_config_and_are_the_same_in_any_slice(tmp_path: Path) -> None:
    shutil.copy(CHECKPOINTS / "deepseek_v3_noq_64e" / "config.json", tmp_path)
    source = open_model(str(tmp_path), load="random", seed=3).source
    key, shape = "model.layers.1.mlp.gate_proj.weight", (160, 64)
    whole = source.read(key, shape, torch.float32)
    assert torch.equal(source.read(key, shape, torch.float32, (63, 130), (5, 60)), whole[63:130, 5:60])
    assert torch.equal(source.read(key, shape, torch.bfloat16), whole.bfloat16())
    assert whole.std() == pytest.approx(1.2 / 8, rel=0.05)
    norm = source.read("model.norm.weight", (64,), torch.float32)
    assert norm.mean() == pytest.approx(1.0, abs=0.1)
    other = open_model(str(tmp_path), load="random", seed=4).source
    assert not torch.equal(other.read(key, shape, torch.float32), whole)
    assert other.identity != source.identity
    assert not source.has("lm_head.weight")  # tied
    with pytest.raises(ModelError, match=r"implies no tensor lm_head\.weight"):
        source.read("lm_head.weight", (512, 64), torch.float32)
