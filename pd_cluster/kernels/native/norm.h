/* Normalised and rotated heads, in float32 between bfloat16. */
#pragma once

#include "vector.h"

/* x / sqrt(mean(x^2) + eps), rounded, times weight, rounded: [n]. */
INLINE void rms_norm(bf16 *out, const bf16 *x, const bf16 *weight, int64_t n, float eps) {
    vf squares = vset(0);
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf v = vload_bf16(x + i);
        squares += v * v;
    }
    for (; i < n; i++) rest += to_float(x[i]) * to_float(x[i]);
    float scale = 1.0f / __builtin_sqrtf((vsum(squares) + rest) / (float)n + eps);
    for (i = 0; i + LANES <= n; i += LANES) {
        bf16 rounded[LANES];
        vstore_bf16(rounded, vload_bf16(x + i) * scale);
        vstore_bf16(out + i, vload_bf16(rounded) * vload_bf16(weight + i));
    }
    for (; i < n; i++) out[i] = to_bf16(to_float(to_bf16(to_float(x[i]) * scale)) * to_float(weight[i]));
}

/* How heads are rotated, and one token's angles. */
typedef struct {
    int64_t dim, interleaved;
    const float *cos, *sin; /* [dim / 2] */
} Rotation;

/* The first `dim` values rotated and in halves, the rest of `head_dim` as they are; `to` may be `from`. */
INLINE void rotate(bf16 *to, const bf16 *from, int64_t head_dim, const Rotation *r) {
    int64_t half = r->dim / 2, i = 0;
    bf16 second_half[512];
    if (r->interleaved) {
        for (; i + LANES <= half; i += LANES) {
            vu pairs = vload_pairs(from + 2 * i);
            vf a = (vf)(pairs << 16), b = (vf)(pairs & 0xffff0000), cos = vload(r->cos + i), sin = vload(r->sin + i);
            vstore_bf16(to + i, a * cos - b * sin);
            vstore_bf16(second_half + i, b * cos + a * sin);
        }
        for (; i < half; i++) {
            float a = to_float(from[2 * i]), b = to_float(from[2 * i + 1]);
            to[i] = to_bf16(a * r->cos[i] - b * r->sin[i]);
            second_half[i] = to_bf16(b * r->cos[i] + a * r->sin[i]);
        }
        memcpy(to + half, second_half, half * sizeof(bf16));
    } else {
        for (; i + LANES <= half; i += LANES) {
            vf a = vload_bf16(from + i), b = vload_bf16(from + half + i);
            vf cos = vload(r->cos + i), sin = vload(r->sin + i);
            vstore_bf16(to + i, a * cos - b * sin);
            vstore_bf16(to + half + i, b * cos + a * sin);
        }
        for (; i < half; i++) {
            float a = to_float(from[i]), b = to_float(from[half + i]);
            to[i] = to_bf16(a * r->cos[i] - b * r->sin[i]);
            to[half + i] = to_bf16(b * r->cos[i] + a * r->sin[i]);
        }
    }
    if (to != from) memcpy(to + r->dim, from + r->dim, (head_dim - r->dim) * sizeof(bf16));
}
