#include "gate.h"

#include "scratch.h"

#define TOKENS 4

/* Logits of up to 4 tokens: [tokens][num_experts]. A sum has its order, whatever the other tokens. */
INLINE void score(const Gate *gate, const float *x, const int tokens, float *logits) {
    for (int64_t e = 0; e < gate->num_experts; e++) {
        const float *weight = gate->weight + e * gate->hidden;
        vf sums[TOKENS][2];
        float rest[TOKENS] = {0};
        for (int t = 0; t < tokens; t++) sums[t][0] = sums[t][1] = vset(0);
        int64_t i = 0;
        for (; i + 2 * LANES <= gate->hidden; i += 2 * LANES) {
            vf w = vload(weight + i), w2 = vload(weight + i + LANES);
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) {
                sums[t][0] += vload(x + t * gate->hidden + i) * w;
                sums[t][1] += vload(x + t * gate->hidden + i + LANES) * w2;
            }
        }
        for (; i < gate->hidden; i++)
            for (int t = 0; t < tokens; t++) rest[t] += x[t * gate->hidden + i] * weight[i];
        for (int t = 0; t < tokens; t++) logits[t * gate->num_experts + e] = vsum(sums[t][0] + sums[t][1]) + rest[t];
    }
}

/* Logits to scores, in place. */
static void activate(const Gate *gate, float *scores) {
    int64_t n = gate->num_experts;
    if (gate->sigmoid) {
        int64_t e = 0;
        for (; e + LANES <= n; e += LANES) vstore(scores + e, 1.0f / (1.0f + vexp(-vload(scores + e))));
        for (; e < n; e++) scores[e] = 1.0f / (1.0f + vexp(vset(-scores[e]))[0]);
        return;
    }
    float highest = scores[0], sum = 0;
    for (int64_t e = 1; e < n; e++) highest = scores[e] > highest ? scores[e] : highest;
    int64_t e = 0;
    for (; e + LANES <= n; e += LANES) vstore(scores + e, vexp(vload(scores + e) - highest));
    for (; e < n; e++) scores[e] = vexp(vset(scores[e] - highest))[0];
    for (e = 0; e < n; e++) sum += scores[e];
    for (e = 0; e < n; e++) scores[e] /= sum;
}

/* The highest of values[0..n) that is not taken, the first of equal ones; it becomes taken. One is left to take. */
static int64_t take_highest(const float *values, int64_t n, char *taken) {
    int64_t best = 0;
    while (taken[best]) best++;
    for (int64_t i = best + 1; i < n; i++)
        if (!taken[i] && values[i] > values[best]) best = i;
    taken[best] = 1;
    return best;
}

/* Experts outside the groups that rank highest become taken. */
static void drop_groups(const Gate *gate, const float *choice, float *ranks, char *taken) {
    int64_t size = gate->num_experts / gate->num_groups;
    char dropped[gate->num_groups];
    memset(dropped, 0, gate->num_groups);
    for (int64_t g = 0; g < gate->num_groups; g++) {
        ranks[g] = 0;
        for (int64_t k = 0; k < gate->best_of_group && k < size; k++)
            ranks[g] += choice[g * size + take_highest(choice + g * size, size, taken + g * size)];
    }
    for (int64_t k = 0; k < gate->topk_groups; k++) take_highest(ranks, gate->num_groups, dropped);
    for (int64_t g = 0; g < gate->num_groups; g++) memset(taken + g * size, !dropped[g], size);
}

static void choose(const Gate *gate, float *scores, float *choice, float *ranks, int64_t *experts, float *weights) {
    int64_t n = gate->num_experts;
    char taken[n];
    memset(taken, 0, n);
    activate(gate, scores);
    for (int64_t e = 0; e < n; e++) choice[e] = scores[e] + (gate->bias ? gate->bias[e] : 0);
    if (gate->best_of_group && gate->topk_groups < gate->num_groups) drop_groups(gate, choice, ranks, taken);
    float sum = 0;
    for (int64_t k = 0; k < gate->num_chosen; k++) {
        experts[k] = take_highest(choice, n, taken);
        sum += weights[k] = scores[experts[k]];
    }
    float factor = gate->factor / (gate->normalise ? sum + 1e-20f : 1.0f);
    for (int64_t k = 0; k < gate->num_chosen; k++) weights[k] *= factor;
}

void route(const Gate *gate, const bf16 *x, int64_t num_tokens, int64_t *experts, float *weights) {
    int64_t hidden = gate->hidden, n = gate->num_experts;
#pragma omp for schedule(static)
    for (int64_t first = 0; first < num_tokens; first += TOKENS) {
        int64_t tokens = num_tokens - first < TOKENS ? num_tokens - first : TOKENS;
        float *rows = scratch(ROWS_SUM, (TOKENS * hidden + (TOKENS + 1) * n + gate->num_groups) * sizeof(float));
        float *scores = rows + TOKENS * hidden, *choice = scores + TOKENS * n, *ranks = choice + n;
        int64_t i = 0;
        for (; i + LANES <= tokens * hidden; i += LANES) vstore(rows + i, vload_bf16(x + first * hidden + i));
        for (; i < tokens * hidden; i++) rows[i] = to_float(x[first * hidden + i]);
        if (tokens == TOKENS)
            score(gate, rows, TOKENS, scores);
        else
            for (int64_t t = 0; t < tokens; t++) score(gate, rows + t * hidden, 1, scores + t * n);
        for (int64_t t = 0; t < tokens; t++)
            choose(gate, scores + t * n, choice, ranks, experts + (first + t) * gate->num_chosen,
                   weights + (first + t) * gate->num_chosen);
    }
}

void gate_layer(const Gate *gate, const bf16 *x, int64_t num_tokens, int64_t *experts, float *weights,
                int64_t num_threads) {
    TEAM(num_threads) route(gate, x, num_tokens, experts, weights);
}
