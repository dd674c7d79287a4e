"""What is said of repairs: the numbers of a report, and counters that measuring does not disturb."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engines import GREEDY, answer, build_engine
from support.loaded import loaded_family

from kvmosaic.prompt import Prompt

SYSTEM, QUESTION = [3, 4, 5], [90, 91, 92]
DOCUMENTS = [list(range(20, 33)), list(range(40, 49)), list(range(60, 75))]
PROMPT = Prompt.from_tokens(SYSTEM, DOCUMENTS, QUESTION)
REPAIRS = ("first(2)", "deviation(0.3)", "query(0.3)", "combined(0.3)")
MEASURED = ("deviation(0.3)", "query(0.3)", "combined(0.3)")
NUM_DOCUMENT_TOKENS = 13 + 9 + 15


def use_of(engine, repair, prompt=PROMPT):
    request, _ = answer(engine, prompt, replace(GREEDY, repair=repair))
    return request.reuse


@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_documents_computed_by_the_request_itself_are_computed_and_then_found(repair, strategy):
    engine = build_engine(loaded_family("llama"), position_strategy=strategy)
    found = "moved" if strategy == "sequential" else "reused"
    actions = [segment.action for segment in use_of(engine, repair).segments]
    assert actions[:-1] == ["computed"] * 4
    actions = [segment.action for segment in use_of(engine, repair).segments]
    assert actions[:-1] == ["reused", "reused", found, found]


@pytest.mark.parametrize("repair", [*REPAIRS, "full"])
def test_a_report_has_a_line_for_every_segment_of_the_prompt_and_one_for_the_repair(repair):
    report = use_of(build_engine(loaded_family("llama")), repair)
    kinds = ["plain"] if repair == "full" else ["system", "chunk", "chunk", "chunk", "question"]
    assert [segment.kind for segment in report.segments] == kinds
    assert report.num_tokens == 3 + NUM_DOCUMENT_TOKENS + 3
    assert report.repair is not None and str(report.repair) in str(report)
    assert report.to_dict()["repair"]["policy"] == repair


def test_numbers_of_a_repair_by_hand():
    engine = build_engine(loaded_family("llama"))
    first, again = (use_of(engine, "first(2)").repair for _ in range(2))
    assert (first.document_tokens, first.repaired_tokens, first.computed_tokens) == (NUM_DOCUMENT_TOKENS, 4, 4)
    assert first.fraction == first.work_fraction == pytest.approx(4 / NUM_DOCUMENT_TOKENS)
    assert (again.repaired_tokens, again.computed_tokens, again.work_fraction) == (4, 0, 0)
    query = use_of(engine, "query(0.3)").repair
    assert query.repaired_tokens == query.computed_tokens == int(0.3 * NUM_DOCUMENT_TOKENS)
    assert query.work_fraction == pytest.approx((11 + 3) / NUM_DOCUMENT_TOKENS)
    deviation = use_of(engine, "deviation(0.4)").repair
    assert deviation.work_fraction == pytest.approx((14 + (9 + 15) / 2) / NUM_DOCUMENT_TOKENS)
    assert all(use.milliseconds >= 0 for use in (first, again, query, deviation))


def test_numbers_of_causal_reading_by_hand():
    engine = build_engine(loaded_family("llama"))
    first, again = (use_of(engine, "full").repair for _ in range(2))
    assert (first.repaired_tokens, first.computed_tokens, first.work_fraction) == (NUM_DOCUMENT_TOKENS, 37, 1)
    assert (again.repaired_tokens, again.computed_tokens, again.work_fraction) == (NUM_DOCUMENT_TOKENS, 0, 0)


@pytest.mark.parametrize("repair", REPAIRS)
def test_the_composition_names_the_repair(repair):
    composition = use_of(build_engine(loaded_family("llama")), repair).composition
    if repair.startswith("temperature"):
        assert composition.endswith("the question weighs documents differently")
    else:
        assert "documents do not see each other, but for" in composition and "repaired tokens" in composition


@pytest.mark.parametrize("repair", MEASURED)
def test_measuring_counts_every_document_once(repair):
    engine, plain = build_engine(loaded_family("llama")), build_engine(loaded_family("llama"))
    for _ in range(2):
        use_of(engine, repair)
        use_of(plain, "none")
        found, expected = engine.kv_cache.statistics(), plain.kv_cache.statistics()
        for name in ("lookups", "hits", "misses", "computed_tokens", "reused_tokens", "moved_tokens", "cached_chunks"):
            assert getattr(found, name) == getattr(expected, name), name
        assert found.prefix_hit_tokens <= expected.prefix_hit_tokens
    assert [chunk.hits for chunk in engine.kv_cache.chunks()] == [chunk.hits for chunk in plain.kv_cache.chunks()]


def test_measuring_is_no_preemption():
    engine = build_engine(loaded_family("llama"))
    use_of(engine, "combined(0.3)")
    assert engine.scheduler.num_preemptions == 0
