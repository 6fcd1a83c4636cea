"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent per token is cached, whatever the heads.

The latent [RMS(c_kv) | rotated k_rope] is the same on every tensor-parallel rank; heads are cut over ranks. Decode
absorbs the key expansion into the query and the value expansion into the result, so that it reads latents only.
Prefill expands latents to keys and values, which costs less once the new tokens are many.
"""

# T tokens, Q heads of this rank, H hidden size, C kv_lora_rank, R rope dim, D nope + rope dim, V value dim,
# N nope + value dim

from typing import Literal

import torch
from torch import Tensor

from pd_cluster.errors import ConfigError
from pd_cluster.kernels.paged import (
    MlaPages,
    PrefillSegment,
    decode_mla,
    prefill_mla_absorbed,
    prefill_mla_expanded,
    write_mla,
)
from pd_cluster.model.batch import Batch
from pd_cluster.model.config import MlaConfig
from pd_cluster.model.linear import Linear, RowLinear
from pd_cluster.model.norm import RmsNorm
from pd_cluster.model.rope import Angles, Rope

LATENT_NORM_EPS = 1e-6
"""Of the norms on compressed queries and keys: a constant of the architecture, not rms_norm_eps."""

PrefillForm = Literal["cheaper", "absorbed", "expanded"]


def mla_heads(config: MlaConfig, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """[start, end) of a rank's heads. Raises ConfigError when they do not divide."""
    if config.num_heads % tp_size:
        raise ConfigError(f"tensor_parallel must divide the model's {config.num_heads} attention heads, got {tp_size}")
    part = config.num_heads // tp_size
    return tp_rank * part, (tp_rank + 1) * part


def absorbing_is_cheaper(config: MlaConfig, num_tokens: int) -> bool:
    """Multiplications per key and head: wide scores and sums, or narrow ones behind one expansion for all."""
    absorbed = num_tokens * (2 * config.kv_lora_rank + config.qk_rope_head_dim)
    narrow = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    expansion = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    return absorbed < expansion + num_tokens * narrow


class Mla:
    """One layer.

    `compress` gives [q_a | c_kv | k_rope] (no q_a when queries are not compressed, then `q_b` reads the hidden
    state); `expand_QNC` is W_kvb by head.
    """

    def __init__(
        self,
        config: MlaConfig,
        compress: Linear,
        q_norm: RmsNorm | None,
        q_b: Linear,
        kv_norm: RmsNorm,
        expand_QNC: Tensor,
        out: Linear | RowLinear,
        rope: Rope,
        scale: float,
    ) -> None:
        self.config = config
        self.num_heads = len(expand_QNC)
        self.compress = compress
        self.q_norm = q_norm
        self.q_b = q_b
        self.kv_norm = kv_norm
        self.expand_QNC = expand_QNC
        self.absorb_keys_QDC = expand_QNC[:, : config.qk_nope_head_dim]
        self.expand_values_QCV = expand_QNC[:, config.qk_nope_head_dim :].transpose(1, 2).contiguous()
        self.out = out
        self.rope = rope
        self.scale = scale
        self.prefill_form: PrefillForm = "cheaper"

    def __call__(self, x_TH: Tensor, batch: Batch, angles: Angles, pages: MlaPages) -> Tensor:
        """[T, H], summed over tensor-parallel ranks. Writes the new tokens' latents first."""
        config, T = self.config, len(x_TH)
        compressed = self.compress(x_TH)
        num_q = config.q_lora_rank or 0
        q_input = x_TH if self.q_norm is None else self.q_norm(compressed[:, :num_q])
        c_kv, k_rope = torch.split(compressed[:, num_q:], [config.kv_lora_rank, config.qk_rope_head_dim], dim=1)
        q_TQD = self.q_b(q_input).view(T, self.num_heads, -1)
        q_nope, q_rope = torch.split(q_TQD, [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=2)
        # the latent's rope part is one more head
        rotated = self.rope.rotate(torch.cat([q_rope, k_rope.unsqueeze(1)], dim=1), angles)
        q_rope = rotated[:, :-1]
        write_mla(pages, batch.writes, torch.cat([self.kv_norm(c_kv), rotated[:, -1]], dim=1))
        parts = []
        for group in batch.decode:
            tokens = slice(group.start, group.end)
            q_NQC = self._absorb(q_nope[tokens], q_rope[tokens])
            parts.append(self._values(decode_mla(q_NQC, pages, group, config.kv_lora_rank, self.scale)))
        for segment in batch.prefill:
            tokens = slice(segment.start, segment.end)
            parts.append(self._prefill(q_nope[tokens], q_rope[tokens], pages, segment))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.out(attended.reshape(T, -1))

    def _absorb(self, q_nope_TQD: Tensor, q_rope_TQR: Tensor) -> Tensor:
        """[T, Q, C + R]: queries in the space of latents."""
        q_QTC = torch.bmm(q_nope_TQD.transpose(0, 1), self.absorb_keys_QDC)
        return torch.cat([q_QTC.transpose(0, 1), q_rope_TQR], dim=2)

    def _values(self, attended_TQC: Tensor) -> Tensor:
        """[T, Q, V]: mixed latents expanded to values."""
        return torch.bmm(attended_TQC.transpose(0, 1), self.expand_values_QCV).transpose(0, 1)

    def _prefill(self, q_nope: Tensor, q_rope: Tensor, pages: MlaPages, segment: PrefillSegment) -> Tensor:
        config = self.config
        form = self.prefill_form
        if form == "cheaper":
            form = "absorbed" if absorbing_is_cheaper(config, len(q_nope)) else "expanded"
        if form == "absorbed":
            q_TQC = self._absorb(q_nope, q_rope)
            return self._values(prefill_mla_absorbed(q_TQC, pages, segment, config.kv_lora_rank, self.scale))
        q_TQD = torch.cat([q_nope, q_rope], dim=2)
        return prefill_mla_expanded(q_TQD, pages, segment, self.expand_QNC, config.v_head_dim, self.scale)
