/* Packing of queries, keys and values for the products: rotated, widened, concatenated, padded with zeros. */
#ifndef KVMOSAIC_PACKING_H
#define KVMOSAIC_PACKING_H

#include "lanes.h"

/* Numbers of a row in float32. */
INLINE void widen(const char *from, int64_t num, int is_bfloat16, float *to) {
    if (!is_bfloat16) {
        memcpy(to, from, (size_t)(4 * num));
        return;
    }
    const uint16_t *halves = (const uint16_t *)from;
    for (int64_t d = 0; d < num; d++) {
        uint32_t bits = (uint32_t)halves[d] << 16;
        memcpy(to + d, &bits, 4);
    }
}

INLINE uint16_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Numbers of a row in bfloat16; W of them at a time. */
INLINE void halve(const float *from, int64_t num, uint16_t *to) {
    for (int64_t d = 0; d < num; d += W) {
#if HAS_PAIRS
        __m256bh halves = _mm512_cvtneps_pbh((__m512)load(from + d));
        memcpy(to + d, &halves, sizeof halves);
#else
        (void)from, (void)to;
#endif
    }
}

/* Queries of one key head, rotated, in the order of the products: [rows * H/G, words]. */
INLINE void pack_queries(const Unit *unit, int64_t head, int how, int64_t words, char *packed) {
    const Layer *layer = unit->layer;
    int is_half = (int)layer->is_bfloat16;
    int64_t group = layer->num_heads / layer->num_kv_heads, dim = layer->key_dim, size = is_half ? 2 : 4;
    int64_t neighbours[MAX_DIM]; /* how many partners from here on lie side by side */
    float x[MAX_DIM + 2 * W], partner[MAX_DIM];
    if (layer->cosines)
        for (int64_t d = dim - 1; d >= 0; d--)
            neighbours[d] = d + 1 < dim && layer->partners[d + 1] == layer->partners[d] + 1 ? neighbours[d + 1] + 1 : 1;
    memset(x + dim, 0, 4 * 2 * W);
    for (int64_t r = unit->first_row; r < unit->last_row; r++) {
        int64_t stacked = unit->call->first + r;
        int64_t at = layer->rows[stacked] * layer->query_row + head * group * layer->query_head;
        const char *row = layer->query + at * size;
        for (int64_t j = 0; j < group; j++, packed += 4 * words, row += layer->query_head * size) {
            if (!layer->cosines && how == (is_half ? PAIRS : FLOATS)) {
                memcpy(packed, row, (size_t)(dim * size));
                memset(packed + dim * size, 0, (size_t)(4 * words - dim * size));
                continue;
            }
            widen(row, dim, is_half, x);
            if (layer->cosines) {
                const float *cosines = layer->cosines + stacked * dim, *sines = layer->sines + stacked * dim;
                for (int64_t d = 0; d < dim; d += neighbours[d])
                    for (int64_t i = 0; i < neighbours[d]; i++) partner[d + i] = x[layer->partners[d] + i];
                for (int64_t d = 0; d < dim; d++) x[d] = x[d] * cosines[d] + partner[d] * sines[d];
            }
            if (how == PAIRS) {
                halve(x, dim, (uint16_t *)packed);
                int64_t done = whole(dim, W);
                memset((uint16_t *)packed + done, 0, (size_t)(2 * (2 * words - done)));
            } else if (how == FLOATS) {
                memcpy(packed, x, (size_t)(4 * dim));
                memset((float *)packed + dim, 0, (size_t)(4 * (words - dim)));
            } else {
                for (int64_t d = 0; d < words; d += 2 * W)
                    for (int i = 0; i < W; i++) {
                        ((float *)packed)[d + i] = x[d + 2 * i];
                        ((float *)packed)[d + W + i] = x[d + 2 * i + 1];
                    }
            }
        }
    }
}

/* Rows of `bytes`, with zeros up to `padded` bytes each. */
INLINE void pad(const char *from, int64_t stride, int64_t num, int64_t bytes, int64_t padded, char *to) {
    for (int64_t i = 0; i < num; i++, from += stride, to += padded) {
        memcpy(to, from, (size_t)bytes);
        memset(to + bytes, 0, (size_t)(padded - bytes));
    }
}

/* Rows of numbers as they are, or in float32 (`how` FLOATS): [num, words], then zeros up to row `all_rows`. */
INLINE void copy_rows(int how, const char *from, int64_t stride, int64_t num, int64_t all_rows, int64_t dim,
                      int is_half, int64_t words, char *to) {
    int64_t bytes = dim * (is_half ? 2 : 4);
    if (is_half && how == FLOATS) {
        for (int64_t i = 0; i < num; i++) widen(from + i * stride, dim, 1, (float *)to + i * words);
    } else if (bytes == 4 * words) {
        for (int64_t i = 0; i < num; i++)
            for (int64_t w = 0; w < words; w += W)
                store((float *)to + i * words + w, (vf)load_words(from + i * stride + 4 * w));
    } else {
        pad(from, stride, num, bytes, 4 * words, to);
    }
    memset(to + num * 4 * words, 0, (size_t)(4 * words * (all_rows - num)));
}

/* Rows of bfloat16, two of them in one word: [all_rows / 2, 2 words], padded with zeros after row `num`. */
INLINE void pair_rows(const char *from, int64_t stride, int64_t num, int64_t all_rows, int64_t dim, int64_t words,
                      char *to) {
#if HAS_PAIRS
    uint16_t low[2 * W], high[2 * W];
    for (int i = 0; i < 2 * W; i++) low[i] = (uint16_t)(i / 2 + i % 2 * 2 * W), high[i] = (uint16_t)(low[i] + W);
    __m512i first = _mm512_loadu_si512(low), second = _mm512_loadu_si512(high);
    char row[2][4 * MAX_DIM];
    for (int64_t s = 0; s < all_rows; s += 2, from += 2 * stride) {
        const char *x = from, *y = from + stride;
        if (s + 1 >= num || 2 * dim != 4 * words) {
            memset(row, 0, sizeof row);
            if (s < num) memcpy(row[0], x, (size_t)(2 * dim));
            if (s + 1 < num) memcpy(row[1], y, (size_t)(2 * dim));
            x = row[0], y = row[1];
        }
        for (int64_t w = 0; w < words; w += W, to += 8 * W) {
            __m512i a = _mm512_loadu_si512(x + 4 * w), b = _mm512_loadu_si512(y + 4 * w);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, first, b));
            _mm512_storeu_si512(to + 4 * W, _mm512_permutex2var_epi16(a, second, b));
        }
    }
#else
    (void)from, (void)stride, (void)num, (void)all_rows, (void)dim, (void)words, (void)to;
#endif
}

#endif
