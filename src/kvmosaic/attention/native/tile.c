/* One unit of attention, compiled once per instruction set (PATH names it; the compiler's flags choose it).
 *
 * Vectors hold W numbers. bfloat16 is read as 32-bit words of two neighbours: `word << 16` and `word & 0xffff0000` are
 * both numbers in float32, so the columns of an output come as W even ones, then W odd ones ("planes"); with AVX512-BF16
 * a word is multiplied whole. Two ways through a block of 64 keys:
 *
 *     narrow   few queries: keys and values are read in place, once
 *     wide     many queries: keys are transposed and values packed, then both products are small matrix products
 */
#include <math.h>
#include <string.h>

#include "paged.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include <immintrin.h>
#define W 16
#define NV 4
#define LANES(F, h) F(0, h), F(1, h), F(2, h), F(3, h), F(4, h), F(5, h), F(6, h), F(7, h), F(8, h), F(9, h), \
    F(10, h), F(11, h), F(12, h), F(13, h), F(14, h), F(15, h)
#elif defined(__AVX2__)
#include <immintrin.h>
#define W 8
#define NV 2
#define LANES(F, h) F(0, h), F(1, h), F(2, h), F(3, h), F(4, h), F(5, h), F(6, h), F(7, h)
#else
#define W 4
#define NV 2
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

/* c[mr, nv vectors] = c * keep + a[mr, n] b[n, nv vectors]; keep NULL: c starts at 0. Strides in bytes. */
INLINE void product_tile(int how, int mr, int nv, const char *a, int64_t lda, const char *b, int64_t ldb, float *c,
                         int64_t ldc, int64_t n, const float *keep) {
    vf sum[6][4];
    for (int i = 0; i < mr; i++)
        for (int j = 0; j < nv; j++) sum[i][j] = keep ? load(c + i * ldc + j * W) * keep[i] : (vf){0};
    for (int64_t k = 0; k < n; k++, b += ldb) {
        vi column[4];
        for (int j = 0; j < nv; j++) {
            if (how != PLANES) column[j] = load_words(b + 4 * W * j);
            else if (j % 2 == 0) column[j] = (vi)even(load_words(b + 2 * W * j));
            else column[j] = (vi)odd(load_words(b + 2 * W * (j - 1)));
        }
        for (int i = 0; i < mr; i++)
            for (int j = 0; j < nv; j++) sum[i][j] = multiply(how, sum[i][j], a + i * lda + 4 * k, column[j]);
    }
    for (int i = 0; i < mr; i++)
        for (int j = 0; j < nv; j++) store(c + i * ldc + j * W, sum[i][j]);
}

INLINE void product_columns(int how, int mr, const char *a, int64_t lda, const char *b, int64_t ldb, float *c,
                            int64_t ldc, int64_t n, int64_t columns, const float *keep) {
    int64_t per_vector = how == PLANES ? 2 * W : 4 * W; /* bytes of b */
    int64_t left = columns / W;
    for (; left >= NV; left -= NV, b += NV * per_vector, c += NV * W)
        product_tile(how, mr, NV, a, lda, b, ldb, c, ldc, n, keep);
    if (NV > 2 && left >= 2) {
        product_tile(how, mr, 2, a, lda, b, ldb, c, ldc, n, keep);
        left -= 2, b += 2 * per_vector, c += 2 * W;
    }
    if (left && how != PLANES) product_tile(how, mr, 1, a, lda, b, ldb, c, ldc, n, keep);
}

INLINE void product(int how, int64_t m, const char *a, int64_t lda, const char *b, int64_t ldb, float *c, int64_t ldc,
                    int64_t n, int64_t columns, const float *keep) {
#define ROWS(mr) \
    for (; m >= mr; m -= mr, a += mr * lda, c += mr * ldc, keep = keep ? keep + mr : keep) \
        product_columns(how, mr, a, lda, b, ldb, c, ldc, n, columns, keep);
    ROWS(6) ROWS(4) ROWS(2) ROWS(1)
#undef ROWS
}

