/* Attention of few queries: keys and values are read in place, once.
 *
 * Columns of bfloat16 outputs come as W even ones, then W odd ones ("planes"), and are put in order at the end.
 */
#ifndef KVMOSAIC_NARROW_H
#define KVMOSAIC_NARROW_H

#include "packing.h"

#if W == 16
#define NV 4 /* vectors of columns at once */
#else
#define NV 2
#endif

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

/* Masks keys, then converts the scores of one query to weights; returns the factor on the previous sums. */
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

INLINE void attend_narrow(const Unit *unit, char *scratch, int how) {
    const Layer *layer = unit->layer;
    const Call *call = unit->call;
    const Pool *pool = layer->pools + call->pool;
    int64_t size = layer->is_bfloat16 ? 2 : 4, group = layer->num_heads / layer->num_kv_heads;
    int64_t step = 4 * W; /* bytes of one vector of words */
    int64_t key_bytes = (layer->key_dim * size + step - 1) / step * step;
    int64_t value_bytes = (layer->value_dim * size + step - 1) / step * step;
    int64_t key_words = key_bytes / 4, value_words = value_bytes / 4;
    int64_t columns = layer->is_bfloat16 ? 2 * value_words : value_words;
    int64_t query_words = how == PLANES ? 2 * key_words : key_words;
    int64_t width = width_of(layer->value_dim);
    int64_t m = (unit->last_row - unit->first_row) * group, readers = (call->last - call->first) * group;
    int pads_keys = key_bytes != layer->key_dim * size, pads_values = value_bytes != layer->value_dim * size;

    float *scores = (float *)scratch;
    float *keep = scores + NARROW * BLOCK;
    char *padded = (char *)(keep + 2 * NARROW);
    char *queries = padded + 4 * BLOCK * MAX_DIM;

    int64_t num_heads = unit->last_head - unit->first_head;
    for (int64_t h = 0; h < num_heads; h++) {
        int64_t at = (unit->first_head + h) * readers + unit->first_row * group;
        pack_queries(unit, unit->first_head + h, how, query_words, queries + h * m * 4 * query_words);
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
            score_narrow(how, m, q, 4 * query_words, keys, key_stride, num, key_words, ahead, scores);
            for (int64_t s = 0; s < num; s++)
                for (int64_t line = 0; line < value_bytes; line += 64)
                    __builtin_prefetch(values + (s + BLOCK) * value_stride + line, 0, 2);
            for (int64_t i = 0; i < m; i++)
                keep[i] = weigh(unit, unit->first_row + i / group, key, num, scores + i * BLOCK,
                                unit->states + 2 * (at + i));
            if (pads_values) {
                pad(values, value_stride, num, layer->value_dim * size, value_bytes, padded);
                values = padded, value_stride = value_bytes;
            }
            product(how == FLOATS ? FLOATS : PLANES, m, (char *)scores, 4 * BLOCK, values, value_stride,
                    unit->outputs + at * width, width, num, columns, keep);
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

#endif
