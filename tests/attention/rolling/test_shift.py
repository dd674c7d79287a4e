"""Tokens that move left where they lie, against a copy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.attention.rolling import cache


@pytest.mark.parametrize("rows_per_block", [0, 10**6], ids=["blocks", "memmove"])
@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_shift_equals_a_copy_and_touches_nothing_else(rows_per_block: int, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] = data.draw(st.integers(2, 40))
    by = data.draw(st.integers(1, shape[dim] - 1))
    start = data.draw(st.integers(0, shape[dim] - by - 1))
    stop = data.draw(st.integers(start + by + 1, shape[dim]))
    storage = torch.arange(torch.Size(shape).numel(), dtype=data.draw(st.sampled_from([torch.float32, torch.int16])))
    storage = storage.reshape(shape)
    expected = storage.clone()
    length = stop - start - by
    expected.narrow(dim, start, length).copy_(storage.narrow(dim, start + by, length).clone())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_ROWS_PER_BLOCK", rows_per_block)
        cache.shift_left(storage, dim, start, stop, by)
    assert torch.equal(storage, expected)
