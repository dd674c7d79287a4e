"""What a self-check found."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison: the largest difference in it, and what is allowed."""

    subject: str
    """What was looked at: "rotation", "attention", …"""
    reference: str
    """What it was compared with."""
    difference: float
    limit: float
    where: str = ""
    """The place of the largest difference, such as "layer 3"."""

    @property
    def passed(self) -> bool:
        """Whether the difference is within the limit; a difference that is not a number never is."""
        return self.difference <= self.limit

    def __str__(self) -> str:
        place = f" of {self.where}" if self.where else ""
        numbers = f"by {self.difference:.2g} (allowed: {self.limit:.2g})"
        return f"{self.subject}{place} differs from {self.reference} {numbers}"


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The result of a self-check."""

    findings: tuple[Finding, ...]
    is_moved: bool
    """Whether the composed prompts had moved documents (not for models whose keys cannot be moved)."""
    error: str = ""
    """What went wrong, if the check could not be finished."""

    @property
    def passed(self) -> bool:
        """Whether every difference is within its limit."""
        return not self.error and all(finding.passed for finding in self.findings)

    @property
    def reason(self) -> str:
        """Why it failed, in words; empty when it passed."""
        if self.error:
            return self.error
        return next((str(finding) for finding in self.findings if not finding.passed), "")


def worst_finding(findings: list[Finding]) -> Finding:
    """The finding that is furthest beyond its limit, or nearest to it."""
    return max(findings, key=lambda finding: _sortable(finding.difference) / max(finding.limit, 1e-30))


def _sortable(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference
