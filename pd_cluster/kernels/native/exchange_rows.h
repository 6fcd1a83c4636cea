/* An exchange's shape and the rows of its messages: values of the model's dtype, as they are or as FP8. */
#pragma once

#include "vector.h"

#define BLOCK 128 /* values that share an FP8 scale */

enum { DISPATCH, COMBINE };
enum { FLOAT32, BFLOAT16 };

typedef struct {
    uint8_t *send, *receive;
    const uint64_t *lives;  /* [num_ranks]: whose messages count; changed between steps */
    const uint8_t *ignored; /* [num_ranks]: nobody to wait for; changed at any time */
    uint64_t life;
    int64_t rank, num_ranks, slots_per_rank, hidden, dtype, fp8;
    int64_t dispatch_bytes, combine_bytes; /* room of one message */
} Exchange;

typedef uint8_t vb __attribute__((vector_size(16)));
typedef uint8_t vb_at __attribute__((vector_size(16), aligned(1)));

INLINE int64_t value_bytes(const Exchange *e) { return e->dtype == FLOAT32 ? 4 : 2; }
INLINE int64_t num_scales(const Exchange *e) { return (e->hidden + BLOCK - 1) / BLOCK; }

INLINE int64_t row_bytes(const Exchange *e, int64_t phase) {
    if (phase == DISPATCH && e->fp8) return (num_scales(e) * 4 + e->hidden + 7) / 8 * 8;
    return e->hidden * value_bytes(e);
}

INLINE vf load16(const Exchange *e, const void *row, int64_t c) {
    return e->dtype == FLOAT32 ? vload((const float *)row + c) : vload_bf16((const bf16 *)row + c);
}

INLINE vu pick(vi mask, vu yes, vu no) { return ((vu)mask & yes) | (~(vu)mask & no); }

/* Rounded as torch does, which the conversion of AVX512-BF16 is not: it drops denormals. */
INLINE void store16(const Exchange *e, void *row, int64_t c, vf v) {
    if (e->dtype == FLOAT32) {
        vstore((float *)row + c, v);
        return;
    }
    vu bits = (vu)v, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    vu stored = pick((bits & 0x7fffffff) > 0x7f800000, bits >> 16 | 0x40, rounded);
    *(vh_at *)((bf16 *)row + c) = __builtin_convertvector(stored, vh);
}

/* The last values of a row that fill no vector, through a vector that zeros fill up. */
INLINE vf load_some(const Exchange *e, const void *row, int64_t c, int64_t n) {
    uint32_t room[LANES] = {0};
    memcpy(room, (const uint8_t *)row + c * value_bytes(e), n * value_bytes(e));
    return load16(e, room, 0);
}

INLINE void store_some(const Exchange *e, void *row, int64_t c, vf v, int64_t n) {
    uint32_t room[LANES];
    store16(e, room, 0, v);
    memcpy((uint8_t *)row + c * value_bytes(e), room, n * value_bytes(e));
}

/* ---- FP8: codes of x / scale, where scale is the highest |x| of 128 values, at least 1e-4, over 448 */

/* Values within +-448 to e4m3: below 2^-6 multiples of 2^-9, above that 3 bits behind the point. */
INLINE vb to_e4m3(vf x) {
    vu bits = (vu)x, size = bits & 0x7fffffff;
    vu small = (vu)((vf)size + 16384.0f) - 0x46800000; /* the last bit of the sum is worth 2^-9 */
    vu normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    vu code = pick(size < 0x3c800000, small, normal);
    code = pick(size > 0x7f800000, (vu){} + 0x7f, code);
    return __builtin_convertvector(code | (bits >> 24 & 0x80), vb);
}

INLINE vf from_e4m3(const uint8_t *codes) {
    vu code = __builtin_convertvector((vb)*(const vb_at *)codes, vu), size = code & 0x7f;
    vu small = (vu)(__builtin_convertvector(size, vf) * 0.001953125f);
    vu value = pick(size < 8, small, (size << 20) + (120 << 23));
    value = pick(size == 0x7f, (vu){} + 0x7fc00000, value);
    return (vf)(value | (code & 0x80) << 24);
}

static void encode_row(const Exchange *e, const void *row, uint8_t *out) {
    float *scales = (float *)out;
    uint8_t *codes = out + num_scales(e) * 4;
    for (int64_t b = 0; b < num_scales(e); b++) {
        int64_t first = b * BLOCK, last = first + BLOCK < e->hidden ? first + BLOCK : e->hidden;
        vu highest = {0}; /* of sizes as whole numbers, so that a NaN is the highest of all */
        for (int64_t c = first; c < last; c += LANES) {
            vf x = last - c < LANES ? load_some(e, row, c, last - c) : load16(e, row, c);
            vu size = (vu)x & 0x7fffffff;
            highest = pick(size > highest, size, highest);
        }
        uint32_t bits = 0;
        for (int l = 0; l < LANES; l++) bits = highest[l] > bits ? highest[l] : bits;
        float amax;
        memcpy(&amax, &bits, 4);
        float scale = (amax < 1e-4f ? 1e-4f : amax) / 448.0f;
        memcpy(scales + b, &scale, 4);
        for (int64_t c = first; c < last; c += LANES) {
            vf x = last - c < LANES ? load_some(e, row, c, last - c) : load16(e, row, c);
            vb code = to_e4m3(x / scale);
            memcpy(codes + c, &code, last - c < LANES ? last - c : LANES);
        }
    }
    memset(codes + e->hidden, 0, row_bytes(e, DISPATCH) - num_scales(e) * 4 - e->hidden);
}

static void decode_row(const Exchange *e, const uint8_t *from, void *row) {
    const uint8_t *codes = from + num_scales(e) * 4;
    for (int64_t c = 0; c < e->hidden; c += LANES) {
        float scale;
        memcpy(&scale, from + c / BLOCK * 4, 4);
        int64_t n = e->hidden - c;
        if (n >= LANES) {
            store16(e, row, c, from_e4m3(codes + c) * scale);
        } else {
            uint8_t room[LANES] = {0};
            memcpy(room, codes + c, n);
            store_some(e, row, c, from_e4m3(room) * scale, n);
        }
    }
}

static void put_row(const Exchange *e, const void *row, uint8_t *out) {
    if (e->fp8)
        encode_row(e, row, out);
    else
        memcpy(out, row, e->hidden * value_bytes(e));
}

static void get_row(const Exchange *e, const uint8_t *from, void *row) {
    if (e->fp8)
        decode_row(e, from, row);
    else
        memcpy(row, from, e->hidden * value_bytes(e));
}
