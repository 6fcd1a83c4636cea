"""A loaded transformer turned into Triton launches: what an engine runs on a GPU.

Layers keep the weights and the multiplications of the torch layers they are made from; everything between those is one
launch: residual and norm, rotation and cache write, attention of all sequences of the step, the gate, the experts'
products. A step's indices travel to the device in one copy. Where tokens are on every rank already, experts are sorted,
multiplied and added up on the device, and no host waits for their counts.
"""

# T tokens, H hidden size, Q query heads, D head dim, C kv_lora_rank, R rope dim, V value dim, K experts per token,
# E experts, P pairs (token, expert), G segments

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pd_cluster.kernels.gpu.attention import (
    attend_gqa,
    attend_mla,
    attend_mla_expanded,
)
from pd_cluster.kernels.gpu.fp8 import silu_mul
from pd_cluster.kernels.gpu.gate import GateRule, Slots, gate
from pd_cluster.kernels.gpu.grouped_gemm import grouped_gemm
from pd_cluster.kernels.gpu.norm import add_rms_norm, rms_norm
from pd_cluster.kernels.gpu.permute import add_pairs, order_by_slot, unpermute
from pd_cluster.kernels.gpu.rotary import rotate_and_write, rotate_queries, write_latents
from pd_cluster.kernels.paged import GqaPages, MlaPages
from pd_cluster.model.batch import Batch, Span, build_segments
from pd_cluster.model.config import MoeConfig
from pd_cluster.model.device_batch import DecodeGraphs, DeviceBatch, device_batch
from pd_cluster.model.gqa import Gqa
from pd_cluster.model.halves import Stages
from pd_cluster.model.linear import multiply
from pd_cluster.model.mla import Mla, absorbing_is_cheaper
from pd_cluster.model.mlp import DenseMlp
from pd_cluster.model.moe import ExpertSlots, Moe, token_mix
from pd_cluster.model.norm import RmsNorm
from pd_cluster.model.rope import Angles
from pd_cluster.model.transformer import Layer, Transformer
from pd_cluster.parallel.dispatch import Arrived
from pd_cluster.parallel.replicated import ReplicatedDispatcher


def _rows(x: Tensor, norm: RmsNorm) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps)


class DeviceGqa:
    def __init__(self, plain: Gqa) -> None:
        self.plain = plain

    def __call__(self, x_TH: Tensor, batch: DeviceBatch, angles: Angles, pages: GqaPages) -> Tensor:
        """[T, H], summed over tensor-parallel ranks. Writes the new tokens' keys and values first."""
        plain, norm = self.plain, self.plain.qk_norm
        q_TQD = rotate_and_write(
            plain.qkv(x_TH).view(len(x_TH), -1, plain.head_dim),
            plain.num_heads,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            angles,
            plain.rope.dim,
            plain.rope.interleaved,
            pages,
            batch.writes,
        )
        attended = attend_gqa(q_TQD, pages, batch.work, plain.scale)
        return plain.out(attended.view(len(x_TH), -1))


class DeviceMla:
    def __init__(self, plain: Mla) -> None:
        self.plain = plain

    def expands(self, num_tokens: int) -> bool:
        """Whether a segment's latents are expanded to keys and values."""
        form = self.plain.prefill_form
        return form == "expanded" or (form == "cheaper" and not absorbing_is_cheaper(self.plain.config, num_tokens))

    def __call__(self, x_TH: Tensor, batch: DeviceBatch, angles: Angles, pages: MlaPages) -> Tensor:
        """[T, H], summed over tensor-parallel ranks. Writes the new tokens' latents first."""
        plain, config, T = self.plain, self.plain.config, len(x_TH)
        interleaved, nope = plain.rope.interleaved, config.qk_nope_head_dim
        compressed = plain.compress(x_TH)
        num_q = config.q_lora_rank or 0
        q_input = x_TH if plain.q_norm is None else _rows(compressed[:, :num_q], plain.q_norm)
        q_TQD = plain.q_b(q_input).view(T, plain.num_heads, -1)
        norm = plain.kv_norm
        write_latents(compressed[:, num_q:], norm.weight, norm.eps, angles, interleaved, pages, batch.writes)
        attended = x_TH.new_empty((T, plain.num_heads, config.v_head_dim))
        if len(batch.work.rows_G5):
            q_TQC = x_TH.new_empty((T, plain.num_heads, config.kv_lora_rank + config.qk_rope_head_dim))
            q_QTC = torch.bmm(q_TQD[..., :nope].transpose(0, 1), plain.expand_QNC[:, :nope])
            q_TQC[..., : config.kv_lora_rank] = q_QTC.transpose(0, 1)
            rotate_queries(q_TQD[..., nope:], q_TQC[..., config.kv_lora_rank :], angles, interleaved)
            latent_TQC = attend_mla(q_TQC, pages, batch.work, config.kv_lora_rank, plain.scale)
            values_QTV = torch.bmm(latent_TQC.transpose(0, 1), plain.expand_QNC[:, nope:].transpose(1, 2))
            attended.copy_(values_QTV.transpose(0, 1))
        if batch.expanded:
            rotated = torch.empty_like(q_TQD)
            rotated[..., :nope] = q_TQD[..., :nope]
            rotate_queries(q_TQD[..., nope:], rotated[..., nope:], angles, interleaved)
        for new in batch.expanded:
            rows = slice(new.start, new.start + new.num_tokens)
            attended[rows] = attend_mla_expanded(
                rotated[rows], pages, new, batch.work.units, plain.expand_QNC, config.v_head_dim, plain.scale
            )
        return plain.out(attended.view(T, -1))


