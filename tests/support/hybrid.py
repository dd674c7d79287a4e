"""The composed prompt of a hybrid model by transformers alone: token by token, in its own caches, without maps."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.layout import Layout
from kvmosaic.model.states import LayerState, StateLayer
from support.float64 import Float64


def composed_logits(
    model: Any, system: Sequence[int], chunks: Sequence[Sequence[int]], question: Sequence[int], position: int
) -> Tensor:
    """[Q, V] logits of a question after documents that have seen the system text only, and not each other.

    Attention layers: the cached keys side by side. Layers with a state: every document's inputs are run again, from
    the state that the documents before it have left.

    Args:
        model: a transformers model.
        system: tokens from position 0 on; may be empty.
        chunks: tokens of the documents, all of which begin right after it.
        question: tokens.
        position: of the first token of the question.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode(), Float64():
            return _composed_logits(model, system, chunks, question, position)
    finally:
        model.set_attn_implementation(before)


def oracle_logits(model: Any, layout: Layout) -> Tensor:
    """The same for a layout in `shared` positions, without texts between its documents."""
    parts = [list(span.token_ids) for span in layout.spans]
    system = [] if layout.spans[0].is_chunk else parts.pop(0)
    return composed_logits(model, system, parts[:-1], parts[-1], layout.last.start)


class RepairedStates:
    """The reference for layers with a state where a layout is repaired: everything is run again, without maps.

    Repaired tokens follow the tokens before them; the rest of their chunk begins with the tail that it had when it was
    computed. A text has the state that it had when it was computed, before documents were repaired.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __call__(self, layer: StateLayer, hidden: Tensor) -> Tensor:
        """See `Mixer`."""
        spans, counts, repair = self.layout.spans, self.layout.repaired_chunks, self.layout.repair
        parts = torch.split(hidden, [span.num_tokens for span in spans], dim=1)
        starts: dict[int, LayerState | None] = {}
        repaired: dict[int, Tensor] = {}
        outputs = []

        def follow(state: LayerState | None, rows: Tensor, own: LayerState | None, *, is_text: bool) -> LayerState:
            begin = own
            if state is not None and state.memory is not None and not is_text:
                begin = LayerState({} if own is None else own.tails, state.memory)
            elif state is None and own is not None and own.memory is not None and not is_text:
                begin = LayerState(own.tails, torch.zeros_like(own.memory))  # of what is not seen here
            return layer.run(rows, None if begin is None else begin.repeated(1))[1]

        def after(indices: Sequence[int]) -> LayerState | None:
            state = None
            for index in indices:
                rows, own, count = parts[index], starts[index], counts.get(index, 0)
                if index in repaired:
                    state = layer.run(repaired[index], None if state is None else state.repeated(1))[1]
                    if count < rows.shape[1]:
                        own = layer.run(rows[:, :count], None if own is None else own.repeated(1))[1]
                        state = follow(state, rows[:, count:], own, is_text=False)
                else:
                    state = follow(state, rows, own, is_text=not spans[index].is_chunk)
            return state

        for number, (span, part) in enumerate(zip(spans, parts, strict=True)):
            seen = sorted({view.span for view in span.views} - {repair})
            if number != repair:
                starts[number] = state = after(seen)
                outputs.append(layer.run(part, None if state is None else state.repeated(1))[0])
                continue
            ends = (*span.parts[1:], span.num_tokens)
            for chunk, first, last in zip(counts, span.parts, ends, strict=True):
                state = after(sorted(view.span for view in self.layout.last.views if view.span < chunk))
                repaired[chunk] = part[:, first:last]
                outputs.append(layer.run(repaired[chunk], None if state is None else state.repeated(1))[0])
        return torch.cat(outputs, dim=1)


def _composed_logits(model: Any, system: Any, chunks: Any, question: Any, position: int) -> Tensor:
    start = _empty_cache(model)
    for number, token in enumerate(system):
        _step(model, token, number, start)
    parts = []
    for chunk in chunks:
        cache, inputs = copy.deepcopy(start), {}
        with _inputs_of(model, inputs):
            for number, token in enumerate(chunk):
                _step(model, token, len(system) + number, cache)
        parts.append((cache, inputs))
    cache = copy.deepcopy(start) if not parts else _joined(model, start, parts, len(system))
    return torch.stack([_step(model, token, position + number, cache) for number, token in enumerate(question)])


def _empty_cache(model: Any) -> Any:
    if type(model).__name__.startswith("MiniMax"):
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        return MiniMaxCache()
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _step(model: Any, token: int, position: int, cache: Any) -> Tensor:
    """[V] logits of one token."""
    logits: Tensor = model(
        input_ids=torch.tensor([[token]]),
        position_ids=torch.tensor([[position]]),
        past_key_values=cache,
        use_cache=True,
    ).logits[0, -1]
    return logits


def mixers(model: nn.Module) -> dict[nn.Module, str]:
    """The modules with a state, and the argument that they get the cache in."""
    found = {}
    for part in model.modules():
        source = inspect.getsource(type(part).forward)
        if "get_conv_state(" in source or "get_linear_cache(" in source:
            names = inspect.signature(type(part).forward).parameters
            found[part] = "cache_params" if "cache_params" in names else "past_key_values"
    return found


@contextmanager
def _inputs_of(model: nn.Module, inputs: dict[nn.Module, list[Tensor]]) -> Iterator[None]:
    """Records what every module with a state is given, token by token."""

    def record(part: nn.Module, arguments: Any, named: Any) -> None:
        inputs.setdefault(part, []).append(arguments[0] if arguments else named["hidden_states"])

    handles = [part.register_forward_pre_hook(record, with_kwargs=True) for part in mixers(model)]
    yield
    for handle in handles:
        handle.remove()


def _joined(model: Any, start: Any, parts: Sequence[Any], num_system: int) -> Any:
    """The cache that a question reads after all parts."""
    joined = copy.deepcopy(parts[-1][0])  # the tails of convolutions are the last document's
    for part, argument in mixers(model).items():
        state = copy.deepcopy(start)
        for _, inputs in parts:
            again = copy.deepcopy(start)  # each document begins with the tail of the system text, as it was computed
            _move_memory(state, again, part.layer_idx)  # type: ignore[arg-type]
            for hidden in inputs[part]:
                needed = {
                    name: None
                    for name, each in inspect.signature(type(part).forward).parameters.items()
                    if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
                }
                for name in ("self", "hidden_states", argument):
                    needed.pop(name, None)
                type(part).forward(part, hidden, **{argument: again}, **needed)
            state = again
        _move_memory(state, joined, part.layer_idx)  # type: ignore[arg-type]
    for index, layer in enumerate(joined.layers):
        if getattr(layer, "keys", None) is None or not isinstance(layer.keys, Tensor) or layer.keys.dim() < 3:
            continue
        for name in ("keys", "values"):
            own = [getattr(cache.layers[index], name)[:, :, num_system:] for cache, _ in parts]
            setattr(layer, name, torch.cat([getattr(parts[0][0].layers[index], name)[:, :, :num_system], *own], dim=2))
    return joined


def _move_memory(source: Any, target: Any, index: int) -> None:
    if hasattr(source, "linear_cache"):
        while len(target.linear_cache) <= index:
            target.linear_cache.append([])
        memory = source.linear_cache[index] if index < len(source.linear_cache) else []
        target.linear_cache[index] = memory
        return
    memory = source.layers[index].recurrent_states[0]
    if memory is None:
        return
    layer = target.layers[index]
    layer.recurrent_states[0] = memory.clone()
    layer.is_recurrent_states_initialized[0] = True
