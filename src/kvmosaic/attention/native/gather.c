/* Copies of tokens from a paged cache whose blocks hold, head by head, keys transposed and then values.
 *
 *     one block of one head    | keys [dim, block_size] | values [block_size, dim] |
 *     the copies               keys [tokens, heads, dim], values [tokens, heads, dim]
 */
#include <stdint.h>
#include <string.h>

typedef void (*Parallel)(void (*work)(void *), void *data, unsigned num_threads, unsigned flags); /* GOMP_parallel */

enum { PART = 128 }; /* tokens that one thread takes at a time */

typedef struct {
    const char *cache;
    const int64_t *slots;
    char *keys, *values;
    int64_t num_slots, num_heads, dim, block_size, number_bytes, block_bytes, next; /* block_bytes: from block to block */
} Gather;

typedef uint32_t Words __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(8)));

/* Four numbers of one row, or of two rows of 16 bits, as words. */
static inline Words words_of(const char *row, int64_t row_bytes, int64_t number_bytes) {
    if (number_bytes == 4) {
        Words words;
        memcpy(&words, row, sizeof words);
        return words;
    }
    Halves low, high;
    memcpy(&low, row, sizeof low);
    memcpy(&high, row + row_bytes, sizeof high);
    return __builtin_convertvector(low, Words) | __builtin_convertvector(high, Words) << 16;
}

/* to [num, dim] = from [dim, num], in squares of four words; rows of `to` are to_bytes apart. */
static inline void transpose(const char *from, int64_t from_bytes, char *to, int64_t to_bytes, int64_t num, int64_t dim,
                             int64_t number_bytes) {
    int64_t per_word = 4 / number_bytes, whole_dim = dim / (4 * per_word) * (4 * per_word), whole_num = num / 4 * 4;
    for (int64_t d = 0; d < whole_dim; d += 4 * per_word) {
        const char *rows = from + d * from_bytes;
        for (int64_t p = 0; p < whole_num; p += 4) {
            Words a[4];
            for (int i = 0; i < 4; i++)
                a[i] = words_of(rows + i * per_word * from_bytes + p * number_bytes, from_bytes, number_bytes);
            Words low = __builtin_shuffle(a[0], a[1], (Words){0, 4, 1, 5});
            Words high = __builtin_shuffle(a[0], a[1], (Words){2, 6, 3, 7});
            Words low2 = __builtin_shuffle(a[2], a[3], (Words){0, 4, 1, 5});
            Words high2 = __builtin_shuffle(a[2], a[3], (Words){2, 6, 3, 7});
            Words out[4] = {__builtin_shuffle(low, low2, (Words){0, 1, 4, 5}), __builtin_shuffle(low, low2, (Words){2, 3, 6, 7}),
                            __builtin_shuffle(high, high2, (Words){0, 1, 4, 5}),
                            __builtin_shuffle(high, high2, (Words){2, 3, 6, 7})};
            for (int i = 0; i < 4; i++) memcpy(to + (p + i) * to_bytes + d * number_bytes, out + i, sizeof out[i]);
        }
    }
    for (int64_t p = 0; p < num; p++)
        for (int64_t d = p < whole_num ? whole_dim : 0; d < dim; d++)
            memcpy(to + p * to_bytes + d * number_bytes, from + d * from_bytes + p * number_bytes, (size_t)number_bytes);
}

/* `num` tokens of one block, from token `offset` on. */
static void gather_run(const Gather *g, int64_t block, int64_t offset, int64_t num, int64_t at) {
    int64_t row = g->num_heads * g->dim, half = g->block_size * g->dim * g->number_bytes;
    for (int64_t h = 0; h < g->num_heads; h++) {
        const char *from = g->cache + block * g->block_bytes + 2 * h * half;
        const char *value = from + half + offset * g->dim * g->number_bytes;
        char *keys = g->keys + (at * row + h * g->dim) * g->number_bytes;
        char *values = g->values + (at * row + h * g->dim) * g->number_bytes;
        from += offset * g->number_bytes;
        int64_t from_bytes = g->block_size * g->number_bytes, to_bytes = row * g->number_bytes;
        if (g->number_bytes == 4) transpose(from, from_bytes, keys, to_bytes, num, g->dim, 4);
        else transpose(from, from_bytes, keys, to_bytes, num, g->dim, 2);
        for (int64_t p = 0; p < num; p++)
            memcpy(values + p * row * g->number_bytes, value + p * g->dim * g->number_bytes,
                   (size_t)(g->dim * g->number_bytes));
    }
}

static void gather_parts(void *data) {
    Gather *g = data;
    for (;;) {
        int64_t at = __atomic_fetch_add(&g->next, PART, __ATOMIC_RELAXED);
        int64_t end = at + PART < g->num_slots ? at + PART : g->num_slots;
        if (at >= end) return;
        while (at < end) {
            int64_t block = g->slots[at] / g->block_size, offset = g->slots[at] % g->block_size, num = 1;
            while (at + num < end && offset + num < g->block_size && g->slots[at + num] == g->slots[at] + num) num++;
            gather_run(g, block, offset, num, at);
            at += num;
        }
    }
}

/* `number_bytes` is 2 or 4. All slots lie inside the cache. `parallel`: GOMP_parallel, or NULL. */
void kvmosaic_gather(Gather *gather, Parallel parallel, int64_t num_threads) {
    gather->next = 0;
    if (num_threads > (gather->num_slots + PART - 1) / PART) num_threads = (gather->num_slots + PART - 1) / PART;
    if (!parallel || num_threads <= 1) gather_parts(gather);
    else parallel(gather_parts, gather, (unsigned)num_threads, 0);
}
