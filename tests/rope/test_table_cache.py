"""Cached rotation tables: the same numbers, in bounded memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.rope import Rotation, TableCache

HALF = Rotation("half", 0, 8, 1, (1.0, 0.5, 0.25, 0.125), 8)
OTHER = Rotation("interleaved", 0, 8, -1, (1.0, 0.5, 0.25, 0.125), 8)
CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.sampled_from([HALF, OTHER]), st.lists(st.integers(-9, 9), min_size=1, max_size=4))))
def test_cached_tables_are_those_of_the_rotation(asked: list[tuple[Rotation, list[int]]]) -> None:
    cache = TableCache(max_entries=3, max_distances=3)
    for rotation, numbers in asked:
        distances = torch.tensor(numbers)
        for dtype in (torch.float32, torch.float64):
            got = cache.tables(rotation, distances, dtype=dtype, device=CPU)
            expected = rotation.tables(distances, dtype=dtype)
            assert got.rotation == rotation and got.is_identity == expected.is_identity
            assert torch.equal(got.cos, expected.cos) and torch.equal(got.sin, expected.sin)
        assert len(cache) <= 3


def test_the_same_distances_in_another_order_have_tables_of_their_own() -> None:
    cache = TableCache()
    for numbers in ([3, 7], [7, 3]):
        got = cache.tables(HALF, torch.tensor(numbers), dtype=torch.float64, device=CPU)
        assert torch.equal(got.sin, HALF.tables(torch.tensor(numbers), dtype=torch.float64).sin)


def test_a_table_that_is_asked_for_again_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TableCache()
    first = cache.tables(HALF, torch.tensor([0, 5]), dtype=torch.float32, device=CPU)
    monkeypatch.setattr(Rotation, "tables", lambda *_, **__: pytest.fail("computed again"))
    assert cache.tables(HALF, torch.tensor([0, 5]), dtype=torch.float32, device=CPU) is first


def test_what_was_asked_for_last_stays() -> None:
    cache = TableCache(max_entries=2)
    one, two, three = (torch.tensor([number]) for number in (1, 2, 3))
    kept = cache.tables(HALF, one, dtype=torch.float32, device=CPU)
    cache.tables(HALF, two, dtype=torch.float32, device=CPU)
    assert cache.tables(HALF, one, dtype=torch.float32, device=CPU) is kept
    cache.tables(HALF, three, dtype=torch.float32, device=CPU)
    assert cache.tables(HALF, one, dtype=torch.float32, device=CPU) is kept


def test_the_many_distances_of_a_prompt_are_not_kept() -> None:
    cache = TableCache()
    cache.tables(HALF, torch.arange(257), dtype=torch.float32, device=CPU)
    assert len(cache) == 0
