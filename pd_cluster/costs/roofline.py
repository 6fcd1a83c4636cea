"""How long prefill, a decode step and a transfer take, from first principles.

A step does `flops` of arithmetic and reads `bytes` of memory, and takes the longer of the two (Williams, Waterman and
Patterson, "Roofline", CACM 2009). Only ratios between workers matter to routing; `calibration` corrects the scale.
"""

from msgspec import Struct


class Hardware(Struct, frozen=True, kw_only=True):
    """What one worker (all its TP ranks together) can do. The defaults are a small CPU host."""

    flops_s: float = 5e10
    memory_bytes_s: float = 1e10
    link_bytes_s: float = 2e9
    link_latency_s: float = 1e-3
    step_overhead_s: float = 2e-3


class ModelWork(Struct, frozen=True, kw_only=True):
    """What one token costs. The defaults are a model so small that overheads dominate."""

    dense_params: float = 1e7  # read and multiplied for every token: attention, shared experts, embeddings
    expert_params: float = 0.0  # of one routed expert, summed over its MoE layers
    num_experts: int = 0
    num_experts_per_tok: int = 0
    bytes_per_param: float = 2.0
    attention_flops: float = 1e4  # for one query token and one context token, over all layers
    kv_token_bytes: float = 1e3

    @property
    def active_params(self) -> float:
        return self.dense_params + self.expert_params * self.num_experts_per_tok

    def weight_bytes(self, num_tokens: int) -> float:
        """Expected bytes of weights read by a step of `num_tokens` that choose experts uniformly."""
        touched = 0.0
        if self.num_experts:
            touched = self.num_experts * (1.0 - (1.0 - self.num_experts_per_tok / self.num_experts) ** num_tokens)
        return self.bytes_per_param * (self.dense_params + self.expert_params * touched)


def prefill_s(hardware: Hardware, work: ModelWork, num_new_tokens: int, num_cached_tokens: int = 0) -> float:
    """Seconds to compute `num_new_tokens` after `num_cached_tokens` whose KV is there."""
    if num_new_tokens <= 0:
        return 0.0
    context = num_new_tokens * (num_cached_tokens + num_new_tokens / 2)
    flops = 2 * work.active_params * num_new_tokens + work.attention_flops * context
    read_s = work.weight_bytes(num_new_tokens) / hardware.memory_bytes_s
    return hardware.step_overhead_s + max(flops / hardware.flops_s, read_s)


def decode_step_s(hardware: Hardware, work: ModelWork, num_seqs: int, num_context_tokens: int) -> float:
    """Seconds of one step of `num_seqs` sequences with `num_context_tokens` of KV between them."""
    if num_seqs <= 0:
        return 0.0
    flops = 2 * work.active_params * num_seqs + work.attention_flops * num_context_tokens
    read = work.weight_bytes(num_seqs) + work.kv_token_bytes * num_context_tokens
    return hardware.step_overhead_s + max(flops / hardware.flops_s, read / hardware.memory_bytes_s)


def transfer_s(hardware: Hardware, num_bytes: float) -> float:
    return hardware.link_latency_s + num_bytes / hardware.link_bytes_s
