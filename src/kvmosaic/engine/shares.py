"""Fair shares: weighted max-min division of running slots, blocks and tokens between competing tenants."""

from __future__ import annotations

from collections.abc import Collection

MAX_WEIGHT = 1_000.0
"""Max weight of a tenant; its inverse is the min."""

HYSTERESIS = 2.0
"""A tenant that has some may take more only from a tenant that has more than this multiple of its then amount."""

SLACK_SECONDS = 0.5
SLACK_STEPS = 4.0
"""A tenant that lags by less than the longer of these shares its steps; a new one lags by twice that."""


class Shares:
    """Weighted max-min fairness: the tenant with the smallest load is next; unwanted shares go to any tenant.

    A tenant that sends one request has the slot it needs. Tenants that send more than there is room for share the
    rest, whatever they send and however many answers they request.
    """

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._served: dict[str, float] = {}
        """Per present tenant: seconds of steps charged to it, divided by its weight; see `is_behind`."""
        self._present: set[str] = set()
        self._step_seconds = 0.0
        """Recent step duration."""

    def set_weight(self, tenant: str, weight: float) -> None:
        """Sets a tenant's share, as a multiple of the default one (1)."""
        assert 1 / MAX_WEIGHT <= weight <= MAX_WEIGHT
        self._weights[tenant] = weight

    def load(self, tenant: str, amount: float) -> float:
        """A tenant's amount divided by its weight; equal loads are fair."""
        return amount / self._weights.get(tenant, 1.0)

    def is_fairer(self, taker: str, amount_then: float, giver: str, amount_now: float) -> bool:
        """Whether a tenant would have a smaller load than another one has now, if it took from it.

        So what was taken is never taken back, and equal shares stay as they are.
        """
        return self.load(taker, amount_then) < self.load(giver, amount_now)

    def may_take(self, taker: str, amount: float, more: float, giver: str, amount_now: float) -> bool:
        """Whether a tenant may preempt another one, which costs recomputation.

        It may if it has nothing and would have less than the other has now; or, with something, less than half of that.
        """
        factor = HYSTERESIS if amount else 1.0
        return self.is_fairer(taker, factor * (amount + more), giver, amount_now)

    def note_present(self, present: Collection[str], seen: Collection[str]) -> None:
        """Records which tenants have unfinished requests, and which had some recently.

        A new or returning tenant lags the others by a bounded credit: time is not saved up. Nor is used time
        written off by a short absence.
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
        """Records the duration of a step."""
        self._step_seconds += 0.1 * (seconds - self._step_seconds)

    @property
    def _slack(self) -> float:
        return max(SLACK_SECONDS, SLACK_STEPS * self._step_seconds)

    def note_served(self, tenant: str, seconds: float) -> None:
        """Charges seconds of a step to a tenant."""
        if tenant in self._served:
            self._served[tenant] += self.load(tenant, seconds)

    def is_behind(self, tenant: str, other: str) -> bool:
        """Whether a tenant has received so much less time than another that it may have a step for itself."""
        return self._served[tenant] + self._slack < self._served[other]

    def divided(self, amount: int, tenants: Collection[str]) -> dict[str, int]:
        """Splits an amount by weight, rounded up, so that every tenant gets some."""
        weights = {tenant: self._weights.get(tenant, 1.0) for tenant in tenants}
        total = sum(weights.values())
        return {tenant: int(-(-amount * weight // total)) for tenant, weight in weights.items()}
