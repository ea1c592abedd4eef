/* Vectors as wide as the variant being compiled, and the conversions between stored and summed numbers.
 *
 * Here: vector types, loads of a "chunk" (two vectors), horizontal sums, bfloat16 rounding, exp and tanh.
 * Not here: loops over tensors. Only GCC/Clang vector extensions, plus intrinsics where the horizontal sum needs
 * them, so that the same text compiles for SSE2, AVX2, AVX-512 and NEON.
 *
 * A chunk is 2 * lanes consecutive elements, loaded as a pair of vectors (lo, hi). For float and double these
 * are the first and the second half. For bfloat16 they are the even and the odd elements, because that split is
 * one shift and one mask; whatever is combined with it must have been loaded or widened the same way.
 */
#ifndef JETTISON_SIMD_H
#define JETTISON_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VEC_BYTES 64
#elif defined(__AVX2__)
#define VEC_BYTES 32
#else
#define VEC_BYTES 16
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES_F32 (VEC_BYTES / 4)
#define LANES_F64 (VEC_BYTES / 8)

typedef uint16_t bf16;
typedef float vf32 __attribute__((vector_size(VEC_BYTES)));
typedef double vf64 __attribute__((vector_size(VEC_BYTES)));
typedef uint32_t vu32 __attribute__((vector_size(VEC_BYTES)));
typedef int32_t vi32 __attribute__((vector_size(VEC_BYTES)));
/* The same in memory: any alignment, may alias anything. */
typedef float vf32_mem __attribute__((vector_size(VEC_BYTES), aligned(4), may_alias));
typedef double vf64_mem __attribute__((vector_size(VEC_BYTES), aligned(8), may_alias));
typedef uint32_t vu32_mem __attribute__((vector_size(VEC_BYTES), aligned(2), may_alias));

/* ---- bfloat16 <-> float ---- */

INLINE float bf16_to_f32(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

/* Round to nearest even; a NaN stays a (quiet) NaN. */
INLINE bf16 f32_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bf16)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

INLINE vu32 round_bits_vf32(vf32 x) {
    vu32 bits = (vu32)x;
    vu32 is_nan = (vu32)((bits & 0x7fffffffu) > 0x7f800000u);
    vu32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (rounded & ~is_nan) | (is_nan & 0x7fc00000u);
}

/* ---- chunks ---- */

INLINE void load_f32(const float *p, vf32 *lo, vf32 *hi) {
    *lo = *(const vf32_mem *)p;
    *hi = *(const vf32_mem *)(p + LANES_F32);
}
INLINE void load_f64(const double *p, vf64 *lo, vf64 *hi) {
    *lo = *(const vf64_mem *)p;
    *hi = *(const vf64_mem *)(p + LANES_F64);
}
INLINE void load_bf16(const bf16 *p, vf32 *lo, vf32 *hi) {
    vu32 both = *(const vu32_mem *)p;
    *lo = (vf32)(both << 16);
    *hi = (vf32)(both & 0xffff0000u);
}
INLINE void store_f32(float *p, vf32 lo, vf32 hi) {
    *(vf32_mem *)p = lo;
    *(vf32_mem *)(p + LANES_F32) = hi;
}
INLINE void store_f64(double *p, vf64 lo, vf64 hi) {
    *(vf64_mem *)p = lo;
    *(vf64_mem *)(p + LANES_F64) = hi;
}
INLINE void store_bf16(bf16 *p, vf32 lo, vf32 hi) {
    *(vu32_mem *)p = (round_bits_vf32(lo) >> 16) | (round_bits_vf32(hi) & 0xffff0000u);
}

INLINE vf32 broadcast_f32(float x) { return x - (vf32){0}; }

/* sum + a * b, rounded once where the processor can. Compilers contract what they see, which may differ from one copy of a
 * function to the next: this is for sums that must not. */
INLINE vf32 add_product(vf32 sum, vf32 a, vf32 b) {
#if defined(__AVX512F__)
    return (vf32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (vf32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    return (vf32)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

/* ---- horizontal sums: four vectors to four numbers, always by the same tree ---- */

INLINE void sum4_f32(vf32 a, vf32 b, vf32 c, vf32 d, float *out) {
#if defined(__AVX512F__)
    __m256 a2 = _mm256_add_ps(_mm512_castps512_ps256((__m512)a), _mm512_extractf32x8_ps((__m512)a, 1));
    __m256 b2 = _mm256_add_ps(_mm512_castps512_ps256((__m512)b), _mm512_extractf32x8_ps((__m512)b, 1));
    __m256 c2 = _mm256_add_ps(_mm512_castps512_ps256((__m512)c), _mm512_extractf32x8_ps((__m512)c, 1));
    __m256 d2 = _mm256_add_ps(_mm512_castps512_ps256((__m512)d), _mm512_extractf32x8_ps((__m512)d, 1));
    __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a2, b2), _mm256_hadd_ps(c2, d2));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
#elif defined(__AVX2__)
    __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
#elif defined(__aarch64__)
    float32x4_t sums = vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d));
    vst1q_f32(out, sums);
