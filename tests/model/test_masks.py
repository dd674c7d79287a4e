"""Reading a mask off its predicate."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from kvmosaic.layers import MaskSpec
from kvmosaic.model.probe.masks import expected_mask, read_mask

_CPU = torch.device("cpu")


@settings(max_examples=examples(40))
@given(st.integers(1, 200_000))
def test_every_window_is_read_exactly(size: int) -> None:
    assert read_mask(sliding_window_causal_mask_function(size), _CPU) == MaskSpec("window", size)


@settings(max_examples=examples(40))
@given(st.integers(2, 200_000))
def test_every_chunk_size_is_read_exactly(size: int) -> None:
    predicate = chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))
    assert read_mask(predicate, _CPU) == MaskSpec("chunked", size)


def test_a_causal_mask_is_full() -> None:
    assert read_mask(causal_mask_function, _CPU) == MaskSpec()


def test_two_way_and_odd_masks_are_not_mistaken() -> None:
    assert read_mask(lambda batch, head, query, key: (key >= 0) & (query >= 0), _CPU) is None
    assert read_mask(lambda batch, head, query, key: key < query, _CPU) is None
    assert read_mask(lambda batch, head, query, key: (key <= query) & ((query - key) % 2 == 0), _CPU) is None
    assert read_mask(lambda batch, head, query, key: (key <= query) & ((key < 4) | (query - key < 9)), _CPU) is None


def test_a_written_out_mask_counts_the_token_itself() -> None:
    query, key = torch.arange(6)[:, None], torch.arange(6)[None, :]
    assert expected_mask(MaskSpec("window", 2), query, key)[3].tolist() == [False, False, True, True, False, False]
    assert expected_mask(MaskSpec("chunked", 4), query, key)[5].tolist() == [False] * 4 + [True, True]
