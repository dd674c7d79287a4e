"""A repair policy that keeps what it is told, and the obvious twins of what it should be told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor
from transformers import DynamicCache

from kvmosaic.attention.dense import DenseAttention
from kvmosaic.layout import Layout, dense
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import SegmentKind
from kvmosaic.repair import ChunkSignals


@dataclass(eq=False)
class Spy:
    """Chooses what it is told to choose, and notes what is known of the chunks."""

    signals: frozenset[str] = frozenset({"deviation", "attention"})
    choice: object = None
    """What `choose` returns, or raises; None: nothing is repaired."""
    seen: list[list[ChunkSignals]] = field(default_factory=list)

    def choose(self, chunks):
        self.seen.append(list(chunks))
        if isinstance(self.choice, BaseException):
            raise self.choice
        return [() for _ in chunks] if self.choice is None else self.choice

    def __str__(self) -> str:
        return "spy"


def attention_shares(model: LoadedModel, layout: Layout) -> list[Tensor]:
    """By span: [m], how much the question's tokens look at its tokens in the later layers of a dense forward.

    A dense forward whose values are numbered gives its weights: the value of token k is 1 at place k.
    """
    written = dense(layout)
    attention, total = DenseAttention(written, model.layers), torch.zeros(len(written.token_ids))
    first_asked = len(written.token_ids) - layout.last.num_tokens

    def receive(call):
        nonlocal total
        identity = torch.eye(len(call.key), dtype=call.value.dtype)[:, None].expand(-1, call.key.shape[1], -1)
        weights = attention(replace(call, value=identity))
        if call.layer_index >= len(model.layers) // 2:
            total = total + weights[first_asked:].mean(1).sum(0) / (len(model.layers) - len(model.layers) // 2)
        return attention(call)

    ids, positions = torch.from_numpy(written.token_ids), torch.from_numpy(written.positions)
    model.forward(ids, positions, torch.tensor([len(ids) - 1]), receive)
    return list(total.split([span.num_tokens for span in layout.spans]))


def key_deviations(module: object, layout: Layout) -> list[Tensor]:
    """By span but the last: [m], the squared distance between two keys of the second layer, computed by transformers.

    One reads everything before it causally, the other what its chunk saw when it was computed; both in the place where
    the question sees the chunk. Only in shared positions, where documents overlap there, documents and the texts
    between them stand behind each other.
    """
    places = [layout.position_of(index) for index in range(len(layout.spans) - 1)]
    spans = layout.spans[:-1]
    if layout.strategy == "shared":
        apart = (SegmentKind.CHUNK, SegmentKind.TEXT)
        first = next((index for index, span in enumerate(spans) if span.segment.kind is SegmentKind.CHUNK), len(spans))
        for before, index in pairwise(range(first, len(spans))):
            assert spans[index].segment.kind in apart
            places[index] = places[before] + spans[before].num_tokens
    causal = _second_keys(module, spans, places)
    deviations, first = [], 0
    for index, span in enumerate(spans):
        shift = places[index] - span.start
        seen = [(layout.spans[view.span], layout.spans[view.span].start + view.distance + shift) for view in span.views]
        alone = _second_keys(
            module, [*(part for part, _ in seen), span], [*(place for _, place in seen), places[index]]
        )
        own = causal[first : first + span.num_tokens]
        deviations.append((own - alone[-span.num_tokens :]).square().sum((1, 2)))
        first += span.num_tokens
    return deviations


def _second_keys(module, spans, places) -> Tensor:
    """[T, G, D] of an ordinary forward over spans in their places, each token seeing all before it."""
    ids = [token for span in spans for token in span.token_ids]
    positions = torch.tensor(
        [place + n for span, place in zip(spans, places, strict=True) for n in range(span.num_tokens)]
    )
    cache = DynamicCache()
    shown = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    window = positions[:, None] < positions[None, :] + (getattr(module.config, "sliding_window", None) or 1 << 30)
    kinds = getattr(module.config, "layer_types", None)
    masks = {"full_attention": _floats(shown), "sliding_attention": _floats(shown & window)}
    with torch.inference_mode():
        module(
            input_ids=torch.tensor([ids]),
            position_ids=positions[None],
            attention_mask=masks if kinds and "sliding_attention" in kinds else masks["full_attention"],
            past_key_values=cache,
            use_cache=True,
        )
    layer = cache.layers[1]
    is_latent = hasattr(
        module.model.layers[1].self_attn, "kv_a_layernorm"
    )  # then it keeps the latent, and rotary parts
    keys = torch.cat((layer.keys, layer.values), dim=-1) if is_latent else layer.keys
    return keys[0].transpose(0, 1)


def _floats(shown: Tensor) -> Tensor:
    return torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, torch.finfo(torch.float64).min)[None, None]
