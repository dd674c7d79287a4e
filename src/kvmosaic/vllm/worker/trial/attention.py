"""Attention trial: inputs and outputs of attention layers, compared with a dense softmax over the cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvmosaic.vllm.operations import RepairedRun
from kvmosaic.vllm.worker.kv_layout import KVLayout, LayerPlace
from kvmosaic.vllm.worker.trial.rotation import unit, wide

ROUNDINGS = 3
"""To the dtype of its queries, of scores, weights or sums: the max number in any kernel."""
SUMMING = 2.0**-16
"""Error of long sums in float32, whatever the dtype of their terms."""


@dataclass(frozen=True, slots=True)
class Attended:
    """One call of an attention layer: queries [T, H, D], keys [T, G, D], values [T, G, Dv], its output [T, H, Dv].

    Of a layer with a latent cache, keys are the rows of the cache, [T, 1, D], and values are None.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor | None
    output: Tensor

    def of(self, tokens: slice) -> Attended:
        """The same for a subset of the tokens."""
        values = None if self.values is None else self.values[tokens]
        return Attended(self.queries[tokens], self.keys[tokens], values, self.output[tokens])


class AttentionRecorder:
    """Records every call of some attention layers while it watches."""

    def __init__(self, places: Sequence[LayerPlace]) -> None:
        self._places = places
        self.calls: dict[str, Attended] = {}
        """The last call of each layer, by its name."""
        self.replaced: Callable[[str, Tensor], Tensor] | None = None
        """Given a layer's name and output, the output to pass on instead."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Installs the hooks inside this context only."""
        hooks = [place.layer.register_forward_hook(self._hook(place), with_kwargs=True) for place in self._places]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, place: LayerPlace) -> Any:
        signature = inspect.signature(type(place.layer).forward)

        def see(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            _, *given = signature.bind(layer, *args, **kwargs).arguments.values()
            self.calls[place.name] = _attended(place, given[0], given[1], given[2], output)
            return None if self.replaced is None else self.replaced(place.name, output)

        return see


def _attended(place: LayerPlace, queries: Tensor, keys: Tensor, values: Tensor, output: Tensor) -> Attended:
    num_tokens, size = len(queries), place.layout.key_size
    if place.layout.is_latent:  # the latent and the rotary part, which are adjacent in the cache
        rows = torch.cat([keys.reshape(num_tokens, 1, -1), values.reshape(num_tokens, 1, -1)], -1)
        num_heads = int(place.layer.num_heads)
        return Attended(
            queries.reshape(num_tokens, num_heads, -1).clone(),
            rows,
            None,
            output.reshape(num_tokens, num_heads, -1).clone(),
        )
    queries = queries.reshape(num_tokens, -1, size).clone()
    heads = int(place.layer.num_kv_heads)
    return Attended(
        queries,
        keys.reshape(num_tokens, heads, size).clone(),
        values.reshape(num_tokens, heads, -1).clone(),
        output.reshape(num_tokens, queries.shape[1], -1).clone(),
    )


def attention_error(places: KVLayout, place: LayerPlace, run: RepairedRun, seen: Attended) -> float:
    """The distance of a layer's output for a run from a softmax over its blocks, as a fraction of the allowed error.

    The allowed error follows from the numbers: weights and values rounded once, and scores that are off by the
    rounding of their products. So it holds however large queries and keys are.
    """
    num_tokens = len(run.token_ids)
    end = run.start + num_tokens
    keys, values = place.layout.read(places.slots(run.blocks, 0, end).to(places.device))
    if values is None:
        keys, values = _expanded(place, keys)
    queries = wide(seen.queries).transpose(0, 1)
    dtype = queries.dtype
    groups = len(queries) // keys.shape[1]
    keys, values = (each.to(dtype).transpose(0, 1).repeat_interleave(groups, 0) for each in (keys, values))
    scale, cap, sinks = _constants(place, dtype)
    scores = queries @ keys.transpose(1, 2) * scale
    if cap:
        scores = cap * (scores / cap).tanh()
    behind = torch.arange(run.start, end, device=keys.device)[:, None] - torch.arange(end, device=keys.device)
    seen_by = (behind >= 0) & (behind < (place.window or end))
    scores = scores.masked_fill(~seen_by, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, num_tokens, 1)], -1)
    weights = scores.softmax(-1)[..., :end]
    wanted = weights @ values
    # a score is off by the rounding of its products, and moves weight between its value and the others
    off = (queries.square() @ keys.square().transpose(1, 2)).sqrt() * scale
    to_output = (
        (values.square().sum(-1)[:, None] - 2 * wanted @ values.transpose(1, 2) + wanted.square().sum(-1)[..., None])
        .clamp(min=0)
        .sqrt()
    )
    bound = (weights * (values.norm(dim=-1)[:, None] + off * to_output)).sum(-1)
    error = (wide(seen.output).to(dtype).transpose(0, 1) - wanted).norm(dim=-1)
    bound = bound * (ROUNDINGS * unit(seen.queries.dtype, seen.output.dtype, *_quantized(place)) + SUMMING)
    # weights below the smallest number of a dtype become zero
    bound += torch.finfo(seen.queries.dtype).smallest_normal * torch.finfo(seen.queries.dtype).eps * _norms(values)
    far = error / bound.clamp(min=1e-30)
    return float(far.max()) if far.isfinite().all() else float("inf")


def _quantized(place: LayerPlace) -> tuple[torch.dtype, ...]:
    """The dtype to which a layer's kernel rounds queries and weights as well, if its cache is in eight bits."""
    how = place.layout.quantization
    return () if how is None or getattr(place.layer, "query_quant", None) is None else (how.format,)


def _norms(values: Tensor) -> Tensor:
    """[H, 1]: the sum of the norms of all values of a head."""
    return values.square().sum(-1).sqrt().sum(-1, keepdim=True)


def _constants(place: LayerPlace, dtype: torch.dtype) -> tuple[float, float, Tensor | None]:
    """A layer's score scale, score cap (0: none), and each head's addition to the softmax's sum."""
    layer = place.layer
    scale = getattr(layer.impl, "scale", None) or getattr(layer, "scale", None) or float(layer.head_size) ** -0.5
    sinks = getattr(layer.impl, "sinks", None)
    cap = float(getattr(layer.impl, "logits_soft_cap", None) or 0)
    return float(scale), cap, sinks.to(dtype) if isinstance(sinks, Tensor) else None


def _expanded(place: LayerPlace, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of every head, expanded from latent rows [T, 1, D]."""
    layer = place.layer
    latent, turning_part = torch.split(rows, [layer.kv_lora_rank, layer.qk_rope_head_dim], -1)
    both = layer.kv_b_proj(latent[:, 0].contiguous())[0].view(len(rows), layer.num_heads, -1)
    keys, values = both.split([layer.qk_nope_head_dim, layer.v_head_dim], -1)
    return torch.cat([keys, turning_part.expand(-1, layer.num_heads, -1).to(keys.dtype)], -1), values
