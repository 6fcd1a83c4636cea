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

/* One pair of inputs of every row. */
INLINE void panel_step(const int num_rows, const int vectors, const bf16 *const *r, const bf16 *panel, int64_t i,
                       vf (*acc)[4]) {
    vu w[4];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) w[v] = vload_pairs(panel + (i * vectors + v) * 2 * LANES);
#pragma GCC unroll 6
    for (int m = 0; m < num_rows; m++) {
        uint32_t pair;
        memcpy(&pair, r[m] + 2 * i, 4);
        vu x = (vu){} + pair;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[m][v] = vdot(acc[m][v], x, w[v]);
    }
}

INLINE void panel_kernel(const int num_rows, const int vectors, const int fetching, const bf16 *const *rows,
                         const bf16 *panel, int64_t pairs, float *sums, int64_t stride, int add,
                         const char *const *chunks) {
    vf acc[ROWS][4];
#pragma GCC unroll 6
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[m][v] = add ? vload(sums + m * stride + v * LANES) : vset(0);
    const bf16 *r[ROWS];
#pragma GCC unroll 6
    for (int m = 0; m < num_rows; m++) r[m] = rows[m];
    int64_t i = 0;
    if (fetching)
        while (i + CHUNK_PAIRS <= pairs) {
            const char *chunk = *chunks++;
            for (int j = 0; j < CHUNK_PAIRS; j++, i++, chunk += 128) {
                __builtin_prefetch(chunk, 0, 2);
                __builtin_prefetch(chunk + 64, 0, 2);
                panel_step(num_rows, vectors, r, panel, i, acc);
            }
        }
    for (; i < pairs; i++) panel_step(num_rows, vectors, r, panel, i, acc);
#pragma GCC unroll 6
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) vstore(sums + m * stride + v * LANES, acc[m][v]);
}

#define CASE(R, V) \
    case (R) * 8 + (V): panel_kernel(R, V, 0, rows, panel, pairs, sums, stride, add, 0); break;
#ifdef __AVX512F__
#define FETCHING(R, V) \
    case 64 + (R) * 8 + (V): panel_kernel(R, V, 1, rows, panel, pairs, sums, stride, add, chunks); break;
#else /* it does not multiply so fast that its memory would be idle */
#define FETCHING(R, V) case 64 + (R) * 8 + (V):
#endif
#define CASES(R) \
    FETCHING(R, 1) CASE(R, 1) FETCHING(R, 2) CASE(R, 2) FETCHING(R, 3) CASE(R, 3) FETCHING(R, 4) CASE(R, 4)

void multiply_panel(const bf16 *const *rows, int64_t num_rows, const bf16 *panel, int64_t vectors, int64_t pairs,
                    float *sums, int64_t stride, int add, const char *const *chunks) {
    switch (num_rows * 8 + vectors + (chunks ? 64 : 0)) { CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6) }
}

void gate_sums(const float *sums, int64_t vectors, bf16 *out, int64_t num_columns) {
    for (int64_t v = 0; v < vectors; v += 2) {
        vf gate = vload(sums + v * LANES), up = vload(sums + (v + 1) * LANES);
        vf y = gate * up * vreciprocal(1.0f + vexp2(-vmax(vset(-126.0f), gate * 1.44269504f)));
        int64_t first = v / 2 * LANES, left = num_columns - first;
        if (left >= LANES) {
            vstore_bf16(out + first, y);
        } else {
            for (int64_t i = 0; i < left; i++) out[first + i] = to_bf16(y[i]);
        }
    }
}

/* A vector of outputs, or its first `count`. */
INLINE void store_outputs(const Ending ending, vf y, void *out, int64_t column, int64_t count) {
    float *floats = (float *)out + column;
    bf16 *rounded = (bf16 *)out + column;
    if (count < LANES) {
        for (int64_t i = 0; i < count; i++) {
            if (ending == STORE_FLOAT || ending == ADD_FLOAT)
                floats[i] = ending == ADD_FLOAT ? floats[i] + y[i] : y[i];
            else
                rounded[i] = to_bf16(ending == ADD ? to_float(rounded[i]) + y[i] : y[i]);
        }
        return;
    }
    if (ending == STORE_FLOAT || ending == ADD_FLOAT)
        vstore(floats, ending == ADD_FLOAT ? vload(floats) + y : y);
    else
        vstore_bf16(rounded, ending == ADD ? vload_bf16(rounded) + y : y);
}

