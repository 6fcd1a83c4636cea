#include "attention.h"

#include "linear.h"
#include "scratch.h"

/* 16 rows of 16 pairs each, `stride` apart, become 16 rows of the pairs of one column, `out_stride` apart. */
INLINE void transpose_pairs(const bf16 *from, int64_t stride, bf16 *to, int64_t out_stride) {
#ifdef __AVX512F__
    __m512i r[16], s[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = (__m512i)vload_pairs(from + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        s[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        s[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        s[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vstore_pairs(to + i * out_stride, (vu)_mm512_shuffle_i32x4(s[i], s[i + 8], 0x88));
        vstore_pairs(to + (i + 8) * out_stride, (vu)_mm512_shuffle_i32x4(s[i], s[i + 8], 0xdd));
        vstore_pairs(to + (i + 4) * out_stride, (vu)_mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0x88));
        vstore_pairs(to + (i + 12) * out_stride, (vu)_mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0xdd));
    }
#else
    for (int column = 0; column < 16; column++)
        for (int row = 0; row < 16; row++)
            memcpy(to + column * out_stride + 2 * row, from + row * stride + 2 * column, 2 * sizeof(bf16));
#endif
}

/* Bring the cache line to the second cache. Blocks lie apart, so that the hardware does not foresee them. */
INLINE void fetch(const bf16 *ahead) { __builtin_prefetch(ahead, 0, 2); }

/* `dim` values of 16 tokens into pairs [dim / 2][width][2] from column 0 of `to` on; `ahead`, if any, is fetched. */
static void pack_key_unit(const bf16 *from, int64_t stride, int64_t dim, bf16 *to, int64_t width, const bf16 *ahead) {
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) {
        if (ahead)
            for (int64_t t = 0; t < UNIT; t++) fetch(ahead + t * stride + d);
        transpose_pairs(from + d, stride, to + d * width, 2 * width);
    }
    for (; d < dim; d += 2)
        for (int64_t t = 0; t < UNIT; t++) memcpy(to + d * width + 2 * t, from + t * stride + d, 2 * sizeof(bf16));
}

INLINE const bf16 *unit_of(const Cache *cache, const bf16 *base, int64_t unit) {
    return base + (cache->units ? cache->units[unit] : unit) * cache->unit_stride;
}

/* Units of keys and values that follow a block: `count` of them from `first` on. */
typedef struct {
    const Cache *cache;
    int64_t first, count;
} Ahead;

INLINE const bf16 *key_unit_ahead(const Ahead *ahead, int64_t unit) {
    return unit < ahead->count ? unit_of(ahead->cache, ahead->cache->keys, ahead->first + unit) : 0;
}

INLINE const bf16 *value_unit_ahead(const Ahead *ahead, int64_t unit) {
    if (unit >= ahead->count || ahead->cache->values == ahead->cache->keys) return 0;
    return unit_of(ahead->cache, ahead->cache->values, ahead->first + unit);
}

/* Keys [start, start + count) as a panel [dim / 2][width][2]; columns past `count` hold what lies there. */
static void pack_keys(const Cache *cache, int64_t start, int64_t count, bf16 *to, const Ahead *ahead) {
    int64_t num_units = (count + UNIT - 1) / UNIT, width = num_units * UNIT;
    for (int64_t u = 0; u < num_units; u++) {
        int64_t unit = start / UNIT + u;
        bf16 *column = to + u * UNIT * 2;
        pack_key_unit(unit_of(cache, cache->keys, unit), cache->token_stride, cache->key_dim, column, width,
                      key_unit_ahead(ahead, u));
        if (cache->more_dim)
            pack_key_unit(cache->more_keys + unit * UNIT * cache->more_stride, cache->more_stride, cache->more_dim,
                          column + cache->key_dim * width, width, 0);
    }
}

/* Two tokens' values of a panel as pairs; `odd` null: zeros. */
INLINE void pack_value_pair(const bf16 *even, const bf16 *odd, int64_t num_columns, int64_t vectors, bf16 *to) {
    for (int64_t v = 0; v < vectors; v++, to += 2 * LANES) {
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
static void pack_values(const Cache *cache, int64_t start, int64_t count, bf16 *to, int64_t pairs, const Ahead *ahead) {
    int64_t dim = cache->value_dim, stride = cache->token_stride;
    for (int64_t u = 0; u < pairs * 2 / UNIT; u++) {
        const bf16 *unit = unit_of(cache, cache->values, start / UNIT + u), *unit_ahead = value_unit_ahead(ahead, u);
        for (int64_t p = 0; p < dim; p += PANEL) {
            int64_t left = dim - p, vectors = ((left < PANEL ? left : PANEL) + LANES - 1) / LANES;
            for (int64_t i = 0; i < UNIT; i += 2) {
                int64_t token = u * UNIT + i;
                bf16 *row = to + (p * pairs + token / 2 * vectors * LANES) * 2;
                if (unit_ahead)
                    for (int64_t c = 0; c < vectors * LANES; c += 32) {
                        fetch(unit_ahead + i * stride + p + c);
                        fetch(unit_ahead + (i + 1) * stride + p + c);
                    }
                if (token < count)
                    pack_value_pair(unit + i * stride + p, token + 1 < count ? unit + (i + 1) * stride + p : 0, left,
                                    vectors, row);
                else
                    memset(row, 0, vectors * LANES * 2 * sizeof(bf16));
            }
        }
    }
}

/* The block that follows the one at `start`, or the first of what comes next. */
INLINE Ahead block_ahead(const Cache *cache, int64_t start, int64_t num_keys, const Cache *next) {
    int64_t first = start + KEY_BLOCK, units = (num_keys - first + UNIT - 1) / UNIT, most = KEY_BLOCK / UNIT;
    if (units > 0) return (Ahead){cache, first / UNIT, units < most ? units : most};
    return (Ahead){next, 0, next ? 1 : 0};
}

typedef struct {
    float highest, sum;
} Row;

/* One row's scores, of which it sees `seen`, to weights relative to its new maximum; the factor for its older sums. */
INLINE float weigh(float *scores, int64_t vectors, int64_t seen, float scale, Row *row, bf16 *weights) {
    static const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf s[4], highest = vset(row->highest);
    vi visible[4];
    for (int64_t v = 0; v < vectors; v++) {
        s[v] = vload(scores + v * LANES) * scale;
        visible[v] = lane + (int32_t)(v * LANES) < (vi){} + (int32_t)seen;
        s[v] = (vf)((visible[v] & (vi)s[v]) | (~visible[v] & (vi)vset(-1e30f)));
        highest = vmax(highest, s[v]);
    }
    float now = vhighest(highest), before = row->highest;
    vf sum = vset(0);
    for (int64_t v = 0; v < vectors; v++) {
        vf weight = (vf)(visible[v] & (vi)vexp(s[v] - now));
        sum += weight;
        vstore_bf16(weights + v * LANES, weight);
    }
    float factor = now == before ? 1.0f : vexp(vset(before - now))[0];
    row->sum = row->sum * factor + vsum(sum);
    row->highest = now;
    return factor;
}

void attend(const Cache *cache, const Queries *q, const Cache *next) {
    int64_t num_rows = q->num_tokens * q->num_heads, dim = cache->key_dim + cache->more_dim;
    int64_t columns = (cache->value_dim + LANES - 1) / LANES * LANES;
    bf16 *keys = scratch(KEYS, dim * KEY_BLOCK * sizeof(bf16));
    bf16 *values = scratch(VALUES, columns * KEY_BLOCK * sizeof(bf16));
    float *sums = scratch(ROWS_SUM, num_rows * (columns * sizeof(float) + sizeof(Row)));
    Row *state = (Row *)(sums + num_rows * columns);
    memset(sums, 0, num_rows * columns * sizeof(float));
    for (int64_t r = 0; r < num_rows; r++) state[r] = (Row){-1e30f, 0};
    int64_t num_blocks = (num_rows + ROWS - 1) / ROWS, num_keys = q->position + q->num_tokens;
    for (int64_t start = 0; start < num_keys; start += KEY_BLOCK) {
        int64_t count = num_keys - start < KEY_BLOCK ? num_keys - start : KEY_BLOCK;
        int64_t vectors = (count + LANES - 1) / LANES, pairs = vectors * LANES / 2;
        Ahead ahead = block_ahead(cache, start, num_keys, next);
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
            multiply_panel(rows, end - begin, keys, vectors, dim / 2, scores, KEY_BLOCK, 0);
            for (int64_t r = begin; r < end; r++) {
                int64_t i = r - begin, seen = q->position + r / q->num_heads + 1 - start;
                rows[i] = weights + i * KEY_BLOCK;
                if (seen <= 0) {
                    memset(weights + i * KEY_BLOCK, 0, KEY_BLOCK * sizeof(bf16));
                    continue;
                }
                float factor = weigh(scores + i * KEY_BLOCK, vectors, seen, q->scale, state + r,
                                     weights + i * KEY_BLOCK);
                if (factor != 1.0f)
                    for (int64_t c = 0; c < columns; c += LANES)
                        vstore(sums + r * columns + c, vload(sums + r * columns + c) * factor);
            }
            for (int64_t p = 0; p < columns; p += PANEL) {
                int64_t width = columns - p < PANEL ? columns - p : PANEL;
                multiply_panel(rows, end - begin, values + p * pairs * 2, width / LANES, pairs,
                               sums + begin * columns + p, columns, 1);
            }
        }
    }
    for (int64_t r = 0; r < num_rows; r++) {
        bf16 *out = q->out + r / q->num_heads * q->out_token_stride + r % q->num_heads * q->out_head_stride;
        float share = 1.0f / state[r].sum;
        int64_t c = 0;
        for (; c + LANES <= cache->value_dim; c += LANES) vstore_bf16(out + c, vload(sums + r * columns + c) * share);
        for (; c < cache->value_dim; c++) out[c] = to_bf16(sums[r * columns + c] * share);
    }
}
