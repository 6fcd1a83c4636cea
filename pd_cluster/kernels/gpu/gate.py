"""The router's choice in one pass on a GPU: scores, groups, top k, weights, physical slots and the count of load.

One program reads one token's logits and writes what `model/gate.py` and `model/moe.py` compute in a dozen operators.
Experts lie as [groups, experts of a group], so any number of either will do. A token whose `mix` is
below 0 is padding: its slots are -1 and it counts for nothing.
"""

# Triton compiles its functions from their source: they have no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

# T tokens, E experts, K experts per token, C copies of an expert, G groups, P experts of a group

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_cluster.kernels.gpu.launch import launch, power_of_two


class GateRule(NamedTuple):
    """How experts are scored and chosen. `best_of_group`: how many of a group's best scores rank the group."""

    top_k: int
    sigmoid: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    best_of_group: int = 1
    normalises: bool = False
    scale: float = 1.0


class Slots(NamedTuple):
    """Where the copies of a layer's experts are, as `model.moe.SlotMap` has it: slots and thresholds [E, C], int64."""

    slots_EC: Tensor
    thresholds_EC: Tensor


@triton.jit
def _gate(
    logits, bias, mix, slots, thresholds, expert_out, slot_out, weight_out, load, scale,
    E: tl.constexpr, K: tl.constexpr, C: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, BP: tl.constexpr,
    KEPT_GROUPS: tl.constexpr, BEST: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr,
    NORMALISES: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    token_mix = tl.load(mix + t)
    num_counted = tl.where(token_mix >= 0, K, 0)
    P: tl.constexpr = E // G
    g = tl.arange(0, BG)
    p = tl.arange(0, BP)
    expert = g[:, None] * P + p[None, :]
    inside = (g < G)[:, None] & (p < P)[None, :]
    logit = tl.load(logits + t * E + expert, mask=inside, other=float("-inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(logit))
        score = score / tl.sum(score)
    choice = score
    if BIASED:
        choice += tl.load(bias + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))
    if KEPT_GROUPS < G:
        group_score = tl.max(choice, 1)
        if BEST > 1 and P > 1:
            best = tl.argmax(choice, 1)
            group_score += tl.max(tl.where(p[None, :] == best[:, None], float("-inf"), choice), 1)
        kept = tl.zeros([BG], tl.int32)
        for _ in tl.static_range(KEPT_GROUPS):
            group = tl.argmax(tl.where((kept == 0) & (g < G), group_score, float("-inf")), 0)
            kept = tl.where(g == group, 1, kept)
        # a mask of 0 would win over negative biased scores
        choice = tl.where((kept == 1)[:, None], choice, float("-inf"))
    flat = tl.reshape(choice, [BG * BP])
    flat_score = tl.reshape(score, [BG * BP])
    at = tl.arange(0, BG * BP)
    k = tl.arange(0, BK)
    chosen_K = tl.zeros([BK], tl.int64)
    weight_K = tl.zeros([BK], tl.float32)
    for rank in tl.static_range(K):
        best = tl.argmax(flat, 0)
        chosen_K = tl.where(k == rank, ((best // BP) * P + best % BP).to(tl.int64), chosen_K)
        weight_K = tl.where(k == rank, tl.sum(tl.where(at == best, flat_score, 0.0)), weight_K)
        flat = tl.where(at == best, float("-inf"), flat)
    if NORMALISES:
        weight_K = weight_K / (tl.sum(weight_K) + 1e-20)
    weight_K = weight_K * scale
    write = k < K
    mixed_K = (token_mix + chosen_K * 0x9E3779B1) & 0x7FFFFFFF
    hashed_K = ((mixed_K * 0x85EBCA6B) & 0x7FFFFFFF) >> 15
    copy_K = tl.zeros([BK], tl.int64)
    for c in range(C - 1):  # the last copy's threshold is out of reach
        copy_K += (hashed_K >= tl.load(thresholds + chosen_K * C + c, mask=write, other=0)).to(tl.int64)
    slot_K = tl.load(slots + chosen_K * C + tl.where(write, copy_K, 0), mask=write, other=0)
    tl.store(expert_out + t * K + k, chosen_K, mask=write)
    tl.store(slot_out + t * K + k, tl.where(k < num_counted, slot_K, -1), mask=write)
    tl.store(weight_out + t * K + k, weight_K, mask=write)
    tl.atomic_add(load + chosen_K, tl.full([BK], 1, tl.int64), mask=k < num_counted)


def gate(
    logits_TE: Tensor, bias_E: Tensor | None, mix_T: Tensor, slots: Slots, rule: GateRule,
    load_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Experts and slots, int64 [T, K], the best first, and weights, float32 [T, K].

    `logits_TE` and `bias_E` float32, `mix_T` int64 (`model.moe.token_mix`); `load_E` int64 grows by the experts of the
    tokens that are no padding.
    """
    T, E = logits_TE.shape
    G, K = rule.num_groups, rule.top_k
    assert logits_TE.is_contiguous()
    experts_TK = torch.empty((T, K), dtype=torch.int64, device=logits_TE.device)
    slots_TK = torch.empty_like(experts_TK)
    weights_TK = torch.empty((T, K), dtype=torch.float32, device=logits_TE.device)
    if T:
        launch(
            _gate,
            (T,),
            *(logits_TE, logits_TE if bias_E is None else bias_E, mix_T, slots.slots_EC, slots.thresholds_EC),
            *(experts_TK, slots_TK, weights_TK, load_E, rule.scale),
            E=E, K=K, C=slots.slots_EC.shape[1], G=G, BG=power_of_two(G), BP=power_of_two(E // G),
            KEPT_GROUPS=rule.topk_groups, BEST=rule.best_of_group, SIGMOID=rule.sigmoid, BIASED=bias_E is not None,
            NORMALISES=rule.normalises, BK=power_of_two(K), num_warps=1,
        )  # fmt: skip
    return experts_TK, slots_TK, weights_TK


def gate_reference(
    logits_TE: Tensor, bias_E: Tensor | None, mix_T: Tensor, slots: Slots, rule: GateRule,
    load_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same, operator by operator."""
    T, E = logits_TE.shape
    scores_TE = logits_TE.sigmoid() if rule.sigmoid else logits_TE.softmax(-1)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if rule.topk_groups < rule.num_groups:
        choice_TGP = choice_TE.view(T, rule.num_groups, -1)
        best = min(rule.best_of_group, choice_TGP.shape[2])
        kept = choice_TGP.topk(best, dim=-1).values.sum(-1).topk(rule.topk_groups, dim=-1).indices
        dropped_TG = torch.ones((T, rule.num_groups), dtype=torch.bool, device=kept.device).scatter_(1, kept, False)
        choice_TE = choice_TGP.masked_fill(dropped_TG.unsqueeze(-1), float("-inf")).view(T, E)
    experts_TK = choice_TE.topk(rule.top_k, dim=-1).indices
    weights_TK = scores_TE.gather(-1, experts_TK)
    if rule.normalises:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    mixed_TK = (mix_T.unsqueeze(1) + experts_TK * 0x9E3779B1) & 0x7FFFFFFF
    hashed_TK = (mixed_TK * 0x85EBCA6B & 0x7FFFFFFF) >> 15
    slots_TK = slots.slots_EC[experts_TK, (hashed_TK.unsqueeze(2) >= slots.thresholds_EC[experts_TK]).sum(2)]
    padding_T = mix_T < 0
    load_E += torch.bincount(experts_TK[~padding_T].reshape(-1), minlength=E)
    return experts_TK, slots_TK.masked_fill(padding_T.unsqueeze(1), -1), weights_TK * rule.scale