static float number_at(const char *p, int64_t i, int is_bfloat16) {
    if (!is_bfloat16) return ((const float *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static uint16_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Queries of one key head, turned, in the order that the products want: [rows * H/G, words]. */
static void pack_queries(const Unit *unit, int64_t head, int how, int64_t words, char *packed) {
    const Layer *layer = unit->layer;
    int is_half = (int)layer->is_bfloat16;
    int64_t group = layer->num_heads / layer->num_kv_heads, dim = layer->key_dim;
    int64_t size = is_half ? 2 : 4;
    for (int64_t r = unit->first_row; r < unit->last_row; r++) {
        int64_t stacked = unit->call->first + r;
        const char *row = layer->query + layer->rows[stacked] * layer->query_row * size;
        for (int64_t j = 0; j < group; j++, packed += 4 * words) {
            const char *q = row + (head * group + j) * layer->query_head * size;
            memset(packed, 0, (size_t)(4 * words));
            for (int64_t d = 0; d < dim; d++) {
                float x = number_at(q, d, is_half);
                if (layer->cosines) {
                    const int64_t at = stacked * dim + d;
                    x = x * layer->cosines[at] + number_at(q, layer->partners[d], is_half) * layer->sines[at];
                }
                uint16_t half = is_half ? rounded(x) : 0;
                if (how == PAIRS) ((uint16_t *)packed)[d] = half;
                else if (how == FLOATS) ((float *)packed)[d] = x;
                else ((float *)packed)[d / (2 * W) * 2 * W + d % 2 * W + d / 2 % W] = number_at((char *)&half, 0, 1);
            }
        }
    }
}

/* Rows of `dim` elements, with zeros up to `padded` bytes each. */
static void pad(const char *from, int64_t stride, int64_t num, int64_t bytes, int64_t padded, char *to) {
    for (int64_t i = 0; i < num; i++, from += stride, to += padded) {
        memcpy(to, from, (size_t)bytes);
        memset(to + bytes, 0, (size_t)(padded - bytes));
    }
}

/* scores[m, BLOCK]: keys in place, W of them at a time. `words` counts 32-bit words of a key. */
INLINE void score_narrow(int how, int64_t m, const char *queries, int64_t query_bytes, const char *keys, int64_t stride,
                         int64_t num, int64_t words, int64_t ahead, float *scores) {
    for (int64_t s = 0; s < num; s += W) {
        const char *key[W];
        for (int j = 0; j < W; j++) key[j] = keys + (s + j < num ? s + j : num - 1) * stride;
        for (int j = 0; j < W; j++)
            for (int64_t line = 0; line < 4 * words; line += 64) __builtin_prefetch(key[j] + ahead + line, 0, 2);
        for (int64_t i = 0; i < m; i++) {
            const char *q = queries + i * query_bytes;
            vf sum[W];
            for (int j = 0; j < W; j++) sum[j] = (vf){0};
            for (int64_t w = 0; w < words; w += W) {
                if (how == PLANES) {
                    vf first = load((const float *)q + 2 * w), second = load((const float *)q + 2 * w + W);
                    for (int j = 0; j < W; j++) {
                        vi word = load_words(key[j] + 4 * w);
                        sum[j] += first * even(word);
                        sum[j] += second * odd(word);
                    }
                } else if (how == FLOATS) {
                    vf x = load((const float *)q + w);
                    for (int j = 0; j < W; j++) sum[j] += x * (vf)load_words(key[j] + 4 * w);
                } else {
#if HAS_PAIRS
                    vi x = load_words(q + 4 * w);
                    for (int j = 0; j < W; j++)
                        sum[j] = (vf)_mm512_dpbf16_ps((__m512)sum[j], (__m512bh)x, (__m512bh)load_words(key[j] + 4 * w));
#endif
                }
            }
            store(scores + i * BLOCK + s, sums(sum));
        }
    }
}

/* Keys as columns: [words (twice as many for planes), BLOCK]. */
INLINE void transpose_keys(int how, const char *keys, int64_t stride, int64_t num, int64_t words, float *to) {
    for (int64_t s = 0; s < BLOCK; s += W) {
        for (int64_t w = 0; w < words; w += W) {
            vi v[W];
            for (int j = 0; j < W; j++) v[j] = load_words(keys + (s + j < num ? s + j : num - 1) * stride + 4 * w);
            transpose(v);
            for (int j = 0; j < W; j++) {
                if (how != PLANES) store(to + (w + j) * BLOCK + s, (vf)v[j]);
                else {
                    store(to + (2 * w + j) * BLOCK + s, even(v[j]));
                    store(to + (2 * w + W + j) * BLOCK + s, odd(v[j]));
                }
            }
        }
    }
}

/* Values side by side: [keys, columns], or pairs of keys in one word: [keys / 2, columns]. */
INLINE void pack_values(int how, const char *values, int64_t stride, int64_t num, int64_t words, float *to) {
    for (int64_t s = 0; s < num; s += how == PAIRS ? 2 : 1, values += (how == PAIRS ? 2 : 1) * stride) {
        for (int64_t w = 0; w < words; w += W) {
            vi x = load_words(values + 4 * w);
            if (how == FLOATS) {
                store(to, (vf)x);
                to += W;
                continue;
            }
            if (how == PLANES) {
                store(to, even(x));
                store(to + W, odd(x));
            } else {
                vi y = s + 1 < num ? load_words(values + stride + 4 * w) : (vi){0};
                store(to, (vf)((x & 0xffff) | (y << 16)));
                store(to + W, (vf)(((x >> 16) & 0xffff) | (y & (int32_t)0xffff0000)));
            }
            to += 2 * W;
        }
    }
}

/* Hides keys, then turns the scores of one query into weights; returns by how much to keep what was summed before. */
INLINE float weigh(const Unit *unit, int64_t row, int64_t key, int64_t num, float *scores, float *state) {
    const Layer *layer = unit->layer;
    const Call *call = unit->call;
    float scaling = (float)layer->scaling, cap = (float)layer->softcap;
    int64_t seen = call->causal && row + 1 - key < num ? row + 1 - key : num;
    vf highest = all(-INFINITY);
    for (int64_t s = 0; s < BLOCK; s += W) {
        vf x = load(scores + s) * scaling;
        if (cap != 0) x = capped(x, cap);
        store(scores + s, x);
    }
    for (int64_t s = seen > 0 ? seen : 0; s < BLOCK; s++) scores[s] = -INFINITY;
    if (call->mask) {
        const uint8_t *mask = call->mask + row * call->num_tokens + key;
        for (int64_t s = 0; s < num; s++)
            if (!mask[s]) scores[s] = -INFINITY;
    }
    for (int64_t s = 0; s < BLOCK; s += W) highest = larger(highest, load(scores + s));
    float before = state[0], now = largest_of(highest);
    if (!(now > before)) now = before;
    float base = now == -INFINITY ? 0 : now;
    vf total = {0};
    for (int64_t s = 0; s < BLOCK; s += W) {
        vf x = exponential(load(scores + s) - base);
        total += x;
        store(scores + s, x);
    }
    float keep = exponential(all(before - base))[0];
    state[0] = now;
    state[1] = state[1] * keep + sum_of(total);
    return keep;
}

/* Weights to words of two bfloat16 numbers, in place: [m, BLOCK] to [m, BLOCK] with the first half used. */
INLINE void halve(int64_t m, float *weights) {
#if HAS_PAIRS
    for (int64_t i = 0; i < m; i++, weights += BLOCK)
        for (int s = 0; s < BLOCK; s += 2 * W) {
            __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(weights + s + W), (__m512)load(weights + s));
            store(weights + s / 2, (vf)both);
        }
#else
    (void)m, (void)weights;
#endif
}

INLINE void attend(const Unit *unit, char *scratch, int key_how, int is_narrow) {
    const Layer *layer = unit->layer;
    const Call *call = unit->call;
    const Pool *pool = layer->pools + call->pool;
    int64_t size = layer->is_bfloat16 ? 2 : 4, group = layer->num_heads / layer->num_kv_heads;
    int64_t step = 4 * W; /* bytes of one vector of words */
    int64_t key_bytes = (layer->key_dim * size + step - 1) / step * step;
    int64_t value_bytes = (layer->value_dim * size + step - 1) / step * step;
    int64_t key_words = key_bytes / 4, value_words = value_bytes / 4;
    int64_t columns = layer->is_bfloat16 ? 2 * value_words : value_words;
    int64_t query_words = key_how == PLANES ? 2 * key_words : key_words;
    int64_t width = width_of(layer->value_dim);
    int64_t m = (unit->last_row - unit->first_row) * group, readers = (call->last - call->first) * group;
    int value_how = is_narrow && key_how == PAIRS ? PLANES : key_how;
    int pads_keys = key_bytes != layer->key_dim * size, pads_values = value_bytes != layer->value_dim * size;

    float *scores = (float *)scratch;
    float *keep = scores + TILE * BLOCK;
    float *turned = keep + TILE;                 /* keys as columns */
    float *packed = turned + BLOCK * MAX_DIM;    /* values */
    char *padded = (char *)(packed + BLOCK * MAX_DIM);
    char *queries = padded + 4 * BLOCK * MAX_DIM;

    int64_t num_heads = unit->last_head - unit->first_head;
    for (int64_t h = 0; h < num_heads; h++) {
        int64_t at = (unit->first_head + h) * readers + unit->first_row * group;
        pack_queries(unit, unit->first_head + h, key_how, query_words, queries + h * m * 4 * query_words);
        memset(unit->outputs + at * width, 0, (size_t)(4 * m * width));
        for (int64_t i = 0; i < m; i++) unit->states[2 * (at + i)] = -INFINITY, unit->states[2 * (at + i) + 1] = 0;
    }
    for (int64_t key = unit->first_key; key < unit->last_key; key += BLOCK) {
        int64_t num = unit->last_key - key < BLOCK ? unit->last_key - key : BLOCK;
        if (call->causal && key >= unit->last_row) break;
        for (int64_t h = 0; h < num_heads; h++) {
            int64_t head = unit->first_head + h, slot = call->first_slot + key;
            int64_t at = head * readers + unit->first_row * group;
            int64_t key_stride = pool->key_token * size, value_stride = pool->value_token * size;
            const char *keys = pool->key + (slot * pool->key_token + head * pool->key_head) * size;
            const char *values = pool->value + (slot * pool->value_token + head * pool->value_head) * size;
            const char *q = queries + h * m * 4 * query_words;
            int64_t ahead = BLOCK * key_stride;
            if (pads_keys) {
                pad(keys, key_stride, num, layer->key_dim * size, key_bytes, padded);
                keys = padded, key_stride = key_bytes, ahead = 0;
            }
            if (is_narrow) {
                score_narrow(key_how, m, q, 4 * query_words, keys, key_stride, num, key_words, ahead, scores);
                for (int64_t s = 0; s < num; s++)
                    for (int64_t line = 0; line < value_bytes; line += 64)
                        __builtin_prefetch(values + (s + BLOCK) * value_stride + line, 0, 2);
            } else {
                transpose_keys(key_how, keys, key_stride, num, key_words, turned);
                product(key_how == PAIRS ? PAIRS : FLOATS, m, q, 4 * query_words, (char *)turned, 4 * BLOCK, scores, BLOCK,
                        query_words, BLOCK, NULL);
            }
            for (int64_t i = 0; i < m; i++)
                keep[i] = weigh(unit, unit->first_row + i / group, key, num, scores + i * BLOCK,
                                unit->states + 2 * (at + i));
            if (pads_values) {
                pad(values, value_stride, num, layer->value_dim * size, value_bytes, padded);
                values = padded, value_stride = value_bytes;
            }
            float *outputs = unit->outputs + at * width;
            if (is_narrow) {
                product(value_how, m, (char *)scores, 4 * BLOCK, values, value_stride, outputs, width, num, columns, keep);
                continue;
            }
            pack_values(value_how, values, value_stride, num, value_words, packed);
            if (value_how == PAIRS) halve(m, scores);
            product(value_how == PAIRS ? PAIRS : FLOATS, m, (char *)scores, 4 * BLOCK, (char *)packed, 4 * columns,
                    outputs, width, value_how == PAIRS ? (num + 1) / 2 : num, columns, keep);
        }
    }
    if (!layer->is_bfloat16) return;
    for (int64_t h = unit->first_head; h < unit->last_head; h++) { /* planes back to their order */
        float *row = unit->outputs + (h * readers + unit->first_row * group) * width;
        for (int64_t i = 0; i < m; i++, row += width)
            for (int64_t block = 0; block < columns; block += 2 * W) {
                float ordered[2 * W];
                for (int j = 0; j < W; j++) ordered[2 * j] = row[block + j], ordered[2 * j + 1] = row[block + W + j];
                memcpy(row + block, ordered, sizeof ordered);
            }
    }
}

void JOIN(kvmosaic_attend_, PATH)(const Unit *unit, char *scratch) {
    const Layer *layer = unit->layer;
    int64_t m = (unit->last_row - unit->first_row) * (layer->num_heads / layer->num_kv_heads);
    int is_narrow = m <= NARROW;
    if (!layer->is_bfloat16) {
        if (is_narrow) attend(unit, scratch, FLOATS, 1);
        else attend(unit, scratch, FLOATS, 0);
    } else if (HAS_PAIRS) {
        if (is_narrow) attend(unit, scratch, PAIRS, 1);
        else attend(unit, scratch, PAIRS, 0);
    } else {
        if (is_narrow) attend(unit, scratch, PLANES, 1);
        else attend(unit, scratch, PLANES, 0);
    }
}
