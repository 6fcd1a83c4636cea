"""The C kernels against torch and float64, built for this processor and for poorer ones, in every form of a layer."""

import ctypes
import shutil
from collections.abc import Callable, Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from golden import Cluster, model
from torch import Tensor

from pd_cluster.bench.roofline import READ_PATTERNS
from pd_cluster.kernels import native
from pd_cluster.kernels.packed import Packed, WeightMemory
from pd_cluster.model.config import GqaConfig, MlaConfig, ModelConfig, MoeConfig, RopeConfig
from pd_cluster.model.fused import FusedLayer, FusedMla, FusedTransformer
from pd_cluster.model.fused_moe import FusedGate
from pd_cluster.model.gate import Gate
from pd_cluster.model.random_weights import RandomSource
from pd_cluster.model.sampler import highest_of_rows

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="there is no C compiler")

TARGETS = {"native": "native", "without bfloat16": "x86-64-v4", "without AVX-512": "x86-64-v3"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], CDLL]:
    """The kernels compiled for a processor that this one can stand in for."""
    made: dict[str, CDLL] = {}

    def get(target: str) -> CDLL:
        if target not in made:
            march = TARGETS[target]
            flags = [f"-march={march}" if flag.startswith("-march") else flag for flag in native.FLAGS]
            path = tmp_path_factory.mktemp("kernels") / f"{march}.so"
            made[target] = native.load(native.compile_to(path, native.find_compiler() or "cc", flags))
        return made[target]

    return get


@pytest.fixture(params=TARGETS)
def kernels(request: pytest.FixtureRequest, built: Callable[[str], CDLL]) -> CDLL:
    flags = Path("/proc/cpuinfo").read_text()
    needs = {"native": "", "without bfloat16": "avx512bw", "without AVX-512": "avx2"}[request.param]
    if needs not in flags:
        pytest.skip(f"this processor has no {needs}")
    return built(request.param)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(("n", "k"), [(64, 32), (1, 2), (100, 62), (200, 576), (16, 4098)])
@pytest.mark.parametrize("num_rows", [1, 5, 7, 40])
def test_packed_products_agree_with_float64(kernels: CDLL, n: int, k: int, num_rows: int) -> None:
    weight, bias, x = seeded(n, k), seeded(n, seed=1), seeded(num_rows, k, seed=2)
    result = Packed(kernels, WeightMemory(), weight, bias)(x)
    assert error(result, x.double() @ weight.double().T + bias.double()) < 3e-3


@pytest.mark.parametrize("width", [16, 37, 96])
def test_gated_products_agree_with_float64(kernels: CDLL, width: int) -> None:
    weight, x = seeded(2 * width, 64) * 0.2, seeded(9, 64, seed=2)
    gate, up = (x.double() @ weight.double().T).split(width, dim=1)
    result = Packed(kernels, WeightMemory(), weight, gated=True)(x)
    assert error(result, torch.nn.functional.silu(gate) * up) < 3e-3


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(kernels: CDLL) -> None:
    packed, x = Packed(kernels, WeightMemory(), seeded(130, 576)), seeded(1500, 576, seed=3)
    whole = packed(x)
    for count in (1, 2, 3, 4, 5, 6, 7, 64):
        assert torch.equal(packed(x[20 : 20 + count]), whole[20 : 20 + count])


class Stream(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("piece", "end", "piece_bytes", "at", "left")]


def test_memory_ahead_is_handed_out_once_in_chunks(kernels: CDLL) -> None:
    pieces = (ctypes.c_int64 * 3)(10_000, 50_000, 90_000)
    first = ctypes.addressof(pieces)
    stream, chunks = Stream(first, first + 3 * 8, 2500, 0, 0), (ctypes.c_int64 * 4)()
    assert kernels.take_chunks(ctypes.byref(stream), chunks, ctypes.c_int64(4)) == 1
    assert list(chunks) == [10_000, 11_024, 50_000, 51_024]
    assert kernels.take_chunks(ctypes.byref(stream), chunks, ctypes.c_int64(4)) == 1
    assert list(chunks) == [90_000, 91_024, 91_024, 91_024]
    assert kernels.take_chunks(ctypes.byref(stream), chunks, ctypes.c_int64(4)) == 0
    assert kernels.take_chunks(None, chunks, ctypes.c_int64(4)) == 0


