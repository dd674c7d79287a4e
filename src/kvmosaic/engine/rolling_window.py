"""Rolling windows: checks that model and memory allow one, and counters of a text that has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.cache import BlockPool
from kvmosaic.errors import InvalidSampling, NotMovable, RequestTooLarge
from kvmosaic.layout import Layout, RollingWindow
from kvmosaic.sampling import SamplingParams

if TYPE_CHECKING:
    from kvmosaic.engine.model_runner import EngineModel


def window_of(params: SamplingParams, model: EngineModel) -> RollingWindow | None:
    """The rolling window that sampling parameters set, if any.

    Raises:
        NotMovable: keys of this model cannot be moved to another position.
    """
    if params.window_tokens is None:
        return None
    assert params.sink_tokens is not None
    if reason := model.no_window_reason:
        raise NotMovable(
            f"window_tokens={params.window_tokens} moves what stays visible along with the text, and this model does "
            f"not allow that ({reason}); leave window_tokens out"
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


class WindowCounters:
    """What of a text with a rolling window is allocated, evicted and skipped.

    Only the head of the text is allocated at first (see `RollingWindow.head_tokens`). The rest is *owed*: it is
    allocated, computed and evicted in parts, prompt and answer alike.
    """

    def __init__(self, window: RollingWindow) -> None:
        self.window = window
        self.first_kept = 0
        """The first token after the sinks that was not skipped."""
        self._num_head = 0
        """Tokens of the first allocation."""

    def begin(self, num_text: int) -> None:
        """Starts over for a text of `num_text` tokens whose head is allocated."""
        self._num_head = self.window.head_tokens(num_text)
        self.first_kept = self.window.replay_from(num_text)

    def num_next(self, num_allocated: int, num_owed: int, max_tokens: int) -> int:
        """Tokens of the next part; it does not cross laps, so that its positions are consecutive."""
        return min(num_owed, max_tokens, self.window.lap_end(num_allocated) - num_allocated)

    def oldest_seen(self, num_allocated: int) -> int | None:
        """The oldest token after the sinks that the next one sees; None while the text fits into sinks and window."""
        if num_allocated < self.window.num_positions:
            return None
        return max(self.window.oldest(num_allocated), self.first_kept)

    def num_skipped(self, num_allocated: int) -> int:
        """Tokens that need not be computed, when they are next; otherwise 0."""
        if num_allocated != self._num_head or self.first_kept < self.window.num_positions:
            return 0
        return self.first_kept - self._num_head
