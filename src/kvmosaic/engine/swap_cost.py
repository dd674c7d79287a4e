"""Swap cost: compares swapping blocks to the host and back with recomputing their tokens."""

from __future__ import annotations

from kvmosaic.tiers.cost import EMA, ComputeCost

_LOOK_AGAIN = 32
"""Refusals after which a copy is measured again: the first ones of a process are slow."""


class SwapCost:
    """Measured seconds of computing a token, and of copying a byte in either direction.

    Until the compute speed is measured, recomputing is assumed to be faster. Then the first copy to the host is a
    measurement, and the way back is assumed to take as long until it is measured, too.
    """

    def __init__(self) -> None:
        self._compute = ComputeCost()
        self._out, self._in = EMA(), EMA()
        self._num_refused = 0

    def note_step(self, num_tokens: int, num_prefilled: int, seconds: float) -> None:
        """Records a step of `num_tokens` tokens, `num_prefilled` of which were prefill."""
        if 2 * num_prefilled >= num_tokens:
            self._compute.note(num_tokens, seconds)
        else:
            self._compute.note_step(num_tokens, seconds)

    def note_out(self, num_bytes: int, seconds: float) -> None:
        """Records a copy to the host."""
        self._out.add(seconds / num_bytes)

    def note_in(self, num_bytes: int, seconds: float) -> None:
        """Records a copy back to the device."""
        self._in.add(seconds / num_bytes)

    def decide(self, num_tokens: int, num_bytes: int) -> bool:
        """Decides whether to swap `num_tokens` of `num_bytes` out and in: if that is expected to save time.

        Counts refusals: after many, the measurements are dropped, so that the next copy is a probe.
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
