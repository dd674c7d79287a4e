"""What a rolling cache refuses says which call, or both numbers, and changes nothing."""

from __future__ import annotations

import pytest
import torch

from kvmosaic import BlockKVCache
from kvmosaic.attention import sink_distance
from kvmosaic.errors import InvalidChunk, InvalidConfig, OutOfStep

SIZES = {"k_shape": (2, 8, 3), "v_shape": (2, 8, 5), "seq_dim": 1, "chunk_size": 2, "window_size": 6, "sink_size": 2}


def cache_with(**changes: object) -> BlockKVCache:
    return BlockKVCache(**{**SIZES, "device": "cpu", **changes})  # type: ignore[arg-type]


def chunk(num_tokens: int = 2, value: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((2, num_tokens, 3), value), torch.full((2, num_tokens, 5), value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": 5}, "room for 8 tokens in dimension 1, but sink_size 2 .* 5 = 7"),
        ({"v_shape": (2, 9, 5)}, r"\(2, 8, 3\) and v_shape \(2, 9, 5\)"),
        ({"v_shape": (2, 8)}, "last dimension only"),
        ({"k_shape": (3, 8), "v_shape": (3, 7)}, "v_shape has room for 7 tokens"),
        ({"k_shape": ()}, r"k_shape is \(\)"),
        ({"k_shape": (2, 0, 3)}, r"k_shape\[1\] is 0"),
        ({"k_shape": (2, 2**41, 3)}, r"k_shape\[1\] is 2199023255552"),
        ({"k_shape": 8}, "k_shape is 8"),
        ({"seq_dim": 3}, "seq_dim is 3; shapes of 3 dimensions have -3 to 2"),
        ({"seq_dim": -4}, "seq_dim is -4"),
        ({"seq_dim": True}, "seq_dim is True"),
        ({"chunk_size": 0}, "chunk_size is 0; give a whole number from 1"),
        ({"chunk_size": 1.5}, "chunk_size is 1.5"),
        ({"window_size": 0, "sink_size": 8}, "window_size is 0"),
        ({"sink_size": -1, "window_size": 9}, "sink_size is -1; give a whole number from 0"),
        ({"sink_size": False}, "sink_size is False"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'; give one of torch, such as torch.bfloat16"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        cache_with(**changes)


def test_calls_in_the_wrong_order_are_named() -> None:
    cache = cache_with()
    with pytest.raises(OutOfStep, match=r"update outside a step; call before_update\(0\)"):
        cache.update(*chunk())
    with pytest.raises(OutOfStep, match=r"after_update\(0\) outside a step"):
        cache.after_update(0)
    cache.before_update(0)
    with pytest.raises(OutOfStep, match=r"before_update\(1\) while chunk 0 is under way; call after_update\(0\)"):
        cache.before_update(1)
    with pytest.raises(InvalidChunk, match=r"after_update\(1\), but chunk 0 is under way"):
        cache.after_update(1)
    with pytest.raises(OutOfStep, match=r"after_update\(0\), but chunk 0 was not written; call update first"):
        cache.after_update(0)
    cache.update(*chunk())
    cache.after_update(0)
    with pytest.raises(OutOfStep, match=r"call before_update\(1\) first"):
        cache.update(*chunk())
    cache.before_update(1)
    cache.reset()
    with pytest.raises(OutOfStep, match=r"call before_update\(0\) first"):
        cache.update(*chunk())


@pytest.mark.parametrize(
    ("num_done", "index", "message"),
    [
        (0, 1, "the last chunk was none; next comes 0"),
        (0, -1, r"before_update\(-1\), but the last chunk was none; next comes 0"),
        (3, 4, "the last chunk was 2; next comes 2 again or 3"),
        (3, 1, r"before_update\(1\), but the last chunk was 2"),
        (3, -1, r"before_update\(-1\)"),
        (3, 3.0, "got chunk 3.0"),
        (1, True, "got chunk True"),
        (1, None, "got chunk None"),
    ],
)
def test_a_wrong_chunk_number_is_refused_with_the_right_one(num_done: int, index: int, message: str) -> None:
    cache = cache_with()
    for number in range(num_done):
        cache.before_update(number)
        cache.update(*chunk())
        cache.after_update(number)
    with pytest.raises(InvalidChunk, match=message):
        cache.before_update(index)
    cache.before_update(num_done)


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        (torch.zeros(2, 3, 3), torch.zeros(2, 2, 5), r"k of shape \(2, 3, 3\), not \(2, 2, 3\): .* chunk_size 2"),
        (torch.zeros(2, 2, 3), torch.zeros(2, 1, 5), r"v of shape \(2, 1, 5\), not \(2, 2, 5\)"),
        (torch.zeros(1, 2, 3), torch.zeros(2, 2, 5), r"k of shape \(1, 2, 3\)"),
        (torch.zeros(2, 3), torch.zeros(2, 2, 5), r"k of shape \(2, 3\)"),
        (torch.zeros(2, 2, 3).double(), torch.zeros(2, 2, 5), "k in torch.float64 on cpu, .* torch.float32 on cpu"),
        (torch.zeros(2, 2, 3), torch.zeros(2, 2, 5, device="meta"), "v in torch.float32 on meta"),
        ([1.0], torch.zeros(2, 2, 5), r"k as list; give a tensor of shape \(2, 2, 3\)"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused_and_nothing_is_written(
    k: torch.Tensor, v: torch.Tensor, message: str
) -> None:
    cache = cache_with()
    for index in range(6):
        cache.before_update(index)
        cache.update(*chunk(value=float(index)))
        cache.after_update(index)
    cache.before_update(5)
    before = cache.cached_k().clone(), cache.cached_v().clone()
    with pytest.raises(InvalidChunk, match=message):
        cache.update(k, v)
    assert torch.equal(cache.cached_k(), before[0])
    assert torch.equal(cache.cached_v(), before[1])
    cache.update(*chunk(value=7.0))
    cache.after_update(5)


def test_a_chunk_to_wrap_has_one_dtype_and_a_dimension_of_tokens() -> None:
    with pytest.raises(InvalidChunk, match=r"keys are in torch.float32 on cpu, values in torch.float64"):
        BlockKVCache.from_tensor(torch.zeros(2, 3), torch.zeros(2, 3).double(), 0)
    with pytest.raises(InvalidConfig, match="seq_dim is 2"):
        BlockKVCache.from_tensor(torch.zeros(2, 3), torch.zeros(2, 3), 2)
    with pytest.raises(InvalidConfig, match=r"\(4, 2, 3\)"):
        BlockKVCache.from_tensor(torch.zeros(4, 3, 3), torch.zeros(4, 2, 3), 1)
    with pytest.raises(InvalidConfig, match="seq_dim"):
        BlockKVCache.from_tensor(torch.tensor(1.0), torch.tensor(1.0), 0)


@pytest.mark.parametrize("sizes", [(-1, 2, 3), (4, -1, 3), (4, 2, -1)])
def test_a_distance_needs_sizes_that_can_be(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidConfig, match="none of them may be negative"):
        sink_distance(*sizes)
