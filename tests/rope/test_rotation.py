"""Turning heads by a distance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as turn_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as turn_half

from kvmosaic.rope import Rotation, rotate

_INV_FREQ = (1.0, 0.3, 0.01, 0.0007)


def _rotation(layout: str = "half", offset: int = 0, sign: int = 1, head_dim: int = 12) -> Rotation:
    return Rotation(layout, offset, 8, sign, _INV_FREQ, head_dim)


rotations = st.builds(
    _rotation,
    layout=st.sampled_from(["half", "interleaved"]),
    offset=st.integers(0, 4),
    sign=st.sampled_from([1, -1]),
)
distances = st.lists(st.integers(-100_000, 100_000), min_size=1, max_size=5)


def _heads(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, 3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(num_rows))


def _tables(rotation: Rotation, values: list[int]):
    return rotation.tables(torch.tensor(values), dtype=torch.float64)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_turning_is_what_transformers_does(layout: str) -> None:
    rotation = Rotation(layout, 0, 8, 1, _INV_FREQ, 8)
    positions = torch.tensor([0, 1, 17, 4000])
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    angles = positions[:, None].double() * torch.tensor(_INV_FREQ, dtype=torch.float64)
    wide = torch.cat((angles, angles), -1) if layout == "half" else angles.repeat_interleave(2, -1)
    reference = turn_half if layout == "half" else turn_interleaved
    expected, _ = reference(x.transpose(0, 1)[None], x.transpose(0, 1)[None], wide.cos()[None], wide.sin()[None])
    turned = rotate(x, rotation.tables(positions, dtype=torch.float64))
    # Cohere turns in float32 whatever the input.
    assert torch.allclose(turned, expected[0].transpose(0, 1).double(), atol=1e-14 if layout == "half" else 1e-6)


@settings(max_examples=examples(40))
@given(rotations, distances, st.integers(-5000, 5000))
def test_two_turns_add_up(rotation: Rotation, first: list[int], second: int) -> None:
    x = _heads(len(first))
    twice = rotate(rotate(x, _tables(rotation, first)), _tables(rotation, [second] * len(first)))
    once = rotate(x, _tables(rotation, [value + second for value in first]))
    assert torch.allclose(twice, once, atol=1e-9)


@settings(max_examples=examples(40))
@given(rotations, distances)
def test_turning_the_query_back_equals_turning_the_key(rotation: Rotation, values: list[int]) -> None:
    query, key = _heads(len(values)), _heads(len(values)).flip(0)
    moved_key = (query * rotate(key, _tables(rotation, values))).sum(-1)
    turned_query = (rotate(query, _tables(rotation, [-value for value in values])) * key).sum(-1)
    assert torch.allclose(moved_key, turned_query, atol=1e-10)


@settings(max_examples=examples(20))
@given(rotations, distances)
def test_dimensions_outside_the_rotation_stay(rotation: Rotation, values: list[int]) -> None:
    x = _heads(len(values))
    turned = rotate(x, _tables(rotation, values))
    inside = slice(rotation.offset, rotation.offset + rotation.rotary_dim)
    rest = [number for number in range(12) if number not in range(*inside.indices(12))]
    assert torch.equal(turned[..., rest], x[..., rest])
    assert torch.allclose(turned[..., inside].norm(dim=-1), x[..., inside].norm(dim=-1))


def test_distance_zero_returns_the_input_itself() -> None:
    x = _heads(3)
    assert rotate(x, _tables(_rotation(), [0, 0, 0])) is x
    assert rotate(x, _tables(_rotation(), [0, 0, 1])) is not x


def test_tables_are_exact_far_away_in_any_dtype() -> None:
    distance = 1_000_003
    fine = _tables(_rotation(), [distance])
    for dtype in (torch.float32, torch.bfloat16):
        tables = _rotation().tables(torch.tensor([distance]), dtype=dtype)
        assert tables.cos.dtype is dtype
        assert torch.equal(tables.cos, fine.cos.to(dtype))
        assert torch.equal(tables.sin, fine.sin.to(dtype))


def test_sixteen_bit_heads_turn_in_the_precision_of_the_tables() -> None:
    tables = _rotation().tables(torch.tensor([3, 4]))
    assert rotate(_heads(2).bfloat16(), tables).dtype is torch.float32
    assert rotate(_heads(2), tables).dtype is torch.float64


@settings(max_examples=examples(20))
@given(rotations, distances)
def test_partners_are_the_permutation_of_the_tables(rotation: Rotation, values: list[int]) -> None:
    x = _heads(len(values))
    assert torch.equal(rotation.partners(x), x[..., _tables(rotation, values).permutation])


def test_equal_rotations_are_one_key() -> None:
    assert _rotation() == _rotation()
    assert len({_rotation(), _rotation(), _rotation("interleaved"), _rotation(sign=-1)}) == 3


def test_a_rotation_can_move_into_a_longer_head() -> None:
    small, large = Rotation("half", 4, 8, 1, _INV_FREQ, 12), Rotation("half", 20, 8, 1, _INV_FREQ, 28)
    assert small.at(20, 28) == large
