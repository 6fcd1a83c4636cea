#include "experts.h"

#include "scratch.h"

/* One block of a slot's rows, a panel of its matrix. */
INLINE void expert_panel(const Linear *w, const bf16 *const *rows, int64_t num_rows, int64_t p, int64_t block,
                         int64_t num_blocks, float *sums) {
    const char *chunks[MOST_CHUNKS];
    Panel panel = panel_of(w, p);
    multiply_panel(rows, num_rows, panel.weights, panel.vectors, w->k / 2, sums, PANEL, 0,
                   block_chunks(w, panel, block, num_blocks, 0, chunks));
}

int64_t used_slots(const Pairs *pairs, Used *used) {
    int64_t count = 0;
    for (int64_t s = 0, first = 0; s < pairs->num_slots; first += pairs->slot_counts[s++])
        if (pairs->slot_counts[s]) used[count++] = (Used){s, first, pairs->slot_counts[s]};
    return count;
}

void run_experts(const ExpertsLayer *layer, const Pairs *pairs, const Used *used, int64_t num_used, const bf16 *x,
                 int64_t num_rows, bf16 *gated, float *sums) {
    int64_t hidden = layer->gate_up.k, width = layer->down.k;
    int64_t up_panels = num_panels(&layer->gate_up), down_panels = num_panels(&layer->down);
#pragma omp for collapse(2) schedule(static)
    for (int64_t u = 0; u < num_used; u++)
        for (int64_t p = 0; p < up_panels; p++) {
            Linear w = matrix_of(&layer->gate_up, layer->stride, used[u].slot);
            int64_t blocks = (used[u].count + ROWS - 1) / ROWS;
            for (int64_t b = 0; b < blocks; b++) {
                int64_t begin = used[u].count * b / blocks, end = used[u].count * (b + 1) / blocks;
                const bf16 *rows[ROWS];
                float panel[ROWS * PANEL] __attribute__((aligned(64)));
                for (int64_t m = begin; m < end; m++) rows[m - begin] = x + pairs->rows[used[u].first + m] * hidden;
                expert_panel(&w, rows, end - begin, p, b, blocks, panel);
                for (int64_t m = begin; m < end; m++)
                    gate_sums(panel + (m - begin) * PANEL, panel_of(&w, p).vectors,
                              gated + (used[u].first + m) * width + p * PANEL / 2, width - p * PANEL / 2);
            }
        }
    /* a thread keeps its panels through all slots, so that a row's experts are added in their order */
    for (int64_t u = 0; u < num_used; u++) {
#pragma omp for schedule(static) nowait
        for (int64_t p = 0; p < down_panels; p++) {
            Linear w = matrix_of(&layer->down, layer->stride, used[u].slot);
            int64_t blocks = (used[u].count + ROWS - 1) / ROWS;
            int64_t columns = hidden - p * PANEL < PANEL ? hidden - p * PANEL : PANEL;
            for (int64_t b = 0; b < blocks; b++) {
                int64_t begin = used[u].count * b / blocks, end = used[u].count * (b + 1) / blocks;
                const bf16 *rows[ROWS];
                float panel[ROWS * PANEL] __attribute__((aligned(64)));
                for (int64_t m = begin; m < end; m++) rows[m - begin] = gated + (used[u].first + m) * width;
                expert_panel(&w, rows, end - begin, p, b, blocks, panel);
                for (int64_t m = begin; m < end; m++) {
                    float *sum = sums + pairs->rows[used[u].first + m] * hidden + p * PANEL;
                    float weight = pairs->weights[used[u].first + m], *term = panel + (m - begin) * PANEL;
                    int64_t c = 0;
                    for (; c + LANES <= columns; c += LANES) vstore(sum + c, vload(sum + c) + weight * vload(term + c));
                    for (; c < columns; c++) sum[c] += weight * term[c];
                }
            }
        }
    }
#pragma omp barrier
}

void clear_sums(float *sums, int64_t n, int64_t num_rows) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < num_rows; r++) memset(sums + r * n, 0, n * sizeof(float));
}

/* out = the rows' sums over their experts here, rounded once: [num_rows, hidden]. */
void experts_layer(const ExpertsLayer *layer, int64_t num_slots, const int64_t *slot_counts, const int64_t *pair_rows,
                   const float *pair_weights, const bf16 *x, int64_t num_rows, bf16 *out, int64_t num_threads) {
    Pairs pairs = {num_slots, slot_counts, pair_rows, pair_weights};
    int64_t hidden = layer->gate_up.k, num_pairs = 0;
    for (int64_t s = 0; s < num_slots; s++) num_pairs += slot_counts[s];
    bf16 *gated = scratch(HIDDEN, num_pairs * layer->down.k * sizeof(bf16));
    float *sums = scratch(SUMS, num_rows * hidden * sizeof(float));
    Used *used = scratch(TASKS, num_slots * sizeof(Used));
    int64_t num_used = used_slots(&pairs, used);
    TEAM(num_threads) {
        clear_sums(sums, hidden, num_rows);
        run_experts(layer, &pairs, used, num_used, x, num_rows, gated, sums);
        store_sums(sums, hidden, num_rows, out, STORE);
    }
}
