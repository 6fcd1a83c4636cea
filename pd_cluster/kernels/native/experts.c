/* One rank's experts of a layer, over the rows that were sent to them. */
#include "scratch.h"
#include "step.h"

typedef struct {
    Linear gate_up, down; /* of the first slot */
    int64_t gate_up_stride, down_stride;
} ExpertsLayer;

/* One slot's rows, a panel of its matrix. */
INLINE void expert_panel(const Linear *w, const bf16 *const *rows, int64_t num_rows, int64_t p, float *sums) {
    Panel panel = panel_of(w, p);
    multiply_panel(rows, num_rows, panel.weights, panel.vectors, w->k / 2, sums, PANEL, 0);
}

/* out[row] = sum over its pairs of weight * expert(x[row]), in the order of slots: bfloat16 [num_rows, hidden].
 * `pair_rows` and `pair_weights` are sorted by slot, `slot_counts` pairs each.
 */
void experts_layer(const ExpertsLayer *layer, int64_t num_slots, const int64_t *slot_counts, const int64_t *pair_rows,
                   const float *pair_weights, const bf16 *x, int64_t num_rows, bf16 *out, int64_t num_threads) {
    int64_t hidden = layer->gate_up.k, width = layer->down.k, num_pairs = 0, num_used = 0;
    for (int64_t s = 0; s < num_slots; s++) num_pairs += slot_counts[s];
    bf16 *gated = scratch(HIDDEN, num_pairs * width * sizeof(bf16));
    float *sums = scratch(SUMS, num_rows * hidden * sizeof(float));
    struct Used { int64_t slot, first, count; } *used = scratch(TASKS, (num_slots + 1) * sizeof(struct Used));
    for (int64_t s = 0, first = 0; s < num_slots; first += slot_counts[s++])
        if (slot_counts[s]) used[num_used++] = (struct Used){s, first, slot_counts[s]};
    int64_t up_panels = num_panels(&layer->gate_up), down_panels = num_panels(&layer->down);
    TEAM(num_threads) {
#pragma omp for collapse(2) schedule(static)
        for (int64_t u = 0; u < num_used; u++)
            for (int64_t p = 0; p < up_panels; p++) {
                Linear w = matrix_of(&layer->gate_up, layer->gate_up_stride, used[u].slot);
                int64_t blocks = (used[u].count + ROWS - 1) / ROWS;
                for (int64_t b = 0; b < blocks; b++) {
                    int64_t begin = used[u].count * b / blocks, end = used[u].count * (b + 1) / blocks;
                    const bf16 *rows[ROWS];
                    float panel[ROWS * PANEL] __attribute__((aligned(64)));
                    for (int64_t m = begin; m < end; m++) rows[m - begin] = x + pair_rows[used[u].first + m] * hidden;
                    expert_panel(&w, rows, end - begin, p, panel);
                    for (int64_t m = begin; m < end; m++)
                        gate_sums(panel + (m - begin) * PANEL, panel_of(&w, p).vectors,
                                  gated + (used[u].first + m) * width + p * PANEL / 2, width - p * PANEL / 2);
                }
            }
#pragma omp for schedule(static)
        for (int64_t r = 0; r < num_rows; r++) memset(sums + r * hidden, 0, hidden * sizeof(float));
        /* a thread keeps its panels through all slots, so that a row's experts are added in their order */
#pragma omp for schedule(static)
        for (int64_t p = 0; p < down_panels; p++)
            for (int64_t u = 0; u < num_used; u++) {
                Linear w = matrix_of(&layer->down, layer->down_stride, used[u].slot);
                int64_t blocks = (used[u].count + ROWS - 1) / ROWS;
                int64_t columns = hidden - p * PANEL < PANEL ? hidden - p * PANEL : PANEL;
                for (int64_t b = 0; b < blocks; b++) {
                    int64_t begin = used[u].count * b / blocks, end = used[u].count * (b + 1) / blocks;
                    const bf16 *rows[ROWS];
                    float panel[ROWS * PANEL] __attribute__((aligned(64)));
                    for (int64_t m = begin; m < end; m++) rows[m - begin] = gated + (used[u].first + m) * width;
                    expert_panel(&w, rows, end - begin, p, panel);
                    for (int64_t m = begin; m < end; m++) {
                        float *sum = sums + pair_rows[used[u].first + m] * hidden + p * PANEL;
                        float weight = pair_weights[used[u].first + m], *term = panel + (m - begin) * PANEL;
                        for (int64_t c = 0; c < columns; c++) sum[c] += weight * term[c];
                    }
                }
            }
#pragma omp for schedule(static)
        for (int64_t r = 0; r < num_rows; r++)
            for (int64_t c = 0; c < hidden; c += LANES) {
                if (c + LANES <= hidden) {
                    vstore_bf16(out + r * hidden + c, vload(sums + r * hidden + c));
                } else {
                    for (int64_t i = c; i < hidden; i++) out[r * hidden + i] = to_bf16(sums[r * hidden + i]);
                }
            }
    }
}
