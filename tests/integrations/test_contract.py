"""What a request to vLLM says about its segments."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import make_tokenizer

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidConfig, InvalidTokenId
from kvmosaic.layout import arrange
from kvmosaic.prompt import Document, PromptEncoder
from kvmosaic.vllm.contract import Composition, How, ModelFacts, choose_strategy, composed

COMPOSITIONS = st.builds(
    lambda system, chunks, strategy, context, repair, named, texts, continues, companions, place: Composition(
        system,
        tuple(chunks),
        strategy,
        context,
        repair,
        tuple(f"d{i}" for i in range(len(chunks))) if named else (),
        texts=tuple(texts[: len(chunks)]) if any(texts[: len(chunks)]) else (),
        continues=(0, *continues[: len(chunks) - 1]) if any(continues[: len(chunks) - 1]) else (),
        companions=tuple(map(tuple, companions)),
        place=place,
    ),
    st.integers(0, 60),
    st.lists(st.integers(1, 70), min_size=1, max_size=6),
    st.sampled_from(["sequential", "shared"]),
    st.sampled_from(["system", "companions", "none"]),
    st.integers(0, 80),
    st.booleans(),
    st.lists(st.sampled_from([0, 0, 5]), min_size=6, max_size=6),
    st.lists(st.sampled_from([0, 1]), min_size=5, max_size=5),
    st.lists(st.lists(st.integers(0, 99), min_size=1), max_size=3),
    st.integers(0, 3),
)


@given(COMPOSITIONS, st.integers(1, 9))
def test_a_composition_comes_back_from_its_fields(composition: Composition, question: int) -> None:
    num_tokens = composition.end + question
    assert Composition.from_params(composition.to_params(), num_tokens) == composition


@pytest.mark.parametrize("strategy", ["sequential", "shared"])
@pytest.mark.parametrize("long_chunks", ["split", "sections"])
def test_parts_of_a_document_are_where_our_own_engine_has_them(strategy: str, long_chunks: Any) -> None:
    options = ChunkCacheConfig(long_chunks=long_chunks, max_chunk_tokens=60, max_section_tokens=30)
    tokenizer = make_tokenizer(None)
    encoder = PromptEncoder(tokenizer, options, vocab_size=len(tokenizer), max_positions=4_096)
    text = "# Mill\nIt is red.\n\n# Ferry\nIt goes home at noon.\n\n# Town\nIt is empty.\n" * 3
    prompt = encoder.encode_documents([Document(text), Document("Short."), Document(text)], chat=False)
    assert len(prompt.chunks) > 4
    ready = composed(prompt, How(position_strategy=strategy, chunk_context="system"), ModelFacts())
    assert ready.composition is not None
    ours = arrange(prompt, strategy)
    theirs = ready.composition.layout(ready.token_ids)
    assert theirs.positions() == ours.positions() and theirs.last.start == ours.last.start


def test_what_a_request_leaves_open_is_filled_in() -> None:
    params: dict[str, Any] = {"kvmosaic": {"system": 2, "chunks": [3, 4]}}
    short = Composition.from_params(params, 12, trained_positions=13, default_repair=8)
    long = Composition.from_params(params, 12, trained_positions=12, default_repair=0)
    assert short is not None and long is not None
    assert (short.position_strategy, short.repair) == ("sequential", 8)
    assert (long.position_strategy, long.repair) == ("shared", 0)
    params["kvmosaic"] |= {"position_strategy": "auto", "repair": 0}
    said = Composition.from_params(params, 12, default_repair=8)
    assert said is not None and (said.position_strategy, said.repair) == ("sequential", 0)
    open_ended = Composition(2, (3, 4), leaves_repair_open=True)
    assert Composition.from_params(open_ended.to_params(), 12, default_repair=8) == Composition(
        2, (3, 4), repair=8, leaves_repair_open=True
    )


@pytest.mark.parametrize("strategy", ["auto", "sequential", "shared"])
@pytest.mark.parametrize(("trained", "chosen"), [(None, "sequential"), (11, "sequential"), (10, "shared")])
def test_auto_is_sequential_where_the_prompt_and_one_token_fit_the_positions_of_the_training(
    strategy: Any, trained: int | None, chosen: str
) -> None:
    assert choose_strategy(strategy, 10, trained) == (chosen if strategy == "auto" else strategy)


def test_its_layout_has_the_tokens_of_each_segment_in_order() -> None:
    composition = Composition(3, (2, 1), "shared", ids=("ferry", None), texts=(2, 1))
    layout = composition.layout(range(12))
    assert [(str(span.segment.kind), span.token_ids) for span in layout.spans] == [
        ("system", (0, 1, 2)),
        ("text", (3, 4)),
        ("chunk", (5, 6)),
        ("text", (7,)),
        ("chunk", (8,)),
        ("question", (9, 10, 11)),
    ]
    assert layout.positions() == {0: 0, 1: 3, 2: 5, 3: 7, 4: 5} and layout.last.start == 8
    assert [span.segment.name for span in layout.spans if span.segment.kind == "chunk"] == ["ferry", None]


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {"kvmosaic": None}, "kvmosaic", [1], 7])
def test_a_request_without_segments_is_an_ordinary_one(params: Any) -> None:
    assert Composition.from_params(params, 10) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "give an object"),
        ({}, "give a list"),
        ({"chunks": []}, "0 chunks"),
        ({"chunks": [3, 0]}, "a chunk of 0 tokens"),
        ({"chunks": [2.0]}, "whole numbers"),
        ({"chunks": [True]}, "whole numbers"),
        ({"chunks": "34"}, "give a list"),
        ({"chunks": [5] * 4097}, "at most 4096"),
        ({"system": -1, "chunks": [3]}, "from 0 to"),
        ({"system": 5, "chunks": [5]}, "10 of 10 tokens"),
        ({"system": 5, "chunks": [5], "chunk": 3}, "no field 'chunk'"),
        ({"chunks": [5], "position_strategy": "absolute"}, "'sequential' or 'shared'"),
        ({"chunks": [5], "chunk_context": "all"}, "'system', 'companions' or 'none'"),
        ({"chunks": [5], "repair": 5000}, "0 to 4096"),
        ({"chunks": [5], "repair": [[0, 2], [1, 2]]}, "runs of 2 chunks, and there are 1"),
        ({"chunks": [5], "repair": [[0, 2, 2, 3]]}, "ascending bounds"),
        ({"chunks": [5], "repair": [[1]]}, "ascending bounds"),
        ({"chunks": [5], "repair": [[4, 6]]}, r"runs \[4, 6\] of 5 tokens"),
        ({"chunks": [5], "repair": [["x", 6]]}, "whole numbers"),
        ({"chunks": [5], "ids": ["a", "b"]}, "2 ids for 1 chunks"),
        ({"chunks": [5], "texts": [1, 1]}, "2 texts for 1 chunks"),
        ({"chunks": [5], "texts": [-1]}, "a text of -1 tokens"),
        ({"chunks": [5], "texts": [5]}, "10 of 10 tokens"),
        ({"chunks": [1] * 4096, "texts": [0, *[1] * 17, *[0] * 4078]}, "17 texts between 4096 chunks; at most 16"),
        ({"system": 2**70, "chunks": [3]}, "from 0 to"),
        ({"chunks": [5], "companions": [[1]] * 4}, "4 entries; at most 3"),
        ({"chunks": [5], "companions": [[]]}, "a companion of 0 tokens"),
        ({"chunks": [5], "companions": [7]}, "give a list"),
        ({"chunks": [5], "companions": [[9, 10]]}, "token 1 of the companion is 10"),
        ({"chunks": [5], "companions": [["x"]]}, "token 0 of the companion is 'x'"),
        ({"chunks": [5], "companions": [[1] * (2**17 + 1)]}, "131073 entries"),
        ({"chunks": [5], "place": 4}, "at most 3"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_value(fields: object, message: str) -> None:
    with pytest.raises((InvalidConfig, InvalidTokenId), match=message):
        Composition.from_params({"kvmosaic": fields}, 10, vocab_size=10)
