#include "attention_block.h"
#include "linear.h"
#include "scratch.h"

/* 16 rows of 16 pairs each, `stride` apart, become 16 rows of the pairs of one column, `out_stride` apart. */
INLINE void transpose_pairs(const bf16 *from, int64_t stride, bf16 *to, int64_t out_stride) {
#ifdef __AVX512BW__
#pragma GCC unroll 4
    for (int group = 0; group < 4; group++) {
        vu columns[4];
        transpose_group(from + group * 8, stride, columns);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) vstore_pairs(to + (group * 4 + i) * out_stride, columns[i]);
    }
#else
    for (int column = 0; column < 16; column++)
        for (int row = 0; row < 16; row++)
            memcpy(to + column * out_stride + 2 * row, from + row * stride + 2 * column, 2 * sizeof(bf16));
#endif
}

/* `dim` values of 16 tokens into pairs [dim / 2][width][2] from column 0 of `to` on. */
static void pack_key_unit(const bf16 *from, int64_t stride, int64_t dim, bf16 *to, int64_t width, Ahead *ahead) {
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) {
        fetch(ahead);
        transpose_pairs(from + d, stride, to + d * width, 2 * width);
    }
    for (; d < dim; d += 2)
        for (int64_t t = 0; t < UNIT; t++) memcpy(to + d * width + 2 * t, from + t * stride + d, 2 * sizeof(bf16));
}

/* Keys [start, start + count) as panels of 64, each [dim / 2][width][2]; columns past `count` hold what lies there. */
static void pack_keys(const Cache *cache, int64_t start, int64_t count, bf16 *to, Ahead *ahead) {
    int64_t num_units = (count + UNIT - 1) / UNIT, dim = cache->key_dim + cache->more_dim;
    for (int64_t u = 0; u < num_units; u++) {
        int64_t unit = start / UNIT + u, first = u / (PANEL / UNIT) * (PANEL / UNIT), left = (num_units - first) * UNIT;
        int64_t width = left < PANEL ? left : PANEL;
        bf16 *column = to + first * UNIT * dim + (u - first) * UNIT * 2;
        pack_key_unit(unit_of(cache, cache->keys, unit), cache->token_stride, cache->key_dim, column, width,
                      ahead);
        if (cache->more_dim)
            pack_key_unit(cache->more_keys + unit * UNIT * cache->more_stride, cache->more_stride, cache->more_dim,
                          column + cache->key_dim * width, width, ahead);
    }
}

/* Two tokens' values of a panel as pairs; `odd` null: zeros. */
INLINE void pack_value_pair(const bf16 *even, const bf16 *odd, int64_t num_columns, int64_t vectors, bf16 *to) {
    int64_t v = 0;
#ifdef __AVX512BW__
    for (; odd && v + 2 <= vectors && (v + 2) * LANES <= num_columns; v += 2, to += 4 * LANES) {
        vu pairs[2];
        interleave((__m512i)vload_pairs(even + v * LANES), (__m512i)vload_pairs(odd + v * LANES), pairs);
        vstore_pairs(to, pairs[0]);
        vstore_pairs(to + 2 * LANES, pairs[1]);
    }
#endif
    for (; v < vectors; v++, to += 2 * LANES) {
        int64_t first = v * LANES, left = num_columns - first;
        if (left >= LANES) {
            vu pairs = vwiden(even + first);
            vstore_pairs(to, odd ? pairs | vwiden(odd + first) << 16 : pairs);
            continue;
        }
        for (int64_t c = 0; c < LANES; c++) {
            to[2 * c] = c < left ? even[first + c] : 0;
            to[2 * c + 1] = c < left && odd ? odd[first + c] : 0;
        }
    }
}

/* Values [start, start + count) as panels of 64 columns [pairs][columns][2], with zeros past `count`. */
static void pack_values(const Cache *cache, int64_t start, int64_t count, bf16 *to, int64_t pairs, Ahead *ahead) {
    int64_t dim = cache->value_dim, stride = cache->token_stride;
    for (int64_t u = 0; u < pairs * 2 / UNIT; u++) {
        const bf16 *unit = unit_of(cache, cache->values, start / UNIT + u);
        for (int64_t p = 0; p < dim; p += PANEL) {
            int64_t left = dim - p, vectors = ((left < PANEL ? left : PANEL) + LANES - 1) / LANES;
            for (int64_t i = 0; i < UNIT; i += 2) {
                int64_t token = u * UNIT + i;
                bf16 *row = to + (p * pairs + token / 2 * vectors * LANES) * 2;
                fetch(ahead);
                if (token < count)
                    pack_value_pair(unit + i * stride + p, token + 1 < count ? unit + (i + 1) * stride + p : 0, left,
                                    vectors, row);
                else
                    memset(row, 0, vectors * LANES * 2 * sizeof(bf16));
            }
        }
    }
}

