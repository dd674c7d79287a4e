"""Step times: measured durations of steps, and how many tokens and answers a step may hold by them."""

from __future__ import annotations

SHARED_STEP_SECONDS = 0.015
"""Target time of a step while there is more than one tenant."""
SMALL_STEP = 4
"""Tokens of a step that takes hardly longer than an empty one."""
LEAST_ANSWERS = 8
"""Answers for which a step always has a token each."""
LEAST_TOKENS = 128
"""Tokens that a step may always have."""


class StepTimes:
    """Moving averages: seconds of a step with hardly any tokens, and of each token or answer more."""

    def __init__(self) -> None:
        self._least: float | None = None
        self._token: float | None = None
        """In steps of many tokens."""
        self._answer: float | None = None
        """In steps of many answers and nothing else."""

    def note(self, num_tokens: int, num_works: int, seconds: float) -> None:
        """Records the duration of a step."""
        if num_tokens <= SMALL_STEP:
            self._least = 0.8 * (self._least or seconds) + 0.2 * seconds
        elif num_tokens == num_works >= LEAST_ANSWERS and self._least is not None:
            each = max(seconds - self._least, 0.0) / num_tokens
            self._answer = each if self._answer is None else 0.8 * self._answer + 0.2 * each
        if num_tokens >= LEAST_TOKENS // 2:
            each = max(seconds - (self._least or 0.0), 0.0) / num_tokens
            self._token = each if self._token is None else 0.8 * self._token + 0.2 * each

    def are_longer(self, num_answers: int) -> bool:
        """Whether `num_answers` make a step longer by a quarter or more.

        With a large model they do not, because reading the weights dominates: leaving answers out gains nothing.
        """
        if self._least is None or self._answer is None:
            return False
        return num_answers * self._answer > self._least / 4

    def max_answers(self) -> int | None:
        """Answers of a step of about `SHARED_STEP_SECONDS`; None if even an empty one takes as long."""
        assert self._answer is not None and self._least is not None
        room = SHARED_STEP_SECONDS - self._least
        return max(LEAST_ANSWERS, int(room / self._answer)) if room > 0 else None

    def max_tokens(self, most: int) -> int:
        """Tokens of a step that other tenants wait for, at most `most`.

        It takes about `SHARED_STEP_SECONDS`, or twice as long as an empty one: shorter ones would cost too much.
        """
        if not self._token:
            return most
        least = self._least or 0.0
        return min(most, max(LEAST_TOKENS, int(max(SHARED_STEP_SECONDS - least, least) / self._token)))
