"""Step budget: remaining tokens and span reads of a step, in all and for each tenant."""

from __future__ import annotations

from collections.abc import Collection

from kvmosaic.engine.shares import Shares

MAX_STEP_LOOKS = 2**18
"""Max rows of a step times the spans that each reads: a query is rotated for each of them, in memory and time."""


class StepBudget:
    """Remaining tokens and looks (rows times spans read) of a step.

    First every tenant that wants some may take its share; then, after `lift`, the rest is first come, first served.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        """Remaining tokens of the step."""
        self.num_looks = MAX_STEP_LOOKS
        self._tokens: dict[str, int] | None = None
        self._looks: dict[str, int] = {}

    @property
    def is_spent(self) -> bool:
        """Whether no tenant can be given anything."""
        return self.num_tokens <= 0 or self.num_looks <= 0

    def keep_looks(self) -> None:
        """Reserves at least half of the looks for prompts, however many documents the running answers read."""
        self.num_looks = max(self.num_looks, MAX_STEP_LOOKS // 2)

    def share(self, tenants: Collection[str], shares: Shares) -> None:
        """Divides the rest between tenants; others get nothing before `lift`."""
        self._tokens = shares.divided(self.num_tokens, tenants)
        self._looks = shares.divided(self.num_looks, tenants)

    def lift(self) -> None:
        """Makes the rest available to all tenants."""
        self._tokens = None

    def tokens_of(self, tenant: str) -> int:
        """Tokens that a tenant may take now."""
        return max(self.num_tokens if self._tokens is None else min(self.num_tokens, self._tokens.get(tenant, 0)), 0)

    def looks_of(self, tenant: str) -> int:
        """Looks that a tenant may take now."""
        return max(self.num_looks if self._tokens is None else min(self.num_looks, self._looks.get(tenant, 0)), 0)

    def spend(self, tenant: str, num_tokens: int, num_looks: int) -> None:
        """Charges a tenant."""
        self.num_tokens -= num_tokens
        self.num_looks -= num_looks
        if self._tokens is not None:
            self._tokens[tenant] = self._tokens.get(tenant, 0) - num_tokens
            self._looks[tenant] = self._looks.get(tenant, 0) - num_looks
