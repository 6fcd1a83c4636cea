#include "step.h"

#include <omp.h>

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

void expect_units(const Step *step, const Task *tasks, int64_t num_tasks, const Pages *pages, const int64_t *heads,
                  int64_t offset, int64_t unit_bytes) {
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    int64_t first = num_tasks * thread / threads, last = num_tasks * (thread + 1) / threads, count = 0;
    int64_t most = MOST_AHEAD / unit_bytes;
    const char **pieces = pieces_ahead(most);
    if (step->num_tokens <= 2 * ROWS) last = first; /* as few rows fetch nothing */
    for (int64_t i = first; i < last; i++) {
        if (tasks[i].first) continue; /* an earlier run of the segment's tokens fetched them */
        const Segment *segment = step->segments + tasks[i].segment;
        const bf16 *base = pages->base + (heads ? heads[tasks[i].group] * pages->head_stride : 0);
        for (int64_t u = 0, seen = units_seen(segment, tasks + i); u < seen && count < most; u++) {
            int64_t unit = step->units[segment->first_unit + u];
            pieces[count++] = (const char *)(base + unit * pages->unit_stride) + offset;
        }
    }
    expect(pieces, count, unit_bytes);
}

void norm_layer(const Norm *norm, const bf16 *x, int64_t n, int64_t num_rows, bf16 *out, int64_t num_threads) {
    TEAM(num_threads) normalise(norm, x, n, out, n, num_rows, n);
}
