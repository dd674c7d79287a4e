"""Caches in eight bits: what a kernel rounded is read, moved and attended to as what it means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.worker.stand_ins import (
    BLOCKS,
    EIGHT_BITS,
    HEADS,
    KEY,
    LATENT,
    SIZE,
    TURNING,
    VALUE,
    EightBits,
    Joined,
    Layer,
    cache_of,
)
from integrations.worker.test_in_place import QUERIES, share_of
from integrations.worker.test_mover import Share, moved_by_hand, some_moves
from torch import Tensor

from kvmosaic.config import TierConfig
from kvmosaic.errors import NotMovable
from kvmosaic.vllm.operations import Move
from kvmosaic.vllm.worker.in_place.reader import DocumentReader, MaskReads, why_not_paged
from kvmosaic.vllm.worker.in_place.trial import check_reading
from kvmosaic.vllm.worker.kv_layout import Mover
from kvmosaic.vllm.worker.layouts import find_layout
from kvmosaic.vllm.worker.layouts.layout import QuantizedLayout
from kvmosaic.vllm.worker.tier_side import Share as WorkerShare
from kvmosaic.vllm.worker.tier_side import StoredEntries
from kvmosaic.vllm.worker.trial.rotation import cache_trouble

PAGED = ("joined by head", "joined by token", "stacked by block", "stacked first", "separate")
KINDS = (*PAGED, "cpu vector", "cpu tiled")
FORMATS = tuple(EIGHT_BITS)
EVERYTHING = torch.arange(BLOCKS * SIZE)


def nearest(numbers: Tensor, scale: float, name: str) -> Tensor:
    """By trying all numbers of the format."""
    codes = torch.arange(256, dtype=torch.int64).to(torch.uint8).view(EIGHT_BITS[name]).float()
    known = codes[codes.isfinite()] * scale
    away = (numbers.flatten()[:, None] - known).abs().min(-1).values
    return away.view(numbers.shape)


def raw(cache: Any) -> list[Tensor]:
    return [part.clone() for part in (cache if isinstance(cache, tuple) else (cache,))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=4)
@given(seed=st.integers(0, 99), scales=st.tuples(*[st.sampled_from([1.0, 0.03, 0.0101, 3.7])] * 2))
def test_what_the_kernel_wrote_is_read_as_the_nearest_number_and_written_as_the_same_bytes(
    kind: str, name: str, dtype: torch.dtype, seed: int, scales: tuple[float, float]
) -> None:
    layer, cache = cache_of(f"{kind} in {name}", dtype)
    layer._k_scale.fill_(scales[0])
    layer._v_scale.fill_(scales[1])
    layout = find_layout("layer", layer, cache)
    assert isinstance(layout, QuantizedLayout)
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(len(EVERYTHING), HEADS, KEY, generator=generator).to(dtype)
    values = torch.randn(len(EVERYTHING), HEADS, VALUE, generator=generator).to(dtype)
    layer.impl.do_kv_cache_update(layer, keys, values, cache, EVERYTHING)
    for found, wanted, scale in zip(layout.read(EVERYTHING), (keys, values), scales, strict=True):
        assert found is not None
        away = (found - wanted.float()).abs()
        assert torch.all(away <= nearest(wanted.float(), scale, name) * 1.0001 + 1e-6)
    before = raw(cache)
    order = EVERYTHING[torch.randperm(len(EVERYTHING), generator=generator)]
    layout.write(order, *layout.read(order))
    assert all(torch.equal(one, other) for one, other in zip(before, raw(cache), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_that_are_too_large_become_the_largest(kind: str, name: str) -> None:
    layer, cache = cache_of(f"{kind} in {name}")
    layout = find_layout("layer", layer, cache)
    keys = torch.full((1, HEADS, KEY), -1e30)
    layout.write(EVERYTHING[:1], keys, keys)
    found, _ = layout.read(EVERYTHING[:1])
    most = torch.finfo(EIGHT_BITS[name]).max
    assert torch.allclose(found, torch.full_like(found, -most * float(layer._k_scale)))


@pytest.mark.parametrize("kind", ["joined by token", "separate", "cpu vector", "cpu tiled"])
@settings(max_examples=6)
@given(moves=some_moves())
def test_a_moved_key_is_rounded_once_more_and_a_copied_one_is_the_same_bytes(kind: str, moves: list[Move]) -> None:
    share = SHARES.setdefault(kind, Share((f"{kind} in fp8", f"{kind} in fp8")))
    wanted = moved_by_hand(share, moves)
    Mover(share.places).move(moves)
    scale = 0.03
    for (keys, values), (wanted_keys, wanted_values) in zip(share.state(), wanted, strict=True):
        assert torch.all((keys - wanted_keys).abs() <= wanted_keys.abs() * 2**-4 * 1.01 + scale * 2**-10 + 1e-6)
        assert values is not None and wanted_values is not None and torch.equal(values, wanted_values)
        for move in moves:
            if move.distance == 0:
                to = torch.arange(move.target_start, move.target_start + move.num_tokens)
                slots = torch.tensor(move.target_blocks)[to // SIZE] * SIZE + to % SIZE
                assert torch.equal(keys[slots], wanted_keys[slots])


SHARES: dict[str, Share] = {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_checks_at_start_pass(kind: str, name: str) -> None:
    share = share_of(f"{kind} in {name}", f"{kind} in {name}")
    for place, (_, cache) in zip(share.places.layers, share.made.values(), strict=True):
        place.layer.kv_cache = cache
    assert cache_trouble(share.places, 100) == ""
    assert share.places.cache_format == str(EIGHT_BITS[name]).removeprefix("torch.")
    for is_paged in (False, kind in PAGED):
        reader = DocumentReader(share.places, is_paged=is_paged)
        assert check_reading(share.places, reader, None) == ""
        assert not is_paged or why_not_paged(share.places) == ""


@pytest.mark.parametrize("is_paged", [False, True])
def test_the_check_finds_a_wrong_rotation_and_a_scale_that_is_not_the_kernels(
    is_paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = share_of("joined by token in fp8", "joined by token in fp8")
    reader = DocumentReader(share.places, is_paged=is_paged)
    original = MaskReads._positions
    with monkeypatch.context() as patch:
        patch.setattr(MaskReads, "_positions", lambda self: original(self)[::-1])
        assert "reading in place differs" in check_reading(share.places, reader, None)
    how = share.places.layers[1].layout.quantization
    assert how is not None
    object.__setattr__(how, "scales", (torch.tensor(0.036), how.scales[1]))
    for place, (_, cache) in zip(share.places.layers, share.made.values(), strict=True):
        place.layer.kv_cache = cache
    assert share.places.layers[1].name in cache_trouble(share.places, 100)


@pytest.mark.parametrize("is_paged", [False, True])
def test_queries_that_the_layer_rounded_are_read_as_what_they_mean(is_paged: bool) -> None:
    share = share_of("joined by head in fp8")
    place, reader = share.places.layers[0], DocumentReader(share.places, is_paged=is_paged)
    from kvmosaic.vllm.operations import DocumentRead, InPlaceRequest
    from kvmosaic.vllm.worker.in_place.step import OwnRows

    request = InPlaceRequest((0,), ((2, 9),), (DocumentRead(2, (3, 4), 3, 9, 2, 5),))
    rows = [OwnRows(request, 3, 2)]
    place.layer._q_scale = torch.tensor(0.25)
    coarse = (torch.randn(3, QUERIES, KEY) / 0.25).to(torch.float8_e4m3fn)
    keys, values = torch.randn(2, 3, HEADS, KEY)
    place.layout.write(share.places.slots((0,), 2, 3), keys, values)
    outputs = []
    for query in (coarse, coarse.float() * 0.25):
        output = torch.zeros(3, QUERIES, VALUE)
        with reader.trying(reader.step_of(rows, torch.arange(3))):
            reader.attend(place.name, query, keys, values, output, place.layer.impl)
        outputs.append(output)
    assert torch.equal(*outputs) and outputs[0].any()


def layer_in(name: str, **attributes: Any) -> tuple[Layer, Tensor]:
    layer, cache = cache_of("joined by head in fp8")
    layer.kv_cache_dtype = name
    for key, value in attributes.items():
        setattr(layer, key, value)
    return layer, cache


ROWS = torch.zeros(BLOCKS, SIZE, LATENT + TURNING, dtype=torch.uint8)
REFUSED: dict[str, tuple[Layer, Any, str]] = {
    "scales by token and head": (*layer_in("fp8_per_token_head"), "fp8_per_token_head.*only float8 with a scale"),
    "four bits": (*layer_in("nvfp4"), "nvfp4"),
    "no format": (*layer_in("auto"), "auto"),
    "scales by head": (*layer_in("fp8", _k_scale=torch.ones(HEADS)), "some for each head"),
    "scales of queries by head": (
        *layer_in("fp8", query_quant=object(), _q_scale=torch.ones(HEADS)),
        "some for each head",
    ),
    "scales that are not known yet": (*layer_in("fp8", calculate_kv_scales=True), "calculates the scales"),
    "another format": (*layer_in("fp8_e5m2"), "not found in its cache"),
    "a latent": (
        Layer(EightBits(Joined(), torch.float8_e4m3fn), kv_lora_rank=LATENT, qk_rope_head_dim=TURNING),
        ROWS,
        "unquantized",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_caches_in_eight_bits_are_refused_with_the_reason(name: str) -> None:
    layer, cache, reason = REFUSED[name]
    with pytest.raises(NotMovable, match=rf"^model\.layers\.0.*({reason})"):
        find_layout("model.layers.0", layer, cache)


def test_tiers_do_not_store_eight_bits() -> None:
    share = Share(("joined by head in fp8",))
    with pytest.raises(NotMovable, match="float8_e4m3fn; tiers store plain numbers only"):
        StoredEntries(share.places, WorkerShare(), TierConfig())
