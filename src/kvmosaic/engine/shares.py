"""Shares: what each tenant may have of places, blocks and tokens while others want some, by weight."""

from __future__ import annotations

from collections.abc import Collection

MAX_WEIGHT = 1_000.0
"""Of a tenant, up; its inverse, down."""

HYSTERESIS = 2.0
"""Who has something takes more from those only who have more than so many times what it has then."""

SLACK_SECONDS = 0.5
SLACK_STEPS = 4.0
"""Who is behind by less than the longer of these shares its steps; who comes new is behind by twice that."""


class Shares:
    """Max-min fairness by weight: whoever has least, for its weight, is next; what nobody else wants goes to anybody.

    A tenant that sends one request has the place it needs. Those that send more than there is room for share what is
    left, whatever they send and however many answers they ask for.
    """

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._served: dict[str, float] = {}
        """By tenant that is there: seconds of steps that were its own, for its weight; see `is_behind`."""
        self._present: set[str] = set()
        self._step_seconds = 0.0
        """Of a step, lately."""

    def set_weight(self, tenant: str, weight: float) -> None:
        """Gives a tenant so many times the share of one that has none of its own (1)."""
        assert 1 / MAX_WEIGHT <= weight <= MAX_WEIGHT
        self._weights[tenant] = weight

    def load(self, tenant: str, amount: float) -> float:
        """What a tenant has, for its weight; equal for all is fair."""
        return amount / self._weights.get(tenant, 1.0)

    def is_fairer(self, taker: str, amount_then: float, giver: str, amount_now: float) -> bool:
        """Whether a tenant would have less than another one has now, if it took from it, each for its weight.

        So what was taken is never taken back, and equal shares stay as they are.
        """
        return self.load(taker, amount_then) < self.load(giver, amount_now)

    def may_take(self, taker: str, amount: float, more: float, giver: str, amount_now: float) -> bool:
        """Whether a tenant may have another one give way: that costs what is to be computed again.

        It may if it has nothing and would have less than the other has now; or, with something, no more than half.
        """
        factor = HYSTERESIS if amount else 1.0
        return self.is_fairer(taker, factor * (amount + more), giver, amount_now)

    def note_present(self, present: Collection[str], seen: Collection[str]) -> None:
        """Notes who has requests under way, and who had some a while ago.

        Who comes new, or comes again, is behind the others by a credit at most: nobody saves time up. Nor does anybody
        get rid of what it has used by going away for a moment.
        """
        for tenant in self._served.keys() - seen:
            del self._served[tenant]
        least = min((self._served[tenant] for tenant in self._present if tenant in present), default=0.0)
        for tenant in present:
            if tenant not in self._present:
                floor = least - 2 * self._slack
                self._served[tenant] = max(self._served.get(tenant, floor), floor)
        self._present = set(present)

    def note_step(self, seconds: float) -> None:
        """Notes how long a step took."""
        self._step_seconds += 0.1 * (seconds - self._step_seconds)

    @property
    def _slack(self) -> float:
        return max(SLACK_SECONDS, SLACK_STEPS * self._step_seconds)

    def note_served(self, tenant: str, seconds: float) -> None:
        """Notes seconds that a step has computed for a tenant."""
        if tenant in self._served:
            self._served[tenant] += self.load(tenant, seconds)

    def is_behind(self, tenant: str, other: str) -> bool:
        """Whether so much less time was spent on a tenant than on another that it may have a step for itself."""
        return self._served[tenant] + self._slack < self._served[other]

    def divided(self, amount: int, tenants: Collection[str]) -> dict[str, int]:
        """Parts of an amount by weight, rounded up, so that nobody has nothing."""
        weights = {tenant: self._weights.get(tenant, 1.0) for tenant in tenants}
        total = sum(weights.values())
        return {tenant: int(-(-amount * weight // total)) for tenant, weight in weights.items()}
