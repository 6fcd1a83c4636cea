/* Attention of few rows, which do not pay for keys and values laid out anew: they take both from the registers that turn
 * them, in the order of the panels, so that the bits are the same.
 */
#include "attention_block.h"
#include "scratch.h"

#ifdef __AVX512BW__
#define FEW 8

INLINE void score_units(const int num_rows, const int num_units, const bf16 *const *rows, const bf16 *const *units,
                        int64_t stride, int64_t dim, float *scores, Ahead *ahead) {
    vf acc[FEW][2];
#pragma GCC unroll 8
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 2
        for (int u = 0; u < num_units; u++) acc[m][u] = vset(0);
    for (int64_t d = 0; d < dim; d += 32) {
#pragma GCC unroll 4
        for (int group = 0; group < 4; group++) {
            vu columns[2][4];
            fetch(ahead);
#pragma GCC unroll 2
            for (int u = 0; u < num_units; u++) transpose_group(units[u] + d + group * 8, stride, columns[u]);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
#pragma GCC unroll 8
                for (int m = 0; m < num_rows; m++) {
                    uint32_t pair;
                    memcpy(&pair, rows[m] + d + group * 8 + 2 * i, 4);
                    vu x = (vu){} + pair;
#pragma GCC unroll 2
                    for (int u = 0; u < num_units; u++) acc[m][u] = vdot(acc[m][u], x, columns[u][i]);
                }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 2
        for (int u = 0; u < num_units; u++) vstore(scores + m * KEY_BLOCK + u * UNIT, acc[m][u]);
}

/* sums = factors * sums + weights . values, for 32 columns or 64 of them. */
INLINE void mix_columns(const int num_rows, const int halves, const bf16 *weights, const float *factors,
                        const bf16 *const *units, int64_t stride, int64_t count, float *sums, int64_t sums_stride,
                        Ahead *ahead) {
    vf acc[FEW][4];
#pragma GCC unroll 8
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * halves; v++)
            acc[m][v] = vload(sums + m * sums_stride + v * LANES) * vset(factors[m]);
    for (int64_t first = 0; first < count; first += UNIT) {
        const bf16 *unit = *units++;
        for (int64_t i = 0; i < UNIT; i += 2, unit += 2 * stride) {
            vu pairs[4];
            if (i % 4 == 0) fetch(ahead);
#pragma GCC unroll 2
            for (int h = 0; h < halves; h++) {
                __m512i even = _mm512_setzero_si512(), odd = even;
                if (first + i < count) even = (__m512i)vload_pairs(unit + h * 32);
                if (first + i + 1 < count) odd = (__m512i)vload_pairs(unit + stride + h * 32);
                interleave(even, odd, pairs + 2 * h);
            }
#pragma GCC unroll 8
            for (int m = 0; m < num_rows; m++) {
                uint32_t pair;
                memcpy(&pair, weights + m * KEY_BLOCK + first + i, 4);
                vu x = (vu){} + pair;
#pragma GCC unroll 4
                for (int v = 0; v < 2 * halves; v++) acc[m][v] = vdot(acc[m][v], x, pairs[v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * halves; v++) vstore(sums + m * sums_stride + v * LANES, acc[m][v]);
}

INLINE void attend_rows(const int num_rows, const Cache *cache, const Queries *q, const Cache *next) {
    const int num_units = num_rows > 4 ? 1 : 2, halves = num_units;
    int64_t columns = cache->value_dim, num_keys = q->position + q->num_tokens, stride = cache->token_stride;
    float *sums = scratch(ROWS_SUM, num_rows * columns * sizeof(float));
    memset(sums, 0, num_rows * columns * sizeof(float));
    const bf16 *rows[FEW];
    Row state[FEW];
    for (int r = 0; r < num_rows; r++) {
        rows[r] = q->q + r / q->num_heads * q->q_token_stride + r % q->num_heads * q->q_head_stride;
        state[r] = (Row){-1e30f, 0};
    }
    for (int64_t start = 0; start < num_keys; start += KEY_BLOCK) {
        int64_t count = num_keys - start < KEY_BLOCK ? num_keys - start : KEY_BLOCK;
        int64_t vectors = (count + UNIT - 1) / UNIT, seen[FEW];
        const bf16 *keys[KEY_BLOCK / UNIT], *values[KEY_BLOCK / UNIT];
        float scores[FEW * KEY_BLOCK] __attribute__((aligned(64))), factors[LANES];
        bf16 weights[FEW * KEY_BLOCK] __attribute__((aligned(64)));
        for (int u = 0; u < KEY_BLOCK / UNIT; u++) {
            int64_t unit = start / UNIT + (u < vectors ? u : vectors - 1);
            keys[u] = unit_of(cache, cache->keys, unit);
            values[u] = unit_of(cache, cache->values, unit);
        }
        int64_t num_shares = (vectors + num_units - 1) / num_units * (cache->key_dim / 8);
        Ahead ahead = block_ahead(cache, start, vectors, next, num_shares + columns / (32 * halves) * vectors * 4);
        for (int64_t u = 0; u < vectors; u += num_units)
            score_units(num_rows, num_units, rows, keys + u, stride, cache->key_dim, scores + u * UNIT, &ahead);
        for (int r = 0; r < num_rows; r++) seen[r] = q->position + r / q->num_heads + 1 - start;
        weigh(scores, num_rows, vectors, seen, q->scale * 1.44269504f, state, weights, factors);
        for (int64_t c = 0; c < columns; c += 32 * halves) {
            mix_columns(num_rows, halves, weights, factors, values, stride, count, sums + c, columns, &ahead);
            for (int u = 0; u < KEY_BLOCK / UNIT; u++) values[u] += 32 * halves;
        }
    }
    store_mixed(cache, q, sums, columns, state);
}

int attend_few(const Cache *cache, const Queries *q, const Cache *next) {
    if (cache->more_dim || cache->key_dim % 32 || cache->value_dim % 64) return 0;
#define FORM(R) case R: attend_rows(R, cache, q, next); return 1;
    switch (q->num_tokens * q->num_heads) { FORM(1) FORM(2) FORM(3) FORM(4) FORM(5) FORM(6) FORM(7) FORM(8) }
    return 0;
}
#else
int attend_few(const Cache *cache, const Queries *q, const Cache *next) { return 0; }
#endif
