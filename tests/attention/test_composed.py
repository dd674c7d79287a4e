"""Composed attention against the obvious twin: re-rotate the keys, concatenate, softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.plain import PlainBackend

from kvmosaic import KVPiece, composed_attention
from kvmosaic.attention import TorchBackend, attend_plain
from kvmosaic.errors import InvalidConfig
from kvmosaic.rope import Rotation, rotate


def rotation_of(layout: str, offset: int, rotary_dim: int, head_dim: int) -> Rotation:
    inv_freq = tuple(10_000.0 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2))
    return Rotation(layout, offset, rotary_dim, 1, inv_freq, head_dim)


def concatenated_attention(query, pieces, rotation, scaling, softcap=None, sinks=None):
    """The twin: keys turned by their distance, one softmax over everything that is seen."""
    num_rows, num_heads, _ = query.shape
    keys, values, masks = [], [], []
    for piece in pieces:
        key = piece.key
        if piece.distance:
            distances = torch.full((key.shape[0],), piece.distance)
            key = rotate(key, rotation.tables(distances, dtype=key.dtype))
        keys.append(key.repeat_interleave(num_heads // key.shape[1], 1))
        values.append(piece.value.repeat_interleave(num_heads // key.shape[1], 1))
        mask = torch.ones(num_rows, key.shape[0], dtype=torch.bool)
        masks.append(mask.tril(key.shape[0] - num_rows) if piece.causal else mask)
    scores = torch.einsum("thd,shd->ths", query, torch.cat(keys)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~torch.cat(masks, 1)[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None].expand(num_rows, -1, 1)], -1)
    weights = scores.softmax(-1)[..., : sum(len(key) for key in keys)]
    return torch.einsum("ths,shd->thd", weights, torch.cat(values))


@st.composite
def cases(draw):
    torch.manual_seed(draw(st.integers(0, 2**31)))
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim, value_dim = draw(st.sampled_from([(8, 8), (16, 16), (16, 8)]))
    num_rows = draw(st.integers(1, 9))
    rotary_dim = draw(st.sampled_from([4, 8]))
    offset = draw(st.integers(0, head_dim - rotary_dim))
    rotation = rotation_of(draw(st.sampled_from(["half", "interleaved"])), offset, rotary_dim, head_dim)
    pieces = []
    for length in draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)):
        causal = length >= num_rows and draw(st.booleans())
        pool = torch.randn(length + 3, num_kv_heads, head_dim, dtype=torch.float64)
        values = torch.randn(length + 3, num_kv_heads, value_dim, dtype=torch.float64)
        pieces.append(KVPiece(pool[2 : 2 + length], values[2 : 2 + length], draw(st.integers(-5000, 5000)), causal))
    query = torch.randn(num_rows, num_kv_heads * group, head_dim, dtype=torch.float64)
    return query, pieces, rotation


@settings(max_examples=examples(60))
@given(
    cases(),
    st.sampled_from([None, 5.0]),
    st.booleans(),
    st.sampled_from([TorchBackend(), PlainBackend()]),
)
def test_turning_the_query_equals_turning_the_keys(case, softcap, with_sinks, backend):
    query, pieces, rotation = case
    sinks = torch.randn(query.shape[1], dtype=torch.float64) if with_sinks else None
    options = {"scaling": 0.3, "softcap": softcap, "sinks": sinks}
    before = [(piece.key.clone(), piece.value.clone()) for piece in pieces]
    result = composed_attention(query, pieces, rotation=rotation, backend=backend, **options)
    twin = concatenated_attention(query, pieces, rotation, **options)
    torch.testing.assert_close(result, twin, atol=1e-10, rtol=0)
    for piece, (key, value) in zip(pieces, before, strict=True):
        assert torch.equal(piece.key, key) and torch.equal(piece.value, value), "cached bytes are never written"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_lower_precision_stays_close_to_float64(dtype, tolerance):
    torch.manual_seed(1)
    rotation = rotation_of("half", 0, 32, 32)
    query = torch.randn(5, 8, 32, dtype=torch.float64)
    pieces = [
        KVPiece(torch.randn(n, 2, 32).double(), torch.randn(n, 2, 32).double(), d) for n, d in ((64, 0), (37, 900))
    ]
    low = [KVPiece(piece.key.to(dtype), piece.value.to(dtype), piece.distance) for piece in pieces]
    exact = composed_attention(query, pieces, rotation=rotation)
    result = composed_attention(query.to(dtype), low, rotation=rotation)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, atol=tolerance, rtol=0)


def test_a_wrong_distance_is_far_from_right():
    torch.manual_seed(2)
    rotation = rotation_of("half", 0, 16, 16)
    query, key, value = (torch.randn(3, 2, 16, dtype=torch.float64) for _ in range(3))
    right = composed_attention(query, [KVPiece(key, value, 7)], rotation=rotation)
    wrong = composed_attention(query, [KVPiece(key, value, 8)], rotation=rotation)
    assert (right - wrong).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "no pieces"),
        ([KVPiece(torch.zeros(4, 3, 8), torch.zeros(4, 3, 8))], "do not fit the query"),
        ([KVPiece(torch.zeros(4, 2, 6), torch.zeros(4, 2, 6))], "do not fit the query"),
        ([KVPiece(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), causal=True)], "one key per query"),
        ([KVPiece(torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), distance=3)], "no rotation was given"),
        ([KVPiece(torch.zeros(0, 2, 8), torch.zeros(0, 2, 8))], "do not fit the query"),
        ([KVPiece(torch.zeros(4, 0, 8), torch.zeros(4, 0, 8))], "do not fit the query"),
        ([KVPiece(torch.zeros(4, 2, 8), torch.zeros(4, 2, dv)) for dv in (8, 4)], "one Dv for all"),
        ([KVPiece(torch.zeros(4, 2, 8).double(), torch.zeros(4, 2, 8))], "one dtype"),
        ([KVPiece(torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), distance=0.5)], "whole number"),
    ],
)
def test_pieces_that_do_not_fit_are_named(pieces, message):
    with pytest.raises(InvalidConfig, match=message):
        composed_attention(torch.zeros(2, 4, 8), pieces)


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0), (2, 4)])
def test_empty_queries_are_refused(shape):
    with pytest.raises(InvalidConfig, match="query must be"):
        composed_attention(torch.zeros(shape), [KVPiece(torch.zeros(4, 2, 8), torch.zeros(4, 2, 8))])
    with pytest.raises(InvalidConfig, match="query must be"):
        composed_attention(torch.zeros(2, 4, 8).int(), [KVPiece(torch.zeros(4, 2, 8), torch.zeros(4, 2, 8))])
    with pytest.raises(InvalidConfig, match="sinks must be"):
        composed_attention(
            torch.zeros(2, 4, 8), [KVPiece(torch.zeros(4, 2, 8), torch.zeros(4, 2, 8))], sinks=torch.ones(3)
        )


@settings(max_examples=examples(40))
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 30), st.sampled_from(["none", "causal", "mask"]))
def test_flash_and_written_out_attention_agree(seed, num_rows, num_keys, shape):
    torch.manual_seed(seed)
    num_keys = num_rows if shape == "causal" else num_keys
    query = torch.randn(num_rows, 6, 16, dtype=torch.float64)
    key, value = torch.randn(2, num_keys, 2, 16, dtype=torch.float64)
    mask = torch.rand(num_rows, num_keys) < 0.4 if shape == "mask" else None
    options = {"scaling": 0.25, "causal": shape == "causal", "mask": mask}
    fast, slow = TorchBackend().attend(query, key, value, **options), attend_plain(query, key, value, **options)
    torch.testing.assert_close(fast[1], slow[1], atol=1e-10, rtol=0)
    torch.testing.assert_close(fast[0], slow[0], atol=1e-10, rtol=0)


def test_latent_values_are_a_view_of_the_keys():
    torch.manual_seed(3)
    key = torch.randn(20, 1, 24, dtype=torch.float64)
    query = torch.randn(4, 8, 24, dtype=torch.float64)
    fast = TorchBackend().attend(query, key, key[..., :16], scaling=0.2)
    slow = attend_plain(query, key, key[..., :16], scaling=0.2)
    torch.testing.assert_close(fast[0], slow[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(fast[1], slow[1], atol=1e-10, rtol=0)


@pytest.mark.slow
def test_one_graph_is_for_pieces_of_any_length_and_distance():
    rotation = Rotation("half", 0, 16, 1, tuple(1e4 ** (-index / 8) for index in range(8)), 16)

    def attend(query, first, second, distance):
        pieces = [KVPiece(*first, distance=distance), KVPiece(*second)]
        return composed_attention(query, pieces, rotation=rotation, backend=TorchBackend())

    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=count)
    for length, distance in ((5, 2), (7, 3), (90, 41)):
        query, first, second = torch.randn(3, 4, 16), torch.randn(2, length, 2, 16), torch.randn(2, length + 1, 2, 16)
        expected = attend(query, first, second, distance)
        torch.testing.assert_close(compiled(query, first, second, distance), expected, atol=1e-6, rtol=0)
    assert len(graphs) == 1
