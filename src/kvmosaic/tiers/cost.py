"""Cost model: whether loading a chunk is faster than computing it again, from what was measured."""

from __future__ import annotations

_WEIGHT = 0.3
"""Of the newest measurement; the rest is what was known before."""


class Average:
    """A mean that forgets: the newest number counts most."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, number: float) -> None:
        """Takes in a measurement."""
        self.value = number if self.value is None else self.value + _WEIGHT * (number - self.value)


class LoadCost:
    """What loading from one tier takes: its latency, known from misses, and a time per byte, known from hits."""

    def __init__(self) -> None:
        self._latency = Average()
        self._seconds_per_byte = Average()

    @property
    def bytes_per_second(self) -> float | None:
        """Measured bandwidth, verifying and decoding included; None before the first hit."""
        return None if self._seconds_per_byte.value is None else 1 / max(self._seconds_per_byte.value, 1e-15)

    def note_miss(self, seconds: float) -> None:
        """An entry was asked for and is not there."""
        self._latency.add(seconds)

    def note_hit(self, num_bytes: int, seconds: float) -> None:
        """An entry was read, verified and decoded."""
        self._seconds_per_byte.add(max(seconds - (self._latency.value or 0.0), 0.0) / max(num_bytes, 1))

    def estimate(self, num_bytes: int) -> float | None:
        """Seconds that an entry of this size will take; None if nothing is known."""
        if self._seconds_per_byte.value is None:
            return self._latency.value
        return (self._latency.value or 0.0) + num_bytes * self._seconds_per_byte.value


class ComputeCost:
    """What computing takes: seconds per token, from the chunks that were computed."""

    def __init__(self) -> None:
        self._seconds_per_token = Average()

    def note(self, num_tokens: int, seconds: float) -> None:
        """A chunk was computed."""
        self._seconds_per_token.add(seconds / max(num_tokens, 1))

    def estimate(self, num_tokens: int) -> float | None:
        """Seconds that so many tokens will take; None before the first chunk."""
        return None if self._seconds_per_token.value is None else num_tokens * self._seconds_per_token.value
