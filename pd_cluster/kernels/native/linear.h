/* Matrix products with weights packed once: x W^T, bfloat16 in, float32 sums. */
#pragma once

#include "ahead.h"
#include "vector.h"

#define PANEL 64    /* outputs of one panel: four vectors */
#define ROWS 6      /* rows of x that share one pass over a panel */

/* W [n, k] as panels of 64 outputs (the last narrower, a multiple of 16, filled up with zeros): [k / 2][outputs][2].
 * `gated`: W is [gate; up] of n / 2 rows each, and vectors of gates alternate with vectors of their ups.
 */
typedef struct {
    const bf16 *packed;
    const float *bias; /* [n] or null */
    int64_t n, k, gated;
} Linear;

typedef enum { STORE, STORE_FLOAT, ADD, ADD_FLOAT } Ending;

int64_t packed_size(int64_t n, int64_t k, int64_t gated);
void pack(bf16 *packed, const bf16 *weight, int64_t n, int64_t k, int64_t gated);

/* One panel of a packed matrix, as wide as its outputs. */
typedef struct {
    const bf16 *weights;
    int64_t vectors;
} Panel;

INLINE int64_t padded_outputs(const Linear *w) {
    return w->gated ? 2 * ((w->n / 2 + LANES - 1) / LANES * LANES) : (w->n + LANES - 1) / LANES * LANES;
}
INLINE int64_t num_panels(const Linear *w) { return (padded_outputs(w) + PANEL - 1) / PANEL; }
INLINE Panel panel_of(const Linear *w, int64_t index) {
    int64_t left = padded_outputs(w) - index * PANEL;
    return (Panel){w->packed + index * PANEL * w->k, (left < PANEL ? left : PANEL) / LANES};
}

/* What one pass over a panel may fetch into the second cache while it computes, in chunks: two lines with each pair of
 * inputs. A pass of five or six rows pays nothing for it; one that waits for memory itself only gets in its own way.
 */
#define CHUNK_PAIRS (CHUNK_BYTES / 128)
#define MOST_CHUNKS 1024

/* sums[m][64] = or += rows[m] . panel over `pairs` pairs of inputs, for 1 to 6 rows. A row's sum runs through its
 * inputs in order, whatever the other rows: its bits depend on nothing else. `chunks`, unless null, says what to fetch
 * meanwhile, one for every 8 pairs.
 */
void multiply_panel(const bf16 *const *rows, int64_t num_rows, const bf16 *panel, int64_t vectors, int64_t pairs,
                    float *sums, int64_t sums_stride, int add, const char *const *chunks);

/* What a block of rows fetches while it passes over a panel: the first two blocks half of the next panel each, the
 * others from `ahead`. In `chunks`, room for MOST_CHUNKS; or null, for nothing: a single block waits for memory itself.
 */
const char *const *block_chunks(const Linear *w, Panel panel, int64_t block, int64_t num_blocks, Stream *ahead,
                                const char **chunks);

/* out[m] (stride in elements) = x[m] W^T + b for m in [0, num_rows), or out[m] + that. The team shares the panels,
 * and meanwhile fetches from `ahead`, unless that is null.
 */
void linear(const Linear *w, const bf16 *x, int64_t x_stride, int64_t num_rows, void *out, int64_t out_stride,
            Ending ending, Stream *ahead);

/* The same for panels [first, last) by one thread. */
void linear_panels(const Linear *w, const bf16 *x, int64_t x_stride, int64_t num_rows, void *out, int64_t out_stride,
                   Ending ending, int64_t first, int64_t last, Stream *ahead);

/* silu(gates) * ups of one panel's sums into `out`, whose column 0 is the panel's first. */
void gate_sums(const float *sums, int64_t vectors, bf16 *out, int64_t num_columns);
