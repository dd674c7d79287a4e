/* Attention of many queries: a lane is a query, and a block of 64 keys is two small matrix products.
 *
 *     scores  [keys, lanes] = keys [keys, dim] * queries [dim, lanes]
 *     weights [keys, lanes] = 2 ^ (scores - largest), lane by lane: nothing is added or compared across a vector
 *     outputs [dim, lanes]  = outputs * keep + values' [dim, keys] * weights
 *
 * Keys and values are taken number by number (or pair by pair), each for three vectors of queries at once, so keys are
 * never transposed. Up to 3 W lanes ("strip") go through both products while their scores are in the nearest cache.
 */
#ifndef KVMOSAIC_WIDE_H
#define KVMOSAIC_WIDE_H

#include "packing.h"

#if W == 16
#define TILE_ROWS 8 /* with 3 vectors: 24 sums of 32 registers; with AVX2 12 of 16 */
#else
#define TILE_ROWS 4
#endif

/* Rows in memory, with software prefetch in small steps: too many at once stall a processor. */
typedef struct {
    const char *from; /* NULL: none */
    int64_t stride, bytes;
} Ahead;

/* Asks for the share of a block's rows that belongs to `rows` of `all_rows`. */
INLINE void ask_for(const Ahead *ahead, int64_t row, int64_t rows, int64_t all_rows) {
    if (!ahead->from) return;
    for (int64_t s = row * BLOCK / all_rows; s < (row + rows) * BLOCK / all_rows; s++)
        for (int64_t line = 0; line < ahead->bytes; line += 64)
            __builtin_prefetch(ahead->from + s * ahead->stride + line, 0, 2);
}

/* c[rows, nv vectors] = c * keep + a[rows, n] b[n, nv vectors]; keep NULL: c starts at 0. Strides of a in bytes. */
INLINE void strip_product(int how, int nv, int64_t rows, const char *a, int64_t a_row, int64_t a_step, const float *b,
                          float *c, int64_t n, const vf *keep, const Ahead *ahead) {
    for (int64_t r = 0; r < rows; r += TILE_ROWS, a += TILE_ROWS * a_row, c += TILE_ROWS * nv * W) {
        ask_for(ahead, r, TILE_ROWS, rows);
        vf sum[TILE_ROWS][3];
        for (int i = 0; i < TILE_ROWS; i++)
            for (int j = 0; j < nv; j++) sum[i][j] = keep ? load(c + (i * nv + j) * W) * keep[j] : (vf){0};
        const char *at = a;
        const float *row = b;
        for (int64_t k = 0; k < n; k++, at += a_step, row += nv * W) {
            vi column[3];
            for (int j = 0; j < nv; j++) column[j] = load_words(row + j * W);
            for (int i = 0; i < TILE_ROWS; i++)
                for (int j = 0; j < nv; j++) sum[i][j] = multiply(how, sum[i][j], at + i * a_row, column[j]);
        }
        for (int i = 0; i < TILE_ROWS; i++)
            for (int j = 0; j < nv; j++) store(c + (i * nv + j) * W, sum[i][j]);
    }
}

/* Hides what a query does not see: lane `first` + l is query head (first + l) % H/G of row (first + l) / H/G. */
static void hide(const Unit *unit, int64_t lanes, int64_t first, int64_t key, int64_t num, float *scores) {
    int64_t group = unit->layer->num_heads / unit->layer->num_kv_heads;
    const Call *call = unit->call;
    for (int64_t lane = 0; lane < lanes; lane++) {
        int64_t row = unit->first_row + (first + lane) / group;
        if (row >= unit->last_row) break;
        const uint8_t *mask = call->mask ? call->mask + row * call->num_tokens + key : NULL;
        int64_t seen = call->causal && row + 1 - key < num ? row + 1 - key : num;
        if (seen < 0) seen = 0;
        for (int64_t s = 0; mask && s < seen; s++)
            if (!mask[s]) scores[s * lanes + lane] = -INFINITY;
        for (int64_t s = seen; s < num; s++) scores[s * lanes + lane] = -INFINITY;
    }
}

