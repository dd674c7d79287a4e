from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.worker.stand_ins import (
    BLOCKS,
    KEY,
    KINDS,
    LATENT,
    SIZE,
    TURNING,
    AttentionModule,
    Model,
    Rotary,
    cache_of,
    config_of,
)
from torch import Tensor

from kvmosaic.errors import PromptTooLong
from kvmosaic.vllm.operations import Move
from kvmosaic.vllm.worker.kv_layout import KVLayout, Mover


class Share:
    """A worker's share of a model: layers with random keys and values, one of them without a rotation."""

    def __init__(self, kinds: tuple[str, ...], dtype: torch.dtype = torch.float32, block_size: int = SIZE) -> None:
        made = {f"layers.{i}.attn": cache_of(kind, dtype) for i, kind in enumerate(kinds)}
        self.made = made
        self.rotary = Rotary(dtype=dtype)
        self.part = Rotary(TURNING, is_neox_style=False, dtype=dtype, head_size=TURNING)
        modules = []
        for i, (layer, _) in enumerate(made.values()):
            rotary = self.part if hasattr(layer, "kv_lora_rank") else self.rotary
            modules.append(AttentionModule(layer, None if i and i == len(made) - 1 else rotary))
        self.model = Model(*modules)
        config = config_of({name: layer for name, (layer, _) in made.items()}, block_size, dtype)
        self.places = KVLayout.of(config, {name: cache for name, (_, cache) in made.items()})
        self.everything = torch.arange(BLOCKS * SIZE)
        generator = torch.Generator().manual_seed(0)
        for place in self.places.layers:
            keys, values = place.layout.read(self.everything)
            keys.copy_(torch.randn(keys.shape, generator=generator))
            if values is not None:
                values.copy_(torch.randn(values.shape, generator=generator))
            place.layout.write(self.everything, keys, values)

    def state(self) -> list[tuple[Tensor, Tensor | None]]:
        return [place.layout.read(self.everything) for place in self.places.layers]


def moved_by_hand(share: Share, moves: list[Move]) -> list[tuple[Tensor, Tensor | None]]:
    """Token by token, in float64."""
    size, before, after = share.places.block_size, share.state(), share.state()
    for (keys, values), (new_keys, new_values), place in zip(before, after, share.places.layers, strict=True):
        for move in moves:
            for i in range(move.num_tokens):
                at, to = move.source_start + i, move.target_start + i
                source = move.source_blocks[at // size] * size + at % size
                target = move.target_blocks[to // size] * size + to % size
                new_keys[target] = keys[source]
                if values is not None and new_values is not None:
                    new_values[target] = values[source]
                if place.rotation is not None and move.distance:
                    new_keys[target] = turned_by_hand(share, keys[source], move.position + i, move)
    return after


def turned_by_hand(share: Share, keys: Tensor, position: int, move: Move) -> Tensor:
    """The heads [G, D] of one token: each pair is a complex number, divided by the old angle, times the new one."""
    rotary = share.rotary if keys.shape[1] == KEY else share.part
    first, half = keys.shape[1] - rotary.rotary_dim, rotary.rotary_dim // 2
    old, new = (
        torch.complex(*rotary.cos_sin_cache[p].double().view(2, half)) for p in (position, position + move.distance)
    )
    part = keys[:, first:].double()
    pairs = part.unflatten(-1, (2, half)).mT if rotary.is_neox_style else part.unflatten(-1, (half, 2))
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) / old * new)
    turned = turned.mT if rotary.is_neox_style else turned
    return torch.cat((keys[:, :first], turned.flatten(-2).to(keys.dtype)), dim=-1)


@st.composite
def some_moves(draw: st.DrawFn) -> list[Move]:
    """Moves from the first three blocks to places of the last three that no other one writes."""
    moves, free = [], 0
    for _ in range(draw(st.integers(1, 4))):
        free += draw(st.integers(0, 3))
        source_start = draw(st.integers(0, 3 * SIZE - 1))
        num_tokens = draw(st.integers(0, max(0, min(3 * SIZE - source_start, 3 * SIZE - free))))
        position = draw(st.integers(0, 200))
        distance = draw(st.one_of(st.just(0), st.integers(-position, 255 - position - num_tokens)))
        source, target = tuple(draw(st.permutations([0, 1, 2]))), (5, 3, 4)
        moves.append(Move(source, source_start, target, free, num_tokens, position, distance))
        free += num_tokens
    return moves


def assert_close(ours: list[Any], theirs: list[Any], tolerance: float) -> None:
    for (keys, values), (wanted_keys, wanted_values) in zip(ours, theirs, strict=True):
        assert torch.allclose(keys, wanted_keys, rtol=0, atol=tolerance)
        assert values is wanted_values or torch.equal(values, wanted_values)


@pytest.mark.parametrize("kind", ["cpu vector", "cpu tiled", "joined by token", "stacked first", "separate", "latent"])
@settings(max_examples=10)
@given(moves=some_moves(), part_tokens=st.sampled_from([1, 5, 4096]))
def test_moves_do_what_token_by_token_loops_do(kind: str, moves: list[Move], part_tokens: int) -> None:
    share = SHARES.setdefault(kind, Share((kind, kind)))
    wanted = moved_by_hand(share, moves)
    Mover(share.places, part_tokens).move(moves)
    assert_close(share.state(), wanted, 5e-6)


SHARES: dict[str, Share] = {}


