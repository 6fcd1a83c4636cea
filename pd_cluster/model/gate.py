"""The router of a MoE layer: scores in float32, the chosen experts, their weights.

deepseek_v3        sigmoid; chosen by score + bias, within the `topk_groups` groups whose two best are highest;
                   weighted by the unbiased score, normalised over the chosen if norm_topk_prob, times the scaling
                   factor (arXiv 2412.19437)
deepseek_v2_greedy softmax over all experts, times the scaling factor, never normalised (arXiv 2405.04434)
deepseek_v2_group  the same within the `topk_groups` groups whose best is highest
qwen3              softmax over all, normalised over the chosen if norm_topk_prob
mixtral            softmax over all, normalised over the chosen: the softmax of the chosen logits
"""

# T tokens, E experts, K experts per token, H hidden size, G groups

import torch
from torch import Tensor

from pd_cluster.model.config import MoeConfig
from pd_cluster.model.linear import multiply


class Gate:
    """`weight_EH` and `bias_E` (deepseek_v3 only) are float32."""

    def __init__(self, config: MoeConfig, weight_EH: Tensor, bias_E: Tensor | None) -> None:
        self.config = config
        self.weight_EH = weight_EH
        self.bias_E = bias_E

    def __call__(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The experts (int64 [T, K], the best first) and their weights (float32 [T, K])."""
        config = self.config
        logits_TE = multiply(hidden_TH.float(), self.weight_EH)
        scores_TE = logits_TE.sigmoid() if config.gate == "deepseek_v3" else logits_TE.softmax(-1)
        choice_TE = scores_TE if self.bias_E is None else scores_TE + self.bias_E
        if config.gate in ("deepseek_v3", "deepseek_v2_group") and config.topk_groups < config.num_groups:
            choice_TE = self._keep_best_groups(choice_TE)
        experts_TK = choice_TE.topk(config.num_experts_per_tok, dim=-1).indices
        weights_TK = scores_TE.gather(-1, experts_TK)
        if config.gate == "mixtral" or (config.norm_topk_prob and config.gate in ("deepseek_v3", "qwen3")):
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        if config.gate.startswith("deepseek") and config.routed_scaling_factor != 1.0:
            weights_TK = weights_TK * config.routed_scaling_factor
        return experts_TK, weights_TK

    def _keep_best_groups(self, choice_TE: Tensor) -> Tensor:
        """Everything outside the best groups becomes -inf: a mask of 0 would win over negative biased scores."""
        config = self.config
        choice_TGE = choice_TE.view(-1, config.num_groups, config.num_experts // config.num_groups)
        if config.gate == "deepseek_v3":
            best = min(2, choice_TGE.shape[-1])
            group_scores_TG = choice_TGE.topk(best, dim=-1).values.sum(-1)
        else:
            group_scores_TG = choice_TGE.amax(-1)
        kept = group_scores_TG.topk(config.topk_groups, dim=-1).indices
        dropped_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(1, kept, False)
        return choice_TGE.masked_fill(dropped_TG.unsqueeze(-1), float("-inf")).flatten(1)
