"""What a Llama-architecture GGUF file says of its model: config, tokenizer and chat template from its metadata. No
torch.

`llama` covers Llama, SmolLM, Mistral and Mixtral alike; experts, biases and tied embeddings show in which tensors
there are.
"""

import math
from functools import cached_property
from pathlib import Path

from gguf.constants import GGMLQuantizationType

from pd_cluster.errors import ModelError
from pd_cluster.model.config import Dtype, GqaConfig, ModelConfig, MoeConfig, RopeConfig
from pd_cluster.model.gguf_file import GgufFile
from pd_cluster.model.gguf_tokenizer import gguf_tokenizer
from pd_cluster.model.hf_rope import yarn_mscale
from pd_cluster.model.tokenizer import Tokenizer

PLAIN_DTYPES: dict[GGMLQuantizationType, Dtype] = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
}


class GgufModel:
    """One .gguf file, opened. Raises ModelError that names the file and what is not supported."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)

    @cached_property
    def config(self) -> ModelConfig:
        file = self.file
        architecture = file.need(str, "general.architecture")
        if architecture != "llama":
            raise ModelError(f"{file.path}: architecture {architecture!r} is not supported; supported in GGUF: llama")
        if (file.get(int, "split.count") or 1) > 1:
            raise ModelError(f"{file.path} is one part of several; merge them with llama-gguf-split --merge")
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelError(f"{file.path} lacks tensor token_embd.weight")
        attention = self._attention()
        max_position = file.need(int, "llama.context_length")
        self._refuse_sliding_window(max_position)
        num_layers = file.need(int, "llama.block_count")
        moe = self._experts()
        return ModelConfig(
            architecture="MixtralForCausalLM" if moe else "LlamaForCausalLM",
            vocab_size=embedding.shape[0],
            hidden_size=file.need(int, "llama.embedding_length"),
            num_layers=num_layers,
            intermediate_size=self._one_value("llama.feed_forward_length"),
            attention=attention,
            rope=self._rope(attention.head_dim, max_position),
            moe=moe,
            moe_layers=tuple(range(num_layers)) if moe else (),
            rms_norm_eps=file.need(float, "llama.attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in file.tensors,
            max_position_embeddings=max_position,
            dtype=self._dtype(),
            bos_token_id=file.get(int, "tokenizer.ggml.bos_token_id"),
            eos_token_ids=self._eos_ids(),
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return gguf_tokenizer(self.file)

    @property
    def chat_template(self) -> str | None:
        return self.file.get(str, "tokenizer.chat_template")

    @property
    def named_chat_templates(self) -> dict[str, str]:
        prefix = "tokenizer.chat_template."
        metadata = self.file.metadata.items()
        return {key.removeprefix(prefix): str(value) for key, value in metadata if key.startswith(prefix)}

    def _one_value(self, key: str) -> int:
        """A number that the format also lets differ from layer to layer."""
        value = self.file.metadata.get(key)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1:
            raise ModelError(f"{self.file.path}: {key} differs from layer to layer, which is not supported")
        found = values.pop()
        if not isinstance(found, int) or found < 1:
            raise ModelError(f"{self.file.path}: {key} must be a positive number, got {found!r}")
        return found

    def _attention(self) -> GqaConfig:
        num_heads = self._one_value("llama.attention.head_count")
        has_kv_heads = "llama.attention.head_count_kv" in self.file.metadata
        head_dim = self.file.get(int, "llama.attention.key_length")
        head_dim = head_dim or self.file.need(int, "llama.embedding_length") // num_heads
        value_dim = self.file.get(int, "llama.attention.value_length") or head_dim
        rope_dim = self.file.get(int, "llama.rope.dimension_count") or head_dim
        if not head_dim == value_dim == rope_dim:
            dims = f"keys of {head_dim}, values of {value_dim} and rope over {rope_dim} dimensions"
            raise ModelError(f"{self.file.path}: {dims} are not supported together; they must be equal")
        return GqaConfig(
            num_heads=num_heads,
            num_kv_heads=self._one_value("llama.attention.head_count_kv") if has_kv_heads else num_heads,
            head_dim=head_dim,
            qkv_bias="blk.0.attn_q.bias" in self.file.tensors,
            o_bias="blk.0.attn_output.bias" in self.file.tensors,
        )

    def _experts(self) -> MoeConfig | None:
        num_experts = self.file.get(int, "llama.expert_count") or 0
        if num_experts == 0:
            return None
        inner = self.file.get(int, "llama.expert_feed_forward_length")
        return MoeConfig(
            gate="mixtral",
            num_experts=num_experts,
            num_experts_per_tok=self.file.need(int, "llama.expert_used_count"),
            intermediate_size=inner or self._one_value("llama.feed_forward_length"),
            norm_topk_prob=True,
        )

    def _refuse_sliding_window(self, max_position: int) -> None:
        window = self.file.get(int, "llama.attention.sliding_window") or max_position
        if window < max_position:
            raise ModelError(f"{self.file.path}: a sliding window of {window} is not supported")

    def _rope(self, dim: int, max_position: int) -> RopeConfig:
        file = self.file
        theta = file.get(float, "llama.rope.freq_base") or 10_000.0
        if "rope_freqs.weight" in file.tensors:
            return self._llama3_rope(theta, dim)
        kind = file.get(str, "llama.rope.scaling.type") or "none"
        factor = file.get(float, "llama.rope.scaling.factor") or file.get(float, "llama.rope.scale_linear") or 1.0
        if kind == "none" and factor == 1.0:
            return RopeConfig(theta=theta, dim=dim)
        if kind in ("none", "linear"):
            return RopeConfig(theta=theta, dim=dim, kind="linear", factor=factor)
        if kind != "yarn":
            raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn")
        return RopeConfig(
            theta=theta,
            dim=dim,
            kind="yarn",
            factor=factor,
            original_max_position=file.get(int, "llama.rope.scaling.original_context_length") or max_position,
            attention_factor=(file.get(float, "llama.rope.scaling.attn_factor") or 1.0) * yarn_mscale(factor, 1.0),
        )

    def _llama3_rope(self, theta: float, dim: int) -> RopeConfig:
        """The file keeps only what each frequency is divided by; find the scaling that gives these divisors.

        Between the two bounds, 1 / divisor = (1 - s) / factor + s with s = (original / wavelength - 1) / 3, for the
        bounds 1 and 4 that every Llama 3 has; one frequency in between tells the original context.
        """
        tensor = self.file.tensors["rope_freqs.weight"]
        divisors = self.file.raw(tensor).reshape(-1).view("<f4").tolist()
        factor = max(divisors)
        wavelengths = [2 * math.pi * theta ** (2 * i / dim) for i in range(dim // 2)]
        original = 8192.0
        for wavelength, divisor in zip(wavelengths, divisors, strict=False):
            if 1.001 < divisor < factor * 0.999:
                smooth = (1 / divisor - 1 / factor) / (1 - 1 / factor)
                original = float(round(wavelength * (1 + 3 * smooth)))
                break
        for wavelength, divisor in zip(wavelengths, divisors, strict=False):
            smooth = min(1.0, max(0.0, (original / wavelength - 1) / 3))
            expected = 1 / ((1 - smooth) / factor + smooth)
            if abs(divisor - expected) > 1e-3 * expected:
                raise ModelError(f"{self.file.path}: rope_freqs.weight is not the scaling of Llama 3")
        return RopeConfig(theta=theta, dim=dim, kind="llama3", factor=factor, original_max_position=int(original))

    def _dtype(self) -> Dtype:
        """The type that most of the weights have; quantised ones are widened to bfloat16."""
        sizes: dict[GGMLQuantizationType, int] = {}
        for tensor in self.file.tensors.values():
            sizes[tensor.qtype] = sizes.get(tensor.qtype, 0) + math.prod(tensor.shape)
        return PLAIN_DTYPES.get(max(sizes, key=lambda qtype: sizes[qtype]), "bfloat16")

    def _eos_ids(self) -> tuple[int, ...]:
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        found = (self.file.get(int, key) for key in keys)
        return tuple(dict.fromkeys(id_ for id_ in found if id_ is not None))
