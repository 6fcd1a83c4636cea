/* A layer of experts that all live here: norm, router, experts, shared expert and sum in one call. */
#include <omp.h>

#include "experts.h"
#include "gate.h"
#include "mlp.h"
#include "norm.h"
#include "scratch.h"

typedef struct {
    Norm norm;
    Gate gate;
    ExpertsLayer experts;
    MlpLayer shared; /* gate_up.packed null: there is none */
    int64_t num_slots;
    const int64_t *slot_of_expert; /* [num_experts] */
    int64_t *load;                 /* [num_experts]: tokens routed to each, counted up */
} MoeLayer;

/* Pairs of [num_tokens, num_chosen] experts sorted by slot, stably by row. */
static void sort_pairs(const MoeLayer *layer, int64_t num_tokens, const int64_t *experts, const float *weights,
                       int64_t *slot_counts, int64_t *starts, int64_t *rows, float *row_weights) {
    int64_t chosen = layer->gate.num_chosen, num_pairs = num_tokens * chosen;
    memset(slot_counts, 0, layer->num_slots * sizeof(int64_t));
    for (int64_t i = 0; i < num_pairs; i++) {
        layer->load[experts[i]]++;
        slot_counts[layer->slot_of_expert[experts[i]]]++;
    }
    starts[0] = 0;
    for (int64_t s = 1; s < layer->num_slots; s++) starts[s] = starts[s - 1] + slot_counts[s - 1];
    for (int64_t i = 0; i < num_pairs; i++) {
        int64_t to = starts[layer->slot_of_expert[experts[i]]]++;
        rows[to] = i / chosen;
        row_weights[to] = weights[i];
    }
}

/* The first matrices of a thread's share of the slots: its products with the shared expert leave the memory idle. */
static void expect_experts(const MoeLayer *layer, const Used *used, int64_t num_used) {
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    int64_t first = num_used * thread / threads, last = num_used * (thread + 1) / threads;
    const Linear *up = &layer->experts.gate_up;
    const char **pieces = pieces_ahead(last - first);
    for (int64_t u = first; u < last; u++)
        pieces[u - first] = (const char *)matrix_of(up, layer->experts.stride, used[u].slot).packed;
    int64_t slot_bytes = 2 * packed_size(up->n, up->k, up->gated), most = (MOST_AHEAD + slot_bytes - 1) / slot_bytes;
    expect(pieces, last - first < most ? last - first : most, slot_bytes);
}

/* x += moe(norm(x)): [num_tokens, hidden]. */
void moe_layer(const MoeLayer *layer, int64_t num_tokens, bf16 *x, int64_t num_threads) {
    int64_t hidden = layer->gate.hidden, num_pairs = num_tokens * layer->gate.num_chosen, shared = layer->shared.down.k;
    int64_t num_used = 0;
    bf16 *normed = scratch(NORMED, num_tokens * hidden * sizeof(bf16));
    bf16 *gated = scratch(HIDDEN, (num_pairs * layer->experts.down.k + num_tokens * shared) * sizeof(bf16));
    bf16 *shared_gated = gated + num_pairs * layer->experts.down.k;
    float *sums = scratch(SUMS, num_tokens * hidden * sizeof(float));
    int64_t *experts = scratch(ROUTED, num_pairs * (sizeof(int64_t) + sizeof(float)));
    float *weights = (float *)(experts + num_pairs);
    size_t pair_bytes = num_pairs * (sizeof(int64_t) + sizeof(float));
    int64_t *rows = scratch(PAIRS, pair_bytes + 2 * layer->num_slots * sizeof(int64_t));
    int64_t *slot_counts = rows + num_pairs, *starts = slot_counts + layer->num_slots;
    float *row_weights = (float *)(starts + layer->num_slots);
    Used *used = scratch(TASKS, layer->num_slots * sizeof(Used));
    Pairs pairs = {layer->num_slots, slot_counts, rows, row_weights};
    TEAM(num_threads) {
        normalise(&layer->norm, x, hidden, normed, hidden, num_tokens, hidden);
        route(&layer->gate, normed, num_tokens, experts, weights);
#pragma omp single
        {
            sort_pairs(layer, num_tokens, experts, weights, slot_counts, starts, rows, row_weights);
            num_used = used_slots(&pairs, used);
        }
        if (layer->shared.gate_up.packed) {
            if (num_tokens > 2 * ROWS) expect_experts(layer, used, num_used); /* fewer rows fetch nothing */
            linear(&layer->shared.gate_up, normed, hidden, num_tokens, shared_gated, shared, STORE, upcoming());
            linear(&layer->shared.down, shared_gated, shared, num_tokens, sums, hidden, STORE_FLOAT, upcoming());
            expect(0, 0, 1);
        } else {
            clear_sums(sums, hidden, num_tokens);
        }
        run_experts(&layer->experts, &pairs, used, num_used, normed, num_tokens, gated, sums);
        store_sums(sums, hidden, num_tokens, x, ADD);
    }
}