void weigh(float *scores, int64_t num_rows, int64_t vectors, const int64_t *seen, float scale, Row *state,
           bf16 *weights, float *factors) {
    static const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float change[LANES] __attribute__((aligned(64))) = {0};
    for (int64_t r = 0; r < num_rows; r++) {
        float *row = scores + r * KEY_BLOCK;
        if (seen[r] < vectors * LANES)
            for (int64_t v = 0; v < vectors; v++) {
                vi visible = lane + (int32_t)(v * LANES) < (vi){} + (int32_t)seen[r];
                vf score = vload(row + v * LANES);
                vstore(row + v * LANES, (vf)((visible & (vi)score) | (~visible & (vi)vset(-1e30f))));
            }
        vf highest = vload(row);
        for (int64_t v = 1; v < vectors; v++) highest = vmax(vload(row + v * LANES), highest);
        float before = state[r].highest, now = vhighest(highest) * scale;
        state[r].highest = now > before ? now : before;
        change[r] = before - state[r].highest;
    }
    vstore(factors, vexp2(vload(change)));
    for (int64_t r = 0; r < num_rows; r++) {
        vf sum = vset(0);
        for (int64_t v = 0; v < vectors; v++) {
            vf weight = vexp2(vload(scores + r * KEY_BLOCK + v * LANES) * scale - state[r].highest);
            if (seen[r] < vectors * LANES) {
                vi visible = lane + (int32_t)(v * LANES) < (vi){} + (int32_t)seen[r];
                weight = (vf)(visible & (vi)weight);
            }
            sum += weight;
            vstore_bf16(weights + r * KEY_BLOCK + v * LANES, weight);
        }
        state[r].sum = state[r].sum * factors[r] + vsum(sum);
    }
}

void store_mixed(const Cache *cache, const Queries *q, const float *sums, int64_t columns, const Row *state) {
    for (int64_t r = 0; r < q->num_tokens * q->num_heads; r++) {
        bf16 *out = q->out + r / q->num_heads * q->out_token_stride + r % q->num_heads * q->out_head_stride;
        float share = 1.0f / state[r].sum;
        int64_t c = 0;
        for (; c + LANES <= cache->value_dim; c += LANES) vstore_bf16(out + c, vload(sums + r * columns + c) * share);
        for (; c < cache->value_dim; c++) out[c] = to_bf16(sums[r * columns + c] * share);
    }
}

void attend(const Cache *cache, const Queries *q, const Cache *next) {
    if (attend_few(cache, q, next)) return;
    int64_t num_rows = q->num_tokens * q->num_heads, dim = cache->key_dim + cache->more_dim;
    int64_t columns = (cache->value_dim + LANES - 1) / LANES * LANES;
    bf16 *keys = scratch(KEYS, dim * KEY_BLOCK * sizeof(bf16));
    bf16 *values = scratch(VALUES, columns * KEY_BLOCK * sizeof(bf16));
    float *sums = scratch(ROWS_SUM, num_rows * (columns * sizeof(float) + sizeof(Row)));
    Row *state = (Row *)(sums + num_rows * columns);
    memset(sums, 0, num_rows * columns * sizeof(float));
    for (int64_t r = 0; r < num_rows; r++) state[r] = (Row){-1e30f, 0};
    float scale = q->scale * 1.44269504f;
    int64_t num_blocks = (num_rows + ROWS - 1) / ROWS, num_keys = q->position + q->num_tokens;
    for (int64_t start = 0; start < num_keys; start += KEY_BLOCK) {
        int64_t count = num_keys - start < KEY_BLOCK ? num_keys - start : KEY_BLOCK;
        int64_t vectors = (count + LANES - 1) / LANES, pairs = vectors * LANES / 2;
        int64_t panels = (columns + PANEL - 1) / PANEL;
        int64_t num_shares = vectors * (dim / 32 + panels * UNIT / 2) + num_blocks * (1 + panels);
        Ahead ahead = block_ahead(cache, start, vectors, next, num_shares);
        pack_keys(cache, start, count, keys, &ahead);
        pack_values(cache, start, count, values, pairs, &ahead);
        for (int64_t b = 0; b < num_blocks; b++) {
            int64_t begin = num_rows * b / num_blocks, end = num_rows * (b + 1) / num_blocks;
            if (q->position + (end - 1) / q->num_heads < start) continue;
            const bf16 *rows[ROWS];
            float scores[ROWS * KEY_BLOCK] __attribute__((aligned(64)));
            bf16 weights[ROWS * KEY_BLOCK] __attribute__((aligned(64)));
            for (int64_t r = begin; r < end; r++)
                rows[r - begin] = q->q + r / q->num_heads * q->q_token_stride + r % q->num_heads * q->q_head_stride;
            fetch(&ahead);
            /* what the last row does not see, none does */
            int64_t in_sight = q->position + (end - 1) / q->num_heads + 1 - start;
            int64_t in_use = in_sight < count ? (in_sight + LANES - 1) / LANES : vectors;
            for (int64_t v = 0; v < in_use; v += PANEL / LANES) {
                int64_t width = vectors - v < PANEL / LANES ? vectors - v : PANEL / LANES;
                multiply_panel(rows, end - begin, keys + v * LANES * dim, width, dim / 2, scores + v * LANES, KEY_BLOCK,
                               0, 0);
            }
            int64_t seen[ROWS];
            float factors[LANES];
            for (int64_t r = begin; r < end; r++) seen[r - begin] = q->position + r / q->num_heads + 1 - start;
            weigh(scores, end - begin, in_use, seen, scale, state + begin, weights, factors);
            for (int64_t r = begin; r < end; r++) {
                rows[r - begin] = weights + (r - begin) * KEY_BLOCK;
                if (factors[r - begin] != 1.0f)
                    for (int64_t c = 0; c < columns; c += LANES)
                        vstore(sums + r * columns + c, vload(sums + r * columns + c) * factors[r - begin]);
            }
            for (int64_t p = 0; p < columns; p += PANEL) {
                int64_t width = columns - p < PANEL ? columns - p : PANEL;
                fetch(&ahead);
                multiply_panel(rows, end - begin, values + p * pairs * 2, width / LANES, in_use * LANES / 2,
                               sums + begin * columns + p, columns, 1, 0);
            }
        }
    }
    store_mixed(cache, q, sums, columns, state);
}
