"""How many examples Hypothesis tries: few before every commit, all in the slow suite."""

from __future__ import annotations

from hypothesis import settings

FAST, FULL = "fast", "full"
"""Profiles: `pytest --hypothesis-profile=full`."""
_FEW = 15


def register_profiles(**options: object) -> None:
    """Registers both; the fast one is in force unless pytest is told otherwise."""
    settings.register_profile(FULL, **options)  # type: ignore[arg-type]
    settings.register_profile(FAST, settings.get_profile(FULL), max_examples=_FEW)
    settings.load_profile(FAST)


def examples(count: int) -> int:
    """`max_examples` of a test that wants `count` of them in the slow suite."""
    return count if settings.default is None or settings.default.max_examples > _FEW else min(count, _FEW)