#else
    out[0] = (a[0] + a[1]) + (a[2] + a[3]);
    out[1] = (b[0] + b[1]) + (b[2] + b[3]);
    out[2] = (c[0] + c[1]) + (c[2] + c[3]);
    out[3] = (d[0] + d[1]) + (d[2] + d[3]);
#endif
}

INLINE double sum_f64(vf64 a) {
#if VEC_BYTES == 64
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
#elif VEC_BYTES == 32
    return (a[0] + a[1]) + (a[2] + a[3]);
#else
    return a[0] + a[1];
#endif
}

INLINE void sum4_f64(vf64 a, vf64 b, vf64 c, vf64 d, double *out) {
    out[0] = sum_f64(a);
    out[1] = sum_f64(b);
    out[2] = sum_f64(c);
    out[3] = sum_f64(d);
}

/* ---- exp, branch-free so that loops over it vectorize ----
 * x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor series (truncated below half an ulp), 2^n by the exponent
 * bits. Within 2 ulp on the normal range; below it the result is 0, above it stays finite; NaN gives NaN. */

INLINE float exp_f32(float x) {
    const float round_to_int = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    float y = x < -87.0f ? -87.0f : x;
    y = y > 88.0f ? 88.0f : y;
    float shifted = y * 1.44269504088896341f + round_to_int;
    float n = shifted - round_to_int;
    float r = y - n * 0.693145751953125f;
    r = r - n * 1.428606765330187e-06f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (int32_t)((uint32_t)(bits - 0x4b400000 + 127) << 23);
    float scale;
    memcpy(&scale, &bits, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

INLINE double exp_f64(double x) {
    const double round_to_int = 6755399441055744.0; /* 1.5 * 2^52 */
    double y = x < -708.0 ? -708.0 : x;
    y = y > 709.0 ? 709.0 : y;
    double shifted = y * 1.4426950408889634074 + round_to_int;
    double n = shifted - round_to_int;
    double r = y - n * 0.693147180369123816490;
    r = r - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    int64_t bits;
    memcpy(&bits, &shifted, 8);
    bits = (int64_t)((uint64_t)(bits - 0x4338000000000000 + 1023) << 52);
    double scale;
    memcpy(&scale, &bits, 8);
    return x < -708.0 ? 0.0 : p * scale;
}

/* ---- tanh, likewise ----
 * e = e^(2 |x|) - 1 as 2^n (e^r - 1) + (2^n - 1), which cancels nothing where x is small; tanh |x| = e / (e + 2). Within
 * a few ulp; 1 from 2 |x| = 20 (40) on; NaN gives NaN. */

INLINE float tanh_f32(float x) {
    const float round_to_int = 12582912.0f;
    float y = 2 * __builtin_fabsf(x);
    y = y > 20.0f ? 20.0f : y;
    float shifted = y * 1.44269504088896341f + round_to_int;
    float n = shifted - round_to_int;
    float r = y - n * 0.693145751953125f;
    r = r - n * 1.428606765330187e-06f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (int32_t)((uint32_t)(bits - 0x4b400000 + 127) << 23);
    float scale;
    memcpy(&scale, &bits, 4);
    const float e = scale * (p * r) + (scale - 1.0f);
    return __builtin_copysignf(e / (e + 2.0f), x);
}

INLINE double tanh_f64(double x) {
    const double round_to_int = 6755399441055744.0;
    double y = 2 * __builtin_fabs(x);
    y = y > 40.0 ? 40.0 : y;
    double shifted = y * 1.4426950408889634074 + round_to_int;
    double n = shifted - round_to_int;
    double r = y - n * 0.693147180369123816490;
    r = r - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    int64_t bits;
    memcpy(&bits, &shifted, 8);
    bits = (int64_t)((uint64_t)(bits - 0x4338000000000000 + 1023) << 52);
    double scale;
    memcpy(&scale, &bits, 8);
    const double e = scale * (p * r) + (scale - 1.0);
    return __builtin_copysign(e / (e + 2.0), x);
}

#endif
