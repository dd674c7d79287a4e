"""Placing: turns a prompt into a layout that the model can run."""

from __future__ import annotations

from dataclasses import replace

from kvmosaic.engine.rolling_window import check_positions
from kvmosaic.errors import InvalidOffset, NotMovable
from kvmosaic.layout import ChunkContext, Layout, RollingWindow, arrange, choose_strategy
from kvmosaic.layout.strategies import AUTO
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.prompt import Prompt, check_length


def place(
    prompt: Prompt,
    strategy: str,
    context: ChunkContext,
    model: LoadedModel,
    max_positions: int | None,
    *,
    chunks_only: bool = False,
    window: RollingWindow | None = None,
) -> Layout:
    """Arranges a prompt, to be answered with at least one token; with `chunks_only`, its question is omitted.

    With a rolling window, question and answer may be of any length.

    Raises:
        InvalidPrompt: the prompt does not fit the strategy (InvalidOffset), or (PromptTooLong) the max position.
        InvalidSampling: the window exceeds the max position.
        NotMovable: it moves documents and the model does not allow that.
    """
    if strategy == AUTO:
        end = 1 if window is None else window.num_positions - prompt.segments[-1].num_tokens
        strategy = choose_strategy(prompt.num_tokens + end, max_positions, is_movable=model.is_movable)
    layout = arrange(prompt, strategy, context)
    if max_positions is not None and any(span.end > max_positions for span in layout.spans[:-1]):
        layout = arrange(replace(prompt, lead_in=()), strategy, context)  # the lead-in has no room
    if chunks_only:
        layout = Layout(layout.spans[:-1], layout.strategy, layout.chunk_context)
    if layout.is_moved and not model.is_movable:
        raise not_movable(model, strategy, context)
    if max_positions is not None:
        _check_offsets(layout, max_positions)
    if window is not None:
        check_positions(window, layout, max_positions)
    elif max_positions is not None:
        check_length(layout, max_positions, 0 if chunks_only else 1)
    return layout


def _check_offsets(layout: Layout, max_positions: int) -> None:
    """Raises InvalidOffset if a chunk's own offset moves it beyond the model's max position."""
    for span in layout.spans:
        offset, most = span.segment.position_offset, max_positions - 1 - span.num_tokens
        if offset is not None and span.end > max_positions and most >= 0:
            raise InvalidOffset(
                f"{span.segment.label} has position_offset {offset} and {span.num_tokens} tokens and needs positions "
                f"up to {span.end - 1}, but the model's are 0 to {max_positions - 1}; use an offset of at most {most}, "
                "which leaves one position for the question"
            )


def not_movable(model: LoadedModel, strategy: str, context: ChunkContext) -> NotMovable:
    """The error for settings that move documents on a model that does not allow that."""
    return NotMovable(
        f"position_strategy={strategy!r} with chunk_context={context!r} moves documents, and this model does not allow "
        f"that ({model.immovable_reason}); use position_strategy='shared' with chunk_context='system', or "
        "position_strategy='absolute'"
    )