INLINE void finish_as(const Ending ending, const Linear *w, int64_t vectors, int64_t first, const float *sums,
                      void *out) {
    for (int64_t v = 0; v < vectors; v++) {
        int64_t column = first + v * LANES, left = w->n - column;
        vf y = vload(sums + v * LANES);
        if (w->bias) {
            if (left >= LANES)
                y += vload(w->bias + column);
            else
                for (int64_t i = 0; i < left; i++) y[i] += w->bias[column + i];
        }
        store_outputs(ending, y, out, column, left);
    }
}

/* One panel's sums of one row, from column `first` of the output on. */
INLINE void finish(const Linear *w, Panel panel, int64_t first, const float *sums, void *out, Ending ending) {
    if (w->gated) {
        gate_sums(sums, panel.vectors, (bf16 *)out + first / 2, w->n / 2 - first / 2);
        return;
    }
    switch (ending) {
    case STORE: finish_as(STORE, w, panel.vectors, first, sums, out); break;
    case STORE_FLOAT: finish_as(STORE_FLOAT, w, panel.vectors, first, sums, out); break;
    case ADD: finish_as(ADD, w, panel.vectors, first, sums, out); break;
    case ADD_FLOAT: finish_as(ADD_FLOAT, w, panel.vectors, first, sums, out); break;
    }
}

const char *const *block_chunks(const Linear *w, Panel panel, int64_t block, int64_t num_blocks, Stream *ahead,
                                const char **chunks) {
    int64_t count = w->k / 2 / CHUNK_PAIRS;
    if (num_blocks == 1 || count > MOST_CHUNKS) return 0;
    if (block >= 2) return take_chunks(ahead, chunks, count) ? chunks : 0;
    const char *half = (const char *)(panel.weights + PANEL * w->k) + block * count * CHUNK_BYTES;
    for (int64_t c = 0; c < count; c++) chunks[c] = half + c * CHUNK_BYTES;
    return chunks;
}

void linear_panels(const Linear *w, const bf16 *x, int64_t x_stride, int64_t num_rows, void *out, int64_t out_stride,
                   Ending ending, int64_t first, int64_t last, Stream *ahead) {
    int64_t num_blocks = (num_rows + ROWS - 1) / ROWS;
    int64_t out_bytes = out_stride * (ending == STORE_FLOAT || ending == ADD_FLOAT ? 4 : 2);
    for (int64_t p = first; p < last; p++) {
        Panel panel = panel_of(w, p);
        for (int64_t b = 0; b < num_blocks; b++) {
            int64_t begin = num_rows * b / num_blocks, end = num_rows * (b + 1) / num_blocks;
            const bf16 *rows[ROWS];
            const char *chunks[MOST_CHUNKS];
            float sums[ROWS * PANEL] __attribute__((aligned(64)));
            for (int64_t m = begin; m < end; m++) rows[m - begin] = x + m * x_stride;
            multiply_panel(rows, end - begin, panel.weights, panel.vectors, w->k / 2, sums, PANEL, 0,
                           block_chunks(w, panel, b, num_blocks, ahead, chunks));
            for (int64_t m = begin; m < end; m++)
                finish(w, panel, p * PANEL, sums + (m - begin) * PANEL, (char *)out + m * out_bytes, ending);
        }
    }
}

#define X_BYTES (384 << 10) /* of x: they stay in the second cache while panels pass */

void linear(const Linear *w, const bf16 *x, int64_t x_stride, int64_t num_rows, void *out, int64_t out_stride,
            Ending ending, Stream *ahead) {
    int64_t chunk = X_BYTES / (2 * w->k) / ROWS * ROWS;
    if (chunk < ROWS) chunk = ROWS;
    int64_t num_chunks = (num_rows + chunk - 1) / chunk, panels = num_panels(w);
    int64_t out_bytes = out_stride * (ending == STORE_FLOAT || ending == ADD_FLOAT ? 4 : 2);
#pragma omp for collapse(2) schedule(static)
    for (int64_t c = 0; c < num_chunks; c++)
        for (int64_t p = 0; p < panels; p++) {
            int64_t begin = num_rows * c / num_chunks, end = num_rows * (c + 1) / num_chunks;
            linear_panels(w, x + begin * x_stride, x_stride, end - begin, (char *)out + begin * out_bytes, out_stride,
                          ending, p, p + 1, ahead);
        }
}

/* For tests and for callers that need one product alone. */
void linear_alone(const Linear *w, const bf16 *x, int64_t x_stride, int64_t num_rows, void *out, int64_t out_stride,
                  int64_t ending, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    linear(w, x, x_stride, num_rows, out, out_stride, (Ending)ending, 0);
}
