"""Stop texts that almost match at every place cost no more than others."""

from __future__ import annotations

import time

import pytest

from kvmosaic.sampling.stop_conditions import StopStrings


@pytest.mark.parametrize(
    "ending", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("b", "ab")), "a" * 100 + "b"]
)
def test_repeated_letters_cost_linear_time(ending: str) -> None:
    """Once 0.3 s a token: 128 texts of 4,096 characters, against an answer that repeats one letter."""
    stops = StopStrings([f"{'a' * (4_000 - number)}{ending}" for number in range(64)])
    begin = time.thread_time()
    for _ in range(4_100):
        assert stops.append("a") is None
        stops.take()
    assert time.thread_time() - begin < 2.5
    assert stops.append(ending) == "a" * 4_000 + ending
