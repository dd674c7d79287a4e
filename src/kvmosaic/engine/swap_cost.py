"""Swap cost: whether moving blocks to the host and back is faster than computing their tokens again."""

from __future__ import annotations

from kvmosaic.tiers.cost import EMA, ComputeCost

_LOOK_AGAIN = 32
"""After so many refusals a copy is measured anew: the first ones of a process are slow."""


class SwapCost:
    """Seconds of computing a token, and of copying a byte either way, all of them measured.

    As long as nobody knows how fast this machine computes, computing again is believed to be faster. Then the first
    copy to the host is a measurement, and the way back is believed to take as long until it was measured, too.
    """

    def __init__(self) -> None:
        self._compute = ComputeCost()
        self._out, self._in = EMA(), EMA()
        self._num_refused = 0

    def note_step(self, num_tokens: int, num_prefilled: int, seconds: float) -> None:
        """A step computed so many tokens, of which so many belonged to prompts, many at once."""
        if 2 * num_prefilled >= num_tokens:
            self._compute.note(num_tokens, seconds)
        else:
            self._compute.note_step(num_tokens, seconds)

    def note_out(self, num_bytes: int, seconds: float) -> None:
        """Bytes were copied to the host."""
        self._out.add(seconds / num_bytes)

    def note_in(self, num_bytes: int, seconds: float) -> None:
        """Bytes were copied back."""
        self._in.add(seconds / num_bytes)

    def is_worth(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether moving so many tokens, which have so many bytes, both ways is expected to save time.

        It is also worth a try when no copy has been measured for long.
        """
        compute_seconds = self._compute.estimate(num_tokens)
        if compute_seconds is None:
            return False
        out_pace = self._out.value
        if out_pace is None:
            return True
        in_pace = out_pace if self._in.value is None else self._in.value
        if num_bytes * (out_pace + in_pace) < compute_seconds:
            self._num_refused = 0
            return True
        self._num_refused += 1
        if self._num_refused >= _LOOK_AGAIN:
            self._num_refused, self._out, self._in = 0, EMA(), EMA()
        return False
