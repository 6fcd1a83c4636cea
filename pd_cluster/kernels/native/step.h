/* What a step computes, as Python says it; `pd_cluster/kernels/native.py` mirrors these structures field by field.
 *
 * A layer is one call: its threads form a team that shares rows, panels or pieces of attention, and the result does not
 * depend on how many they are.
 */
#pragma once

#include "linear.h"

typedef struct {
    const bf16 *weight;
    double eps;
} Norm;

/* One layer's pages: strides in elements. MLA has no head stride. */
typedef struct {
    bf16 *base;
    int64_t unit_stride, head_stride;
} Pages;

typedef struct {
    int64_t first_token, num_tokens, num_prefix, first_unit, expanded;
} Segment;

typedef struct {
    int64_t num_tokens, num_segments, num_decodes, num_threads;
    const Segment *segments; /* those of one token first, in the order of the tokens */
    const int64_t *units;    /* of all segments: the units of their KV up to their last token */
    const int64_t *token_units, *token_offsets;
    const float *cos, *sin; /* [num_tokens, rope_dim / 2] */
} Step;

#define PRAGMA(text) _Pragma(#text)
#define TEAM(threads) PRAGMA(omp parallel num_threads(threads) if (threads > 1))

/* Every row normalised, by the team. */
void normalise(const Norm *norm, const bf16 *x, int64_t x_stride, bf16 *out, int64_t out_stride, int64_t num_rows,
               int64_t n);

/* out = or += float32 sums, both [num_rows, n], by the team. */
void store_sums(const float *sums, int64_t n, int64_t num_rows, bf16 *out, Ending ending);

/* A piece of attention for one thread: tokens [first, last) of a segment, heads of one group. */
typedef struct {
    int64_t segment, group, first, last;
} Task;

/* Of a segment, up to a task's last token. */
INLINE int64_t units_seen(const Segment *segment, const Task *task) {
    return (segment->num_prefix + task->last + 15) / 16;
}

/* Every (segment, group) cut into runs of tokens that share packed keys; the costliest, which see most, come first.
 * Segments in the other form are left out. Valid until the thread asks again.
 */
Task *attention_tasks(const Step *step, int64_t num_groups, int64_t heads, int64_t expanded, int64_t *count);

/* Expect `unit_bytes` of each unit that a thread's share of the tasks sees, `offset` bytes behind where the layer's lie.
 * `heads`: of each group, or null.
 */
void expect_units(const Step *step, const Task *tasks, int64_t num_tasks, const Pages *pages, const int64_t *heads,
                  int64_t offset, int64_t unit_bytes);

/* One of several matrices of one shape. */
INLINE Linear matrix_of(const Linear *first, int64_t stride, int64_t index) {
    Linear w = *first;
    w.packed += index * stride;
    return w;
}
