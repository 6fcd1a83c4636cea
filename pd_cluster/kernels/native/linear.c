#include "linear.h"

int64_t packed_size(int64_t n, int64_t k, int64_t gated) {
    Linear w = {.n = n, .k = k, .gated = gated};
    return padded_outputs(&w) * k;
}

/* The row of W that lies in a column of the packed matrix; n or more where there is none. */
INLINE int64_t row_of_column(int64_t column, int64_t n, int64_t gated) {
    if (!gated) return column;
    int64_t pair = column / (2 * LANES), lane = column % LANES, row = pair * LANES + lane;
    if (row >= n / 2) return n;
    return column / LANES % 2 ? n / 2 + row : row;
}

void pack(bf16 *packed, const bf16 *weight, int64_t n, int64_t k, int64_t gated) {
    Linear w = {.packed = packed, .n = n, .k = k, .gated = gated};
    for (int64_t p = 0; p < num_panels(&w); p++) {
        Panel panel = panel_of(&w, p);
        int64_t width = panel.vectors * LANES;
        for (int64_t c = 0; c < width; c++) {
            int64_t row = row_of_column(p * PANEL + c, n, gated);
            bf16 *to = (bf16 *)panel.weights + 2 * c;
            for (int64_t i = 0; i < k / 2; i++)
                for (int64_t j = 0; j < 2; j++) to[i * width * 2 + j] = row < n ? weight[row * k + 2 * i + j] : 0;
        }
    }
}

INLINE void panel_kernel(const int num_rows, const int vectors, const bf16 *const *rows, const bf16 *panel,
                         int64_t pairs, float *sums, int64_t stride, int add, const char *ahead) {
    vf acc[ROWS][4];
#pragma GCC unroll 6
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[m][v] = add ? vload(sums + m * stride + v * LANES) : vset(0);
    const bf16 *r[ROWS];
#pragma GCC unroll 6
    for (int m = 0; m < num_rows; m++) r[m] = rows[m];
    for (int64_t i = 0; i < pairs; i++) {
        vu w[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) w[v] = vload_pairs(panel + (i * vectors + v) * 2 * LANES);
        __builtin_prefetch(ahead + i * AHEAD, 0, 2);
        __builtin_prefetch(ahead + i * AHEAD + 64, 0, 2);
#pragma GCC unroll 6
        for (int m = 0; m < num_rows; m++) {
            uint32_t pair;
            memcpy(&pair, r[m] + 2 * i, 4);
            vu x = (vu){} + pair;
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) acc[m][v] = vdot(acc[m][v], x, w[v]);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) vstore(sums + m * stride + v * LANES, acc[m][v]);
}

#define CASE(R, V) \
    case (R) * 8 + (V): panel_kernel(R, V, rows, panel, pairs, sums, stride, add, to_fetch); break;
#define CASES(R) CASE(R, 1) CASE(R, 2) CASE(R, 3) CASE(R, 4)

void multiply_panel(const bf16 *const *rows, int64_t num_rows, const bf16 *panel, int64_t vectors, int64_t pairs,
                    float *sums, int64_t stride, int add, const bf16 *ahead) {
    /* fetching what is read anyway costs less than a branch */
    const char *to_fetch = (const char *)(ahead ? ahead : panel);
    switch (num_rows * 8 + vectors) { CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6) }
}

void gate_sums(const float *sums, int64_t vectors, bf16 *out, int64_t num_columns) {
    for (int64_t v = 0; v < vectors; v += 2) {
        vf gate = vload(sums + v * LANES), up = vload(sums + (v + 1) * LANES);
        vf y = gate / (1.0f + vexp(-gate)) * up;
        int64_t first = v / 2 * LANES, left = num_columns - first;
        if (left >= LANES) {
            vstore_bf16(out + first, y);
        } else {
            for (int64_t i = 0; i < left; i++) out[first + i] = to_bf16(y[i]);
        }
    }
}

