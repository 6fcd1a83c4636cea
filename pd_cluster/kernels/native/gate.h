/* The router of a layer of experts, in float32: `pd_cluster/model/gate.py` says which family does what. */
#pragma once

#include "step.h"

typedef struct {
    const float *weight; /* [num_experts, hidden] */
    const float *bias;   /* [num_experts] or null: chosen by score + bias, weighted by the score */
    int64_t num_experts, hidden, num_chosen, num_groups, topk_groups;
    int64_t sigmoid;       /* else softmax */
    int64_t best_of_group; /* how many of a group's highest scores rank it; 0: there are no groups */
    int64_t normalise;
    double factor;
} Gate;

/* The experts of every token, the best first, and their weights: [num_tokens, num_chosen] each. By the team. */
void route(const Gate *gate, const bf16 *x, int64_t num_tokens, int64_t *experts, float *weights);