@pytest.mark.parametrize(("num_streams", "ahead"), READ_PATTERNS)
def test_a_pass_over_memory_reads_all_of_it(kernels: CDLL, num_streams: int, ahead: int) -> None:
    memory = torch.ones(num_streams * 640)
    assert kernels.sum_of_bytes(memory.data_ptr(), 4 * len(memory), num_streams, ahead) == len(memory)


def test_highest_of_rows_is_the_first_and_a_nan_wins(small: "Small") -> None:
    rows = torch.randn(9, 1003, generator=torch.Generator().manual_seed(0))
    rows[1, [70, 900]] = 9.0
    rows[2, 1001] = float("nan")
    rows[3, [5, 1002]] = float("inf")
    rows[4] = float("-inf")
    rows[5, [17, 900]] = torch.tensor([float("nan"), float("inf")])
    rows[6] = 0.0
    rows[7, 1002] = 9.0
    rows[8, 0] = 9.0
    values, columns = small.fused.highest(rows[:, :1003])
    expected_values, expected_columns = highest_of_rows(rows)
    assert torch.equal(columns, expected_columns)
    assert torch.equal(values.nan_to_num(nan=7.0), expected_values.nan_to_num(nan=7.0))


GATES = [
    ("deepseek_v3", {"num_groups": 8, "topk_groups": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.5}),
    ("deepseek_v2_greedy", {"routed_scaling_factor": 16.0, "norm_topk_prob": True}),
    ("deepseek_v2_group", {"num_groups": 4, "topk_groups": 2}),
    ("qwen3", {"norm_topk_prob": True}),
    ("qwen3", {}),
    ("mixtral", {}),
]


@pytest.mark.parametrize(("kind", "options"), GATES)
@pytest.mark.parametrize("num_tokens", [1, 6])
def test_gates_choose_and_weigh_as_the_plain_ones_do(
    kernels: CDLL, kind: str, options: dict[str, Any], num_tokens: int
) -> None:
    config = MoeConfig(gate=kind, num_experts=40, num_experts_per_tok=6, intermediate_size=8, **options)  # type: ignore[arg-type]
    weight = torch.randn(40, 70, generator=torch.Generator().manual_seed(1)) * 0.2
    bias = torch.linspace(-0.4, 0.1, 40) if kind == "deepseek_v3" else None
    plain, x = Gate(config, weight, bias), seeded(num_tokens, 70)
    experts, weights = FusedGate(kernels, plain)(x)
    expected_experts, expected_weights = plain(x)
    assert torch.equal(experts, expected_experts)
    assert torch.allclose(weights, expected_weights, rtol=1e-5)


def test_a_gate_gives_experts_to_a_token_that_is_not_a_number(kernels: CDLL) -> None:
    config = MoeConfig(
        gate="deepseek_v3", num_experts=8, num_experts_per_tok=3, intermediate_size=8, num_groups=4, topk_groups=2
    )
    gate = FusedGate(kernels, Gate(config, torch.ones(8, 16), torch.zeros(8)))
    experts, weights = gate(torch.full((2, 16), float("nan"), dtype=torch.bfloat16))
    assert all(len(set(row)) == 3 and set(row) <= set(range(8)) for row in experts.tolist())
    assert weights.isnan().all()


class RoundedSource(RandomSource):
    """Weights that bfloat16 holds exactly, so that a float32 engine computes with the same."""

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, **cut: Any) -> Tensor:
        rounded = torch.float32 if "gate.weight" in name or "bias" in name else torch.bfloat16
        return super().read(name, shape, torch.float32, **cut).to(rounded).to(dtype)


