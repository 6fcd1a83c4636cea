/* What the two forms of attention do alike with a block of 128 keys. */
#pragma once

#include "attention.h"

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

typedef struct {
    float highest, sum;
} Row;

/* Scores of a few rows, of which row r sees `seen[r]` keys, to weights relative to the row's new maximum; 16 factors for
 * what the rows summed up before. `scale` is that of powers of two. Rows go through each stage together: one alone
 * would wait for its own reductions.
 */
void weigh(float *scores, int64_t num_rows, int64_t vectors, const int64_t *seen, float scale, Row *state,
           bf16 *weights, float *factors);

/* The rows' sums over the sums of their weights. */
void store_mixed(const Cache *cache, const Queries *q, const float *sums, int64_t columns, const Row *state);

/* `attend` for a few rows whose sizes allow it; 0 when they do not. */
int attend_few(const Cache *cache, const Queries *queries, const Cache *next);
