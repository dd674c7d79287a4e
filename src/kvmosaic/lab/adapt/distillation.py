"""Distillation: the divergence of isolated reading from the model's own full attention, over the same tokens.

Both are forwards of packed rows, with gradients: a prompt with several continuations as one causal forward without
moved keys, under one dense mask.

    layout    system | chunk 1 | chunk 2, moved by d | question a
                                                     | question b
    rows      system | chunk 1 | system, d later | chunk 2 there | question a | question b

A chunk that is moved takes what it saw along: keys depend on distances only, so both together, d positions later, are
what it was computed from. Nothing is rotated twice and nothing of the engine's attention is used, so the same rows are
a reference of it, too. Questions after the same documents see these and themselves, not each other, so reading the
documents is paid once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from kvmosaic.layers import AttentionCall, LayerSpec, MaskSpec
from kvmosaic.layout import ChunkContext, Layout, arrange
from kvmosaic.model import LoadedModel
from kvmosaic.model.hook import attention_scope
from kvmosaic.model.lora import AdaptedRows, adapter_scope
from kvmosaic.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Lesson:
    """Questions about the same documents, with the teacher's answers.

    prompt: one of them; its question is not used
    questions, answers: token ids
    """

    prompt: Prompt
    questions: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]

    @property
    def continuations(self) -> list[tuple[int, ...]]:
        """Questions with their answers."""
        return [(*question, *answer) for question, answer in zip(self.questions, self.answers, strict=True)]


@dataclass(frozen=True, slots=True)
class Losses:
    """Result of one lesson."""

    loss: Tensor
    """Scalar, with gradients if they are on."""
    divergence: float
    """Mean over the answers' tokens, in nats."""
    agreement: float
    """Share of the answers' tokens for which both would choose the same next token."""
    num_rows: int
    """Rows of the adapted forward."""


def distill(
    model: LoadedModel,
    adapter: str,
    lesson: Lesson,
    strategy: str,
    context: ChunkContext,
    question_weight: float,
) -> Losses:
    """Both readings of a lesson, and how far they are apart.

    Args:
        model: the model; its base is the teacher.
        adapter: digest of the adapter that reads in isolation.
        lesson: documents, questions and answers.
        strategy: positions of the documents, "sequential" or "shared".
        context: what documents saw.
        question_weight: of the divergence at the question's tokens, beside 1 for those of the answer.
    """
    continuations = lesson.continuations
    full = ordinary_rows(lesson.prompt, continuations)
    composed = composed_rows(arrange(lesson.prompt, strategy, context), continuations)
    is_answer = _is_answer(lesson)
    importance = torch.where(is_answer, 1.0, question_weight)
    with torch.no_grad():
        teacher = forward(model, full, _before_last(full.continuations))
    student = forward(model, composed, _before_last(composed.continuations), adapter)
    expected, found = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    divergences = (expected.exp() * (expected - found)).sum(-1)
    importance = importance.to(divergences)
    loss = (divergences * importance).sum() / importance.sum()
    is_answer = is_answer.to(divergences.device)
    same = (expected.argmax(-1) == found.argmax(-1))[is_answer]
    return Losses(
        loss, float(divergences.detach()[is_answer].mean()), float(same.float().mean()), len(composed.token_ids)
    )


def _before_last(parts: Sequence[slice]) -> Tensor:
    """Rows that predict a next token of their own part."""
    return torch.cat([torch.arange(part.start, part.stop - 1) for part in parts])


def _is_answer(lesson: Lesson) -> Tensor:
    """[R], whether a row predicts a token of an answer, and not of a question."""
    parts = []
    for question, answer in zip(lesson.questions, lesson.answers, strict=True):
        parts += [
            torch.zeros(len(question) - 1, dtype=torch.bool),
            torch.ones(len(answer), dtype=torch.bool),
        ]
    return torch.cat(parts)


def forward(model: LoadedModel, packed: PackedRows, rows: Tensor, adapter: str = "") -> Tensor:
    """The logits [R, V] of one forward; gradients are kept as torch's current mode says.

    Args:
        model: the model, whose module may hold the adapter.
        packed: the rows.
        rows: [R], those whose results are needed.
        adapter: digest of the adapter that computes all rows; empty: the base model.
    """
    device = model.device
    attention = PackedAttention(model.layers, packed.mask.to(device), packed.positions.to(device))
    adapted = [AdaptedRows(adapter, slice(0, len(packed.token_ids)))] if adapter else []
    arguments: dict[str, Any] = {"logits_to_keep": rows.to(device)} if model.keeps_rows else {}
    with attention_scope(attention), adapter_scope(adapted):
        logits: Tensor = model.module(
            input_ids=packed.token_ids[None].to(device),
            position_ids=packed.positions[None].to(device),
            use_cache=False,
            **arguments,
        ).logits[0]
    return logits if model.keeps_rows else logits[rows.to(device)]