def gqa_config(num_heads: int, num_kv_heads: int, head_dim: int, **options: Any) -> ModelConfig:
    attention = GqaConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **options)
    return msgspec.structs.replace(
        model("llama").config,
        attention=attention,
        rope=RopeConfig(theta=1e4, dim=head_dim),
        hidden_size=96,
        intermediate_size=152,
        vocab_size=301,
    )


def mla_config(q_lora_rank: int | None, *, num_heads: int = 4, latent_dim: int = 70, rope_dim: int = 12) -> ModelConfig:
    config = model("deepseek_v3_yarn").config
    attention = MlaConfig(
        num_heads=num_heads,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=latent_dim,
        qk_nope_head_dim=24,
        qk_rope_head_dim=rope_dim,
        v_head_dim=40,
    )
    return msgspec.structs.replace(
        config, attention=attention, rope=msgspec.structs.replace(config.rope, dim=rope_dim), softmax_scale=0.0
    )


CONFIGS = {
    "grouped heads of 64": gqa_config(9, 3, 64),
    "one head of 80 for each query, biases": gqa_config(2, 2, 80, qkv_bias=True, o_bias=True),
    "normalised heads of 8, one KV head": gqa_config(5, 1, 8, qk_norm=True),
    "latents and compressed queries": mla_config(36),
    "latents and plain queries": mla_config(None),
    "latents of whole vectors": mla_config(36, num_heads=6, latent_dim=64, rope_dim=32),
}
PROMPTS = [
    torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 15, 64, 65, 290)
]


class Small:
    """One random model in bfloat16 on the C kernels, and in float32 on torch with equal weights."""

    def __init__(self, config: ModelConfig, **shape: int) -> None:
        options = {"num_blocks": 90, "make_source": RoundedSource, **shape}
        self.cluster = Cluster(config, dtype="bfloat16", **options)  # type: ignore[arg-type]
        self.plain = Cluster(config, dtype="float32", **options)  # type: ignore[arg-type]
        fused = self.cluster.engines[0].model
        assert isinstance(fused, FusedTransformer), "the kernels were built, so they must be used"
        self.fused = fused

    def set_form(self, form: str) -> None:
        for layer in self.fused.layers:
            assert isinstance(layer, FusedLayer)
            if isinstance(layer.attention, FusedMla):
                layer.attention.prefill_form = form  # type: ignore[assignment]

    def close(self) -> None:
        self.cluster.close()
        self.plain.close()


@pytest.fixture(scope="module", params=CONFIGS)
def small(request: pytest.FixtureRequest) -> Iterator[Small]:
    made = Small(CONFIGS[request.param])
    yield made
    made.close()


@pytest.fixture(params=["absorbed", "expanded"])
def form(request: pytest.FixtureRequest, small: Small) -> str:
    if request.param == "expanded" and not isinstance(small.fused.layers[0].attention, FusedMla):
        pytest.skip("only latents are expanded")
    small.set_form(request.param)
    return str(request.param)


def test_fused_layers_agree_with_float32_to_the_rounding_of_bfloat16(small: Small, form: str) -> None:
    fused, plain = small.cluster.prefill_logits(PROMPTS), small.plain.prefill_logits(PROMPTS)
    for a, b in zip(fused, plain, strict=True):
        errors_T = (a - b).norm(dim=1) / b.norm(dim=1)
        # the median: a rounded score may choose another expert
        assert 1e-4 < errors_T.median() < 0.02


