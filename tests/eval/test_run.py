"""Runs on the bundled reader: the same tokens for every way, documents known before, results that repeat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.loaded import chatting_llama

from kvmosaic.assembly import bundled_reader
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import ChunkCacheFull, InvalidConfig, RequestTooLarge
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.case_measurement import prompt_of
from kvmosaic.lab.eval.cases import gather
from kvmosaic.lab.eval.run import Evaluation, evaluate
from kvmosaic.lab.eval.tasks import USUAL_TASKS, Long, OneHop, Similar, task
from kvmosaic.lab.eval.variants import FULL, OTHER_ORDER, Variant, variants
from kvmosaic.llm import LLM
from kvmosaic.model import LoadedModel, load_model
from kvmosaic.prompt import Document, SegmentKind
from kvmosaic.sampling import SamplingParams

ASKED = (Variant("sequential"), Variant("shared"), Variant("sequential", repair="first(4)"))


@pytest.fixture(scope="module")
def reader() -> LoadedModel:
    return load_model(bundled_reader(), local_files_only=True)


@pytest.fixture(scope="module")
def llm(reader: LoadedModel) -> Iterator[LLM]:
    with LLM(reader, chunk_cache_config=ChunkCacheConfig(chunk_cache_size="64MiB"), self_check=False) as made:
        yield made


@pytest.fixture(scope="module")
def evaluation(reader: LoadedModel) -> Evaluation:
    return evaluate(reader, gather(["one-hop(3)", "story"], count=3), ASKED, capacity="64MiB")


@pytest.mark.filterwarnings("ignore:documents that are too long")
@pytest.mark.parametrize("name", USUAL_TASKS)
def test_full_attention_reads_the_very_tokens_of_the_composed_prompt(llm: LLM, name: str) -> None:
    """So its answer is that of the plain prompt of the conversation's tokens."""
    case = task(name).cases(0, 1)[0]
    prompt = prompt_of(llm, case)
    params = SamplingParams(temperature=0, max_tokens=8)
    full = llm.generate([prompt], replace(params, repair="full"), position_strategy="sequential")[0]
    plain = llm.generate([prompt.joined()], params)[0]
    assert full.prompt_token_ids == plain.prompt_token_ids
    assert full.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.slow
def test_the_yardstick_is_full_attention_with_the_first_document_last(reader: LoadedModel) -> None:
    case = replace(Similar(3).cases(0, 1)[0], answer_tokens=2)
    turned = replace(case, id="turned", documents=(*case.documents[1:], case.documents[0]), needs=())
    alone = replace(case, id="alone", documents=case.documents[:1], needs=())
    rows = evaluate(reader, [case, turned, alone], [OTHER_ORDER], capacity="64MiB").rows
    full, other = ({reading.case: reading for reading in row.readings} for row in rows)
    assert other[case.id].divergence > 1e-3 and set(other) == {case.id, "turned"}, "one document has one order"
    assert other[case.id].answer == full["turned"].answer
    assert other[case.id].loss == pytest.approx(full["turned"].loss, abs=2e-2)


def test_pieces_of_a_long_document_are_its_tokens_cut_at_equal_lengths(llm: LLM) -> None:
    case = Long(20).cases(0, 1)[0]
    whole, cut = prompt_of(llm, replace(case, piece_tokens=None)), prompt_of(llm, case)
    assert cut.joined().segments[0].token_ids == whole.joined().segments[0].token_ids
    assert [chunk.num_tokens for chunk in cut.chunks][:-1] == [20] * (len(cut.chunks) - 1)
    assert 1 <= cut.chunks[-1].num_tokens <= 20
    assert cut.segments[0].kind is SegmentKind.SYSTEM
    assert cut.segments[-1] == whole.segments[-1]


def test_document_shorter_than_a_piece_stays_whole(llm: LLM) -> None:
    case = replace(OneHop(2).cases(0, 1)[0], piece_tokens=1_000)
    assert len(prompt_of(llm, case).chunks) == 2


def test_every_way_answers_every_case_of_every_task(evaluation: Evaluation) -> None:
    assert [(row.task, row.way) for row in evaluation.rows] == [
        (name, way) for name in ("one-hop(3)", "story") for way in (FULL, *ASKED)
    ]
    assert all(row.num_cases == 3 for row in evaluation.rows)
    assert all(0 < reading.first_seconds < 600 for row in evaluation.rows for reading in row.readings)
    assert not evaluation.notes


def test_reader_answers_one_hop_and_is_scored(evaluation: Evaluation) -> None:
    for row in evaluation.rows[:3]:
        assert row.accuracy >= 2 / 3
        assert row.ratio == pytest.approx(row.accuracy / row.full_accuracy)


def test_documents_are_known_before_they_are_asked_about(evaluation: Evaluation) -> None:
    full, *composed = evaluation.rows[:3]
    for row in composed:
        for reading, whole in zip(row.readings, full.readings, strict=True):
            assert reading.computed_tokens <= whole.computed_tokens - reading.document_tokens / 3
            assert reading.computed_tokens < reading.document_tokens


