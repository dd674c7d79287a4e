/* One unit of attention, compiled once per instruction set (PATH names it; the compiler's flags choose it).
 *
 *     narrow   up to NARROW queries per key head: bound by reading
 *     wide     more of them: bound by multiplication
 */
#include "narrow.h"
#include "wide.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

static void attend(const Unit *unit, char *scratch) {
    const Layer *layer = unit->layer;
    int64_t m = (unit->last_row - unit->first_row) * (layer->num_heads / layer->num_kv_heads);
    if (m <= NARROW && unit->num_calls == 1) {
        if (!layer->is_bfloat16) attend_narrow(unit, scratch, FLOATS);
        else attend_narrow(unit, scratch, HAS_PAIRS ? PAIRS : PLANES);
    } else {
        if (!layer->is_bfloat16) attend_wide(unit, scratch, FLOATS, 0);
        else attend_wide(unit, scratch, HAS_PAIRS ? PAIRS : FLOATS, 1);
    }
}

static void add(float *sum, const float *x, float factor, int64_t num) {
    for (int64_t d = 0; d < num; d += W) store(sum + d, load(sum + d) + load(x + d) * factor);
}

static void write(char *to, const float *x, float factor, int64_t num, int64_t is_bfloat16) {
    float product[MAX_DIM];
    uint16_t halves[MAX_DIM];
    for (int64_t d = 0; d < num; d++) product[d] = x[d] * factor;
    for (int64_t d = 0; d < num && is_bfloat16; d++) halves[d] = rounded(product[d]);
    memcpy(to, is_bfloat16 ? (char *)halves : (char *)product, (size_t)(num * (is_bfloat16 ? 2 : 4)));
}

const Way JOIN(kvmosaic_way_, PATH) = {attend, add, write};
