"""Distillation: the divergence of isolated reading from the model's own full attention, over the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmosaic.adapt.forward import Outputs, forward
from kvmosaic.adapt.rows import composed_rows, ordinary_rows
from kvmosaic.layout import ChunkContext, arrange
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt


@dataclass(frozen=True, slots=True)
class LossWeights:
    """What counts how much in the loss."""

    question: float = 0.2
    """Divergence at the question's tokens, beside 1 for those of the answer."""
    document: float = 0.0
    """Divergence at the documents' own tokens."""
    hidden: float = 0.0
    """Differences of the decoder layers' outputs at tokens of question and answer, in their deviations, squared."""


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
    weights: LossWeights,
) -> Losses:
    """Both readings of a lesson, and how far they are apart.

    Args:
        model: the model; its base is the teacher.
        adapter: digest of the adapter that reads in isolation.
        lesson: documents, questions and answers.
        strategy: positions of the documents, "sequential" or "shared".
        context: what documents saw.
        weights: of the parts of the loss.
    """
    continuations = lesson.continuations
    full = ordinary_rows(lesson.prompt, continuations)
    composed = composed_rows(arrange(lesson.prompt, strategy, context), continuations)
    is_answer = _is_answer(lesson)
    importance = torch.where(is_answer, 1.0, weights.question)
    full_rows, composed_rows_ = _before_last(full.continuations), _before_last(composed.continuations)
    if weights.document:
        lengths = [rows.stop - rows.start - 1 for rows in full.documents]
        full_rows = torch.cat((full_rows, _before_last(full.documents)))
        composed_rows_ = torch.cat((composed_rows_, _before_last(composed.documents)))
        importance = torch.cat((importance, torch.full((sum(lengths),), weights.document)))
        is_answer = torch.cat((is_answer, torch.zeros(sum(lengths), dtype=torch.bool)))
    keeps_hidden = weights.hidden > 0
    with torch.no_grad():
        teacher = forward(model, full, full_rows, keeps_hidden=keeps_hidden)
    student = forward(model, composed, composed_rows_, adapter, keeps_hidden=keeps_hidden)
    expected, found = teacher.logits.float().log_softmax(-1), student.logits.float().log_softmax(-1)
    divergences = (expected.exp() * (expected - found)).sum(-1)
    importance = importance.to(divergences)
    loss = (divergences * importance).sum() / importance.sum()
    if keeps_hidden:
        loss = loss + weights.hidden * _hidden_loss(teacher, student)
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


def _hidden_loss(teacher: Outputs, student: Outputs) -> Tensor:
    total = torch.zeros(())
    for expected, found in zip(teacher.hidden, student.hidden, strict=True):
        deviation = expected.std(0) + 1e-3 * expected.std() + 1e-6
        total = total + (((found - expected) / deviation) ** 2).mean()
    return total / len(teacher.hidden)
