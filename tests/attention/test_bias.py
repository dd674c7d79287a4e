"""A bias by distance: in step attention, against every score written out, and what moving a run does to it."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.plain import PlainBackend
from support.programs import needs_extension
from support.worlds import World, layer_of, worlds

from kvmosaic.attention import NativeBackend, Piece, RowGroup, TorchBackend
from kvmosaic.layers import DistanceBias, MaskSpec

DTYPES = (torch.float32, torch.bfloat16)


def biased(world: World, slopes: list[float]) -> World:
    """The same world with a bias and without a rotation."""
    num_heads = world.rows[0].shape[1]
    chosen = tuple(slopes[head % len(slopes)] / (head + 1) for head in range(num_heads))
    world.layer = replace(world.layer, rotation=None, bias=DistanceBias(chosen))
    return world


def written_out(world: World) -> torch.Tensor:
    """Every row by itself, in float64: all scores of all it reads in one softmax."""
    query, key, value = (part.double() for part in world.rows)
    group = query.shape[1] // key.shape[1]
    slopes = torch.tensor(world.layer.bias.slopes, dtype=torch.float64)
    outputs = []
    for rows in world.groups:
        for row in range(rows.num_rows):
            place = rows.position + row
            parts = [
                (
                    *(part[read.first_slot : read.first_slot + read.num_tokens].double() for part in stored),
                    read.position,
                )
                for read in rows.reads
                for stored in (world.stored[read.pool],)
            ]
            if not rows.reads_itself:
                own = slice(rows.first_row, rows.first_row + row + 1)
                parts.append((key[own], value[own], rows.position))
            keys, values = (torch.cat([part[index] for part in parts]) for index in (0, 1))
            places = torch.cat([torch.arange(start, start + len(part)) for part, _, start in parts])
            scores = torch.einsum("hd,khd->hk", query[rows.first_row + row], keys.repeat_interleave(group, dim=1))
            scores = scores * world.layer.key_dim**-0.5
            if world.softcap is not None:
                scores = world.softcap * torch.tanh(scores / world.softcap)
            scores = scores + slopes[:, None] * (places - place)
            visible = _shown(world.layer.mask, place, places)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hk,khd->hd", weights, values.repeat_interleave(group, dim=1)))
    return torch.stack(outputs)


def _shown(mask: MaskSpec, place: int, places: torch.Tensor) -> torch.Tensor:
    if mask.kind == "window":
        return place - places < mask.size
    if mask.kind == "chunked":
        return places >= place // mask.size * mask.size
    return torch.ones(len(places), dtype=torch.bool)


@settings(max_examples=examples(20))
@given(worlds(DTYPES, dims=(8, 20, 64), num_rows=(1, 1, 2, 7, 40)), st.lists(st.floats(0.001, 0.9), min_size=1))
def test_a_step_equals_every_score_written_out(world, slopes):
    biased(world, slopes)
    expected = written_out(world)
    torch.testing.assert_close(world.attend(PlainBackend(), torch.float64), expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(world.attend(TorchBackend(), torch.float64), expected, atol=1e-10, rtol=0)
    tolerance = 2e-2 if world.dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(world.attend(TorchBackend()).double(), expected, atol=tolerance, rtol=0)


@needs_extension
def test_a_backend_of_whole_layers_leaves_biased_layers_to_torch():
    reads = (Piece("chunk_cache", 4, 40, 20, 7), Piece("request", 0, 9, 80))
    world = biased(World(layer_of(2, 16, 16), [RowGroup(0, 3, 100, reads)], 4), [0.3])
    assert torch.equal(world.attend(NativeBackend()), world.attend(TorchBackend()))


@given(st.integers(-5000, 5000), st.integers(1, 60))
def test_moving_a_run_changes_nothing_but_its_weight_against_others(distance, num_keys):
    bias = DistanceBias((0.5, 0.03))
    here, there, positions = torch.tensor([10, 10]), torch.tensor([10, 10]) + distance, torch.tensor([6000, 6001])
    within, last = bias.of_run(num_keys, here, positions, torch.float64)
    moved_within, moved_last = bias.of_run(num_keys, there, positions, torch.float64)
    assert torch.equal(within, moved_within)
    torch.testing.assert_close(moved_last - last, torch.tensor([[0.5, 0.03]] * 2).double() * distance)


def test_far_away_the_bias_does_not_lose_what_is_near():
    # two keys one position apart, a million positions on: their scores still differ by one slope
    near, far = torch.tensor([5]), torch.tensor([1_000_000])
    within, last = DistanceBias((0.001,)).of_run(2, far, far + 3, torch.float32)
    again, last_near = DistanceBias((0.001,)).of_run(2, near, near + 3, torch.float32)
    assert torch.equal(within, again) and torch.equal(last, last_near)