def test_decode_and_chunks_give_the_bits_of_one_prefill(small: Small, form: str) -> None:
    prompt = PROMPTS[-1]
    (whole,) = small.cluster.generate([[prompt]], 3, budget=400)
    (chunked,) = small.cluster.generate([[prompt]], 3, budget=37)
    (together,) = small.cluster.generate([PROMPTS], 3, budget=150)
    assert whole[0].output == chunked[0].output == together[-1].output
    for a, b, c in zip(whole[0].logits, chunked[0].logits, together[-1].logits, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    # the last output token's logits again, as the last row of a prefill
    ids = [*prompt, *whole[0].output[:2]]
    last = small.cluster.prefill_logits([ids])[0][-1]
    if not isinstance(small.fused.layers[0].attention, FusedMla) or form == "absorbed":
        assert torch.equal(last, whole[0].logits[2])


@pytest.mark.parametrize("form", ["cheaper"])
def test_every_token_is_counted_in_the_expert_load(small: Small, form: str) -> None:
    small.set_form(form)
    engine = small.cluster.engines[0]
    before = torch.tensor(engine.expert_load())
    small.cluster.generate([PROMPTS], 2, budget=64)
    moe = engine.model.config.moe
    num_tokens = sum(map(len, PROMPTS)) + len(PROMPTS)
    for layer in torch.tensor(engine.expert_load()) - before:
        assert moe is not None
        assert int(layer.sum()) == num_tokens * moe.num_experts_per_tok


def test_what_an_earlier_owner_left_in_the_memory_is_never_read(small: Small) -> None:
    (before,) = small.cluster.generate([[PROMPTS[3]]], 3)
    small.cluster.engines[0].arena.bytes.view(torch.bfloat16).fill_(float("nan"))
    (after,) = small.cluster.generate([[PROMPTS[3]]], 3)
    assert torch.equal(torch.stack(before[0].logits), torch.stack(after[0].logits))


@pytest.mark.parametrize("shape", [{"tp": 2}, {"dp": 2}])
@pytest.mark.parametrize("name", ["grouped heads of 64", "latents and compressed queries"])
def test_ranks_and_threads_compute_the_same(name: str, shape: dict[str, int]) -> None:
    config = CONFIGS[name]
    if isinstance(config.attention, GqaConfig):
        config = msgspec.structs.replace(config, attention=GqaConfig(num_heads=6, num_kv_heads=2, head_dim=16))
        config = msgspec.structs.replace(config, rope=RopeConfig(theta=1e4, dim=16))
    alone, cut = Small(config), Small(config, **shape)
    expected = alone.cluster.prefill_logits(PROMPTS)
    for a, b in zip(cut.cluster.prefill_logits(PROMPTS), expected, strict=True):
        assert ((a - b).norm(dim=1) / b.norm(dim=1)).median() < 0.02
    torch.set_num_threads(2)
    try:
        two = alone.cluster.on_all(lambda engine: torch.set_num_threads(2))
        assert two == [None]
        for a, b in zip(alone.cluster.prefill_logits(PROMPTS), expected, strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(1)
    alone.close()
    cut.close()


def test_a_nan_stays_with_its_sequence_and_comes_through() -> None:
    made = Small(CONFIGS["grouped heads of 64"])
    clean = made.cluster.prefill_logits(PROMPTS[:3])
    embedding = made.fused.vocabulary.embedding_VH
    embedding[300] = float("nan")
    poisoned = made.cluster.prefill_logits([*PROMPTS[:3], [5, 300, 7, *range(20)]])
    by_length = {len(rows): rows for rows in poisoned}
    for rows in clean:
        assert torch.equal(by_length[len(rows)], rows)
    assert by_length[23][1:].isnan().all()
    made.close()


def test_without_a_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    native.library.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    try:
        assert native.library() is None
        cluster = Cluster(CONFIGS["grouped heads of 64"], dtype="bfloat16", num_blocks=40)
        assert not isinstance(cluster.engines[0].model, FusedTransformer)
        assert torch.isfinite(cluster.prefill_logits(PROMPTS[:3])[0]).all()
        cluster.close()
    finally:
        native.library.cache_clear()


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    native.library.cache_clear()
    monkeypatch.setenv("PD_CLUSTER_NATIVE", "0")
    try:
        assert native.library() is None
    finally:
        native.library.cache_clear()


def test_a_failing_compiler_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho broken >&2\nexit 1\n')
    compiler.chmod(0o755)
    native.library.cache_clear()
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        assert native.library() is None
        assert list((tmp_path / "pd-cluster").glob("*.so")) == []
    finally:
        native.library.cache_clear()