class PackedAttention:
    """A receiver for one forward over packed rows."""

    def __init__(self, layers: Sequence[LayerSpec], mask: Bool[Tensor, "T T"], positions: Int[Tensor, " T"]) -> None:
        self._layers = layers
        self._mask = mask
        self._positions = positions
        self._masks: dict[MaskSpec, Tensor] = {}

    def __call__(self, call: AttentionCall) -> Float[Tensor, "T H Dv"]:
        """Attention of one layer."""
        layer = self._layers[call.layer_index]
        mask = self._visible(layer.mask)
        groups = call.query.shape[1] // call.key.shape[1]
        query, key, value = (part.transpose(0, 1) for part in call.rows)
        key, value = (part.repeat_interleave(groups, dim=0) for part in (key, value))
        if call.softcap is None and call.sinks is None and layer.bias is None:
            # a mask of zeros and -inf in the dtype of the queries takes the fused kernel; a boolean one does not
            bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, -torch.inf)
            out = functional.scaled_dot_product_attention(
                query[None], key[None], value[None], attn_mask=bias[None, None], scale=call.scaling
            )
            return out[0].transpose(0, 1)
        scores = query @ key.transpose(1, 2) * call.scaling
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if layer.bias is not None:
            at = self._positions
            scores = scores + layer.bias.between(at, at[None].expand(len(at), -1), scores.dtype).to(scores.device)
        scores = scores.masked_fill(~mask, -torch.inf)
        if call.sinks is not None:
            sinks = call.sinks.to(scores)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
        return (weights @ value).transpose(0, 1)

    def _visible(self, spec: MaskSpec) -> Tensor:
        """[T, T], what rows see in a layer with this mask of its own."""
        if spec not in self._masks:
            query, key = self._positions[:, None], self._positions[None, :]
            shown = self._mask
            if spec.kind == "window":
                shown = shown & (query - key < spec.size)
            elif spec.kind == "chunked":
                shown = shown & (query // spec.size == key // spec.size)
            self._masks[spec] = shown
        return self._masks[spec]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of one forward.

    token_ids, positions: [T]
    mask: [T, T], True where the row token sees the column token
    continuations: rows of each continuation
    """

    token_ids: Tensor
    positions: Tensor
    mask: Tensor
    continuations: tuple[slice, ...]


def composed_rows(layout: Layout, continuations: Sequence[Sequence[int]]) -> PackedRows:
    """Rows of a composed prompt, whose last span is replaced by each continuation (a question and its answer)."""
    rows = _Rows()
    places: dict[tuple[int, int], slice] = {}

    def add(index: int, shift: int) -> slice:
        if (index, shift) not in places:
            span = layout.spans[index]
            assert not span.positions and all(view.visibility is None for view in span.views), "nothing is repaired"
            seen = [add(view.span, view.distance + shift) for view in span.views]
            places[index, shift] = rows.add(span.token_ids, span.start + shift, seen)
        return places[index, shift]

    last = layout.last
    seen = [add(view.span, view.distance) for view in last.views]
    return rows.packed([rows.add(each, last.start, seen) for each in continuations])


def ordinary_rows(prompt: Prompt, continuations: Sequence[Sequence[int]]) -> PackedRows:
    """Rows of ordinary causal attention over the same segments, one after the other."""
    rows = _Rows()
    seen: list[slice] = []
    for segment in prompt.segments[:-1]:
        seen.append(rows.add(segment.token_ids or (), rows.num_rows, list(seen)))
    end = rows.num_rows
    return rows.packed([rows.add(each, end, seen) for each in continuations])


class _Rows:
    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._seen: list[tuple[slice, Sequence[slice]]] = []

    @property
    def num_rows(self) -> int:
        return len(self._token_ids)

    def add(self, token_ids: Sequence[int], start: int, seen: Sequence[slice]) -> slice:
        rows = slice(len(self._token_ids), len(self._token_ids) + len(token_ids))
        self._token_ids.extend(token_ids)
        self._positions.extend(range(start, start + len(token_ids)))
        self._seen.append((rows, tuple(seen)))
        return rows

    def packed(self, continuations: Sequence[slice]) -> PackedRows:
        count = len(self._token_ids)
        mask = torch.zeros(count, count, dtype=torch.bool)
        for rows, seen in self._seen:
            mask[rows, rows] = torch.ones(rows.stop - rows.start, rows.stop - rows.start, dtype=torch.bool).tril()
            for columns in seen:
                mask[rows, columns] = True
        positions = torch.tensor(self._positions)
        return PackedRows(torch.tensor(self._token_ids), positions, mask, tuple(continuations))
