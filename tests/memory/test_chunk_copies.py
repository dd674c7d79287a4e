"""Chunks leave the pool whole and come back whole, whatever blocks they lie in."""

from __future__ import annotations

import pytest
import torch
from entries.entries import same_bits
from hypothesis import given
from hypothesis import strategies as st
from memory.test_storage import LAYERS, storage

from kvmosaic.memory import BlockStorage


def filled() -> BlockStorage:
    blocks = storage()
    for index, layer in enumerate(LAYERS):
        keys = torch.randn(24, layer.num_kv_heads, layer.key_dim)
        blocks.write(index, slice(None), keys, torch.randn(24, layer.num_kv_heads, layer.value_dim))
    return blocks


def token_by_token(blocks: BlockStorage, block_ids: list[int], num_tokens: int) -> list:
    """The obvious twin of `read_chunk`."""
    result = []
    for index, layer in enumerate(blocks.layers):
        if layer.source_layer != index:
            continue
        rows = [blocks.run(index, block_ids[token // 4] * 4 + token % 4, 1) for token in range(num_tokens)]
        value = None if layer.value_in_key else torch.cat([value for _, value in rows])
        result.append((torch.cat([key for key, _ in rows]), value))
    return result


@given(order=st.permutations(range(6)), num_tokens=st.integers(1, 24))
def test_a_chunk_is_read_as_it_would_be_token_by_token(order, num_tokens):
    blocks = filled()
    chunk = blocks.read_chunk(order, num_tokens)
    assert same_bits(chunk, token_by_token(blocks, order, num_tokens))
    assert all(tensor.is_contiguous() for pair in chunk for tensor in pair if tensor is not None)


@given(old=st.permutations(range(6)), new=st.permutations(range(6)), num_tokens=st.integers(1, 24))
def test_a_chunk_comes_back_into_any_blocks_and_touches_no_other_slot(old, new, num_tokens):
    blocks, others = filled(), filled()
    chunk = blocks.read_chunk(old, num_tokens)
    before = others.read_chunk(new, 24)
    others.write_chunk(new, chunk)
    assert same_bits(others.read_chunk(new, num_tokens), chunk)
    for pair, kept in zip(others.read_chunk(new, 24), before, strict=True):
        for tensor, old_tensor in zip(pair, kept, strict=True):
            assert tensor is None or torch.equal(tensor[num_tokens:], old_tensor[num_tokens:])


def test_what_was_read_is_a_copy():
    blocks = filled()
    chunk = blocks.read_chunk([1, 2], 8)
    kept = [[None if tensor is None else tensor.clone() for tensor in pair] for pair in chunk]
    blocks.write(0, slice(4, 12), torch.zeros(8, 2, 4), torch.zeros(8, 2, 3))
    assert same_bits(chunk, kept)


def test_layers_that_store_nothing_are_left_out_and_latents_have_no_values():
    chunk = filled().read_chunk([0], 3)
    assert [(key.shape, None if value is None else value.shape) for key, value in chunk] == [
        ((3, 2, 4), (3, 2, 3)),
        ((3, 1, 4), None),
    ]


def test_a_chunk_moves_between_pools_with_other_block_sizes():
    layers = [LAYERS[0]]
    small = BlockStorage(layers, 8, 2, torch.float32, torch.device("cpu"))
    large = BlockStorage(layers, 2, 16, torch.float32, torch.device("cpu"))
    small.write(0, slice(None), torch.randn(16, 2, 4), torch.randn(16, 2, 3))
    chunk = small.read_chunk([5, 0, 3], 5)
    large.write_chunk([1], chunk)
    assert same_bits(large.read_chunk([1], 5), chunk)


def test_more_tokens_than_blocks_are_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="9 tokens do not fit into 2 blocks of 4"):
        filled().read_chunk([0, 1], 9)


def test_geometry_repeats_what_the_layers_say():
    assert [layer.numbers for layer in LAYERS] == [[0, 2, 4, 3, 0], [1, 1, 4, 3, 1], [0, 2, 4, 3, 0]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_chunk_leaves_a_gpu_and_comes_back():
    device = torch.device("cuda")
    blocks = BlockStorage(LAYERS, 6, 4, torch.bfloat16, device)
    for index, layer in enumerate(LAYERS):
        keys = torch.randn(24, layer.num_kv_heads, 4, device=device).bfloat16()
        blocks.write(index, slice(None), keys, keys[..., :3])
    for order in ([0, 1, 2], [4, 1, 3]):
        chunk = blocks.read_chunk(order, 11)
        assert all(tensor.device.type == "cpu" for pair in chunk for tensor in pair if tensor is not None)
        blocks.write_chunk([5, 3, 1], chunk)
        assert same_bits(blocks.read_chunk([5, 3, 1], 11), chunk)
