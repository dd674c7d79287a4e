"""The twins of texts without end, one token at a time, as obvious as can be.

`StreamingLLM` is the idea written down: keys are kept unrotated, and in every step each of them is rotated at the place
that it has in the cache now. It knows no blocks, no laps and no moved queries. `composed_logits` is for prompts with
documents: one dense forward at places that grow with the text, with every visible pair's true distance written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvmosaic.attention.dense import DenseAttention
from kvmosaic.layers import AttentionCall
from kvmosaic.layout import Layout, dense
from kvmosaic.model import LoadedModel
from kvmosaic.rope import Rotation, rotate


class StreamingLLM:
    """A plain text, token by token: sinks and window side by side, the newest token behind them."""

    def __init__(self, model: LoadedModel, sink_tokens: int, window_tokens: int) -> None:
        self._model = model
        self._sizes = sink_tokens, window_tokens
        self._kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.layers]
        self._place = 0
        self._num_tokens = 0

    def append(self, token_id: int) -> Tensor:
        """Logits [V] of the token that follows this one."""
        num_sinks, num_window = self._sizes
        self._num_tokens += 1
        self._place = min(self._num_tokens, num_sinks + num_window) - 1
        one = torch.tensor([0])
        return self._model.forward(torch.tensor([token_id]), torch.tensor([self._place]), one, self._attend)[0]

    def _attend(self, call: AttentionCall) -> Tensor:
        layer = self._model.layers[call.layer_index]
        kept = self._kept[call.layer_index]
        kept.append((_turned(call.key, layer.rotation, [-self._place])[0], call.value[0]))
        if len(kept) > sum(self._sizes):
            del kept[self._sizes[0]]
        places = range(len(kept))
        assert places[-1] == self._place
        group = call.query.shape[1] // call.key.shape[1]
        keys = _turned(torch.stack([key for key, _ in kept]), layer.rotation, places).repeat_interleave(group, dim=1)
        values = torch.stack([value for _, value in kept]).repeat_interleave(group, dim=1)
        scores = (call.query * keys).sum(-1) * call.scaling
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if layer.bias is not None:
            here, there = torch.tensor([self._place]), torch.tensor(list(places))[None]
            scores = scores + layer.bias.between(here, there, scores.dtype)[:, 0].T
        if layer.mask.kind == "window":
            scores[: max(0, len(kept) - layer.mask.size)] = -torch.inf
        if call.sinks is not None:
            scores = torch.cat((scores, call.sinks.to(scores.dtype)[None]))
        weights = torch.softmax(scores, dim=0)[: len(kept)]
        return (weights[:, :, None] * values).sum(0)[None]


def streaming_logits(model: LoadedModel, token_ids: Sequence[int], sink_tokens: int, window_tokens: int) -> Tensor:
    """[T, V] logits behind every token of a plain text."""
    twin = StreamingLLM(model, sink_tokens, window_tokens)
    return torch.stack([twin.append(token_id) for token_id in token_ids])


def composed_logits(model: LoadedModel, layout: Layout, sink_tokens: int, window_tokens: int) -> Tensor:
    """[T, V] logits behind every token of a prompt with documents, whose last span holds the answer, too."""
    written = dense(layout)
    mask, distances = written.mask.copy(), written.distances.copy()
    count = layout.last.num_tokens
    before = len(written.token_ids) - count
    for token in range(count):
        row = before + token
        gap = max(0, token - (sink_tokens + window_tokens - 1))
        for column in range(row + 1):
            other = column - before
            if other < sink_tokens:
                distances[row, column] += gap if mask[row, column] else 0
            elif token - other >= window_tokens:
                mask[row, column] = False
    changed = replace(written, mask=mask, distances=np.where(mask, distances, 0))
    return model.forward(
        torch.from_numpy(changed.token_ids),
        torch.from_numpy(changed.positions),
        torch.arange(len(changed.token_ids)),
        DenseAttention(changed, model.layers),
    )


def _turned(heads: Tensor, rotation: Rotation | None, positions: Sequence[int]) -> Tensor:
    """Heads [R, G, D], row i turned by positions[i]."""
    if rotation is None:
        return heads
    precision = torch.promote_types(heads.dtype, torch.float32)
    return rotate(heads, rotation.tables(torch.tensor(positions), dtype=precision)).to(heads.dtype)
