/* One rank's experts of a layer, over the rows that were sent to them. */
#pragma once

#include "step.h"

typedef struct {
    Linear gate_up, down; /* of the first slot; the others follow at the stride */
    int64_t stride;
} ExpertsLayer;

/* (row, slot) pairs sorted by slot: `slot_counts[s]` pairs of each of `num_slots`. */
typedef struct {
    int64_t num_slots;
    const int64_t *slot_counts, *rows;
    const float *weights;
} Pairs;

/* A slot that has pairs. */
typedef struct {
    int64_t slot, first, count;
} Used;

/* The used slots in order, [num_slots] room; how many. */
int64_t used_slots(const Pairs *pairs, Used *used);

/* sums[row] += the sum over its pairs of weight * expert(x[row]), float32 [num_rows, hidden], in the order of slots.
 * `gated` is room for [pairs, intermediate]. By the team.
 */
void run_experts(const ExpertsLayer *layer, const Pairs *pairs, const Used *used, int64_t num_used, const bf16 *x,
                 int64_t num_rows, bf16 *gated, float *sums);

/* Zeros to add to. By the team. */
void clear_sums(float *sums, int64_t n, int64_t num_rows);
