"""Codecs lose no more than they say, whatever the numbers are."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from entries.entries import expectation, header, same_bits, stored, tensors
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvmosaic.entries import choose_codec, decode_entry, encode_entry, read_header
from kvmosaic.entries.codec import CODECS, group_size
from kvmosaic.entries.compression import expanded, squeezed
from kvmosaic.errors import InvalidConfig
from kvmosaic.layers import LayerGeometry

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LOSSY = ["fp8", "int8", "int4"]
shapes = st.tuples(st.integers(1, 140), st.integers(1, 3), st.integers(1, 130))


def groups_of(tensor: torch.Tensor, along: str, most: int) -> list[torch.Tensor]:
    """The obvious twin of `groups`: one small tensor per group, found by counting."""
    tokens, heads, width = tensor.shape
    if along == "tokens":
        return [
            tensor[first : first + most, head, channel]
            for first in range(0, tokens, most)
            for head in range(heads)
            for channel in range(width)
        ]
    size = group_size(width, most)
    return [
        tensor[token, head, first : first + size]
        for token in range(tokens)
        for head in range(heads)
        for first in range(0, width, size)
    ]


def allowed(codec: str, group: torch.Tensor) -> torch.Tensor:
    """The largest error of each number of a group, rounding of the dtype left out."""
    low, high = group.min().item(), group.max().item()
    largest = max(abs(low), abs(high))
    if codec == "int8":
        return torch.full_like(group, largest / 127 / 2 * 1.01 + 1e-30)
    if codec == "fp8":  # 3 bits behind the point, down to the smallest step
        return group.abs() * 2**-4 + largest / 448 * 1.01 * 2**-10 + 1e-30
    return torch.full_like(group, (high - low + 0.01 * abs(low)) / 15 / 2 * 1.01 + 1e-30)


@given(
    codec=st.sampled_from(LOSSY),
    dtype=st.sampled_from(DTYPES),
    along=st.sampled_from(["tokens", "channels"]),
    shape=shapes,
    size=st.sampled_from([1e-6, 1e-2, 1.0, 300.0]),
    shift=st.sampled_from([0.0, 1.0, -30.0]),
    seed=st.integers(0, 1000),
)
@example("int4", torch.float32, "tokens", (65, 1, 1), 1e-2, -30.0, 0)
@example("fp8", torch.float16, "channels", (1, 1, 127), 300.0, 1.0, 0)
def test_errors_stay_within_half_a_step(codec, dtype, along, shape, size, shift, seed):
    assume(shape[0] * shape[1] * shape[2] < 20_000)
    generator = torch.Generator().manual_seed(seed)
    numbers = ((torch.randn(shape, generator=generator) + shift) * size).to(dtype)
    chosen = choose_codec(codec, dtype)
    parts = chosen.encode(numbers, along)
    assert parts is not None
    assert [(part.dtype, tuple(part.shape)) for part in parts] == [
        (part.dtype, part.shape) for part in chosen.parts(shape, dtype, along)
    ]
    found = chosen.decode(parts, shape, dtype, along)
    assert found.dtype == dtype and found.shape == numbers.shape
    most = 32 if codec == "int4" else 64
    rounding = torch.finfo(dtype)
    before, after = groups_of(numbers.double(), along, most), groups_of(found.double(), along, most)
    for group, decoded in zip(before, after, strict=True):
        bound = allowed(codec, group) + decoded.abs() * rounding.eps + rounding.smallest_normal * rounding.eps
        assert ((group - decoded).abs() <= bound).all()


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("along", ["tokens", "channels"])
def test_zeros_stay_zeros(codec, along):
    chosen = CODECS[codec]
    zeros = torch.zeros(70, 2, 5)
    assert torch.equal(chosen.decode(chosen.encode(zeros, along), (70, 2, 5), zeros.dtype, along), zeros)


@pytest.mark.parametrize("codec", LOSSY)
def test_the_order_of_channels_in_memory_does_not_matter(codec):
    numbers = torch.randn(5, 2, 70)
    turned = numbers.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not turned.is_contiguous()
    for one, two in zip(CODECS[codec].encode(numbers, "tokens"), CODECS[codec].encode(turned, "tokens"), strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), "end"])
def test_numbers_that_no_scale_can_hold_are_stored_as_they_are(codec, dtype, number):
    head = header(70, dtype=str(dtype).removeprefix("torch."), codec=codec)
    chunk = tensors(head)
    chunk[1][0][3, 0, 2] = torch.finfo(dtype).max if number == "end" else number
    for compression in ("none", "zstd"):
        entry = encode_entry(replace(head, compression=compression), chunk)
        assert read_header(entry).codec == "none"
        assert same_bits(decode_entry(entry, expectation(head)).layers, chunk)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_large_but_usable_numbers_stay_finite(codec, dtype):
    head = header(70, dtype=dtype, codec=codec)
    limit = torch.finfo(getattr(torch, dtype)).max * 0.39
    chunk = [
        (key.clamp(-1, 1) * limit, None if value is None else value.clamp(-1, 1) * limit)
        for key, value in tensors(head)
    ]
    found = stored(70, dtype=dtype, codec=codec)
    entry = encode_entry(head, chunk)
    assert read_header(entry).codec == codec
    decoded = replace(found, entry=bytes(entry)).decode().layers
    assert all(tensor.isfinite().all() for pair in decoded for tensor in pair if tensor is not None)


@given(codec=st.sampled_from(LOSSY), seed=st.integers(0, 100), num_tokens=st.integers(1, 140))
def test_a_stored_chunk_comes_back_within_the_error_of_its_codec(codec, seed, num_tokens):
    layers = (
        LayerGeometry(0, 2, 16, 8, False),
        LayerGeometry(1, 1, 72, 64, True),
        LayerGeometry(0, 2, 16, 8, False),
    )
    chunk = stored(num_tokens, seed=seed, codec=codec, layers=layers)
    found = chunk.decode()
    assert found.header.codec == codec
    share = {"fp8": 0.07, "int8": 0.005, "int4": 0.08}[codec]
    for before, after in zip(chunk.layers, found.layers, strict=True):
        for one, two in zip(before, after, strict=True):
            assert (one is None) == (two is None)
            assert one is None or (one - two).abs().max() <= share * one.abs().max()


@pytest.mark.parametrize("codec", LOSSY)
def test_scales_are_aligned_behind_an_odd_number_of_codes(codec):
    layers = (LayerGeometry(0, 1, 3, 5, False), LayerGeometry(1, 1, 7, 1, False))
    chunk = stored(5, codec=codec, layers=layers)
    assert all(key.isfinite().all() for key, _ in chunk.decode().layers)


def test_a_latent_is_scaled_by_groups_of_channels_of_one_token():
    latent = torch.ones(3, 1, 576)
    latent[:, :, 512:] = 1000.0  # the rotary part, far larger
    for codec in LOSSY:
        chosen = CODECS[codec]
        parts = chosen.encode(latent, "channels")
        assert parts[0].shape == (3, 1, 576 // (32 if codec == "int4" else 64))
        found = chosen.decode(parts, (3, 1, 576), latent.dtype, "channels")
        assert torch.allclose(found, latent, rtol=0.02), "no group mixes both"


@pytest.mark.parametrize(
    ("width", "size"), [(1, 1), (64, 64), (128, 64), (80, 40), (96, 48), (576, 64), (127, 127), (7, 7)]
)
def test_groups_of_channels_are_equal_and_not_too_small(width, size):
    assert group_size(width, 64) == size


def test_codecs_make_entries_as_small_as_they_promise():
    layers = (LayerGeometry(0, 8, 64, 64, False),)
    sizes = {
        codec: sum(part.num_bytes for part in chosen.parts((512, 8, 64), torch.bfloat16, "tokens"))
        for codec, chosen in CODECS.items()
    }
    bits = {codec: size * 8 / (512 * 8 * 64) for codec, size in sizes.items()}
    assert bits == {"none": 16, "fp8": 8.25, "int8": 8.25, "int4": 5}
    plain, small = (stored(512, layers=layers, codec=codec, dtype="bfloat16").entry for codec in ("none", "int4"))
    assert len(plain) / len(small) > 3.1


def test_unknown_codecs_and_lossy_float64_are_refused():
    with pytest.raises(InvalidConfig, match="codec is 'int3'; choose one of none, fp8, int8, int4"):
        choose_codec("int3", torch.float32)
    with pytest.raises(InvalidConfig, match=r"computes in float64, .* use codec 'none'"):
        choose_codec("int8", torch.float64)
    assert choose_codec("none", torch.float64).name == "none"
    with pytest.raises(InvalidConfig, match="float64"):
        stored(dtype="float64", codec="fp8")


def test_bytes_that_zstd_cannot_make_smaller_are_kept():
    random = torch.randint(0, 256, (2**21,), dtype=torch.uint8)
    assert squeezed(random) is None
    assert squeezed(random[:100]) is None
    mixed = random.clone()
    mixed[: 2**20] = 0
    frame = squeezed(mixed)
    assert frame is not None and len(frame) < 0.6 * len(mixed)
    assert torch.equal(expanded(frame, len(mixed)), mixed)


def test_compression_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(InvalidConfig, match=r"pip install 'kvmosaic\[tiers\]'"):
        stored(compression="zstd")
