from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.worker.stand_ins import KEY, Rotary
from support.examples import examples
from torch import Tensor

from kvmosaic.errors import NotMovable, PromptTooLong
from kvmosaic.vllm.worker.key_rotation import KeyRotation, arithmetic, find_key_rotation

POSITIONS = st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), min_size=1, max_size=8)
EXACT = {torch.float64: 1e-12, torch.float32: 2e-6}


def turned(rotation: KeyRotation, keys: torch.Tensor, moves: list[tuple[int, int]]) -> torch.Tensor:
    old, new = torch.tensor(moves).T
    rotation.rotate(keys, rotation.factors(old, new, arithmetic(keys.dtype)))
    return keys


@pytest.mark.parametrize("dtype", list(EXACT))
@settings(max_examples=examples(40))
@given(
    moves=POSITIONS,
    is_neox=st.booleans(),
    rotary_dim=st.sampled_from([4, 10, KEY]),
    at_end=st.booleans(),
    scale=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 99),
)
def test_a_turned_key_is_the_one_the_model_computes_at_the_new_position(
    dtype: torch.dtype,
    moves: list[tuple[int, int]],
    is_neox: bool,
    rotary_dim: int,
    at_end: bool,
    scale: float,
    seed: int,
) -> None:
    rotary = Rotary(rotary_dim, is_neox_style=is_neox, dtype=dtype, scale=scale)
    rotation = find_key_rotation("layer", rotary, dtype, KEY, at_end=at_end)
    raw = torch.randn(len(moves), 3, KEY, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    first = KEY - rotary_dim if at_end else 0

    def model(column: int) -> torch.Tensor:
        heads = [
            [rotary.apply(head, move[column], first) for head in key] for key, move in zip(raw, moves, strict=True)
        ]
        return torch.stack([torch.stack(key) for key in heads])

    assert torch.allclose(turned(rotation, model(0), moves), model(1), rtol=0, atol=EXACT[dtype] * scale * 4)


@settings(max_examples=examples(40))
@given(moves=POSITIONS, seed=st.integers(0, 99))
def test_a_rounded_table_is_undone_by_what_it_is_and_not_by_what_it_should_be(
    moves: list[tuple[int, int]], seed: int
) -> None:
    rotary = Rotary(dtype=torch.bfloat16)  # its cosines and sines add up to 1 within a percent only
    rotation = find_key_rotation("layer", rotary, torch.bfloat16, KEY, at_end=False)
    raw = torch.randn(len(moves), 1, KEY, generator=torch.Generator().manual_seed(seed))
    before = torch.stack([rotary.apply(key[0], old, 0) for key, (old, _) in zip(raw, moves, strict=True)])[:, None]
    after = torch.stack([rotary.apply(key[0], new, 0) for key, (_, new) in zip(raw, moves, strict=True)])[:, None]
    assert torch.allclose(turned(rotation, before, moves), after, rtol=0, atol=1e-5)
    stored = turned(rotation, after.bfloat16(), [(new, old) for old, new in moves]).float()
    back = torch.stack([rotary.apply(key[0], old, 0) for key, (old, _) in zip(raw, moves, strict=True)])[:, None]
    assert torch.allclose(stored, back, rtol=2**-6, atol=2**-6), "two roundings to 8 bits, of key and of turned key"


def test_what_does_not_turn_is_left_alone() -> None:
    rotation = find_key_rotation("layer", Rotary(4), torch.float32, KEY, at_end=True)
    keys = torch.randn(2, 3, KEY)
    result = turned(rotation, keys.clone(), [(0, 9), (5, 70)])
    assert torch.equal(result[..., :-4], keys[..., :-4]) and not torch.equal(result[..., -4:], keys[..., -4:])


def test_the_table_is_used_as_the_forward_rounds_it_also_after_vllm_replaced_it() -> None:
    rotary = Rotary(dtype=torch.float32)
    rotation = find_key_rotation("layer", rotary, torch.bfloat16, KEY, at_end=False)
    where = torch.arange(256)
    before = rotation.rows(where)
    rotary.cos_sin_cache = rotary.cos_sin_cache.bfloat16()  # as the first forward does
    assert before.dtype == torch.bfloat16 and torch.equal(before, rotation.rows(where))
    rotary.use_flashinfer = True  # its kernel reads the table as it is
    rotary.cos_sin_cache = rotary.cos_sin_cache.float()
    assert rotation.rows(where).dtype == torch.float32


@pytest.mark.parametrize("use_long_rope", [False, True])
def test_of_short_and_long_rows_those_of_the_forward_are_taken(use_long_rope: bool) -> None:
    short, long = torch.randn(64, KEY), torch.randn(256, KEY)
    rotary = SimpleNamespace(
        long_short_cos_sin_cache=torch.cat((short, long)),
        original_max_position_embeddings=64,
        use_long_rope=use_long_rope,
        rotary_dim=KEY,
    )
    rotation = find_key_rotation("layer", rotary, torch.float32, KEY, at_end=False)
    assert torch.equal(rotation.table, long if use_long_rope else short)
    assert rotation.layout == "half"


@pytest.mark.parametrize("position", [-1, 256, 10**9])
def test_a_position_that_the_table_does_not_have_is_an_error(position: int) -> None:
    rotation = find_key_rotation("layer", Rotary(), torch.float32, KEY, at_end=False)
    rotation.require(0)
    rotation.require(255)
    with pytest.raises(PromptTooLong, match=f"position {position}; the model's rotary table has 256 positions"):
        rotation.require(position)


class SeveralPositions:
    """An embedding of three positions per token, whose sections are in their order, or not."""

    head_size = rotary_dim = KEY
    mrope_section = (2, 3, 3)

    def __init__(self, *, is_sorted: bool) -> None:
        self.is_sorted = is_sorted
        self.cos_sin_cache = Rotary().cos_sin_cache

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.cos_sin_cache[positions].chunk(2, dim=-1)
        if positions.dim() == 2:
            in_order = range(3) if self.is_sorted else (2, 0, 1)
            split = [part.split(self.mrope_section, dim=-1) for part in parts]
            parts = tuple(torch.cat([each[i][i] for i in in_order], dim=-1) for each in split)
        return query * torch.cat(parts, dim=-1), key


def test_several_positions_per_token_are_one_for_text() -> None:
    rotary = SeveralPositions(is_sorted=True)
    rotation = find_key_rotation("layer", rotary, torch.float32, KEY, at_end=False)
    assert torch.equal(rotation.table, rotary.cos_sin_cache)


TABLE = torch.zeros(16, KEY)
REFUSED: dict[str, tuple[Any, str]] = {
    "several positions per token": (SeveralPositions(is_sorted=False), "several positions per token"),
    "no table": (SimpleNamespace(rotary_dim=KEY), "no table"),
    "a table per head": (SimpleNamespace(cos_sin_cache=TABLE[:, None], rotary_dim=KEY), "no table"),
    "complex numbers": (SimpleNamespace(cos_sin_cache=torch.zeros(4, 8, dtype=torch.complex64)), "no table"),
    "whole rows twice": (SimpleNamespace(cos_sin_cache=TABLE, rotary_dim=KEY // 2), "rows of 16 numbers for 8 rotary"),
    "more than the key": (SimpleNamespace(cos_sin_cache=torch.zeros(4, 32), rotary_dim=32), "a key of 16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_embedding_without_one_row_per_position_is_refused(name: str) -> None:
    rotary, reason = REFUSED[name]
    with pytest.raises(NotMovable, match=f"^model.layers.0.*{reason}"):
        find_key_rotation("model.layers.0", rotary, torch.float32, KEY, at_end=False)
