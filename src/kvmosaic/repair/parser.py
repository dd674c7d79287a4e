"""Parser of repair policies from text such as "query(0.15)": options, HTTP fields and configuration files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import get_args

from kvmosaic.errors import InvalidRepair
from kvmosaic.repair.policy import (
    Combined,
    FirstTokens,
    FullRepair,
    KeyDeviation,
    Names,
    NoRepair,
    QueryAttention,
    RepairPolicy,
    Signal,
    Temperature,
)

DEFAULT_REPAIR = "first(8)"


MAX_POLICY_CHARACTERS = 100
FORMS = "none, first(k), names, deviation(fraction), query(fraction), combined(fraction), temperature(t, scale), full"
_SIGNALS = frozenset(get_args(Signal))
_FORM = re.compile(r"([a-z]+)(?:\(([^()]*)\))?")
_POLICIES: Mapping[str, tuple[Callable[..., RepairPolicy], int]] = MappingProxyType(
    {
        "none": (NoRepair, 0),
        "first": (FirstTokens, 1),
        "names": (Names, 0),
        "deviation": (KeyDeviation, 1),
        "query": (QueryAttention, 1),
        "combined": (Combined, 1),
        "temperature": (Temperature, 2),
        "full": (FullRepair, 0),
    }
)


def repair_policy(policy: str | RepairPolicy) -> RepairPolicy:
    """The policy of a text, such as "first(16)", or the given policy itself.

    Raises:
        InvalidRepair: neither of them, or numbers outside their range.
    """
    if not isinstance(policy, str):
        if not isinstance(policy, RepairPolicy) or isinstance(policy, type):
            raise InvalidRepair(f"repair must be one of {FORMS}, or a RepairPolicy; got {policy!r:.80}")
        _check_members(policy)
        return policy
    form = _FORM.fullmatch(policy.strip().lower()) if len(policy) <= MAX_POLICY_CHARACTERS else None
    if form is None or form[1] not in _POLICIES:
        raise InvalidRepair(f"repair is {policy[:80]!r}; choose one of {FORMS}")
    make, most = _POLICIES[form[1]]
    numbers = [_number(part, policy) for part in form[2].split(",")] if form[2] and form[2].strip() else []
    if len(numbers) > most:
        raise InvalidRepair(f"repair is {policy!r} with {len(numbers)} numbers; the forms are {FORMS}")
    return make(*numbers)


def _check_members(policy: RepairPolicy) -> None:
    """Raises InvalidRepair if a user's own policy lacks a member or names an unknown signal."""
    name = type(policy).__name__
    try:
        str(policy)
        signals = frozenset(policy.signals)
    except Exception as error:
        raise InvalidRepair(f"the repair policy {name} has no text or no set of signals: {error!r:.200}") from error
    if unknown := sorted(map(repr, signals - _SIGNALS)):
        raise InvalidRepair(
            f"the repair policy {name} asks for the signals {', '.join(unknown)[:80]}; there are "
            f"{', '.join(sorted(_SIGNALS))}"
        )


def _number(text: str, policy: str) -> int | float:
    try:
        return int(text) if re.fullmatch(r"\s*\d{1,12}\s*", text) else float(text)
    except ValueError:
        raise InvalidRepair(f"repair is {policy!r}, and {text.strip()!r} is no number; the forms are {FORMS}") from None
