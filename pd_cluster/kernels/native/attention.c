#include "attention.h"

#include "linear.h"
#include "scratch.h"

#ifdef __AVX512BW__
/* 16 rows of 4 pairs each, `stride` apart, as 4 columns of 16 pairs: lanes of 128 bits come from memory in place, which
 * leaves a transposition inside lanes, of 4 by 4.
 */
INLINE void transpose_group(const bf16 *from, int64_t stride, vu *columns) {
    __m512i r[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const bf16 *first = from + i * stride;
        r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)first));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x00f0, _mm_loadu_si128((const __m128i *)(first + 4 * stride)));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x0f00, _mm_loadu_si128((const __m128i *)(first + 8 * stride)));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0xf000, _mm_loadu_si128((const __m128i *)(first + 12 * stride)));
    }
    __m512i low = _mm512_unpacklo_epi32(r[0], r[1]), low2 = _mm512_unpacklo_epi32(r[2], r[3]);
    __m512i high = _mm512_unpackhi_epi32(r[0], r[1]), high2 = _mm512_unpackhi_epi32(r[2], r[3]);
    columns[0] = (vu)_mm512_unpacklo_epi64(low, low2);
    columns[1] = (vu)_mm512_unpackhi_epi64(low, low2);
    columns[2] = (vu)_mm512_unpacklo_epi64(high, high2);
    columns[3] = (vu)_mm512_unpackhi_epi64(high, high2);
}

/* 32 columns of two tokens' values as pairs: the first 16, then the others. */
INLINE void interleave(__m512i even, __m512i odd, vu *pairs) {
    static const uint16_t low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    __m512i first_half = _mm512_loadu_si512(low), second_half = _mm512_add_epi16(first_half, _mm512_set1_epi16(16));
    pairs[0] = (vu)_mm512_permutex2var_epi16(even, first_half, odd);
    pairs[1] = (vu)_mm512_permutex2var_epi16(even, second_half, odd);
}
#endif

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

INLINE const bf16 *unit_of(const Cache *cache, const bf16 *base, int64_t unit) {
    return base + (cache->units ? cache->units[unit] : unit) * cache->unit_stride;
}

/* The units some way ahead, fetched into the second cache a few lines at a time while others are computed: they lie
 * apart, so that the hardware does not foresee them, and all at once they would wait for each other.
 */
#define LEAD 6

typedef struct {
    const Cache *cache, *next;
    const char *line;
    int64_t unit, end, left, share;
} Ahead;

/* The next unit: of this cache, or of the one that follows it. */
INLINE void fetch_next_unit(Ahead *ahead) {
    const Cache *cache = ahead->cache;
    int64_t unit = ahead->unit++;
    if (unit >= cache->num_units) {
        unit -= cache->num_units;
        cache = ahead->next;
        if (!cache || unit >= cache->num_units) return;
    }
    ahead->line = (const char *)unit_of(cache, cache->keys, unit);
    ahead->left = cache->unit_bytes / 64;
}

INLINE void fetch(Ahead *ahead) {
    if (ahead->left <= 0) {
        if (ahead->unit >= ahead->end) return;
        fetch_next_unit(ahead);
    }
    for (int64_t i = 0; i < ahead->share; i++) __builtin_prefetch(ahead->line + 64 * i, 0, 2);
    ahead->line += 64 * ahead->share;
    ahead->left -= ahead->share;
}

/* As many units as the block at `start` has, in `num_shares` parts. */
INLINE Ahead block_ahead(const Cache *cache, int64_t start, int64_t vectors, const Cache *next, int64_t num_shares) {
    int64_t unit = start / UNIT + LEAD, lines = cache->unit_bytes / 64;
    if (lines == 0) return (Ahead){0};
    return (Ahead){cache, next, 0, unit, unit + vectors, 0, (vectors * lines + num_shares - 1) / num_shares};
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

typedef struct {
    float highest, sum;
} Row;

/* Scores of a few rows, of which row r sees `seen[r]` keys, to weights relative to the row's new maximum; 16 factors for
 * what the rows summed up before. `scale` is that of powers of two. Rows go through each stage together: one alone
 * would wait for its own reductions.
 */
static void weigh(float *scores, int64_t num_rows, int64_t vectors, const int64_t *seen, float scale, Row *state,
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

/* The rows' sums over the sums of their weights. */
static void store_mixed(const Cache *cache, const Queries *q, const float *sums, int64_t columns, const Row *state) {
    for (int64_t r = 0; r < q->num_tokens * q->num_heads; r++) {
        bf16 *out = q->out + r / q->num_heads * q->out_token_stride + r % q->num_heads * q->out_head_stride;
        float share = 1.0f / state[r].sum;
        int64_t c = 0;
        for (; c + LANES <= cache->value_dim; c += LANES) vstore_bf16(out + c, vload(sums + r * columns + c) * share);
        for (; c < cache->value_dim; c++) out[c] = to_bf16(sums[r * columns + c] * share);
    }
}

#ifdef __AVX512BW__
/* Few rows do not pay for keys and values laid out anew: they take both from the registers that turn them, in the order
 * of the panels, so that the bits are the same.
 */
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

static int attend_few(const Cache *cache, const Queries *q, const Cache *next) {
    if (cache->more_dim || cache->key_dim % 32 || cache->value_dim % 64) return 0;
#define FORM(R) case R: attend_rows(R, cache, q, next); return 1;
    switch (q->num_tokens * q->num_heads) { FORM(1) FORM(2) FORM(3) FORM(4) FORM(5) FORM(6) FORM(7) FORM(8) }
    return 0;
}
#else
static int attend_few(const Cache *cache, const Queries *q, const Cache *next) { return 0; }
#endif

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