/* Two vectors of weights as pairs of bfloat16: lane i holds a[i], b[i]. */
INLINE void store_pairs(float *to, vf a, vf b, vi order) {
#if HAS_PAIRS
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    store(to, (vf)_mm512_permutexvar_epi16((__m512i)order, both));
#else
    (void)to, (void)a, (void)b, (void)order;
#endif
}

/* Scores to weights, in place. `state`: largest score and sum of weights, lane by lane; `keep`: what is left of before. */
INLINE void weigh_strip(const Unit *unit, int how, int nv, int64_t first, int64_t key, int64_t num, int64_t rows,
                        float *scores, float *state, vf *keep) {
    const Layer *layer = unit->layer;
    const Call *call = unit->call;
    float scaling = (float)layer->scaling, cap = (float)layer->softcap;
    for (int64_t i = nv * W * num; i < nv * W * rows; i += W) store(scores + i, all(-INFINITY));
    if (cap != 0) {
        for (int64_t i = 0; i < nv * W * num; i += W) store(scores + i, capped(load(scores + i) * scaling, cap));
        scaling = 1;
    }
    if (call->mask || (call->causal && key + num > unit->first_row + 1)) hide(unit, nv * W, first, key, num, scores);
    vf highest[3], base[3], total[3];
    for (int j = 0; j < nv; j++) highest[j] = load(state + j * W);
    for (int64_t s = 0; s < rows; s++)
        for (int j = 0; j < nv; j++) highest[j] = larger(highest[j], load(scores + (s * nv + j) * W));
    for (int j = 0; j < nv; j++) {
        base[j] = choose(highest[j] == -INFINITY, (vf){0}, highest[j]);
        keep[j] = power_of_two(5, (load(state + j * W) - base[j]) * (scaling * 1.44269504f));
        store(state + j * W, highest[j]);
        total[j] = (vf){0};
    }
    int32_t words[W];
    for (int i = 0; i < W; i++) words[i] = i | (i + W) << 16;
    vi order = load_words(words);
    for (int64_t s = 0; s < rows; s += 2)
        for (int j = 0; j < nv; j++) {
            float *a = scores + (s * nv + j) * W, *b = a + nv * W;
            vf x = power_of_two(how == PAIRS ? 4 : 5, (load(a) - base[j]) * (scaling * 1.44269504f));
            vf y = power_of_two(how == PAIRS ? 4 : 5, (load(b) - base[j]) * (scaling * 1.44269504f));
            total[j] += x + y;
            if (how == PAIRS) {
                store_pairs(scores + (s / 2 * nv + j) * W, x, y, order);
            } else {
                store(a, x);
                store(b, y);
            }
        }
    for (int j = 0; j < nv; j++) store(state + (nv + j) * W, load(state + (nv + j) * W) * keep[j] + total[j]);
}

/* One block of keys for one head of a unit. */
typedef struct {
    const char *keys, *values;
    int64_t key_stride;
    int64_t key, num, rows;    /* rows: `num` up to whole tiles */
    int64_t key_words, value_words, key_steps, value_dims;
    Ahead next_keys, next_values;
} Block;

INLINE void attend_strip(const Unit *unit, int how, int nv, const Block *block, int64_t first, const float *queries,
                         float *scores, float *state, float *outputs) {
    vf keep[3];
    strip_product(how, nv, block->rows, block->keys, block->key_stride, 4, queries, scores, block->key_steps, NULL,
                  &block->next_values);
    weigh_strip(unit, how, nv, first, block->key, block->num, block->rows, scores, state, keep);
    int64_t columns = how == PAIRS ? 2 * block->value_words : block->value_words;
    strip_product(how, nv, whole(block->value_dims, TILE_ROWS), block->values, 4, 4 * columns, scores, outputs,
                  how == PAIRS ? block->rows / 2 : block->rows, keep, &block->next_keys);
}

