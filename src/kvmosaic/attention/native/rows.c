/* Small operations of a transformer layer, row by row, in bfloat16; compiled once per instruction set (see tile.c).
 *
 * Each rounds where transformers rounds: numbers are widened to float32, computed, and cut to bfloat16 to the nearest
 * even. A row is computed in one way only, whatever stands beside it and however many threads there are.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define INLINE static inline __attribute__((always_inline))
#define EXPORT(name) JOIN(name, PATH)

#if defined(__AVX512F__)
#include <immintrin.h>
#define W 16
#elif defined(__AVX2__)
#define W 8
#else
#define W 4
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef uint16_t bf16;
typedef void (*Parallel)(void (*work)(void *), void *data, unsigned num_threads, unsigned flags); /* GOMP_parallel */

enum { PART = 1 << 14 }; /* numbers that one thread takes at a time */

INLINE vf all(float x) { return x - (vf){0}; }
INLINE vf choose(vi where, vf yes, vf no) { return (vf)((where & (vi)yes) | (~where & (vi)no)); }
INLINE vf widen(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }

/* To the nearest even; with AVX512-BF16, numbers below 2^-126 become 0. */
INLINE vh narrow(vf x) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu is_number = (vu)(x == x);
    return __builtin_convertvector((rounded & is_number) | (0x7fc0 & ~is_number), vh);
#endif
}

INLINE vf rounded(vf x) { return widen(narrow(x)); }

/* `count` of the numbers at p, then zeros. */
INLINE vf load(const bf16 *p, int64_t count) {
    vh h = {0};
    if (count >= W) memcpy(&h, p, sizeof h);
    else memcpy(&h, p, (size_t)count * sizeof *p);
    return widen(h);
}

INLINE void store(bf16 *p, vf x, int64_t count) {
    vh h = narrow(x);
    if (count >= W) memcpy(p, &h, sizeof h);
    else memcpy(p, &h, (size_t)count * sizeof *p);
}

INLINE float sum_of(vf x) {
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
}

/* Between the two; what is not a number stays so. */
INLINE vf clamped(vf x, float low, float high) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)all(high), _mm512_max_ps((__m512)all(low), (__m512)x));
#else
    x = choose(x < low, all(low), x);
    return choose(x > high, all(high), x);
#endif
}

