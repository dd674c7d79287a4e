"""Block storage: runs are views, writes land where they should, copies copy all layers."""

from __future__ import annotations

import pytest
import torch

from kvmosaic.assembly import check_fits, device_memory_bytes
from kvmosaic.container import MAX_BLOCKS, blocks_within
from kvmosaic.errors import InvalidConfig
from kvmosaic.layers import LayerGeometry
from kvmosaic.memory import BlockStorage

LAYERS = [LayerGeometry(0, 2, 4, 3), LayerGeometry(1, 1, 4, 3, True), LayerGeometry(0, 2, 4, 3)]


def storage(dtype: torch.dtype = torch.float32) -> BlockStorage:
    return BlockStorage(LAYERS, 6, 4, dtype, torch.device("cpu"))


def test_a_run_is_a_view_of_what_was_written():
    blocks = storage()
    keys, values = torch.randn(5, 2, 4), torch.randn(5, 2, 3)
    blocks.write(0, torch.tensor([9, 10, 11, 12, 13]), keys, values)
    key, value = blocks.run(0, 9, 5)
    assert torch.equal(key, keys) and torch.equal(value, values)
    again, _ = blocks.run(0, 9, 5)
    assert again.data_ptr() == key.data_ptr(), "reading copies nothing"
    blocks.write(0, slice(9, 10), keys[4:], values[4:])
    assert torch.equal(key[0], keys[4]), "a view sees later writes"


def test_several_runs_are_copied_and_one_is_a_view():
    blocks = storage()
    keys, values = torch.randn(24, 2, 4), torch.randn(24, 2, 3)
    blocks.write(0, slice(0, 24), keys, values)
    for layer in (0, 2):
        key, value = blocks.get_kv(layer, [(4, 3), (16, 8)])
        assert torch.equal(key, torch.cat([keys[4:7], keys[16:]])) and torch.equal(value[3:], values[16:])
        key, _ = blocks.get_kv(layer, [(4, 3)])
        assert key.data_ptr() == blocks.run(0, 4, 3)[0].data_ptr()
    for layer, runs, message in ((3, [(0, 1)], "layers 0 to 2"), (0, [], "no runs")):
        with pytest.raises(InvalidConfig, match=message):
            blocks.get_kv(layer, runs)


def test_latent_values_are_the_front_of_the_keys():
    blocks = storage()
    keys = torch.randn(2, 1, 4)
    blocks.write(1, slice(0, 2), keys, keys[..., :3])
    key, value = blocks.run(1, 0, 2)
    assert torch.equal(value, keys[..., :3]) and value.data_ptr() == key.data_ptr()


def test_a_layer_that_shares_keys_stores_nothing():
    blocks = storage()
    blocks.write(0, slice(0, 1), torch.ones(1, 2, 4), torch.ones(1, 2, 3))
    blocks.write(2, slice(0, 1), torch.zeros(1, 2, 4), torch.zeros(1, 2, 3))
    assert torch.equal(blocks.run(2, 0, 1)[0], torch.ones(1, 2, 4))


def test_copying_a_block_copies_every_layer_and_nothing_else():
    blocks = storage()
    for index, layer in enumerate(LAYERS[:2]):
        key = torch.randn(24, layer.num_kv_heads, 4)
        value = key[..., :3] if layer.value_in_key else torch.randn(24, layer.num_kv_heads, 3)
        blocks.write(index, slice(0, 24), key, value)
    before = [[part.clone() for part in blocks.run(index, 0, 24)] for index in range(2)]
    blocks.copy_block(1, 4)
    for index in range(2):
        for part, old in zip(blocks.run(index, 0, 24), before[index], strict=True):
            assert torch.equal(part[16:20], old[4:8])
            assert torch.equal(part[:16], old[:16]) and torch.equal(part[20:], old[20:])


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_are_counted_per_stored_number(dtype, size):
    blocks = storage(dtype)
    assert blocks.bytes_per_block == 4 * (2 * 7 + 1 * 4) * size
    assert blocks.num_bytes == 6 * blocks.bytes_per_block


def test_a_budget_below_one_block_says_how_much_is_needed():
    assert blocks_within(1000, 300, "the cache") == 3
    with pytest.raises(InvalidConfig, match=r"the cache is 10 bytes, .* at least 300 bytes"):
        blocks_within(10, 300, "the cache")


def test_a_budget_of_more_blocks_than_a_pool_counts_is_refused_and_not_cut():
    assert blocks_within(MAX_BLOCKS * 300 + 299, 300, "the cache") == MAX_BLOCKS
    with pytest.raises(
        InvalidConfig, match=rf"{MAX_BLOCKS + 1} blocks of 300 bytes, .* at most {MAX_BLOCKS * 300} bytes"
    ):
        blocks_within((MAX_BLOCKS + 1) * 300, 300, "the cache")


def test_the_machine_has_memory():
    assert device_memory_bytes(torch.device("cpu")) > 2**28


def test_caches_larger_than_the_device_are_refused_before_they_are_made() -> None:
    cpu = torch.device("cpu")
    check_fits(device_memory_bytes(cpu), cpu)
    with pytest.raises(InvalidConfig, match=r"GiB, but cpu has .* make the caches smaller"):
        check_fits(device_memory_bytes(cpu) + 1, cpu)