def test_keys_in_bfloat16_are_rounded_once() -> None:
    share = Share(("cpu vector", "latent"), torch.bfloat16)
    moves = [Move((0, 1), 3, (4, 5), 6, 9, 100, 37)]
    wanted = moved_by_hand(share, moves)
    Mover(share.places).move(moves)
    (keys, _), *_ = share.state()
    assert (keys.double() - wanted[0][0].double()).abs().max() <= 2**-7  # one unit in the last place of keys below 4


def test_the_scheduler_may_count_in_larger_blocks_than_the_kernel() -> None:
    share = Share(("joined by token",), block_size=3 * SIZE)
    assert (share.places.block_size, share.places.num_blocks) == (24, 2)
    moves = [Move((0,), 5, (1,), 0, 18, 40, -40)]
    wanted = moved_by_hand(share, moves)
    Mover(share.places).move(moves)
    assert_close(share.state(), wanted, 5e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_rotated_in_place_are_those_of_a_copy(kind: str) -> None:
    copied, turned = Share((kind,)), Share((kind,))
    Mover(copied.places).move([Move((0, 1), 3, (4, 5), 3, SIZE, 20, 30)])
    Mover(turned.places, part_tokens=4).move([Move((0, 1), 3, (0, 1), 3, SIZE, 20, 30)])
    slots = torch.arange(3, 3 + SIZE)
    in_place, copy = (
        share.places.layers[0].layout.read(at) for share, at in ((turned, slots), (copied, slots + 4 * SIZE))
    )
    assert_close([in_place], [copy], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_move_by_nothing_copies_bytes(kind: str) -> None:
    share = Share((kind,))
    layout = share.places.layers[0].layout
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]).repeat(8)
    keys, values = layout.read(torch.arange(SIZE))
    keys[...] = odd[: keys.shape[-1]]
    layout.write(torch.arange(SIZE), keys, values)
    rotation = Move((1,), 0, (5,), 0, SIZE, 0, 7)
    Mover(share.places).move([rotation, Move((0,), 0, (4,), 0, SIZE, 9, 0), replace(rotation, target_blocks=(3,))])
    copied = layout.read(torch.arange(4 * SIZE, 5 * SIZE))[0]
    assert torch.equal(copied.view(torch.int32), keys.view(torch.int32))


GOOD = Move((0, 1), 3, (4, 5), 2, 10, 20, 30)
BAD = {
    "beyond the table": (replace(GOOD, distance=227), PromptTooLong, "position 256; the model's rotary table has 256"),
    "before the first position": (replace(GOOD, distance=-21), PromptTooLong, "position -1"),
    "more than its source blocks": (replace(GOOD, source_start=7), ValueError, "7 to 17 lie outside 2 blocks"),
    "more than its target blocks": (replace(GOOD, target_start=7), ValueError, "7 to 17 lie outside 2 blocks"),
    "from before its blocks": (replace(GOOD, source_start=-1), ValueError, "-1 to 9 lie outside"),
    "an unknown block": (replace(GOOD, target_blocks=(4, 6)), ValueError, "block 6 of a cache with 6 blocks"),
    "a negative block": (replace(GOOD, target_blocks=(-1, 5)), ValueError, "block -1 of a cache with 6 blocks"),
    "in place, where another one reads": (
        replace(GOOD, target_blocks=(0, 1), target_start=3),
        ValueError,
        "reads a slot",
    ),
    "its own source": (replace(GOOD, target_blocks=(1, 0)), ValueError, "reads a slot that another one writes"),
}


@pytest.mark.parametrize("name", BAD)
def test_when_one_move_is_impossible_nothing_is_written(name: str) -> None:
    move, error, message = BAD[name]
    share = Share(("cpu vector", "latent"))
    before = share.state()
    with pytest.raises(error, match=message):
        Mover(share.places, part_tokens=4).move([GOOD, move])
    assert_close(share.state(), before, 0)


def test_the_last_position_of_the_table_can_be_reached() -> None:
    share = Share(("cpu vector",))
    Mover(share.places).move([replace(GOOD, distance=226)])
    with pytest.raises(PromptTooLong, match="position 256"):
        share.places.require(256)


def test_no_moves_are_no_work() -> None:
    share = Share(("cpu vector",))
    before = share.state()
    Mover(share.places).move([])
    Mover(share.places).move([replace(GOOD, num_tokens=0)])
    assert_close(share.state(), before, 0)


def test_copies_are_made_of_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Share(("cpu vector", "latent"))
    read, sizes = {}, []
    for place in share.places.layers:
        read[place.name] = place.layout.read
        original = place.layout.read

        def watched(slots: Tensor, original: Any = original) -> Any:
            sizes.append(len(slots))
            return original(slots)

        monkeypatch.setattr(place.layout, "read", watched)
    Mover(share.places, part_tokens=6).move([GOOD, replace(GOOD, target_blocks=(2, 3), distance=0)])
    assert max(sizes) == 6 and sum(sizes) == 2 * 2 * 10


def test_layers_that_turn_alike_share_their_turning() -> None:
    share = Share(("cpu vector", "joined by head", "latent", "latent", "separate"))
    one, two, three, four, last = share.places.layers
    assert one.rotation is two.rotation is not None and three.rotation is four.rotation is not None
    assert last.rotation is None
    assert (one.rotation.first, three.rotation.first) == (0, LATENT)