/* e^x to 2 units in the last place (Cephes); arguments are kept between -87 and 88. */
INLINE vf exponential(vf x) {
    x = clamped(x, -87.0f, 88.0f);
    vf shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the whole number lands in the low bits */
    vf whole = shifted - 12582912.0f;
    vf r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vf y = ((((r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
            1.6666665459e-1f) * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    return y * (vf)(((vi)shifted - 0x4B400000 + 127) << 23);
}

/* Work on `count` items, shared out in parts. */
typedef struct Job Job;
struct Job {
    void (*work)(const Job *job, int64_t first, int64_t last);
    const void *plan;
    const bf16 *a, *b, *c, *d;
    bf16 *x, *y;
    int64_t count, part, next;
};

static void run_parts(void *data) {
    Job *job = data;
    for (;;) {
        int64_t first = __atomic_fetch_add(&job->next, job->part, __ATOMIC_RELAXED);
        if (first >= job->count) return;
        job->work(job, first, first + job->part < job->count ? first + job->part : job->count);
    }
}

/* `width`: numbers per item. */
static void run(Job *job, int64_t width, Parallel parallel, int64_t num_threads) {
    job->part = width < PART ? PART / width : 1;
    if (!parallel || num_threads <= 1 || job->count <= job->part) job->work(job, 0, job->count);
    else parallel(run_parts, job, (unsigned)num_threads, 0);
}

/* Norm: out = x / sqrt(mean(x^2) + epsilon) * weight. */
enum { ADDS_ONE = 1, WEIGHS_WIDE = 2 }; /* 1 + weight; weighed before it is rounded */

typedef struct {
    int64_t width, form;
    double epsilon;
    Parallel parallel;
} Norm;

static void norm_rows(const Job *job, int64_t first, int64_t last) {
    const Norm *norm = job->plan;
    int64_t width = norm->width;
    int adds_one = (norm->form & ADDS_ONE) != 0, wide = (norm->form & WEIGHS_WIDE) != 0;
    for (int64_t row = first; row < last; row++) {
        const bf16 *from = job->a + row * width;
        bf16 *out = job->x + row * width;
        vf squares = {0};
        if (job->b) { /* the residual: x + b is kept, and normed */
            bf16 *sum = job->y + row * width;
            for (int64_t i = 0; i < width; i += W) {
                vf x = rounded(load(from + i, width - i) + load(job->b + row * width + i, width - i));
                store(sum + i, x, width - i);
                squares += x * x;
            }
            from = sum;
        } else {
            for (int64_t i = 0; i < width; i += W) {
                vf x = load(from + i, width - i);
                squares += x * x;
            }
        }
        float scale = 1.0f / sqrtf(sum_of(squares) / (float)width + (float)norm->epsilon);
        for (int64_t i = 0; i < width; i += W) {
            vf x = load(from + i, width - i) * scale, weight = load(job->c + i, width - i);
            if (adds_one) weight += 1.0f;
            store(out + i, (wide ? x : rounded(x)) * weight, width - i);
        }
    }
}

/* [num_rows, width] -> out. With `residual`, sum = x + residual is stored and normed. */
void EXPORT(kvmosaic_norm)(const Norm *norm, const bf16 *x, const bf16 *residual, const bf16 *weight, bf16 *sum,
                           bf16 *out, int64_t num_rows, int64_t num_threads) {
    Job job = {norm_rows, norm, x, residual, weight, 0, out, sum, num_rows, 0, 0};
    run(&job, norm->width, norm->parallel, num_threads);
}

/* Gate: gate = activation(gate) * up, in place. */
enum { SILU, GELU_TANH };

typedef struct {
    int64_t activation;
    Parallel parallel;
} Gate;

static void gate_numbers(const Job *job, int64_t first, int64_t last) {
    const Gate *gate = job->plan;
    for (int64_t i = first; i < last; i += W) {
        vf x = load(job->x + i, last - i), y;
        if (gate->activation == SILU) {
            y = x / (1.0f + exponential(-x));
        } else {
            vf z = (x + x * x * x * 0.044715f) * 0.7978845608028654f;
            vf e = exponential(z * 2.0f);
            y = x * 0.5f * (1.0f + (1.0f - 2.0f / (e + 1.0f)));
        }
        store(job->x + i, rounded(y) * load(job->a + i, last - i), last - i);
    }
}

void EXPORT(kvmosaic_gate)(const Gate *gate, bf16 *x, const bf16 *up, int64_t count, int64_t num_threads) {
    Job job = {gate_numbers, gate, up, 0, 0, 0, x, 0, count, 0, 0};
    run(&job, 1, gate->parallel, num_threads);
}

/* Rotation of queries and keys, in place: a pair (a, b) becomes (a cos - b sin, b cos + a sin). */
typedef struct {
    int64_t num_heads[2], stride[2], head_dim; /* queries, keys; stride: numbers from row to row */
    int64_t dims;                              /* rotated numbers at the beginning of a head */
    int64_t pairs;                             /* neighbours are a pair; otherwise a number of each half is */
    int64_t table_dim, second;                 /* table numbers per row; where those of the pairs' b begin */
    int64_t step;                              /* from one pair's table number to the next one's */
    int64_t wide;                              /* rounded once, at the end */
    double sign;                               /* -1: the other way round */
    Parallel parallel;
} Turn;

INLINE vf joined(vf a, vf b, int wide) { return wide ? a + b : rounded(a) + rounded(b); }

static void turn_halves(const Turn *turn, bf16 *x, const bf16 *cosines, const bf16 *sines) {
    int64_t half = turn->dims / 2;
    int wide = turn->wide != 0;
    float sign = (float)turn->sign;
    for (int64_t i = 0; i < half; i += W) {
        int64_t count = half - i;
        vf a = load(x + i, count), b = load(x + half + i, count);
        vf cos_a = load(cosines + i, count), sin_a = load(sines + i, count) * sign;
        vf cos_b = load(cosines + turn->second + i, count), sin_b = load(sines + turn->second + i, count) * sign;
        store(x + i, joined(a * cos_a, -(b * sin_a), wide), count);
        store(x + half + i, joined(b * cos_b, a * sin_b, wide), count);
    }
}

static void turn_neighbours(const Turn *turn, bf16 *x, const bf16 *cosines, const bf16 *sines) {
    enum { MOST = W };
    float sign = (float)turn->sign;
    int wide = turn->wide != 0;
    int64_t half = turn->dims / 2;
    for (int64_t i = 0; i < half; i += W) {
        int count = half - i < W ? (int)(half - i) : W;
        bf16 parts[6][MOST] = {{0}};
        for (int j = 0; j < count; j++) {
            int64_t at = (i + j) * turn->step;
            parts[0][j] = x[2 * (i + j)], parts[1][j] = x[2 * (i + j) + 1];
            parts[2][j] = cosines[at], parts[3][j] = cosines[at + turn->second];
            parts[4][j] = sines[at], parts[5][j] = sines[at + turn->second];
        }
        vf a = load(parts[0], W), b = load(parts[1], W);
        store(parts[0], joined(a * load(parts[2], W), -(b * (load(parts[4], W) * sign)), wide), W);
        store(parts[1], joined(b * load(parts[3], W), a * (load(parts[5], W) * sign), wide), W);
        for (int j = 0; j < count; j++) x[2 * (i + j)] = parts[0][j], x[2 * (i + j) + 1] = parts[1][j];
    }
}

static void turn_rows(const Job *job, int64_t first, int64_t last) {
    const Turn *turn = job->plan;
    bf16 *heads[2] = {job->x, job->y};
    for (int64_t row = first; row < last; row++)
        for (int which = 0; which < 2; which++)
            for (int64_t head = 0; head < turn->num_heads[which]; head++) {
                bf16 *x = heads[which] + row * turn->stride[which] + head * turn->head_dim;
                const bf16 *cosines = job->a + row * turn->table_dim, *sines = job->b + row * turn->table_dim;
                if (turn->pairs) turn_neighbours(turn, x, cosines, sines);
                else turn_halves(turn, x, cosines, sines);
            }
}

void EXPORT(kvmosaic_turn)(const Turn *turn, bf16 *query, bf16 *key, const bf16 *cosines, const bf16 *sines,
                           int64_t num_rows, int64_t num_threads) {
    Job job = {turn_rows, turn, cosines, sines, 0, 0, query, key, num_rows, 0, 0};
    run(&job, (turn->num_heads[0] + turn->num_heads[1]) * turn->head_dim, turn->parallel, num_threads);
}
