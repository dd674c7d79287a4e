"""Positions in a stream without end, as the model was trained for them."""

from __future__ import annotations

from kvmosaic.errors import InvalidConfig


def sink_distance(num_tokens: int, sink_size: int, window_size: int) -> int:
    """How far the sinks are moved so that they stand right before the window (StreamingLLM positions).

        stream     0 1 2 3 | gone: 4 … 103 | 104 … 1127       keys keep the rotation of these positions
        seen at    0 1 2 3 |                 4 … 1027         what the model would have been trained for

    The window and the query behind it are as far apart in both. Only the sinks have to come nearer, by the number of
    tokens that are gone. That is the `distance` of a `Piece`: the query is turned back by it, no key is touched. A
    token at stream position p stands at p - distance in the model's window.

    Args:
        num_tokens: tokens of the stream so far, those of the newest chunk too.
        sink_size: tokens that stay for ever.
        window_size: newest tokens that stay.

    Raises:
        InvalidConfig: a negative number.

    Source: "Efficient Streaming Language Models with Attention Sinks", Xiao et al., 2023.
    """
    if min(num_tokens, sink_size, window_size) < 0:
        raise InvalidConfig(
            f"{num_tokens} tokens with {sink_size} sinks and a window of {window_size}: none of them may be negative"
        )
    return max(0, num_tokens - sink_size - window_size)
