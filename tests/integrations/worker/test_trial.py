"""What a check at start computes, and how far numbers may lie apart: without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from integrations.worker.stand_ins import KEY, Rotary

from kvmosaic.vllm.worker.key_rotation import KeyRotation, find_key_rotation
from kvmosaic.vllm.worker.trial.plan import HEAD_TOKENS, MAX_CONTEXT, TrialPlan, far_positions
from kvmosaic.vllm.worker.trial.rotation import (
    allowed,
    apart,
    direct_trouble,
    noise_ratio,
    perturbed,
    turned,
    unit,
)

TYPES = (torch.float32, torch.bfloat16, torch.float16)


@given(
    num_tokens=st.integers(4, 192),
    last=st.integers(1, 200_000),
    block_size=st.sampled_from([8, 16, 32, 128, 256]),
    num_blocks=st.integers(8, 200),
    max_runs=st.integers(1, 40),
    windows=st.sets(st.integers(1, 5_000), max_size=2),
)
def test_runs_that_are_computed_at_once_share_no_block_that_they_write(
    num_tokens: int, last: int, block_size: int, num_blocks: int, max_runs: int, windows: set[int]
) -> None:
    positions = far_positions(last, windows)
    context = max(MAX_CONTEXT, *windows, 0)
    plan = TrialPlan.of(
        tuple(range(num_tokens)),
        positions,
        block_size=block_size,
        num_blocks=num_blocks,
        max_runs=max_runs,
        context=context,
    )
    if isinstance(plan, str):
        assert "has no room" in plan
        return
    assert len(set(plan.blocks)) == len(plan.blocks) and min(plan.blocks) > 0 and max(plan.blocks) < num_blocks
    seen = []
    for runs in plan.head_runs():
        assert len(runs) <= max(max_runs, 2) and runs[0].position == 0
        written: set[int] = set()
        for run in runs:
            end = run.start + len(run.token_ids)
            assert len(run.blocks) * block_size >= end
            mine = set(run.blocks[run.start // block_size : -(-end // block_size)])
            assert not mine & written and not mine & set(plan.text_blocks)
            written |= mine
            assert run.position == run.start or (run.start == 0 and run.position > context)
        seen += [run.position for run in runs[1:]]
    assert tuple(seen) == positions[1:] and last in positions
    behind = plan.behind(plan.moved_head)
    assert len(behind.blocks) * block_size >= behind.start + 1


def test_positions_are_near_and_far_and_end_where_a_run_still_fits() -> None:
    assert far_positions(8000 - HEAD_TOKENS)[:6] == (0, 1, 7, 37, 64, 129)
    assert far_positions(8000 - HEAD_TOKENS)[-1] == 8000 - HEAD_TOKENS
    assert far_positions(40) == (0, 1, 7, 37, 40)


def test_a_window_ends_in_the_middle_of_a_run() -> None:
    begin = next(each for each in far_positions(8000, [4096]) if each not in far_positions(8000))
    assert begin < 4096 < begin + HEAD_TOKENS
    assert far_positions(8000, [4, 9000]) == far_positions(8000)


def _turning(dtype: torch.dtype, **fields: Any) -> KeyRotation:
    return find_key_rotation("layer", Rotary(KEY, dtype=dtype, **fields), dtype, KEY, at_end=False)


@pytest.mark.parametrize("dtype", TYPES)
def test_one_large_number_hides_no_fault_and_makes_none(dtype: torch.dtype) -> None:
    rotation = _turning(dtype)
    keys = torch.randn(17, 2, KEY, generator=torch.Generator().manual_seed(0))
    keys[..., 1] *= 1000
    moved = turned(rotation, keys.to(dtype), 0, 90)
    assert apart(rotation, moved.to(dtype), moved) <= allowed(dtype)
    for number in range(KEY):
        wrong = moved.clone()
        wrong[..., number] += 0.1 * moved[..., [number, (number + KEY // 2) % KEY]].norm(dim=-1)
        assert apart(rotation, wrong, moved) > allowed(dtype)


class Called:
    """A rotary embedding that is called as vLLM's are, and may turn by other angles far out."""

    def __init__(self, dtype: torch.dtype, slower_from: int) -> None:
        angles = torch.arange(256)[:, None] / 100.0 ** (torch.arange(KEY // 2) / (KEY // 2))
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
        self.rotary_dim = self.head_size = KEY
        self.slower_from = slower_from

    def __call__(self, positions: Any, query: Any, key: Any) -> Any:
        far = (positions - self.slower_from).clamp(min=0)
        rows = self.cos_sin_cache[positions - far // 2].float()
        return tuple(_rotated(each.float(), rows).to(each.dtype) for each in (query, key))


@pytest.mark.parametrize("dtype", TYPES)
def test_an_embedding_called_directly_is_compared_near_and_far(dtype: torch.dtype) -> None:
    for slower_from, words in ((10_000, ""), (100, "rotation was not understood")):
        rotation = find_key_rotation("layer", Called(dtype, slower_from), dtype, KEY, at_end=False)
        place: Any = SimpleNamespace(rotation=rotation, layout=SimpleNamespace(is_latent=False, key_size=KEY))
        assert direct_trouble(place, (0, 1, 7, 64)) == ""
        found = direct_trouble(place, (0, 1, 7, 64, 200))
        assert words in found and bool(words) == bool(found)


def _rotated(vectors: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    cos, sin = rows.chunk(2, -1)
    x, y = vectors.chunk(2, -1)
    return torch.cat([x * cos - y * sin, y * cos + x * sin], -1)


@pytest.mark.parametrize("dtype", TYPES)
def test_noise_is_measured_channel_by_channel(dtype: torch.dtype) -> None:
    wanted = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    wanted[:, 3] *= 1e4
    wanted = wanted.to(dtype)
    noisy = [perturbed(wanted, 1)]
    assert noise_ratio([perturbed(wanted, 2)], [wanted], noisy) < 2
    assert noise_ratio([(wanted.float() * (1 + 40 * unit(dtype))).to(dtype)], [wanted], noisy) > 4
    assert noise_ratio([wanted * float("nan")], [wanted], noisy) == float("inf")