/* One panel's sums of one row, from column `first` of the output on. */
INLINE void finish(const Linear *w, Panel panel, int64_t first, const float *sums, void *out, Ending ending) {
    if (w->gated) {
        gate_sums(sums, panel.vectors, (bf16 *)out + first / 2, w->n / 2 - first / 2);
        return;
    }
    for (int64_t v = 0; v < panel.vectors; v++) {
        int64_t column = first + v * LANES, left = w->n - column;
        vf y = vload(sums + v * LANES);
        if (left >= LANES) {
            if (w->bias) y += vload(w->bias + column);
            if (ending == STORE_FLOAT || ending == ADD_FLOAT) {
                float *to = (float *)out + column;
                vstore(to, ending == ADD_FLOAT ? vload(to) + y : y);
            } else {
                bf16 *to = (bf16 *)out + column;
                vstore_bf16(to, ending == ADD ? vload_bf16(to) + y : y);
            }
            continue;
        }
        for (int64_t i = 0; i < left; i++) {
            float sum = y[i] + (w->bias ? w->bias[column + i] : 0);
            if (ending == STORE_FLOAT || ending == ADD_FLOAT) {
                float *to = (float *)out + column + i;
                *to = ending == ADD_FLOAT ? *to + sum : sum;
            } else {
                bf16 *to = (bf16 *)out + column + i;
                *to = to_bf16(ending == ADD ? to_float(*to) + sum : sum);
            }
        }
    }
}

void linear_panels(const Linear *w, const bf16 *x, int64_t x_stride, int64_t num_rows, void *out, int64_t out_stride,
                   Ending ending, int64_t first, int64_t last) {
    int64_t num_blocks = (num_rows + ROWS - 1) / ROWS;
    int64_t out_bytes = out_stride * (ending == STORE_FLOAT || ending == ADD_FLOAT ? 4 : 2);
    for (int64_t p = first; p < last; p++) {
        Panel panel = panel_of(w, p);
        for (int64_t b = 0; b < num_blocks; b++) {
            int64_t begin = num_rows * b / num_blocks, end = num_rows * (b + 1) / num_blocks;
            const bf16 *rows[ROWS];
            float sums[ROWS * PANEL] __attribute__((aligned(64)));
            for (int64_t m = begin; m < end; m++) rows[m - begin] = x + m * x_stride;
            /* the first block of rows reads the panel from memory, the others from the cache: they fetch the next */
            int64_t fetched = (b - 1) * w->k / 2 * AHEAD, left = p + 1 < num_panels(w) ? PANEL * 2 * w->k - fetched : 0;
            const bf16 *ahead = b > 0 && left > 0 ? panel.weights + PANEL * w->k + fetched / 2 : 0;
            multiply_panel(rows, end - begin, panel.weights, panel.vectors, w->k / 2, sums, PANEL, 0, ahead);
            for (int64_t m = begin; m < end; m++)
                finish(w, panel, p * PANEL, sums + (m - begin) * PANEL, (char *)out + m * out_bytes, ending);
        }
    }
}

#define CHUNK_BYTES (384 << 10) /* of x: they stay in the second cache while panels pass */

void linear(const Linear *w, const bf16 *x, int64_t x_stride, int64_t num_rows, void *out, int64_t out_stride,
            Ending ending) {
    int64_t chunk = CHUNK_BYTES / (2 * w->k) / ROWS * ROWS;
    if (chunk < ROWS) chunk = ROWS;
    int64_t num_chunks = (num_rows + chunk - 1) / chunk, panels = num_panels(w);
    int64_t out_bytes = out_stride * (ending == STORE_FLOAT || ending == ADD_FLOAT ? 4 : 2);
#pragma omp for collapse(2) schedule(static)
    for (int64_t c = 0; c < num_chunks; c++)
        for (int64_t p = 0; p < panels; p++) {
            int64_t begin = num_rows * c / num_chunks, end = num_rows * (c + 1) / num_chunks;
            linear_panels(w, x + begin * x_stride, x_stride, end - begin, (char *)out + begin * out_bytes, out_stride,
                          ending, p, p + 1);
        }
}

/* For tests and for callers that need one product alone. */
void linear_alone(const Linear *w, const bf16 *x, int64_t x_stride, int64_t num_rows, void *out, int64_t out_stride,
                  int64_t ending, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    linear(w, x, x_stride, num_rows, out, out_stride, (Ending)ending);
}
