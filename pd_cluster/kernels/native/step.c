#include "step.h"

#include "attention.h"
#include "norm.h"
#include "scratch.h"

void normalise(const Norm *norm, const bf16 *x, int64_t x_stride, bf16 *out, int64_t out_stride, int64_t num_rows,
               int64_t n) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_rows; t++) rms_norm(out + t * out_stride, x + t * x_stride, norm->weight, n, norm->eps);
}

void store_sums(const float *sums, int64_t n, int64_t num_rows, bf16 *out, Ending ending) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
        const float *from = sums + r * n;
        bf16 *to = out + r * n;
        int64_t c = 0;
        for (; c + LANES <= n; c += LANES)
            vstore_bf16(to + c, ending == ADD ? vload_bf16(to + c) + vload(from + c) : vload(from + c));
        for (; c < n; c++) to[c] = to_bf16(ending == ADD ? to_float(to[c]) + from[c] : from[c]);
    }
}

Task *attention_tasks(const Step *step, int64_t num_groups, int64_t heads, int64_t expanded, int64_t *count) {
    int64_t run = ROWS_AT_ONCE / heads, capacity = 0;
    if (run < 1) run = 1;
    for (int64_t s = 0; s < step->num_segments; s++)
        capacity += (step->segments[s].num_tokens + run - 1) / run * num_groups;
    Task *tasks = scratch(TASKS, (capacity + 1) * sizeof(Task));
    *count = 0;
    for (int64_t s = step->num_segments; s-- > 0;) {
        const Segment *segment = step->segments + s;
        if (segment->expanded != expanded) continue;
        for (int64_t i = (segment->num_tokens + run - 1) / run; i-- > 0;)
            for (int64_t g = 0; g < num_groups; g++) {
                int64_t last = (i + 1) * run < segment->num_tokens ? (i + 1) * run : segment->num_tokens;
                tasks[(*count)++] = (Task){s, g, i * run, last};
            }
    }
    return tasks;
}

void norm_layer(const Norm *norm, const bf16 *x, int64_t n, int64_t num_rows, bf16 *out, int64_t num_threads) {
    TEAM(num_threads) normalise(norm, x, n, out, n, num_rows, n);
}
