/* Attention of one layer over runs of keys in blocks.
 *
 *     calls -> units (keys x rows x heads), any thread takes the next one -> partial outputs -> merge by log-sum-exp
 *
 * How calls are cut into units, and the order of the merge, depend on the calls alone: the number of threads cannot
 * change a bit. Threads are borrowed from the OpenMP runtime that torch has loaded, so that no second pool of threads
 * waits beside it; without one, the caller works alone.
 */
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "paged.h"

enum { PORTABLE, AVX2, AVX512 };
enum { MAX_THREADS = 64, WORTH_A_THREAD = 1 << 18, JOINED_KEYS = 1600 };

typedef void (*Parallel)(void (*work)(void *), void *data, unsigned num_threads, unsigned flags); /* GOMP_parallel */

int64_t kvmosaic_version(void) { return 2; }

/* Which of the three ways this processor knows, the best one last. */
int64_t kvmosaic_best_path(void) {
#if defined(HAS_AVX512)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16"))
        return AVX512;
#endif
#if defined(HAS_AVX2)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return PORTABLE;
}

/* How one call is cut. */
typedef struct {
    int64_t split, num_splits, tile_rows, num_tiles, unit_heads, num_head_parts, num_units;
    int64_t readers; /* query heads per key head */
    int64_t first_unit, first_output, first_state;
    int64_t num_calls; /* this call and the ones joined with it; 0: joined with an earlier one */
    int64_t left;      /* how many of the next calls are joined with an earlier one */
} Cut;

static int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

static Cut cut(const Layer *layer, const Call *call) {
    int64_t group = layer->num_heads / layer->num_kv_heads, rows = call->last - call->first;
    Cut c = {.readers = rows * group};
    c.tile_rows = TILE / group < rows ? TILE / group : rows;
    c.num_tiles = parts(rows, c.tile_rows);
    c.tile_rows = parts(rows, c.num_tiles);
    int64_t spread = call->num_tokens * rows / 2048;
    c.split = c.readers <= NARROW ? 2 * BLOCK : 8 * BLOCK;
    if (spread > c.split) c.split = parts(spread, BLOCK) * BLOCK;
    c.num_splits = parts(call->num_tokens, c.split);
    int64_t heads = UNIT_ROWS / (parts(c.tile_rows * group, 16) * 16);
    c.unit_heads = heads < 1 ? 1 : heads > layer->num_kv_heads ? layer->num_kv_heads : heads;
    c.num_head_parts = parts(layer->num_kv_heads, c.unit_heads);
    c.num_units = c.num_splits * c.num_tiles * c.num_head_parts;
    return c;
}

/* How many calls from this one on are one piece of work: few keys each, the same queries, not rotated, many of them. */
static int64_t joined(const Layer *layer, int64_t number) {
    const Call *first = layer->calls + number, *call = first;
    int64_t rows = first->last - first->first, keys = 0;
    if (layer->cosines || rows * (layer->num_heads / layer->num_kv_heads) <= NARROW) return 1;
    for (; call < layer->calls + layer->num_calls; call++) {
        keys += call->num_tokens;
        if (keys > JOINED_KEYS || call->causal || call->mask || call->last - call->first != rows) break;
        if (memcmp(layer->rows + first->first, layer->rows + call->first, (size_t)(8 * rows))) break;
    }
    return call > first ? call - first : 1;
}

/* The cut of call `number`, whose units and partial results follow the ones of the previous call. */
static Cut next_cut(const Layer *layer, int64_t number, Cut before, int joins) {
    int64_t partials = before.num_splits * before.readers * layer->num_kv_heads;
    Cut c = {0};
    if (before.left > 0) c.left = before.left - 1;
    else if (number < layer->num_calls) {
        c = cut(layer, layer->calls + number);
        c.num_calls = joins ? joined(layer, number) : 1;
        c.left = c.num_calls - 1;
        if (c.left > 0) {
            c.num_splits = 1;
            c.num_units = c.num_tiles * c.num_head_parts;
        }
    }
    c.first_unit = before.first_unit + before.num_units;
    c.first_output = before.first_output + partials * width_of(layer->value_dim);
    c.first_state = before.first_state + 2 * partials;
    return c;
}

static int64_t aligned(int64_t bytes) { return (bytes + 127) / 128 * 128; }

