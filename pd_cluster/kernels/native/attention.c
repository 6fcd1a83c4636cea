#include "attention.h"

#include "linear.h"
#include "scratch.h"

/* 16 rows of 16 pairs each, `stride` apart, become 16 rows of the pairs of one column, `out_stride` apart. */
INLINE void transpose_pairs(const bf16 *from, int64_t stride, bf16 *to, int64_t out_stride) {
#ifdef __AVX512F__
    /* lanes of 128 bits come from memory in place: that leaves a transposition inside lanes, of 4 by 4 */
#pragma GCC unroll 4
    for (int group = 0; group < 4; group++) {
        __m512i r[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const bf16 *first = from + i * stride + group * 8;
            r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)first));
            r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x00f0, _mm_loadu_si128((const __m128i *)(first + 4 * stride)));
            r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x0f00, _mm_loadu_si128((const __m128i *)(first + 8 * stride)));
            r[i] = _mm512_mask_broadcast_i32x4(r[i], 0xf000, _mm_loadu_si128((const __m128i *)(first + 12 * stride)));
        }
        __m512i low = _mm512_unpacklo_epi32(r[0], r[1]), low2 = _mm512_unpacklo_epi32(r[2], r[3]);
        __m512i high = _mm512_unpackhi_epi32(r[0], r[1]), high2 = _mm512_unpackhi_epi32(r[2], r[3]);
        bf16 *column = to + group * 4 * out_stride;
        vstore_pairs(column, (vu)_mm512_unpacklo_epi64(low, low2));
        vstore_pairs(column + out_stride, (vu)_mm512_unpackhi_epi64(low, low2));
        vstore_pairs(column + 2 * out_stride, (vu)_mm512_unpacklo_epi64(high, high2));
        vstore_pairs(column + 3 * out_stride, (vu)_mm512_unpackhi_epi64(high, high2));
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

/* The units that follow a block, fetched into the second cache a few lines at a time while the block is computed: they
 * lie apart, so that the hardware does not foresee them, and all at once they would wait for each other.
 */
typedef struct {
    const Cache *cache;
    const bf16 *line;
    int64_t unit, end, left_of_unit, share;
} Ahead;

INLINE void fetch(Ahead *ahead) {
    if (ahead->unit == ahead->end) return;
    int64_t count = ahead->share < ahead->left_of_unit ? ahead->share : ahead->left_of_unit;
    for (int64_t i = 0; i < count; i++, ahead->line += 32) __builtin_prefetch(ahead->line, 0, 2);
    ahead->left_of_unit -= count;
    if (ahead->left_of_unit == 0 && ++ahead->unit < ahead->end) {
        ahead->line = unit_of(ahead->cache, ahead->cache->keys, ahead->unit);
        ahead->left_of_unit = ahead->cache->unit_bytes / 64;
    }
}

/* What follows the block at `start`: the next, or the first of what comes after, in about `num_shares` parts. */
INLINE Ahead block_ahead(const Cache *cache, int64_t start, int64_t num_keys, const Cache *next, int64_t num_shares) {
    int64_t first = start + KEY_BLOCK, units = (num_keys - first + UNIT - 1) / UNIT, most = KEY_BLOCK / UNIT;
    if (units > most) units = most;
    if (units <= 0) cache = next, first = 0, units = next ? 1 : 0;
    int64_t lines = units ? cache->unit_bytes / 64 : 0, unit = first / UNIT;
    if (lines == 0) return (Ahead){0};
    return (Ahead){cache, unit_of(cache, cache->keys, unit), unit, unit + units, lines,
                   (units * lines + num_shares - 1) / num_shares};
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

/* Keys [start, start + count) as a panel [dim / 2][width][2]; columns past `count` hold what lies there. */
static void pack_keys(const Cache *cache, int64_t start, int64_t count, bf16 *to, Ahead *ahead) {
    int64_t num_units = (count + UNIT - 1) / UNIT, width = num_units * UNIT;
    for (int64_t u = 0; u < num_units; u++) {
        int64_t unit = start / UNIT + u;
        bf16 *column = to + u * UNIT * 2;
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
    static const uint16_t low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    __m512i first_half = _mm512_loadu_si512(low), second_half = _mm512_add_epi16(first_half, _mm512_set1_epi16(16));
    for (; odd && v + 2 <= vectors && (v + 2) * LANES <= num_columns; v += 2, to += 4 * LANES) {
        __m512i a = (__m512i)vload_pairs(even + v * LANES), b = (__m512i)vload_pairs(odd + v * LANES);
        vstore_pairs(to, (vu)_mm512_permutex2var_epi16(a, first_half, b));
        vstore_pairs(to + 2 * LANES, (vu)_mm512_permutex2var_epi16(a, second_half, b));
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

/* Scores of a few rows, of which row r sees `seen[r]` keys, to weights relative to the row's new maximum; factors for
 * what the rows summed up before. `scale` is that of powers of two. Rows go through each stage together: one alone
 * would wait for its own reductions.
 */
static void weigh(float *scores, int64_t num_rows, int64_t vectors, const int64_t *seen, float scale, Row *state,
                  bf16 *weights, float *factors) {
    static const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf change = vset(0);
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
    change = vexp2(change);
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
        factors[r] = change[r];
        state[r].sum = state[r].sum * factors[r] + vsum(sum);
    }
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
    float scale = q->scale * 1.44269504f;
    int64_t num_blocks = (num_rows + ROWS - 1) / ROWS, num_keys = q->position + q->num_tokens;
    for (int64_t start = 0; start < num_keys; start += KEY_BLOCK) {
        int64_t count = num_keys - start < KEY_BLOCK ? num_keys - start : KEY_BLOCK;
        int64_t vectors = (count + LANES - 1) / LANES, pairs = vectors * LANES / 2;
        int64_t panels = (columns + PANEL - 1) / PANEL;
        int64_t num_shares = vectors * (dim / 32 + panels * UNIT / 2) + num_blocks * (1 + panels);
        Ahead ahead = block_ahead(cache, start, num_keys, next, num_shares);
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
            multiply_panel(rows, end - begin, keys, vectors, dim / 2, scores, KEY_BLOCK, 0, 0);
            int64_t seen[ROWS];
            float factors[ROWS];
            for (int64_t r = begin; r < end; r++) seen[r - begin] = q->position + r / q->num_heads + 1 - start;
            weigh(scores, end - begin, vectors, seen, scale, state + begin, weights, factors);
            for (int64_t r = begin; r < end; r++) {
                rows[r - begin] = weights + (r - begin) * KEY_BLOCK;
                if (factors[r - begin] != 1.0f)
                    for (int64_t c = 0; c < columns; c += LANES)
                        vstore(sums + r * columns + c, vload(sums + r * columns + c) * factors[r - begin]);
            }
            for (int64_t p = 0; p < columns; p += PANEL) {
                int64_t width = columns - p < PANEL ? columns - p : PANEL;
                fetch(&ahead);
                multiply_panel(rows, end - begin, values + p * pairs * 2, width / LANES, pairs,
                               sums + begin * columns + p, columns, 1, 0);
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