/* Vectors of the next strip, if `left` are left: 3, and no single one at the end if that can be helped. */
INLINE int64_t strip_of(int64_t left) { return left == 4 ? 2 : left < 3 ? left : 3; }

/* [m, words] to strips of [words, lanes], padded with zeros after the last query. */
INLINE void turn_rows(const float *from, int64_t m, int64_t words, float *to) {
    for (int64_t first = 0, nv; first < m; first += nv * W, to += nv * W * words) {
        nv = strip_of(whole(m - first, W) / W);
        for (int64_t j = 0; j < nv; j++)
            for (int64_t w = 0; w < words; w += W) {
                vi v[W];
                for (int i = 0; i < W; i++) {
                    int64_t row = first + j * W + i;
                    v[i] = row < m ? load_words(from + row * words + w) : (vi){0};
                }
                transpose(v);
                for (int i = 0; i < W; i++) store(to + ((w + i) * nv + j) * W, (vf)v[i]);
            }
    }
}

/* The way back: strips of [dims, lanes] to [m, width]. */
INLINE void turn_back(const float *from, int64_t m, int64_t dims, float *to, int64_t width) {
    for (int64_t first = 0, nv; first < m; first += nv * W, from += nv * W * dims) {
        nv = strip_of(whole(m - first, W) / W);
        for (int64_t j = 0; j < nv; j++)
            for (int64_t d = 0; d < dims; d += W) {
                vi v[W];
                for (int i = 0; i < W; i++) v[i] = load_words(from + ((d + i) * nv + j) * W);
                transpose(v);
                for (int i = 0; i < W && first + j * W + i < m; i++)
                    store(to + (first + j * W + i) * width + d, (vf)v[i]);
            }
    }
}

/* Keys of a call from number `key` on, for the unit's head `h`. */
INLINE Ahead keys_of(const Unit *unit, const Call *call, int64_t key, int64_t h) {
    const Layer *layer = unit->layer;
    const Pool *pool = layer->pools + call->pool;
    int64_t size = layer->is_bfloat16 ? 2 : 4, head = unit->first_head + h;
    int64_t at = (call->first_slot + key) * pool->key_token + head * pool->key_head;
    return (Ahead){pool->key + at * size, pool->key_token * size, layer->key_dim * size};
}

INLINE Ahead values_of(const Unit *unit, const Call *call, int64_t key, int64_t h) {
    const Layer *layer = unit->layer;
    const Pool *pool = layer->pools + call->pool;
    int64_t size = layer->is_bfloat16 ? 2 : 4, head = unit->first_head + h;
    int64_t at = (call->first_slot + key) * pool->value_token + head * pool->value_head;
    return (Ahead){pool->value + at * size, pool->value_token * size, layer->value_dim * size};
}

