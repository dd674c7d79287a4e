"""The rolling window: what a token of an endless text sees, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RollingWindow:
    """Sinks that never leave, then the newest tokens: the rule of a text that goes on without end.

    It is about the last span of a layout (question and answer, or the plain prompt and its answer), whose tokens have
    numbers 0, 1, 2, … With S sinks and a window of W tokens, token t sees

        everything      all that the span sees: system prompt, documents
        sinks           tokens 0 … S - 1
        window          the newest W tokens, itself included: t - W + 1 … t

    and sees them as if only these were there, side by side (positions as in StreamingLLM, https://arxiv.org/abs/2309.17453):

        text            s s s s . . . . . . . . . w w w w w w        token t is the last one
        seen at         0 1 2 3                   4 5 6 7 8 9        place in the cache, from the span's start on

    So the first S + W tokens are an ordinary causal prompt. From then on the window moves one token further with every
    token, and everything before it keeps its distance from the newest token.

    Keys are cached once, rotated at the place where they were computed. That place must not grow with the text, so it
    goes round: `place` counts from S to S + W - 1, then begins at S again. The tokens between two beginnings are a
    *lap*. A window reaches back into the lap before at most, whose keys then count as W places earlier.
    """

    sink_tokens: int
    window_tokens: int
    num_layers: int = 1
    """Layers of the model: each lets a token reach one window further back."""

    def __post_init__(self) -> None:
        assert self.sink_tokens >= 0 and self.window_tokens >= 1 and self.num_layers >= 1

    @property
    def num_places(self) -> int:
        """S + W: as many tokens are an ordinary prompt, and no place is as large as this."""
        return self.sink_tokens + self.window_tokens

    def place(self, token: int) -> int:
        """Where a token stands while it is computed, counted from the span's start."""
        if token < self.num_places:
            return token
        return self.sink_tokens + (token - self.sink_tokens) % self.window_tokens

    def shift(self, token: int) -> int:
        """How far the sinks, and all before the span, are moved for a token; 0 for the first S + W tokens."""
        return self.place(token) - min(token, self.num_places - 1)

    def lap_start(self, token: int) -> int:
        """The first token of the lap of a token: from there on, place and number grow together."""
        if token < self.num_places:
            return 0
        return token - (token - self.sink_tokens) % self.window_tokens

    def lap_end(self, token: int) -> int:
        """The first token of the next lap."""
        if token < self.num_places:
            return self.num_places
        return self.lap_start(token) + self.window_tokens

    def oldest(self, token: int) -> int:
        """The oldest token that is no sink and that a token sees."""
        return max(self.sink_tokens, token - self.window_tokens + 1)

    def replay_from(self, num_tokens: int) -> int:
        """The first token behind the sinks that must be computed, to go on behind a text of `num_tokens` tokens.

        A layer mixes in tokens of the last window only, so L layers reach back (L - 1)(W - 1) tokens from the oldest
        key that is needed, however long the text is. What lies between the sinks and that token makes no difference.
        S, if nothing can be left out.
        """
        reach = self.window_tokens + (self.num_layers - 1) * (self.window_tokens - 1)
        first = num_tokens - reach
        return first if first >= self.num_places else self.sink_tokens

    def head_tokens(self, num_tokens: int) -> int:
        """How many tokens of such a text are computed first, as an ordinary prompt; the others follow in parts."""
        if self.replay_from(num_tokens) > self.sink_tokens:
            return max(self.sink_tokens, 1)
        return min(num_tokens, self.num_places)
