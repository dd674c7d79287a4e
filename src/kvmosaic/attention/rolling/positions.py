"""StreamingLLM positions: positions in an endless stream, within the model's trained range."""

from __future__ import annotations

from kvmosaic.errors import InvalidConfig


def sink_distance(num_tokens: int, sink_size: int, window_size: int) -> int:
    """How far the sinks are moved to be right before the window (StreamingLLM positions).

        stream     0 1 2 3 | evicted: 4 … 103 | 104 … 1127    keys keep the rotation of these positions
        seen at    0 1 2 3 |                    4 … 1027      within the trained range

    The window and the query after it are equally far apart in both. Only the sinks are moved closer, by the number of
    evicted tokens. That is the `distance` of a `Piece`: the query is rotated back by it, no key is rotated. A
    token at stream position p is at p - distance in the model's window.

    Args:
        num_tokens: tokens of the stream so far, including the newest chunk.
        sink_size: first tokens, which are never evicted.
        window_size: newest tokens, which stay.

    Raises:
        InvalidConfig: a negative number.

    Source: "Efficient Streaming Language Models with Attention Sinks", Xiao et al., 2023.
    """
    if min(num_tokens, sink_size, window_size) < 0:
        raise InvalidConfig(
            f"{num_tokens} tokens with {sink_size} sinks and a window of {window_size}: none of them may be negative"
        )
    return max(0, num_tokens - sink_size - window_size)