INLINE void attend_wide(const Unit *unit, char *scratch, int how, int is_half) {
    const Layer *layer = unit->layer;
    const Call *call = unit->call;
    int64_t group = layer->num_heads / layer->num_kv_heads;
    int64_t per_word = how == PAIRS ? 2 : 1;
    int64_t m = (unit->last_row - unit->first_row) * group, readers = (call->last - call->first) * group;
    int64_t lanes = whole(m, W), dims = whole(layer->value_dim, W), width = width_of(layer->value_dim);
    Block block = {.value_dims = layer->value_dim};
    block.key_steps = (layer->key_dim + per_word - 1) / per_word;
    block.key_words = whole(block.key_steps, W);
    block.value_words = whole((layer->value_dim + per_word - 1) / per_word, W);

    float *scores = (float *)scratch;
    char *keys = (char *)(scores + BLOCK * 3 * W), *values = keys + 4 * BLOCK * MAX_DIM;
    float *queries = (float *)(values + 4 * BLOCK * MAX_DIM);
    float *outputs = queries + UNIT_ROWS * MAX_DIM, *states = outputs + UNIT_ROWS * MAX_DIM;
    block.values = values;
    int in_place = (how == PAIRS) == is_half && (how == FLOATS || layer->key_dim % 2 == 0);

    int64_t num_heads = unit->last_head - unit->first_head;
    for (int64_t h = 0; h < num_heads; h++) { /* the first block comes while queries are packed */
        Ahead first_keys = keys_of(unit, call, unit->first_key, h);
        Ahead first_values = values_of(unit, call, unit->first_key, h);
        ask_for(&first_keys, 0, 1, 1);
        ask_for(&first_values, 0, 1, 1);
    }
    for (int64_t h = 0; h < num_heads; h++) {
        pack_queries(unit, unit->first_head + h, how, block.key_words, (char *)outputs); /* there for now */
        turn_rows(outputs, m, block.key_words, queries + h * lanes * block.key_words);
    }
    memset(outputs, 0, (size_t)(4 * num_heads * lanes * dims));
    for (int64_t h = 0; h < num_heads; h++)
        for (int64_t first = 0, nv; first < lanes; first += nv * W) {
            nv = strip_of((lanes - first) / W);
            float *state = states + 2 * (h * lanes + first);
            for (int64_t i = 0; i < nv * W; i++) state[i] = -INFINITY, state[nv * W + i] = 0;
        }
    int64_t key = unit->first_key, end = unit->last_key;
    for (const Call *last = call + unit->num_calls; call < last;) {
        block.key = key;
        block.num = end - key < BLOCK ? end - key : BLOCK;
        block.rows = whole(block.num, TILE_ROWS);
        if (call->causal && key >= unit->last_row) break;
        const Call *next = key + BLOCK < end ? call : call + 1;
        int64_t next_key = key + BLOCK < end ? key + BLOCK : 0;
        for (int64_t h = 0; h < num_heads; h++) {
            Ahead from = keys_of(unit, call, key, h);
            block.keys = from.from, block.key_stride = from.stride;
            if (!in_place || block.num < block.rows) {
                copy_rows(how, from.from, from.stride, block.num, block.rows, layer->key_dim, is_half, block.key_words,
                          keys);
                block.keys = keys, block.key_stride = 4 * block.key_words;
            }
            from = values_of(unit, call, key, h);
            if (how == PAIRS)
                pair_rows(from.from, from.stride, block.num, block.rows, layer->value_dim, block.value_words, values);
            else
                copy_rows(how, from.from, from.stride, block.num, block.rows, layer->value_dim, is_half,
                          block.value_words, values);
            for (int64_t first = 0, nv; first < lanes; first += nv * W) {
                nv = strip_of((lanes - first) / W);
                block.next_keys.from = block.next_values.from = NULL;
                if (first == 0 && next < last) {
                    block.next_keys = keys_of(unit, next, next_key, h);
                    block.next_values = values_of(unit, next, next_key, h);
                }
                const float *q = queries + (h * lanes + first) * block.key_words;
                float *state = states + 2 * (h * lanes + first), *o = outputs + (h * lanes + first) * dims;
                if (nv == 3) attend_strip(unit, how, 3, &block, first, q, scores, state, o);
                else if (nv == 2) attend_strip(unit, how, 2, &block, first, q, scores, state, o);
                else attend_strip(unit, how, 1, &block, first, q, scores, state, o);
            }
        }
        key = next_key;
        if (next > call && next < last) end = next->num_tokens;
        call = next;
    }
    float scaling = layer->softcap != 0 ? 1 : (float)layer->scaling;
    for (int64_t h = 0; h < num_heads; h++) {
        int64_t at = (unit->first_head + h) * readers + unit->first_row * group;
        turn_back(outputs + h * lanes * dims, m, dims, unit->outputs + at * width, width);
        for (int64_t first = 0, nv; first < lanes; first += nv * W) {
            nv = strip_of((lanes - first) / W);
            const float *state = states + 2 * (h * lanes + first);
            for (int64_t i = 0; i < nv * W && first + i < m; i++) {
                unit->states[2 * (at + first + i)] = state[i] * scaling;
                unit->states[2 * (at + first + i) + 1] = state[nv * W + i];
            }
        }
    }
}

#endif