def test_repairs_are_counted(evaluation: Evaluation) -> None:
    full, none, _, first = evaluation.rows[:4]
    assert none.repaired == none.work == 0
    assert 0 < first.repaired < 0.3
    assert full.repaired == 1
    assert 0 < first.work < full.work <= 1


def test_same_cases_give_the_same_answers_whatever_else_is_asked(reader: LoadedModel, evaluation: Evaluation) -> None:
    cases = gather(["story", "one-hop(3)"], count=3)
    again = evaluate(reader, cases, tuple(reversed(ASKED)), capacity="64MiB")
    answers = {(row.task, row.way): [(r.case, r.answer, r.score) for r in row.readings] for row in evaluation.rows}
    for row in again.rows:
        assert sorted((r.case, r.answer, r.score) for r in row.readings) == sorted(answers[row.task, row.way])


def test_progress_counts_every_answer(reader: LoadedModel) -> None:
    seen: list[tuple[int, int]] = []
    evaluate(reader, OneHop(1).cases(0, 2), [Variant()], capacity="64MiB", progress=lambda *each: seen.append(each))
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_interrupted_run_keeps_the_cases_that_every_way_answered(reader: LoadedModel) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    found = evaluate(reader, OneHop(1).cases(0, 4), [Variant()], capacity="64MiB", progress=interrupt)
    assert [row.num_cases for row in found.rows] == [2, 2]
    assert found.notes == ("Interrupted: what came later was not asked.",)
    with pytest.raises(KeyboardInterrupt):
        evaluate(reader, OneHop(1).cases(0, 4), [Variant()], capacity="64MiB", progress=_interrupt_at_once)


def _interrupt_at_once(done: int, total: int) -> None:
    raise KeyboardInterrupt


def test_cases_that_are_too_long_are_left_out_and_counted() -> None:
    model = chatting_llama()
    fine = Case("fine", "own", "Who?", ("Ann",), (Document("Ann sings."),), answer_tokens=1)
    long = replace(fine, id="long", documents=(Document("word " * 3_000),))
    found = evaluate(model, [long, fine], [Variant()], capacity="64MiB")
    assert [row.num_cases for row in found.rows] == [1, 1]
    assert found.notes[0].startswith("1 of 2 cases cannot be asked; the first one, 'long': ")
    with pytest.raises(InvalidConfig, match="1 of 1 cases cannot be asked; the first one, 'long': "):
        evaluate(model, [long], [Variant()], capacity="64MiB")


def test_case_larger_than_the_memory_is_left_out_and_the_others_go_on(reader: LoadedModel) -> None:
    fine, large = OneHop(1).cases(0, 2)
    large = replace(large, documents=tuple(Document(f"Number {n}. {large.documents[0].text * 3}") for n in range(12)))
    found = evaluate(reader, [large, fine], [Variant()], capacity="1MiB")
    assert [[reading.case for reading in row.readings] for row in found.rows] == [[fine.id], [fine.id]]
    assert found.notes[0].startswith(f"1 of 2 cases cannot be asked; the first one, '{large.id}': ")
    with pytest.raises((RequestTooLarge, ChunkCacheFull)):
        evaluate(reader, [large], [Variant()], capacity="1MiB")


def test_each_way_is_asked_as_it_says(reader: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Variant] = []
    generate = LLM.generate

    def watched(self: LLM, prompts: Any, params: Any, **rest: Any) -> Any:
        way = Variant(rest["position_strategy"], self.chunk_cache_config.chunk_context, str(params.repair))
        if not asked or asked[-1] != way:  # a way whose answer differs is asked for all of it
            asked.append(way)
        return generate(self, prompts, params, **rest)

    monkeypatch.setattr(LLM, "generate", watched)
    chosen = variants(["none", "first(4)"])
    evaluate(reader, OneHop(1).cases(0, 2), chosen, capacity="64MiB")
    tried, first, second = (asked[start : start + len(chosen)] for start in range(0, 3 * len(chosen), len(chosen)))
    assert tried == first == list(chosen)
    assert second == [FULL, *chosen[2:], chosen[1]]  # another one begins


def test_cases_without_documents_and_doubles_are_told(reader: LoadedModel) -> None:
    bare = Case("bare", "own", "Who?", ("Ann",))
    with pytest.raises(InvalidConfig, match="case 'bare' has no documents"):
        evaluate(reader, [bare], [Variant()], capacity="64MiB")
    with pytest.raises(InvalidConfig, match="two cases have the id 'bare'"):
        evaluate(reader, [bare, bare], [Variant()], capacity="64MiB")
    with pytest.raises(InvalidConfig, match="0 cases; a run needs 1 to"):
        evaluate(reader, [], [Variant()], capacity="64MiB")
