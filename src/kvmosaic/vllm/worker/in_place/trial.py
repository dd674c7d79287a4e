"""Check at start: what rows read in place is what they would read of keys that were moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvmosaic.vllm.operations import DocumentRead, InPlaceRequest, RepairedRun
from kvmosaic.vllm.worker.extra_forward import ExtraForward
from kvmosaic.vllm.worker.in_place.reader import DocumentReader, layer_dtype, relative_error
from kvmosaic.vllm.worker.in_place.step import InPlaceStep, OwnRows
from kvmosaic.vllm.worker.key_rotation import arithmetic
from kvmosaic.vllm.worker.kv_layout import KVLayout, LayerPlace
from kvmosaic.vllm.worker.trial.plan import trial_tokens
from kvmosaic.vllm.worker.trial.rotation import clear

NUM_BEFORE, NUM_ROWS, NUM_TOKENS = 5, 3, 11
"""Own tokens before the rows of the trial, its rows, and tokens of each of its two documents."""
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest error, in multiples of the outputs' deviation."""
_COARSE = 0.5
"""The same where vLLM's kernel rounds queries and weights to eight bits; ours does not."""


@torch.inference_mode()
def check_reading(places: KVLayout, reader: DocumentReader, nested: ExtraForward | None) -> str:
    """Why documents cannot be read in place; empty: they can.

    Two documents of random keys and values are read in every layer, and compared with keys that were moved; once more
    for each width of a window, whose end is inside the first document. Then an ordinary text is computed, and every
    layer's attention by vLLM is compared with ours. Runs before any request is served, and zeroes the blocks it used.

    Args:
        places: the attention layers.
        reader: what is checked.
        nested: computes the text; None: it cannot be computed here.
    """
    size = places.block_size
    per_run = -(-(size // 2 + NUM_TOKENS) // size)
    if places.num_blocks < 2 + 2 * per_run:
        return (
            f"a cache of {places.num_blocks} blocks has no room for the check at start, which takes {2 + 2 * per_run}"
        )
    documents = [tuple(range(2 + number * per_run, 2 + (number + 1) * per_run)) for number in (0, 1)]
    windows = sorted({place.window for place in places.layers if place.window})
    within = [window for window in windows if NUM_BEFORE + _away(window) + NUM_ROWS <= places.num_positions]
    try:
        requests = (_request(documents, size, window) for window in (0, *within))
        found = next((fault for request in requests if (fault := _fault_of_reads(places, reader, request))), "")
        if not found and nested is not None:
            found = _fault_of_text(places, reader, nested)
        clear(places, (1, *documents[0], *documents[1]))
    except Exception as error:  # vLLM must start, with copies, whatever its parts raise
        return f"the check of reading failed: {type(error).__name__}: {error}"[:400]
    return found


def _request(documents: Sequence[tuple[int, ...]], block_size: int, window: int) -> InPlaceRequest:
    """Rows after two documents; with a window, these are so far before that it ends inside the first one."""
    away = _away(window)
    last = away - NUM_TOKENS  # the second document ends where the rows begin
    first = away - window + 1 - NUM_TOKENS // 2 if window else 0
    reads = (
        DocumentRead(NUM_BEFORE, documents[0], 0, NUM_TOKENS, position=NUM_BEFORE, distance=first),
        DocumentRead(NUM_BEFORE + 1, documents[1], block_size // 2, NUM_TOKENS, position=NUM_BEFORE, distance=last),
    )
    return InPlaceRequest((1,), ((NUM_BEFORE, away),), reads)


def _away(window: int) -> int:
    """By how much the rows are shifted."""
    return NUM_TOKENS + max(NUM_TOKENS, window)


def _fault_of_reads(places: KVLayout, reader: DocumentReader, request: InPlaceRequest) -> str:
    """Why some layer does not read what it should of a request, which is planned once for all; empty: all do."""
    rows = OwnRows(request, NUM_ROWS, NUM_BEFORE)
    step = reader.step_of([rows], torch.arange(NUM_ROWS, device=places.device))
    return next((fault for place in places.layers if (fault := _fault(places, reader, place, step, rows))), "")


def _fault(places: KVLayout, reader: DocumentReader, place: LayerPlace, step: InPlaceStep, rows: OwnRows) -> str:
    """Why a layer does not read what it should; empty: it does."""
    layer, impl = place.layer, place.layer.impl
    if getattr(impl, "alibi_slopes", None) is not None or _has_window(impl) != bool(place.window):
        return f"{place.name} has a bias, or a window that only its implementation knows"
    generator = torch.Generator().manual_seed(0)
    dtype = layer_dtype(place)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(places.device, dtype)

    heads, keys_heads, key_size = int(layer.num_heads), int(layer.num_kv_heads), place.layout.key_size
    value_size = int(getattr(layer, "head_size_v", None) or key_size)
    query = drawn(NUM_ROWS, heads, key_size)
    total = NUM_BEFORE + NUM_ROWS + 2 * NUM_TOKENS
    keys, values = drawn(total, keys_heads, key_size), drawn(total, keys_heads, value_size)
    slots = [places.slots((1,), 0, NUM_BEFORE + NUM_ROWS)]
    slots += [places.slots(read.blocks, read.start, read.num_tokens) for read in rows.request.reads]
    place.layout.write(torch.cat(slots).to(places.device), keys, values)
    if (how := place.layout.quantization) is not None:
        keys, values = how.rounded(keys, values)
    own = slice(NUM_BEFORE, NUM_BEFORE + NUM_ROWS)
    output = torch.zeros(NUM_ROWS, heads, value_size, dtype=dtype, device=places.device)
    with reader.trying(step):
        reader.attend(place.name, query, keys[own], values[own], output, impl)
    expected = _expected(place, query, keys.double(), values.double(), rows)
    error = relative_error(output, expected)
    limit = _LIMITS[dtype]
    return "" if error <= limit else f"{place.name}: reading in place differs by {error:.2g} (limit {limit:.2g})"


def _fault_of_text(places: KVLayout, reader: DocumentReader, nested: ExtraForward) -> str:
    """Why a layer's attention over an ordinary text is not ours; empty: it is."""
    num_tokens = min(nested.block_size, nested.max_tokens, nested.max_length - 1)
    run = RepairedRun((1,), 0, trial_tokens(nested.model_config, num_tokens), 0)
    with reader.comparing(InPlaceRequest((1,), (), (), num_scheduled=num_tokens)) as errors:
        nested.forward([run], compiled=False)
    if not errors:
        return "no layer asked for what it reads"
    coarse = {place.name for place in places.layers if getattr(place.layer, "query_quant", None) is not None}
    limits = {name: _COARSE if name in coarse else _LIMITS[nested.dtype] for name in errors}
    name = max(errors, key=lambda each: errors[each] / limits[each])
    if errors[name] <= limits[name]:
        return ""
    return f"{name}: attention differs by {errors[name]:.2g} (limit {limits[name]:.2g})"


def _has_window(impl: Any) -> bool:
    """Whether a layer sees the last tokens only; backends keep its window as a number or as (left, right)."""
    window = getattr(impl, "sliding_window", None)
    return any(each is not None and each >= 0 for each in (window if isinstance(window, tuple | list) else (window,)))


def _expected(place: LayerPlace, query: Tensor, keys: Tensor, values: Tensor, own: OwnRows) -> Tensor:
    """[rows, H, Dv] in float64: softmax over moved keys, written out."""
    impl, request = place.layer.impl, own.request
    moved = keys.clone()
    first = NUM_BEFORE + NUM_ROWS
    for read in request.reads:
        part = moved[first : first + read.num_tokens].float()
        if place.rotation is not None and read.distance:
            old = torch.arange(read.position, read.position + read.num_tokens, device=keys.device)
            factors = place.rotation.factors(old, old + read.distance, dtype=arithmetic(torch.float64))
            part = part.double()
            place.rotation.rotate(part, factors)
        moved[first : first + read.num_tokens] = part.double()
        first += read.num_tokens
    group = query.shape[1] // keys.shape[1]
    scores = torch.einsum("rhd,shd->rhs", query.double(), moved.repeat_interleave(group, 1)) * float(impl.scale)
    if cap := float(getattr(impl, "logits_soft_cap", 0) or 0):
        scores = torch.tanh(scores / cap) * cap
    positions = [own.position(index) for index in range(NUM_BEFORE + NUM_ROWS)]
    for read in request.reads:
        positions += range(read.position + read.distance, read.position + read.distance + read.num_tokens)
    behind = torch.tensor(positions, device=keys.device)
    for row in range(NUM_ROWS):
        index = NUM_BEFORE + row
        scores[row, :, index + 1 : NUM_BEFORE + NUM_ROWS] = -torch.inf
        start = NUM_BEFORE + NUM_ROWS
        for read in request.reads:
            if index < read.first_reader:
                scores[row, :, start : start + read.num_tokens] = -torch.inf
            start += read.num_tokens
        if place.window:
            scores[row, :, behind <= own.position(index) - place.window] = -torch.inf
    sinks = getattr(impl, "sinks", None)
    total = torch.logsumexp(scores, -1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.double()[None])
    return torch.einsum("rhs,shd->rhd", torch.exp(scores - total[..., None]), values.repeat_interleave(group, 1))
