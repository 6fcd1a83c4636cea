/* Vectors of 16 floats, bfloat16, and the one product that everything here is made of.
 *
 * A machine with AVX512-BF16 multiplies 16 pairs at a time; any other gets the same sums from float arithmetic that the
 * compiler cuts to the vectors it has.
 */
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef float vf_at __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu_at __attribute__((vector_size(64), aligned(2)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef uint16_t vh_at __attribute__((vector_size(32), aligned(2)));

INLINE vf vload(const float *p) { return *(const vf_at *)p; }
INLINE void vstore(float *p, vf v) { *(vf_at *)p = v; }
INLINE vf vset(float x) { return (vf){} + x; }
INLINE vu vload_pairs(const bf16 *p) { return *(const vu_at *)p; }
INLINE void vstore_pairs(bf16 *p, vu v) { *(vu_at *)p = v; }

INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Round to nearest, ties to even; a NaN stays one. */
INLINE bf16 to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (bf16)(bits >> 16 | 0x40);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* 16 values widened to 32 bits each. */
INLINE vu vwiden(const bf16 *p) {
#ifdef __AVX512F__
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#else
    return __builtin_convertvector((vh)*(const vh_at *)p, vu);
#endif
}

INLINE vf vload_bf16(const bf16 *p) { return (vf)(vwiden(p) << 16); }

INLINE void vstore_bf16(bf16 *p, vf v) {
#ifdef __AVX512BF16__
    *(vh_at *)p = (vh)_mm512_cvtneps_pbh((__m512)v);
#else
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    vu is_nan = (vu)((bits & 0x7fffffff) > 0x7f800000);
    *(vh_at *)p = __builtin_convertvector((is_nan & (bits >> 16 | 0x40)) | (~is_nan & rounded), vh);
#endif
}

INLINE vf vmax(vf a, vf b) {
#ifdef __AVX512F__
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    vi greater = a > b;
    return (vf)((greater & (vi)a) | (~greater & (vi)b));
#endif
}

INLINE float vsum(vf v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
#endif
}

INLINE float vhighest(vf v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#else
    float highest = v[0];
    for (int i = 1; i < LANES; i++) highest = v[i] > highest ? v[i] : highest;
    return highest;
#endif
}

/* acc + a[even] * b[even] + a[odd] * b[odd], for 16 pairs of bfloat16 on either side. */
INLINE vf vdot(vf acc, vu a, vu b) {
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += (vf)(a << 16) * (vf)(b << 16);
    acc += (vf)(a & 0xffff0000) * (vf)(b & 0xffff0000);
    return acc;
#endif
}

/* 2^x for x < 127, within 6e-6 of it; 2^-126 for all x below -126. A NaN stays one. */
INLINE vf vexp2(vf x) {
    x = vmax(vset(-126.0f), x);
    vf shifted = x + 12582912.0f; /* its lowest bits are the nearest whole number */
    vf r = x - (shifted - 12582912.0f);
    vf p = vset(9.59024e-3f);
    p = p * r + 5.587027e-2f;
    p = p * r + 2.4023678e-1f;
    p = p * r + 6.9312805e-1f;
    p = p * r + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

/* 1 / x for a normal x, within 2^-23 of it. */
INLINE vf vreciprocal(vf x) {
#ifdef __AVX512F__
    vf r = (vf)_mm512_rcp14_ps((__m512)x);
    return r * (2.0f - x * r);
#else
    return 1.0f / x;
#endif
}

/* e^x, within 2 units in the last place for -87 < x < 88; outside it is the value at the bound. A NaN stays one: vmax
 * gives its second argument when either is a NaN.
 */
INLINE vf vexp(vf x) {
    x = vmax(vset(-87.0f), x);
    x = -vmax(vset(-88.0f), -x);
    vf n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = vset(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    return p * (vf)power;
}
