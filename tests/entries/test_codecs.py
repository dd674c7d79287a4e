"""The codec int8 loses no more than it says, whatever the numbers are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from entries.entries import expectation, header, same_bits, stored, tensors
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvmosaic.entries import choose_codec, decode_entry, encode_entry
from kvmosaic.entries.codec import CODECS, GROUP, Int8, group_size
from kvmosaic.entries.entry import read_file_header
from kvmosaic.errors import InvalidConfig
from kvmosaic.layers import LayerGeometry

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INT8 = Int8()
shapes = st.tuples(st.integers(1, 140), st.integers(1, 3), st.integers(1, 130))


def groups_of(tensor: torch.Tensor, along: str) -> list[torch.Tensor]:
    """The obvious twin of `groups`: one small tensor per group, found by counting."""
    tokens, heads, width = tensor.shape
    if along == "tokens":
        return [
            tensor[first : first + GROUP, head, channel]
            for first in range(0, tokens, GROUP)
            for head in range(heads)
            for channel in range(width)
        ]
    size = group_size(width)
    return [
        tensor[token, head, first : first + size]
        for token in range(tokens)
        for head in range(heads)
        for first in range(0, width, size)
    ]


@given(
    dtype=st.sampled_from(DTYPES),
    along=st.sampled_from(["tokens", "channels"]),
    shape=shapes,
    size=st.sampled_from([1e-6, 1e-2, 1.0, 300.0]),
    shift=st.sampled_from([0.0, 1.0, -30.0]),
    seed=st.integers(0, 1000),
)
@example(torch.float32, "tokens", (65, 1, 1), 1e-2, -30.0, 0)
@example(torch.float16, "channels", (1, 1, 127), 300.0, 1.0, 0)
def test_errors_stay_within_half_a_step(dtype, along, shape, size, shift, seed):
    assume(shape[0] * shape[1] * shape[2] < 20_000)
    generator = torch.Generator().manual_seed(seed)
    numbers = ((torch.randn(shape, generator=generator) + shift) * size).to(dtype)
    parts = INT8.encode(numbers, along)
    assert parts is not None
    assert [(part.dtype, tuple(part.shape)) for part in parts] == [
        (part.dtype, part.shape) for part in INT8.parts(shape, dtype, along)
    ]
    found = INT8.decode(parts, shape, dtype, along)
    assert found.dtype == dtype and found.shape == numbers.shape
    rounding = torch.finfo(dtype)
    before, after = groups_of(numbers.double(), along), groups_of(found.double(), along)
    for group, decoded in zip(before, after, strict=True):
        step = group.abs().max() / 127 * 1.01 + 1e-30
        bound = step / 2 + decoded.abs() * rounding.eps + rounding.smallest_normal * rounding.eps
        assert ((group - decoded).abs() <= bound).all()


@pytest.mark.parametrize("along", ["tokens", "channels"])
def test_zeros_stay_zeros(along):
    zeros = torch.zeros(70, 2, 5)
    assert torch.equal(INT8.decode(INT8.encode(zeros, along), (70, 2, 5), zeros.dtype, along), zeros)


def test_the_order_of_channels_in_memory_does_not_matter():
    numbers = torch.randn(5, 2, 70)
    turned = numbers.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not turned.is_contiguous()
    for one, two in zip(INT8.encode(numbers, "tokens"), INT8.encode(turned, "tokens"), strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), "end"])
def test_numbers_that_no_scale_can_hold_are_stored_as_they_are(dtype, number):
    head = header(70, dtype=str(dtype).removeprefix("torch."), codec="int8")
    chunk = tensors(head)
    chunk[1][0][3, 0, 2] = torch.finfo(dtype).max if number == "end" else number
    entry = encode_entry(head, chunk)
    assert read_file_header(entry).header.codec == "none"
    assert same_bits(decode_entry(entry, expectation(head)).layers, chunk)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_large_but_usable_numbers_stay_finite(dtype):
    head = header(70, dtype=dtype, codec="int8")
    limit = torch.finfo(getattr(torch, dtype)).max * 0.39
    chunk = [
        (key.clamp(-1, 1) * limit, None if value is None else value.clamp(-1, 1) * limit)
        for key, value in tensors(head)
    ]
    found = stored(70, dtype=dtype, codec="int8")
    entry = encode_entry(head, chunk)
    assert read_file_header(entry).header.codec == "int8"
    decoded = replace(found, entry=bytes(entry)).decode().layers
    assert all(tensor.isfinite().all() for pair in decoded for tensor in pair if tensor is not None)


@given(seed=st.integers(0, 100), num_tokens=st.integers(1, 140))
def test_a_stored_chunk_comes_back_within_the_error_of_its_codec(seed, num_tokens):
    layers = (
        LayerGeometry(0, 2, 16, 8, False),
        LayerGeometry(1, 1, 72, 64, True),
        LayerGeometry(0, 2, 16, 8, False),
    )
    chunk = stored(num_tokens, seed=seed, codec="int8", layers=layers)
    found = chunk.decode()
    assert found.header.codec == "int8"
    for before, after in zip(chunk.layers, found.layers, strict=True):
        for one, two in zip(before, after, strict=True):
            assert (one is None) == (two is None)
            assert one is None or (one - two).abs().max() <= 0.005 * one.abs().max()


def test_scales_are_aligned_behind_an_odd_number_of_codes():
    layers = (LayerGeometry(0, 1, 3, 5, False), LayerGeometry(1, 1, 7, 1, False))
    chunk = stored(5, codec="int8", layers=layers)
    assert all(key.isfinite().all() for key, _ in chunk.decode().layers)


def test_a_latent_is_scaled_by_groups_of_channels_of_one_token():
    latent = torch.ones(3, 1, 576)
    latent[:, :, 512:] = 1000.0  # the rotary part, far larger
    parts = INT8.encode(latent, "channels")
    assert parts[0].shape == (3, 1, 576 // 64)
    found = INT8.decode(parts, (3, 1, 576), latent.dtype, "channels")
    assert torch.allclose(found, latent, rtol=0.02), "no group mixes both"


@pytest.mark.parametrize(
    ("width", "size"), [(1, 1), (64, 64), (128, 64), (80, 40), (96, 48), (576, 64), (127, 127), (7, 7)]
)
def test_groups_of_channels_are_equal_and_not_too_small(width, size):
    assert group_size(width) == size


def test_codecs_make_entries_as_small_as_they_promise():
    layers = (LayerGeometry(0, 8, 64, 64, False),)
    sizes = {
        codec: sum(part.num_bytes for part in chosen.parts((512, 8, 64), torch.bfloat16, "tokens"))
        for codec, chosen in CODECS.items()
    }
    bits = {codec: size * 8 / (512 * 8 * 64) for codec, size in sizes.items()}
    assert bits == {"none": 16, "int8": 8.25}
    plain, small = (stored(512, layers=layers, codec=codec, dtype="bfloat16").entry for codec in ("none", "int8"))
    assert len(plain) / len(small) > 1.9


def test_unknown_codecs_and_lossy_float64_are_refused():
    with pytest.raises(InvalidConfig, match="codec is 'int4'; choose one of none, int8"):
        choose_codec("int4", torch.float32)
    with pytest.raises(InvalidConfig, match=r"computes in float64, .* use codec 'none'"):
        choose_codec("int8", torch.float64)
    assert choose_codec("none", torch.float64).name == "none"
    with pytest.raises(InvalidConfig, match="float64"):
        stored(dtype="float64", codec="int8")