class DeviceMlp:
    def __init__(self, plain: DenseMlp) -> None:
        self.plain = plain

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self.plain.down(silu_mul(self.plain.gate_up(x_TH)))


class DeviceExperts:
    """Called as `ExpertSlots` is, for rows that a dispatcher brought."""

    def __init__(self, plain: ExpertSlots) -> None:
        self.plain = plain

    def __call__(self, arrived: Arrived) -> Tensor:
        """[R, H]: every row's weighted sum over its experts here, summed in float32 in slot order."""
        hidden_RH, num_pairs = arrived.hidden_RH, len(arrived.pair_row_P)
        counts_S = torch.tensor(arrived.slot_counts, dtype=torch.int32).to(hidden_RH.device, non_blocking=True)
        values_PH = self.multiply(hidden_RH, counts_S, num_pairs, arrived.pair_row_P, 1)
        return add_pairs(values_PH, arrived.pair_row_P, arrived.pair_weight_P, len(hidden_RH))

    def multiply(self, x_RH: Tensor, counts_S: Tensor, num_pairs: int, row_P: Tensor, divisor: int) -> Tensor:
        """[P, H]: each pair through its slot's expert; see `grouped_gemm`."""
        gate_up = grouped_gemm(x_RH, self.plain.gate_up_SNH, counts_S, num_pairs, row_P, divisor)
        return grouped_gemm(silu_mul(gate_up), self.plain.down_SHI, counts_S, num_pairs)


class DeviceMoe(Moe):
    """A layer of experts behind the fused gate."""

    def __init__(self, plain: Moe) -> None:
        shared = plain.shared
        experts = {
            rank: DeviceExperts(slots) if isinstance(slots, ExpertSlots) else slots
            for rank, slots in plain.experts.items()
        }
        super().__init__(
            plain.layer,
            plain.gate,
            plain.choice,
            experts,
            DeviceMlp(shared) if isinstance(shared, DenseMlp) else shared,
            plain.dispatcher,
            plain.tp,
        )
        self._rule = gate_rule(plain.gate.config)
        self._uncounted_E = torch.zeros_like(self.load_E)

    def _route(self, x_TH: Tensor, mix_T: Tensor, start: int, end: int) -> Stages:
        dispatcher = self.dispatcher
        counts_here = not (dispatcher.replicated and self.tp is not None and self.tp.rank)
        logits_TE = multiply(x_TH.float(), self.gate.weight_EH)
        _, slots_TK, weights_TK = gate(
            logits_TE,
            self.gate.bias_E,
            mix_T,
            Slots(self.choice.slots_EC, self.choice.thresholds_EC),
            self._rule,
            self.load_E if counts_here else self._uncounted_E,
        )
        if isinstance(dispatcher, ReplicatedDispatcher):
            return self._here(x_TH, slots_TK, weights_TK, dispatcher, start, end)
        combining = dispatcher.dispatch(self.layer, x_TH, slots_TK, weights_TK)
        shared = self.shared(x_TH[start:end]) if self.shared is not None and end > start else None
        yield
        outputs = [self.experts[arrived.rank](arrived) for arrived in combining.arrived()]
        combining.reply(outputs)
        yield
        routed = combining.total()
        return routed if shared is None else routed.add_(shared)

    def _here(
        self,
        x_TH: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        dispatcher: ReplicatedDispatcher,
        start: int,
        end: int,
    ) -> Tensor:
        """All tokens are on this rank: its own experts, without asking the host how many rows each has."""
        rank = dispatcher.ranks[0]
        experts: Any = self.experts[rank]
        num_slots = len(experts.plain.gate_up_SNH)
        local_TK = slots_TK - rank * num_slots
        counts_S, pair_of_P, place_of_P = order_by_slot(local_TK, num_slots)
        values_PH = experts.multiply(x_TH, counts_S, len(pair_of_P), pair_of_P, slots_TK.shape[1])
        partial_TH = unpermute(values_PH, place_of_P, weights_TK)
        if self.shared is not None and end > start:
            partial_TH[start:end] += self.shared(x_TH[start:end])
        return dispatcher.add_ranks(partial_TH)


