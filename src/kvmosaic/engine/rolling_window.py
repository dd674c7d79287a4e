"""Rolling windows: checks that model and memory allow one, and the reads of tokens inside it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvmosaic.attention import Piece
from kvmosaic.cache import BlockPool
from kvmosaic.errors import InvalidSampling, NotMovable, RequestTooLarge
from kvmosaic.layout import Layout, RollingWindow
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.sampling import SamplingParams


def window_of(params: SamplingParams, model: LoadedModel) -> RollingWindow | None:
    """The rolling window that sampling parameters set, if any.

    Raises:
        NotMovable: keys of this model cannot be moved to another position.
    """
    if params.window_tokens is None:
        return None
    assert params.sink_tokens is not None
    if not model.is_movable:
        raise NotMovable(
            f"window_tokens={params.window_tokens} moves what stays visible along with the text, and this model does "
            f"not allow that ({model.immovable_reason}); leave window_tokens out"
        )
    chunked = next((layer for layer in model.layers if layer.mask.kind == "chunked"), None)
    if chunked is not None:
        raise NotMovable(
            f"window_tokens={params.window_tokens} gives tokens other positions than in the text, and layer "
            f"{chunked.index} of this model attends in parts of {chunked.mask.size} tokens that begin at fixed places; "
            "leave window_tokens out"
        )
    return RollingWindow(params.sink_tokens, params.window_tokens, len(model.layers))


def check_positions(window: RollingWindow, layout: Layout, max_positions: int | None) -> None:
    """Checks that sinks and window fit after the preceding spans.

    Raises:
        InvalidSampling: they exceed the model's max position.
    """
    start = layout.last.start
    if max_positions is None or start + window.num_positions <= max_positions:
        return
    before = f"after {start} positions of system prompt and documents, " if start else ""
    room = max(max_positions - start, 0)
    raise InvalidSampling(
        f"{before}sink_tokens={window.sink_tokens} and window_tokens={window.window_tokens} need "
        f"{window.num_positions} positions and the model has {room}; lower window_tokens, or send fewer documents"
    )


def max_at_once(window: RollingWindow, block_size: int) -> int:
    """Max tokens after the first S + W of a text that one step computes: all of them hold blocks at once."""
    return max(window.window_tokens // 2, block_size)


def check_memory(window: RollingWindow, pool: BlockPool) -> None:
    """Checks that an endless text fits into the pool when it runs alone.

    While tokens of the first window are evicted, its blocks in the prefix cache stay: then most blocks are held.

    Raises:
        RequestTooLarge: it does not fit.
    """
    most = window.sink_tokens + 2 * window.window_tokens + max_at_once(window, pool.block_size)
    needed = pool.blocks_for(most) + 2  # a partial sink block, and a first block that is partly evicted
    if needed > pool.num_blocks:
        raise RequestTooLarge(
            f"sink_tokens={window.sink_tokens} and window_tokens={window.window_tokens} take up to {needed} blocks of "
            f"{pool.block_size} tokens and the pool {pool.name!r} has {pool.num_blocks}; use a smaller window_tokens "
            "or give the request cache more memory"
        )


def moved(reads: Iterable[Piece], shift: int) -> tuple[Piece, ...]:
    """Reads that keep their distance from a row (and the rows after it in its group), which is `shift` further on."""
    return tuple(
        replace(read, position=read.position + shift, distance=read.distance + shift, follows=True) for read in reads
    )
