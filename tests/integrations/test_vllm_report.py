"""The reuse report of a request inside vLLM."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.server.generation.usage import ReplyReport
from kvmosaic.vllm.contract import Composition
from kvmosaic.vllm.report import ChunkOutcome, ComposedReport

CACHED = ChunkOutcome("cached")
SHAPE = Composition(system=6, chunks=(4, 8), ids=("ferry", None))


def report_of(shape: Composition, num_tokens: int, *outcomes: Any, **fields: Any) -> ComposedReport:
    return ComposedReport(shape.layout(range(num_tokens)), shape.repair, *outcomes, **fields)


def test_moved_chunks_are_told_with_their_distance_and_their_tier() -> None:
    outcomes = (CACHED, ChunkOutcome("cached", tier="host", seconds=0.002))
    told = report_of(SHAPE, 20, outcomes, prefix_tokens=4).to_json()
    ferry, other = told["documents"]
    assert (ferry["id"], ferry["action"], ferry["distance"], ferry["tier"]) == ("ferry", "reused", 0, "device")
    assert (other["id"], other["action"], other["distance"], other["tier"]) == (None, "moved", 4, "host")
    assert (other["ms"], other["note"]) == (2.0, "loaded from host")
    assert told["composition"] == "composed (sequential): documents do not see each other"
    assert told["totals"] == {
        **{"prompt_tokens": 20, "cached_tokens": 18, "composed_tokens": 12, "recomputed_tokens": 2},
        "moved_tokens": 8,
    }
    assert told["bypass"] is None


def test_a_computed_chunk_is_in_no_tier_and_an_awaited_one_was_computed_by_another_request() -> None:
    told = report_of(SHAPE, 20, (ChunkOutcome("computed"), ChunkOutcome("awaited"))).to_json()
    computed, awaited = told["documents"]
    assert (computed["action"], computed["tier"], computed["reused_tokens"]) == ("computed", None, 0)
    assert (awaited["action"], awaited["note"]) == ("moved", "computed by another request")
    assert told["segments"][0]["action"] == "computed"
    assert told["totals"]["recomputed_tokens"] == 6 + 4 + 2


def test_of_a_prompt_that_was_asked_before_all_that_the_prefix_cache_had_is_reused() -> None:
    shape = Composition(system=6, chunks=(4, 8), position_strategy="shared", chunk_context="none")
    told = report_of(shape, 20, (CACHED, CACHED), prefix_tokens=19).to_json()
    assert [segment["action"] for segment in told["segments"]] == ["reused", "moved", "moved", "partly reused"]
    assert {document["distance"] for document in told["documents"]} == {6}
    assert told["totals"]["recomputed_tokens"] == 1
    assert "documents did not see the system prompt" in told["composition"]


def test_documents_are_compared_unless_they_are_known_to_differ() -> None:
    layout = Composition(2, (12, 12)).layout([1, 2, *range(10, 22), *range(10, 21), 30, 3, 4])
    for is_apart in (False, True):
        told = ComposedReport(layout, 0, (CACHED, CACHED), is_apart=is_apart).to_json()
        assert ("may be mixed up" in told["composition"]) != is_apart
    for runs, remark in ((((), (0, 12)), "like one before them are read in full"), (((), (0, 11)), "may be mixed up")):
        told = ComposedReport(layout, runs, (CACHED, ChunkOutcome("computed"))).to_json()
        assert remark in told["composition"]
        assert told["documents"][1]["reused_tokens"] == 0


def test_repaired_tokens_count_as_computed() -> None:
    shape = Composition(system=2, chunks=(4, 8), chunk_context="none", repair=4)
    first, second = report_of(shape, 20, (CACHED, CACHED)).to_json()["documents"]
    assert (first["action"], first["tier"]) == ("computed", None)
    assert (second["action"], second["reused_tokens"]) == ("partly reused", 4)
    assert second["note"] == "its first 4 tokens computed again"


def test_the_first_document_has_seen_all_there_is_before_it() -> None:
    shape = Composition(system=3, chunks=(4, 8), repair=4)
    report = report_of(shape, 20, (CACHED, CACHED))
    first, second = report.to_json()["documents"]
    assert (first["reused_tokens"], first["note"]) == (4, "")
    assert (second["reused_tokens"], report.repaired_tokens) == (4, 4)


def test_a_bypass_says_why_and_counts_what_an_ordinary_prompt_would_reuse() -> None:
    told = report_of(SHAPE, 20, prefix_tokens=12, bypass="it asks for prompt_logprobs").to_json()
    assert told["bypass"] == "it asks for prompt_logprobs"
    assert told["composition"] == "exact"
    assert [document["action"] for document in told["documents"]] == ["reused", "partly reused"]
    assert told["totals"]["cached_tokens"] == 12
    assert told["totals"]["composed_tokens"] == 0


@st.composite
def reports(draw: st.DrawFn) -> ComposedReport:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    shape = Composition(
        system=draw(st.integers(0, 40)),
        chunks=tuple(lengths),
        position_strategy=draw(st.sampled_from(["sequential", "shared"])),
        chunk_context=draw(st.sampled_from(["system", "none"])),
        repair=draw(st.integers(0, 50)),
        ids=tuple(map(str, lengths)) if draw(st.booleans()) else (),
        texts=tuple(draw(st.integers(0, 5)) for _ in lengths),
    )
    num_tokens = shape.end + draw(st.integers(1, 40))
    sources = st.builds(ChunkOutcome, st.sampled_from(["cached", "computed", "awaited", "same"]), st.just("disk"))
    return report_of(
        shape,
        num_tokens,
        tuple(draw(st.lists(sources, min_size=len(lengths), max_size=len(lengths)))),
        prefix_tokens=draw(st.integers(0, num_tokens - 1)),
        bypass=draw(st.sampled_from(["", "the model has windows"])),
    )


@given(reports())
def test_every_report_has_the_form_of_our_own_server_and_its_numbers_add_up(report: ComposedReport) -> None:
    told = json.loads(json.dumps(report.to_json()))
    own = {name: told[name] for name in ReplyReport.model_fields}
    assert ReplyReport.model_validate(own).model_dump() == own
    totals = told["totals"]
    assert sum(segment["tokens"] for segment in told["segments"]) == totals["prompt_tokens"] == report.layout.num_tokens
    assert totals["cached_tokens"] + totals["recomputed_tokens"] == report.layout.num_tokens
    assert totals["recomputed_tokens"] >= 1
    layout = report.layout
    chunks = [index for index, span in enumerate(layout.spans) if span.segment.kind == "chunk"]
    for index, document in zip(chunks, told["documents"], strict=True):
        expected = layout.position_of(index) - layout.spans[index].start if report.is_composed else 0
        assert document["distance"] == expected


def test_the_rest_of_a_system_text_and_texts_between_documents_have_rows_of_their_own() -> None:
    shape = Composition(system=6, chunks=(4, 8), texts=(3, 2))
    told = report_of(shape, 30, (CACHED, CACHED), prefix_tokens=4, rest=ChunkOutcome("computed")).to_json()
    kinds = [(row["kind"], row["tokens"], row["reused_tokens"]) for row in told["segments"]]
    assert kinds == [
        *(("system", 6, 6), ("text", 3, 0), ("chunk", 4, 4), ("text", 2, 0), ("chunk", 8, 8), ("question", 7, 0))
    ]
    assert [row["distance"] for row in told["documents"]] == [3, 9]
    assert "documents saw 6 of 9 tokens before them" in told["composition"]
    again = report_of(shape, 30, (CACHED, CACHED), rest=CACHED).to_json()
    assert [row["reused_tokens"] for row in again["segments"]] == [6, 3, 4, 0, 8, 0]


def test_a_report_has_one_outcome_for_each_chunk() -> None:
    with pytest.raises(AssertionError):
        report_of(SHAPE, 20, (CACHED,))


def test_a_copy_where_reading_in_place_was_chosen_is_a_warning() -> None:
    told = report_of(SHAPE, 20, (CACHED, CACHED), copied="the graphs are full").to_json()
    assert told["warnings"] == ["documents were copied, not read in place: the graphs are full"]
    assert report_of(SHAPE, 20, (CACHED, CACHED)).to_json()["warnings"] == []