def gate_rule(config: MoeConfig) -> GateRule:
    """What `model/gate.py` does for this family, as the kernel is told."""
    limits = config.gate in ("deepseek_v3", "deepseek_v2_group")
    return GateRule(
        top_k=config.num_experts_per_tok,
        sigmoid=config.gate == "deepseek_v3",
        num_groups=config.num_groups if limits else 1,
        topk_groups=config.topk_groups if limits else 1,
        best_of_group=2 if config.gate == "deepseek_v3" else 1,
        normalises=config.gate == "mixtral" or (config.norm_topk_prob and config.gate in ("deepseek_v3", "qwen3")),
        scale=config.routed_scaling_factor if config.gate.startswith("deepseek") else 1.0,
    )


class DeviceLayer:
    """Attention, then a dense MLP or experts. What the last layer computed is added by the norm in front."""

    def __init__(self, plain: Layer) -> None:
        attention, mlp = plain.attention, plain.mlp
        self.attention_norm = plain.attention_norm
        self.attention: Any = DeviceMla(attention) if isinstance(attention, Mla) else DeviceGqa(attention)
        self.mlp_norm = plain.mlp_norm
        self.mlp: DeviceMlp | DeviceMoe = DeviceMoe(mlp) if isinstance(mlp, Moe) else DeviceMlp(mlp)

    def __call__(
        self, x_TH: Tensor, add_TH: Tensor | None, batch: DeviceBatch, angles: Angles, mix_T: Tensor, pages: Any
    ) -> tuple[Tensor, Tensor]:
        """The hidden states behind attention, and what this layer's MLP adds to them."""
        if add_TH is None:
            normed_TH = _rows(x_TH, self.attention_norm)
        else:
            x_TH, normed_TH = add_rms_norm(x_TH, add_TH, self.attention_norm.weight, self.attention_norm.eps)
        attended_TH = self.attention(normed_TH, batch, angles, pages)
        x_TH, normed_TH = add_rms_norm(x_TH, attended_TH, self.mlp_norm.weight, self.mlp_norm.eps)
        return x_TH, self.mlp(normed_TH, mix_T) if isinstance(self.mlp, DeviceMoe) else self.mlp(normed_TH)


class DeviceTransformer(Transformer):
    """A transformer of such layers, with the weights of `plain`. On a CUDA device decode steps are replayed graphs."""

    def __init__(self, plain: Transformer) -> None:
        layers = [DeviceLayer(layer) for layer in plain.layers]
        super().__init__(plain.config, plain.heads, plain.vocabulary, layers, plain.norm, plain.rope)
        device = plain.norm.weight.device
        self._read_K = torch.tensor(plain.heads.read, dtype=torch.int64, device=device)
        # a graph can neither ask the host how many rows arrived nor wait for it to add up ranks
        alone = plain.vocabulary.group is None
        stays_here = all(isinstance(moe.dispatcher, ReplicatedDispatcher) for moe in self.moe_layers)
        self._graphs = DecodeGraphs(self.forward) if device.type == "cuda" and alone and stays_here else None

    def batch(self, spans: Sequence[Span], device: torch.device) -> Batch:
        first = self.layers[0].attention
        cpu = build_segments(spans, first.expands if isinstance(first, DeviceMla) else None)
        return device_batch(cpu, self._read_K)

    def __call__(self, batch: Batch, pages: Sequence[GqaPages | MlaPages]) -> Tensor:
        """See `Transformer`."""
        assert isinstance(batch, DeviceBatch), "the batch was built for other kernels"
        if self._graphs is not None and self._graphs.serves(batch):
            return self._graphs(batch, pages)
        return self.forward(batch, pages)

    def forward(self, batch: DeviceBatch, pages: Sequence[GqaPages | MlaPages]) -> Tensor:
        """The launches of one step. Tokens that are written nowhere are padding."""
        x_TH = self.vocabulary.embed(batch.token_ids_T)
        mix_T = token_mix(batch.token_ids_T, batch.positions_T).masked_fill_(batch.writes.units_T < 0, -1)
        if not batch.num_tokens:
            for moe in self.moe_layers:
                moe(x_TH, mix_T)
            return x_TH
        angles = self.rope.angles(batch.positions_T)
        add_TH = None
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            x_TH, add_TH = layer(x_TH, add_TH, batch, angles, mix_T, layer_pages)
        return x_TH if add_TH is None else x_TH + add_TH

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """See `Transformer`."""
        return self.vocabulary.logits(_rows(hidden_SH, self.norm))
