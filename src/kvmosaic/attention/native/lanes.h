/* Vectors of W numbers, and what can be done with them, for the instruction set that is compiled.
 *
 * bfloat16 is read as 32-bit words of two neighbours: `word << 16` and `word & 0xffff0000` are both numbers in float32;
 * with AVX512-BF16 a word is multiplied whole.
 */
#ifndef KVMOSAIC_LANES_H
#define KVMOSAIC_LANES_H

#include <math.h>
#include <string.h>

#include "paged.h"



#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include <immintrin.h>
#define W 16
#define LANES(F, h) F(0, h), F(1, h), F(2, h), F(3, h), F(4, h), F(5, h), F(6, h), F(7, h), F(8, h), F(9, h), \
    F(10, h), F(11, h), F(12, h), F(13, h), F(14, h), F(15, h)
#elif defined(__AVX2__)
#include <immintrin.h>
#define W 8
#define LANES(F, h) F(0, h), F(1, h), F(2, h), F(3, h), F(4, h), F(5, h), F(6, h), F(7, h)
#else
#define W 4
#define LANES(F, h) F(0, h), F(1, h), F(2, h), F(3, h)
#endif

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef float vfu __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t viu __attribute__((vector_size(4 * W), aligned(2), may_alias));

enum { FLOATS, PLANES, PAIRS }; /* how the words of a matrix are multiplied */

INLINE vf load(const float *p) { return *(const vfu *)p; }
INLINE vi load_words(const void *p) { return *(const viu *)p; }
INLINE void store(float *p, vf x) { *(vfu *)p = x; }
INLINE vf all(float x) { return x - (vf){0}; }
INLINE vf choose(vi where, vf yes, vf no) { return (vf)((where & (vi)yes) | (~where & (vi)no)); }
INLINE vf even(vi words) { return (vf)(words << 16); }
INLINE vf odd(vi words) { return (vf)(words & (int32_t)0xffff0000); }

/* The larger; `b` where either is not a number. */
INLINE vf larger(vf a, vf b) {
#if W == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif W == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

/* Blocks of h lanes from two vectors, the even ones and the odd ones: LO and HI transpose, LO + HI adds neighbours. */
#define LO_LANE(l, h) ((l) / (h) % 2 ? W + (l) - (h) : (l))
#define HI_LANE(l, h) ((l) / (h) % 2 ? W + (l) : (l) + (h))
#if defined(__clang__)
#define LO(a, b, h) __builtin_shufflevector(a, b, LANES(LO_LANE, h))
#define HI(a, b, h) __builtin_shufflevector(a, b, LANES(HI_LANE, h))
#else
#define LO(a, b, h) __builtin_shuffle(a, b, (vi){LANES(LO_LANE, h)})
#define HI(a, b, h) __builtin_shuffle(a, b, (vi){LANES(HI_LANE, h)})
#endif

#define SUM_STAGE(h) \
    if (h < W) for (int i = 0; i < W; i += 2 * h) v[i] = LO(v[i], v[i + h], h) + HI(v[i], v[i + h], h);
#define TURN_STAGE(h) \
    if (h < W) for (int i = 0; i < W; i++) if (!(i & h)) { \
        vi low = LO(v[i], v[i + h], h), high = HI(v[i], v[i + h], h); v[i] = low; v[i + h] = high; }

/* Lane i: the sum of vector i. */
INLINE vf sums(vf *v) {
    SUM_STAGE(1) SUM_STAGE(2)
#if W > 4
    SUM_STAGE(4)
#endif
#if W > 8
    SUM_STAGE(8)
#endif
    return v[0];
}

INLINE void transpose(vi *v) {
    TURN_STAGE(1) TURN_STAGE(2)
#if W > 4
    TURN_STAGE(4)
#endif
#if W > 8
    TURN_STAGE(8)
#endif
}

INLINE float sum_of(vf x) {
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
}

INLINE float largest_of(vf x) {
    float largest = x[0];
    for (int i = 1; i < W; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

/* e^x for x <= 88 to 2 units in the last place (Cephes); 0 below -87, which is where -inf falls. */
INLINE vf exponential(vf x) {
    vi vanishes = x <= -87.0f;
    x = larger(all(-87.0f), x);
    vf shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the whole number lands in the low bits */
    vf whole = shifted - 12582912.0f;
    vf r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vf y = ((((r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
            1.6666665459e-1f) * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    vi power = ((vi)shifted - 0x4B400000 + 127) << 23;
    return (vf)((vi)(y * (vf)power) & ~vanishes);
}

INLINE vf capped(vf x, float cap) {
    vf y = exponential(larger(all(-20.0f), -larger(all(-20.0f), -(x * (1.0f / cap)))) * 2.0f);
    return (y - 1.0f) / (y + 1.0f) * cap;
}

/* 2^x for x <= 127, to 1e-7 with `degree` 5 and to 3e-6 with 4; 0 below -127, which is where -inf falls. */
INLINE vf power_of_two(int degree, vf x) {
    vf y;
#if W == 16
    x = larger(all(-150.0f), x);
    vf nearest = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = x - nearest;
#else
    x = larger(all(-127.0f), x);
    vf shifted = x + 12582912.0f; /* 1.5 * 2^23: the whole number lands in the low bits */
    vf r = x - (shifted - 12582912.0f);
#endif
    if (degree == 4) y = ((r * 9.5700994e-3f + 5.5917859e-2f) * r + 2.4024745e-1f) * r + 6.9312179e-1f;
    else y = (((r * 1.3276469e-3f + 9.6755410e-3f) * r + 5.5507135e-2f) * r + 2.4022120e-1f) * r + 6.9314694e-1f;
#if W == 16
    return (vf)_mm512_scalef_ps((__m512)(y * r + 1.0f), (__m512)nearest);
#else
    vi power = ((vi)shifted - 0x4B400000 + 127) << 23;
    return (y * r + 1.0f) * (vf)power;
#endif
}

/* sum + a b, for a number (or a pair of bfloat16 numbers) a and W of them in b. */
INLINE vf multiply(int how, vf sum, const char *a, vi b) {
    if (how == PAIRS) {
#if HAS_PAIRS
        int32_t word;
        memcpy(&word, a, 4);
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(word), (__m512bh)b);
#endif
    }
    return sum + all(*(const float *)a) * (vf)b;
}

INLINE int64_t whole(int64_t n, int64_t part) { return (n + part - 1) / part * part; }

#endif