static int64_t thread_bytes(void) {
    return aligned(4 * (3 * 16 * BLOCK + 2 * BLOCK * MAX_DIM + 2 * UNIT_ROWS * (MAX_DIM + 1)));
}

static int64_t index_bytes(const Layer *layer) {
    int64_t cuts = (layer->num_calls + 1) * (int64_t)sizeof(Cut);
    return aligned(8 * (layer->num_rows + 1 + 2 * layer->num_stacked) + cuts);
}

/* Bytes that `kvmosaic_attend` needs in `layer->scratch` (aligned to 64). */
int64_t kvmosaic_scratch_bytes(const Layer *layer, int64_t num_threads) {
    Cut c = {0};
    for (int64_t i = 0; i <= layer->num_calls; i++) c = next_cut(layer, i, c, 0); /* rotated or not is still open */
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    return num_threads * thread_bytes() + index_bytes(layer) + 4 * (c.first_output + c.first_state) + 256;
}

typedef struct {
    const Layer *layer;
    const Way *way;
    char *threads;
    int64_t *first_partial, *stacked; /* by row: [T + 1] into the stacked queries [R] */
    int64_t *call_of;                 /* [R] */
    Cut *cuts;                        /* [calls + 1] */
    float *outputs, *states;
    int64_t num_units, merge_rows;
    atomic_long next_unit, next_rows, next_thread;
} Job;

static void run_units(void *data) {
    Job *job = data;
    const Layer *layer = job->layer;
    char *scratch = job->threads + atomic_fetch_add(&job->next_thread, 1) * thread_bytes();
    int64_t number = 0;
    for (int64_t i; (i = atomic_fetch_add(&job->next_unit, 1)) < job->num_units;) {
        while (i >= job->cuts[number + 1].first_unit) number++;
        const Call *call = layer->calls + number;
        Cut c = job->cuts[number];
        int64_t part = i - c.first_unit, heads = part % c.num_head_parts, tile = part / c.num_head_parts % c.num_tiles;
        int64_t split = part / c.num_head_parts / c.num_tiles, rows = call->last - call->first;
        Unit unit = {layer, call, c.num_calls, .first_key = split * c.split, .first_row = tile * c.tile_rows,
                     .first_head = heads * c.unit_heads};
        unit.last_key = unit.first_key + c.split < call->num_tokens ? unit.first_key + c.split : call->num_tokens;
        if (c.num_calls > 1) unit.last_key = call->num_tokens;
        unit.last_row = unit.first_row + c.tile_rows < rows ? unit.first_row + c.tile_rows : rows;
        unit.last_head = unit.first_head + c.unit_heads;
        if (unit.last_head > layer->num_kv_heads) unit.last_head = layer->num_kv_heads;
        int64_t partial = split * c.readers * layer->num_kv_heads;
        unit.outputs = job->outputs + c.first_output + partial * width_of(layer->value_dim);
        unit.states = job->states + c.first_state + 2 * partial;
        job->way->attend(&unit, scratch);
    }
}

/* Visits the partial results of a row and head in order; with `sum`, adds them up relative to `highest`. */
static float visit(const Job *job, int64_t row, int64_t head, float *sum, float highest, float *total) {
    const Layer *layer = job->layer;
    int64_t group = layer->num_heads / layer->num_kv_heads, width = width_of(layer->value_dim);
    for (int64_t n = job->first_partial[row]; n < job->first_partial[row + 1]; n++) {
        const Call *call = layer->calls + job->call_of[job->stacked[n]];
        Cut c = job->cuts[job->call_of[job->stacked[n]]];
        const float *outputs = job->outputs + c.first_output, *states = job->states + c.first_state;
        int64_t at = head / group * c.readers + (job->stacked[n] - call->first) * group + head % group;
        for (int64_t split = 0; split < c.num_splits; split++, at += c.readers * layer->num_kv_heads) {
            float score = states[2 * at], weight = states[2 * at + 1];
            if (!sum) {
                if (score > highest) highest = score;
                continue;
            }
            if (score == -INFINITY && weight == 0) continue;
            float factor = expf(score - highest);
            *total += factor * weight;
            job->way->add(sum, outputs + at * width, factor, layer->value_dim);
        }
    }
    return highest;
}

