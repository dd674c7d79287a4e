"""The rolling window: visibility and positions for a text of unlimited length."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RollingWindow:
    """Attention sinks that are never evicted, and a window of the newest tokens.

    It applies to the last span of a layout (question and answer, or the plain prompt and its answer), whose tokens have
    indexes 0, 1, 2, … With S sinks and a window of W tokens, token t sees

        everything      all that the span sees: system prompt, documents
        sinks           tokens 0 … S - 1
        window          the newest W tokens, itself included: t - W + 1 … t

    at contiguous positions, as if only these existed (StreamingLLM, https://arxiv.org/abs/2309.17453):

        text            s s s s . . . . . . . . . w w w w w w        token t is the last one
        seen at         0 1 2 3                   4 5 6 7 8 9        position in the cache, from the span's start on

    So the first S + W tokens are an ordinary causal prompt. From then on the window moves by one token per token, and
    everything before it keeps its distance from the newest token.

    Keys are cached once, rotated for the position where they were computed. It must not grow with the text, so
    it wraps around: it counts from S to S + W - 1, then starts at S again. The tokens between two starts are a *lap*.
    A window reaches back into the previous lap at most, whose keys then count as W positions earlier.
    """

    sink_tokens: int
    window_tokens: int
    num_layers: int = 1
    """Layers of the model: each lets a token reach one window further back."""

    def __post_init__(self) -> None:
        assert self.sink_tokens >= 0 and self.window_tokens >= 1 and self.num_layers >= 1

    @property
    def num_positions(self) -> int:
        """S + W: the length of an ordinary prompt, and the exclusive upper bound of positions."""
        return self.sink_tokens + self.window_tokens

    def position_of(self, token: int) -> int:
        """The position of a token when it is computed, relative to the span's start."""
        if token < self.num_positions:
            return token
        return self.sink_tokens + (token - self.sink_tokens) % self.window_tokens

    def shift(self, token: int) -> int:
        """Distance by which the sinks, and all spans before, are moved for a token; 0 for the first S + W tokens."""
        return self.position_of(token) - min(token, self.num_positions - 1)

    def lap_start(self, token: int) -> int:
        """The first token of a token's lap: from there on, position and index grow together."""
        if token < self.num_positions:
            return 0
        return token - (token - self.sink_tokens) % self.window_tokens

    def lap_end(self, token: int) -> int:
        """The first token of the next lap."""
        if token < self.num_positions:
            return self.num_positions
        return self.lap_start(token) + self.window_tokens

    def oldest(self, token: int) -> int:
        """The oldest non-sink token that a token sees."""
        return max(self.sink_tokens, token - self.window_tokens + 1)

    def replay_from(self, num_tokens: int) -> int:
        """The first token after the sinks that must be computed to continue a text of `num_tokens` tokens.

        A layer mixes in tokens of the last window only, so L layers reach back (L - 1)(W - 1) tokens from the oldest
        needed key, independent of the text's length. Tokens between the sinks and that token make no difference. S, if
        nothing can be skipped.
        """
        reach = self.window_tokens + (self.num_layers - 1) * (self.window_tokens - 1)
        first = num_tokens - reach
        return first if first >= self.num_positions else self.sink_tokens

    def head_tokens(self, num_tokens: int) -> int:
        """Number of tokens that are computed first, as an ordinary prompt; the others follow in parts."""
        if self.replay_from(num_tokens) > self.sink_tokens:
            return max(self.sink_tokens, 1)
        return min(num_tokens, self.num_positions)
