"""Tokens copied from a paged cache with transposed keys, against indexing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.programs import needs_extension

from kvmosaic.attention.native.backend import gather, load_library

pytestmark = needs_extension


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 3),
    st.sampled_from([(16, 8), (32, 64), (48, 80)]),
    st.lists(st.integers(0, 5 * 16 - 1), max_size=300),
    st.integers(1, 2),
)
def test_tokens_are_those_of_the_cache(dtype, num_heads, shape, chosen, num_threads):
    block_size, dim = shape
    layers = torch.randn(5, 2, num_heads, block_size, 2 * dim).to(dtype)
    cache = layers[:, 1]  # blocks of several layers are beside each other
    halves = cache.reshape(5, num_heads, 2, -1)
    keys = halves[:, :, 0].reshape(5, num_heads, dim, block_size).permute(0, 3, 1, 2).reshape(-1, num_heads, dim)
    values = halves[:, :, 1].reshape(5, num_heads, block_size, dim).transpose(1, 2).reshape(-1, num_heads, dim)
    slots = torch.tensor([*chosen, *range(3, 2 * block_size)])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = gather(load_library(), cache, slots)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], keys[slots]) and torch.equal(found[1], values[slots])


def test_slots_outside_the_cache_are_refused():
    cache = torch.zeros(2, 1, 16, 16)
    for slot in (-1, 32):
        with pytest.raises(ValueError, match="of 32"):
            gather(load_library(), cache, torch.tensor([slot]))
    with pytest.raises(ValueError, match="float64"):
        gather(load_library(), cache.double(), torch.tensor([0]))