static void merge_rows(void *data) {
    Job *job = data;
    const Layer *layer = job->layer;
    int64_t size = layer->is_bfloat16 ? 2 : 4;
    for (int64_t first; (first = atomic_fetch_add(&job->next_rows, job->merge_rows)) < layer->num_rows;) {
        int64_t last = first + job->merge_rows < layer->num_rows ? first + job->merge_rows : layer->num_rows;
        for (int64_t row = first; row < last; row++)
            for (int64_t head = 0; head < layer->num_heads; head++) {
                float sum[MAX_DIM] = {0}, total = 0;
                float highest = visit(job, row, head, NULL, -INFINITY, NULL);
                visit(job, row, head, sum, highest == -INFINITY ? 0 : highest, &total);
                int64_t at = row * layer->num_heads + head;
                float factor = total == 0 ? 0 : 1 / total;
                job->way->write(layer->output + at * layer->value_dim * size, sum, factor, layer->value_dim,
                                layer->is_bfloat16);
                layer->lse[at] = total == 0 ? -INFINITY : highest + logf(total);
            }
    }
}

/* Sorts the stacked queries by row, keeping their order. */
static void index_rows(Job *job) {
    const Layer *layer = job->layer;
    memset(job->first_partial, 0, (size_t)(8 * (layer->num_rows + 1)));
    for (int64_t n = 0; n < layer->num_stacked; n++) job->first_partial[layer->rows[n] + 1]++;
    for (int64_t t = 0; t < layer->num_rows; t++) job->first_partial[t + 1] += job->first_partial[t];
    for (int64_t i = 0; i < layer->num_calls; i++)
        for (int64_t n = layer->calls[i].first; n < layer->calls[i].last; n++) job->call_of[n] = i;
    for (int64_t n = 0; n < layer->num_stacked; n++) job->stacked[job->first_partial[layer->rows[n]]++] = n;
    for (int64_t t = layer->num_rows; t > 0; t--) job->first_partial[t] = job->first_partial[t - 1];
    job->first_partial[0] = 0;
}

/* Attends. `path`: one that this processor knows. `parallel`: GOMP_parallel, or NULL. Returns 0; 1: unknown path. */
int64_t kvmosaic_attend(const Layer *layer, int64_t path, Parallel parallel, int64_t num_threads) {
    static const Way *const ways[] = {
        &kvmosaic_way_portable,
#if defined(HAS_AVX2)
        &kvmosaic_way_avx2,
#endif
#if defined(HAS_AVX512)
        &kvmosaic_way_avx512,
#endif
    };
    if (path < 0 || path > kvmosaic_best_path()) return 1;
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    Job job = {.layer = layer, .way = ways[path], .threads = layer->scratch};
    char *free_space = layer->scratch + num_threads * thread_bytes();
    job.first_partial = (int64_t *)free_space;
    job.stacked = job.first_partial + layer->num_rows + 1;
    job.call_of = job.stacked + layer->num_stacked;
    job.cuts = (Cut *)(job.call_of + layer->num_stacked);
    job.outputs = (float *)(free_space + index_bytes(layer));
    int64_t work = 0, group = layer->num_heads / layer->num_kv_heads;
    Cut c = {0};
    for (int64_t i = 0; i < layer->num_calls; i++) {
        const Call *call = layer->calls + i;
        job.cuts[i] = c = next_cut(layer, i, c, 1);
        int64_t readers = (call->last - call->first) * group;
        work += call->num_tokens * layer->num_kv_heads * (8 + readers) * (layer->key_dim + layer->value_dim) / 4;
    }
    Cut end = job.cuts[layer->num_calls] = next_cut(layer, layer->num_calls, c, 1);
    job.num_units = end.first_unit;
    job.states = job.outputs + end.first_output;
    index_rows(&job);
    job.merge_rows = parts(layer->num_rows, 4 * num_threads);
    int64_t useful = 1 + work / WORTH_A_THREAD;
    if (num_threads > useful) num_threads = useful;
    if (num_threads > job.num_units) num_threads = job.num_units;
    if (!parallel || num_threads <= 1) {
        run_units(&job);
        merge_rows(&job);
        return 0;
    }
    parallel(run_units, &job, (unsigned)num_threads, 0);
    if (end.first_output < WORTH_A_THREAD) merge_rows(&job);
    else parallel(merge_rows, &job, (unsigned)num_threads, 0);
    return 0;
}
