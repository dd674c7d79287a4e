"""Triton kernels: attention of one tile of rows over one walk, and the merge of the walks' partial results.

Scores are kept in units of log 2, because the GPU computes powers of 2. Everything is accumulated in float32.
"""
# Triton reads the source of these functions and gives their parameters types of its own; those in capitals are
# compile-time constants.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _widened(x):
    """8 bits in float32; Triton 3.6 converts float8_e5m2, the upper half of a float16, for capability 8.9 only."""
    if x.dtype == tl.float8e5:
        return (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    return x.to(tl.float32)


# parts of one tensor begin anywhere: their alignment must not trigger a recompilation
@triton.jit(do_not_specialize_on_alignment=["blocks", "rows", "segments", "units"])
def attend_walks(
    query,
    query_row,
    query_head,
    cosines,
    sines,
    partners,
    own_key,
    own_value,
    own_key_row,
    own_key_head,
    own_value_row,
    own_value_head,
    request_key,
    request_value,
    request_key_row,
    request_key_head,
    request_value_row,
    request_value_head,
    chunk_key,
    chunk_value,
    chunk_key_row,
    chunk_key_head,
    chunk_value_row,
    chunk_value_head,
    blocks,
    chunk_key_block,
    chunk_value_block,
    key_scale,
    value_scale,
    masks,
    rows,
    segments,
    units,
    outputs,
    sums,
    num_heads,
    scaling,
    softcap,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_TURNED: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    IS_MASKED: tl.constexpr,
    IS_DIRECT: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    """Program (u, g): unit u of the work list, key head g. See `Work` for segments and units.

    Lane i of a tile is query head g * GROUP + i % GROUP of its row i // GROUP. `outputs` [place, H, VALUE_DIM] and
    `sums` [place, H] are contiguous; with IS_DIRECT a place is a row. IS_WIDENED is for the interpreter, which takes
    bfloat16 for whole numbers when it multiplies.

    If TABLE_BLOCK is not 0, all runs are in "chunk_cache", which is a paged cache: slot s is stored at offset
    s % TABLE_BLOCK of block `blocks[s // TABLE_BLOCK]`. The cache itself has blocks of CACHE_BLOCK slots, of which
    TABLE_BLOCK is a multiple; `chunk_key_block` and `chunk_value_block` are their strides. With IS_SCALED, its
    numbers are multiplied by *`key_scale` and *`value_scale`.
    """
    unit = units + tl.program_id(0) * 5
    kv_head = tl.program_id(1)
    first_segment = tl.load(unit)
    last_segment = tl.load(unit + 1)
    first_row = tl.load(unit + 2)
    num_rows = tl.load(unit + 3)

    lane = tl.arange(0, TILE)
    row = lane // GROUP
    is_lane = row < num_rows
    head = kv_head * GROUP + lane % GROUP
    key_dims = tl.arange(0, BLOCK_KEY)
    value_dims = tl.arange(0, BLOCK_VALUE)
    is_key_dim = key_dims < KEY_DIM
    is_value_dim = value_dims < VALUE_DIM
    is_query = is_lane[:, None] & is_key_dim[None, :]

    highest = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.full([TILE], 0.0, tl.float32)
    summed = tl.full([TILE, BLOCK_VALUE], 0.0, tl.float32)
    for number in range(first_segment, last_segment):
        segment = segments + number * 7
        pool = tl.load(segment)
        first_slot = tl.load(segment + 1)
        num_keys = tl.load(segment + 2)
        stacked = tl.load(segment + 3) + first_row + row
        seen = tl.load(segment + 4) + first_row + row
        if TABLE_BLOCK:
            # 64 bits: in a cache with its heads outermost, they are as far apart as the cache is long
            key = chunk_key + kv_head.to(tl.int64) * chunk_key_head
            value = chunk_value + kv_head.to(tl.int64) * chunk_value_head
            key_row, value_row = chunk_key_row, chunk_value_row
        elif pool == 0:
            key = own_key + first_slot * own_key_row + kv_head * own_key_head
            value = own_value + first_slot * own_value_row + kv_head * own_value_head
            key_row, value_row = own_key_row, own_value_row
        elif pool == 1:
            key = request_key + first_slot * request_key_row + kv_head * request_key_head
            value = request_value + first_slot * request_value_row + kv_head * request_value_head
            key_row, value_row = request_key_row, request_value_row
        else:
            key = chunk_key + first_slot * chunk_key_row + kv_head * chunk_key_head
            value = chunk_value + first_slot * chunk_value_row + kv_head * chunk_value_head
            key_row, value_row = chunk_key_row, chunk_value_row

        reader = query + tl.load(rows + stacked, mask=is_lane, other=0) * query_row + head * query_head
        turned = tl.load(reader[:, None] + key_dims[None, :], mask=is_query, other=0.0)
        if IS_TURNED:
            partner = tl.load(partners + key_dims, mask=is_key_dim, other=0)
            other = tl.load(reader[:, None] + partner[None, :], mask=is_query, other=0.0).to(tl.float32)
            table = stacked[:, None] * KEY_DIM + key_dims[None, :]
            cosine = tl.load(cosines + table, mask=is_query, other=0.0)
            sine = tl.load(sines + table, mask=is_query, other=0.0)
            turned = (turned.to(tl.float32) * cosine + other * sine).to(turned.dtype)
        if IS_WIDENED:
            turned = turned.to(tl.float32)

        limit = tl.minimum(seen, num_keys)
        end = tl.max(tl.where(is_lane, limit, 0), 0)
        for first in range(0, end, KEYS):
            # 64 bits for where keys begin, 32 inside: addresses fill registers
            slot = first + tl.arange(0, KEYS)
            is_key = slot < end
            if TABLE_BLOCK:
                # 64 bits for every address: the blocks of a run are anywhere in the cache
                numbered = first_slot + slot
                block = tl.load(blocks + numbered // TABLE_BLOCK, mask=is_key, other=0).to(tl.int64)
                block = block * (TABLE_BLOCK // CACHE_BLOCK) + numbered % TABLE_BLOCK // CACHE_BLOCK
                offset = numbered % CACHE_BLOCK
                key_start, value_start = key, value
                key_at = (block * chunk_key_block + offset * key_row)[None, :] + key_dims[:, None]
                value_at = (block * chunk_value_block + offset * value_row)[:, None] + value_dims[None, :]
            else:
                key_start, value_start = key + first * key_row, value + first * value_row
                key_at = (tl.arange(0, KEYS) * key_row)[None, :] + key_dims[:, None]
                value_at = (tl.arange(0, KEYS) * value_row)[:, None] + value_dims[None, :]
            keys = tl.load(key_start + key_at, mask=is_key_dim[:, None] & is_key[None, :], other=0.0)
            if IS_SCALED:
                keys = (_widened(keys) * tl.load(key_scale)).to(query.dtype.element_ty)
            if IS_WIDENED:
                keys = keys.to(tl.float32)
            scores = tl.dot(turned, keys, input_precision="ieee") * scaling
            if IS_CAPPED:
                # tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|), which cannot overflow
                shrunk = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / softcap))
                capped = softcap * (1.0 - shrunk) / (1.0 + shrunk)
                scores = tl.where(scores < 0.0, -capped, capped)
            is_seen = is_lane[:, None] & (slot[None, :] < limit[:, None])
            if IS_MASKED:
                mask = tl.load(segment + 5)
                mask_at = masks + mask + (first_row + row[:, None]) * tl.load(segment + 6) + slot[None, :]
                # compared as a block: the interpreter of Triton 3.9 makes int64 of a comparison that is spread
                has_mask = (slot * 0 + mask >= 0)[None, :]
                is_seen = is_seen & (tl.load(mask_at, mask=is_seen & has_mask, other=1) != 0)
            scores = tl.where(is_seen, scores * LOG2_E, -float("inf"))
            # a lane that has seen no key keeps -inf, and -inf - -inf is NaN
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            level = tl.where(new_highest == -float("inf"), 0.0, new_highest)
            weights = tl.exp2(scores - level[:, None])
            fading = tl.exp2(highest - level)
            values = tl.load(value_start + value_at, mask=is_key[:, None] & is_value_dim[None, :], other=0.0)
            if IS_SCALED:
                values = (_widened(values) * tl.load(value_scale)).to(query.dtype.element_ty)
            total = total * fading + tl.sum(weights, 1)
            rounded = weights.to(values.dtype)
            if IS_WIDENED:
                rounded, values = rounded.to(tl.float32), values.to(tl.float32)
            summed = tl.dot(rounded, values, summed * fading[:, None], input_precision="ieee")
            highest = new_highest

    saw_nothing = total == 0.0
    total = tl.where(saw_nothing, 1.0, total)
    summed = summed / total[:, None]
    lse = tl.where(saw_nothing, -float("inf"), (highest + tl.log2(total)) * LN_2)
    if IS_DIRECT:
        stacked = tl.load(segments + first_segment * 7 + 3) + first_row + row
        place = tl.load(rows + stacked, mask=is_lane, other=0)
    else:
        place = tl.load(unit + 4) + row
    result = place * num_heads + head
    tl.store(sums + result, lse, mask=is_lane)
    output_at = outputs + result[:, None] * VALUE_DIM + value_dims[None, :]
    tl.store(output_at, summed.to(outputs.dtype.element_ty), mask=is_lane[:, None] & is_value_dim[None, :])


@triton.jit(do_not_specialize_on_alignment=["places", "starts"])
def merge_walks(
    partials,
    partial_sums,
    places,
    starts,
    outputs,
    sums,
    num_heads,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program (t, h): merges the partial results of row t and head h by their log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_VALUE)
    is_dim = dims < VALUE_DIM
    last = tl.load(starts + row + 1)
    highest = tl.full([1], -float("inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    summed = tl.full([BLOCK_VALUE], 0.0, tl.float32)
    for first in range(tl.load(starts + row), last, PARTS):
        part = first + tl.arange(0, PARTS)
        is_part = part < last
        partial = tl.load(places + part, mask=is_part, other=0) * num_heads + head
        lse = tl.load(partial_sums + partial, mask=is_part, other=-float("inf"))
        partial_at = partials + partial[:, None] * VALUE_DIM + dims[None, :]
        output = tl.load(partial_at, mask=is_part[:, None] & is_dim[None, :], other=0.0)
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        level = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        weights = tl.exp2((lse - level) * LOG2_E)
        fading = tl.exp2((highest - level) * LOG2_E)
        total = total * fading + tl.sum(weights, 0)
        summed = summed * fading + tl.sum(weights[:, None] * output, 0)
        highest = new_highest
    saw_nothing = total == 0.0
    total = tl.where(saw_nothing, 1.0, total)
    summed = summed / total
    lse = tl.where(saw_nothing, -float("inf"), highest + tl.log2(total) * LN_2)
    result = row * num_heads + head
    tl.store(sums + result + tl.arange(0, 1), lse)
    tl.store(outputs + result * VALUE_DIM + dims, summed.to(outputs.dtype.element_ty), mask=is_dim)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def store_rows(
    key,
    value,
    key_row,
    key_head,
    value_row,
    value_head,
    keys,
    values,
    keys_row,
    keys_head,
    values_row,
    values_head,
    slots,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Program (t, g): copies key and value of row t, head g into slot `slots[t]`; nowhere if it is negative."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    key_dims = tl.arange(0, BLOCK_KEY)
    value_dims = tl.arange(0, BLOCK_VALUE)
    is_key = (key_dims < KEY_DIM) & (slot >= 0)
    is_value = (value_dims < VALUE_DIM) & (slot >= 0)
    key_numbers = tl.load(key + row * key_row + head * key_head + key_dims, mask=is_key)
    value_numbers = tl.load(value + row * value_row + head * value_head + value_dims, mask=is_value)
    tl.store(keys + slot * keys_row + head * keys_head + key_dims, key_numbers, mask=is_key)
    tl.store(values + slot * values_row + head * values_head + value_dims, value_numbers, mask=is_value)


IS_INTERPRETED = not isinstance(attend_walks, triton.JITFunction)
"""Whether TRITON_INTERPRET was set when Triton was imported: kernels run on the CPU, slowly."""
