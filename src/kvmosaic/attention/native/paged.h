/* Attention of one layer over runs of keys in blocks: what goes in, and how it is cut into units. */
#ifndef KVMOSAIC_PAGED_H
#define KVMOSAIC_PAGED_H

#include <stdint.h>

enum { MAX_DIM = 256, BLOCK = 64, TILE = 144, UNIT_ROWS = 144, NARROW = 8 };
/* BLOCK: keys scored at once. TILE: query heads per key head in one unit. NARROW: up to here keys are read in place. */

/* Where keys and values lie: a pool of slots, or the step's own rows. Strides count elements. */
typedef struct {
    const char *key, *value;
    int64_t key_token, key_head, value_token, value_head;
} Pool;

/* The stacked queries [first, last) read the keys [first_slot, first_slot + num_tokens) of a pool. */
typedef struct {
    int64_t pool, first_slot, num_tokens, first, last, causal;
    const uint8_t *mask; /* [last - first, num_tokens], or NULL: everything is seen */
} Call;

typedef struct {
    const char *query; /* [T, H, D] */
    char *output;      /* [T, H, Dv] */
    float *lse;        /* [T, H] */
    const Pool *pools;
    const Call *calls;
    const int64_t *rows; /* [R], the row of every stacked query */
    const float *cosines, *sines; /* [R, D] rotate the stacked queries, or NULL */
    const int64_t *partners;      /* [D] */
    char *scratch;
    int64_t query_row, query_head, num_rows, num_stacked, num_calls;
    int64_t num_heads, num_kv_heads, key_dim, value_dim, is_bfloat16;
    double scaling, softcap; /* softcap 0: none */
} Layer;

/* A part of one call: keys [first_key, last_key), rows [first_row, last_row) of its readers, some key heads. Or all
 * keys of several calls with the same readers, none of them turned: then `num_calls` counts them. */
typedef struct {
    const Layer *layer;
    const Call *call;
    int64_t num_calls;
    int64_t first_key, last_key, first_row, last_row, first_head, last_head;
    float *outputs; /* [G, readers * H/G, width], columns in the order of `column_of` */
    float *states;  /* [G, readers * H/G, 2]: largest score, sum of weights */
} Unit;

/* Floats of one partial output: whole pairs of the widest vectors. */
static inline int64_t width_of(int64_t dim) { return (dim + 31) / 32 * 32; }

/* What is compiled for every instruction set. */
typedef struct {
    void (*attend)(const Unit *unit, char *scratch);
    void (*add)(float *sum, const float *x, float factor, int64_t num);                      /* sum += x factor */
    void (*write)(char *to, const float *x, float factor, int64_t num, int64_t is_bfloat16); /* x factor */
} Way;

extern const Way kvmosaic_way_portable, kvmosaic_way_avx2, kvmosaic_way_avx512;

#endif
