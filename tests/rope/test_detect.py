"""Finding a rotation from queries and keys alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvmosaic.rope import PROBE_POSITIONS, Detection, Rotation, detect_rotation, rotate

_SLOW = torch.tensor([1.0 / 1_000_000 ** (number / 4) for number in range(4)])
_FAST = torch.tensor([1.0 / 10_000 ** (number / 4) for number in range(4)])
_NUM = len(PROBE_POSITIONS)


def _rows(heads: int, dim: int, seed: int) -> Tensor:
    """The same heads at every position."""
    one = torch.randn(1, heads, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return one.expand(_NUM, -1, -1).contiguous()


def _turned(x: Tensor, rotation: Rotation) -> Tensor:
    return rotate(x, rotation.tables(torch.tensor(PROBE_POSITIONS), dtype=torch.float64))


def _detect(
    query: Tensor, key: Tensor, value: Tensor | None = None, frequencies: tuple[Tensor, ...] = (_FAST, _SLOW)
) -> Detection:
    value = _rows(2, 5, 3).to(query.dtype) if value is None else value
    moved = (query, key, value)
    # the first position is 0
    home = tuple(part[:1].expand_as(part) for part in moved)
    return detect_rotation(moved, home, PROBE_POSITIONS, frequencies)


def test_rows_that_differ_from_each_other_by_rounding_are_compared_with_themselves() -> None:
    """Deep in a trained model rounding, another in each row, is larger than any tolerance of a rotation."""
    rotation = Rotation("half", 0, 8, 1, tuple(_FAST.double().tolist()), 12)
    noise = torch.Generator().manual_seed(9)
    home = tuple(
        rows * (1 + 1e-2 * torch.randn(rows.shape, dtype=rows.dtype, generator=noise))
        for rows in (_rows(4, 12, 1), _rows(2, 12, 2), _rows(2, 5, 3))
    )
    moved = (_turned(home[0], rotation), _turned(home[1], rotation), home[2])
    found = detect_rotation(moved, home, PROBE_POSITIONS, (_FAST, _SLOW))
    assert found.is_movable
    assert found.rotation == rotation


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("frequencies", [_FAST, _SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_layout_place_direction_and_base_is_found(layout, offset, sign, frequencies, dtype) -> None:
    rotation = Rotation(layout, offset, 8, sign, tuple(frequencies.double().tolist()), 12)
    query, key = (_turned(x, rotation).to(dtype) for x in (_rows(4, 12, 1), _rows(2, 12, 2)))
    found = _detect(query, key)
    assert found.is_movable
    assert found.rotation == rotation
    assert found.residual < (1e-12 if dtype is torch.float64 else 1e-2)


def test_a_layer_without_positions_is_movable_without_a_rotation() -> None:
    found = _detect(_rows(4, 12, 1), _rows(2, 12, 2))
    assert found.is_movable
    assert found.rotation is None


def test_queries_may_be_scaled_by_their_position() -> None:
    rotation = Rotation("half", 0, 8, 1, tuple(_FAST.double().tolist()), 12)
    scale = torch.linspace(1, 3, _NUM, dtype=torch.float64)[:, None, None]
    key = _turned(_rows(2, 12, 2), rotation)
    assert _detect(_turned(_rows(4, 12, 1), rotation) * scale, key).rotation == rotation
    still = _detect(_rows(4, 12, 1) * scale, _rows(2, 12, 2))
    assert still.is_movable
    assert still.rotation is None


def test_scaled_keys_cannot_be_moved() -> None:
    rotation = Rotation("half", 0, 8, 1, tuple(_FAST.double().tolist()), 12)
    scale = torch.linspace(1, 3, _NUM, dtype=torch.float64)[:, None, None]
    found = _detect(_turned(_rows(4, 12, 1), rotation), _turned(_rows(2, 12, 2), rotation) * scale)
    assert not found.is_movable


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_learned_norm_after_turning_cannot_be_moved(dtype) -> None:
    rotation = Rotation("half", 0, 8, 1, tuple(_FAST.double().tolist()), 12)
    weight = 1 + 0.2 * torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key = ((_turned(_rows(2, 12, seed), rotation) * weight).to(dtype) for seed in (1, 2))
    found = _detect(query, key)
    assert not found.is_movable
    assert found.rotation is None
    assert "rotated and then scaled" in found.reason


def test_added_positions_cannot_be_moved() -> None:
    added = torch.randn(_NUM, 2, 12, dtype=torch.float64)
    key = _rows(2, 12, 2) + added
    assert "values depend on the position" in _detect(key, key, value=key).reason
    assert not _detect(_rows(4, 12, 1), key).is_movable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_huge_dimensions_do_not_drown_the_rest(dtype) -> None:
    # As in Qwen 2, whose key bias is hundreds of times larger in two slow dimensions: seen by the whole head's length
    # such a key hardly turns.
    rotation = Rotation("half", 0, 8, 1, tuple(_SLOW.double().tolist()), 12)
    huge = torch.ones(12, dtype=torch.float64)
    huge[[3, 7]] = 500.0
    query, key = (_turned(_rows(2, 12, seed) * huge, rotation).to(dtype) for seed in (1, 2))
    found = _detect(query, key)
    assert found.rotation == rotation
    weight = torch.ones(12, dtype=torch.float64)
    weight[0] = 1.2
    assert not _detect(query, (key.double() * weight).to(dtype)).is_movable


def test_unknown_frequencies_are_not_guessed() -> None:
    rotation = Rotation("half", 0, 8, 1, (1.0, 0.5, 0.25, 0.125), 12)
    query, key = (_turned(x, rotation) for x in (_rows(4, 12, 1), _rows(2, 12, 2)))
    assert not _detect(query, key).is_movable
    assert "no rotary frequencies" in _detect(query, key, frequencies=()).reason
