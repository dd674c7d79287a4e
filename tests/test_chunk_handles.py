"""From a handle to keys and values: get_kv and pieces, against a forward of transformers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvmosaic import LLM, ChunkCacheConfig, KVPiece, Prompt, SamplingParams, Segment, SegmentKind, composed_attention
from kvmosaic.assembly import bundled_reader
from kvmosaic.attention import Piece
from kvmosaic.chunks import ChunkHandle
from kvmosaic.errors import EngineAsleep, InvalidConfig, InvalidOffset, InvalidPrompt, InvalidTokenId, UnknownChunk

NEAR = {"rtol": 0, "atol": 1e-4}
SYSTEM, TOWN, SHIP = list(range(50, 63)), list(range(100, 140)), list(range(200, 217))


@pytest.fixture
def llm() -> Iterator[LLM]:
    config = ChunkCacheConfig(chunk_cache_size="1MiB")
    with LLM("reader", dtype="float32", chunk_cache_config=config, self_check=False) as llm:
        yield llm


@pytest.fixture
def town(llm: LLM) -> ChunkHandle:
    return llm.chunks.create(TOWN, name="town", system=SYSTEM)


def test_keys_and_values_are_those_of_an_ordinary_forward(llm: LLM, town: ChunkHandle) -> None:
    module = AutoModelForCausalLM.from_pretrained(bundled_reader(), dtype=torch.float32)
    with torch.no_grad():
        cache = module(torch.tensor([SYSTEM + TOWN]), use_cache=True).past_key_values
    for layer in range(module.config.num_hidden_layers):
        key, value = llm.chunks.get_kv(town, layer)
        assert key.shape == value.shape == (len(TOWN), 2, 64)
        torch.testing.assert_close(key, cache.layers[layer].keys[0, :, len(SYSTEM) :].transpose(0, 1), **NEAR)
        torch.testing.assert_close(value, cache.layers[layer].values[0, :, len(SYSTEM) :].transpose(0, 1), **NEAR)


def test_they_are_views_of_the_cache(llm: LLM, town: ChunkHandle) -> None:
    key, value = llm.chunks.get_kv(town, 3)
    stored = llm.engine.runner.storages["chunk_cache"].run(3, 0, 1)
    assert [part.untyped_storage().data_ptr() for part in (key, value)] == [
        part.untyped_storage().data_ptr() for part in stored
    ]


def test_pieces_say_where_the_keys_are_and_how_far_they_are_moved(llm: LLM, town: ChunkHandle) -> None:
    (piece,) = llm.chunks.pieces(town)
    assert piece == Piece("chunk_cache", piece.first_slot, len(TOWN), position=len(SYSTEM))
    (moved,) = llm.chunks.pieces(town, position=500)
    assert moved == Piece("chunk_cache", piece.first_slot, len(TOWN), position=500, distance=500 - len(SYSTEM))
    storage = llm.engine.runner.storages[piece.pool]
    for one, other in zip(storage.run(2, piece.first_slot, piece.num_tokens), llm.chunks.get_kv(town, 2), strict=True):
        assert torch.equal(one, other)


def test_attention_over_handles_equals_attention_over_one_text(llm: LLM, town: ChunkHandle) -> None:
    """Layer 0 does not depend on what a token saw: two chunks one after the other are one text there."""
    ship = llm.chunks.create(SHIP, system=SYSTEM)
    both = llm.chunks.create(TOWN + SHIP, system=SYSTEM)
    torch.manual_seed(0)
    query = torch.randn(3, 4, 64)
    pieces = [
        KVPiece(*llm.chunks.get_kv(town, 0)),
        KVPiece(*llm.chunks.get_kv(ship, 0), distance=len(TOWN)),
    ]
    composed = composed_attention(query, pieces, rotation=llm.model.layers[0].rotation)
    expected = composed_attention(query, [KVPiece(*llm.chunks.get_kv(both, 0))])
    torch.testing.assert_close(composed, expected, **NEAR)


def test_handle_of_the_same_text_after_another_system_text_has_other_keys(llm: LLM, town: ChunkHandle) -> None:
    other = llm.chunks.create(TOWN, name="town", system=SYSTEM[:5])
    assert other.key != town.key
    assert llm.chunks.pieces(other)[0].position == 5
    assert llm.chunks.create(TOWN, system=SYSTEM).key == town.key
    assert not torch.equal(llm.chunks.get_kv(town, 1)[0], llm.chunks.get_kv(other, 1)[0])


def test_handle_of_a_chunk_that_left_says_so(llm: LLM, town: ChunkHandle) -> None:
    llm.chunks.delete("town")
    for ask in (lambda: llm.chunks.get_kv(town, 0), lambda: llm.chunks.pieces(town)):
        with pytest.raises(UnknownChunk, match="evicted: warm it again, and pin it"):
            ask()
    llm.chunks.create(TOWN, system=SYSTEM)
    assert len(llm.chunks.get_kv(town, 0)[0]) == len(TOWN)


@pytest.mark.parametrize("layer", [-1, 6, True, 1.0, "0"])
def test_layers_that_do_not_exist_are_refused(llm: LLM, town: ChunkHandle, layer: int) -> None:
    with pytest.raises(InvalidConfig, match="the model has layers 0 to 5"):
        llm.chunks.get_kv(town, layer)


@pytest.mark.parametrize("position", [-1, 2**27 + 1, True, 1.5])
def test_positions_outside_their_range_are_refused(llm: LLM, town: ChunkHandle, position: int) -> None:
    with pytest.raises(InvalidConfig, match="a position is a whole number from 0 to"):
        llm.chunks.pieces(town, position)


def test_sleeping_engine_has_no_keys_to_show(llm: LLM, town: ChunkHandle) -> None:
    llm.sleep()
    with pytest.raises(EngineAsleep, match="wake it first"):
        llm.chunks.get_kv(town, 0)
    llm.wake()
    assert len(llm.chunks.get_kv(town, 0)[0]) == len(TOWN)


@pytest.mark.parametrize("ids", [list, torch.tensor, np.array, partial(array, "i"), iter])
def test_a_segment_takes_any_whole_numbers(ids: Callable[[list[int]], Any]) -> None:
    assert Segment(SegmentKind.CHUNK, ids(TOWN)) == Segment(SegmentKind.CHUNK, tuple(TOWN))


@pytest.mark.parametrize("ids", [[1.5], torch.tensor([[1]]), "text", [TOWN]])
def test_a_segment_refuses_other_tokens_at_once(ids: Any) -> None:
    with pytest.raises(InvalidTokenId, match="token ids must be whole numbers"):
        Segment(SegmentKind.CHUNK, ids)


def test_handles_and_texts_are_a_prompt(llm: LLM) -> None:
    parts = [llm.chunks.create(text, name=text, system="Answer.") for text in ("Ann sings.", "Bob runs.")]
    asked = ["Answer.", parts[1], "Next:", parts[0], "Who runs?"]
    prompt = Prompt(asked)  # type: ignore[arg-type]
    assert [segment.kind for segment in prompt.segments] == ["system", "chunk", "text", "chunk", "question"]
    assert [segment.name for segment in prompt.chunks] == ["Bob runs.", "Ann sings."]
    short = SamplingParams(max_tokens=1)
    for one in (asked, tuple(asked), [asked], prompt):
        (output,) = llm.generate(one, short)
        actions = [segment.action for segment in output.reuse.segments if segment.kind == "chunk"]
        assert actions == ["reused", "moved"]
    assert next(iter(llm.stream(asked, short))).reuse.reused_tokens and llm.plan(asked).reused_tokens
    for wrong in ("text", 3, [parts[0], 3], []):
        with pytest.raises(InvalidPrompt, match="list of segments, chunk handles and texts"):
            Prompt(wrong)  # type: ignore[arg-type]


def test_an_offset_before_the_end_of_the_bos_token_names_it(llm: LLM) -> None:
    with pytest.raises(InvalidOffset, match="the BOS token of this model ends at 1; use an offset of at least 1, or"):
        llm.chunks.create("Ann sings.", position_offset=0)
    assert llm.chunks.create(TOWN, position_offset=0).position_offset == 0
