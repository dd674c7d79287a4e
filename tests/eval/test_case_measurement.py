"""What is measured of a case: beside the distributions of step by step answers, and without labels."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
import torch

from kvmosaic.assembly import bundled_reader
from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.eval import run
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.case_measurement import Recalled, accepted_tokens, ask, divergence, prompt_of
from kvmosaic.lab.eval.run import _open, evaluate
from kvmosaic.lab.eval.tasks import TwoHop
from kvmosaic.lab.eval.variants import FULL, Variant
from kvmosaic.llm import LLM
from kvmosaic.model import LoadedModel, load_model
from kvmosaic.prompt import Document
from kvmosaic.repair import ChunkSignals
from kvmosaic.sampling import SamplingParams

WAYS = (
    Variant(),
    Variant("shared"),
    Variant(repair="first(4)"),
    Variant(repair="query(0.3)"),
)


@pytest.fixture(scope="module")
def reader() -> LoadedModel:
    return load_model(bundled_reader(), dtype="float32", local_files_only=True)


@pytest.fixture(scope="module")
def llm(reader: LoadedModel):
    made = _open(reader, [FULL], "64MiB")
    yield made
    made.close()


@pytest.fixture(scope="module")
def case() -> Case:
    return TwoHop().cases(0, 1)[0]


def asked(llm: LLM, case: Case, **options):
    return ask(lambda way: llm, case, prompt_of(llm, case), WAYS, lambda done: None, **options)


def distributions(llm: LLM, case: Case, way: Variant, answer: tuple[int, ...]) -> torch.Tensor:
    """The twin: the model is asked for one token at a time, with what it answered before in the question."""
    recalled = Recalled.of(way.repair)
    prompt, rows = prompt_of(llm, case), []
    for count in range(len(answer)):
        question = replace(prompt.segments[-1], token_ids=(*prompt.segments[-1].token_ids, *answer[:count]))
        longer = replace(prompt, segments=(*prompt.segments[:-1], question))
        request = llm.engine.add_score(
            longer, [0], repair=recalled or way.repair, position_strategy=way.strategy, keeps_distributions=True
        )
        llm.engine.run([request])
        rows.append(request.scoring.distributions[0])
    return torch.stack(rows)


def test_divergence_and_agreement_are_those_of_answers_step_by_step(llm: LLM, case: Case) -> None:
    readings = asked(llm, case)
    params = SamplingParams(temperature=0, max_tokens=case.answer_tokens, repair="full")
    answer = llm.generate([prompt_of(llm, case)], params)[0].outputs[0].token_ids
    full = distributions(llm, case, FULL, answer)
    for way in WAYS:
        other = distributions(llm, case, way, answer)
        expected = float((full.exp() * (full - other)).sum(-1).mean())
        assert readings[way].divergence == pytest.approx(expected, abs=1e-4)
        assert readings[way].agreement == fmean((full.argmax(-1) == other.argmax(-1)).float().tolist())
    assert (readings[FULL].divergence, readings[FULL].agreement) == (0.0, 1.0)


def test_loss_is_that_of_the_accepted_answer_and_answers_are_ones_own(llm: LLM, case: Case) -> None:
    asked(llm, case)  # what is cached then is no work below, either
    readings = asked(llm, case)
    tokens = accepted_tokens(llm, case)
    assert llm.model.tokenizer.decode(tokens) == " " + case.answers[0]  # as its chat template writes an answer
    for way in (FULL, *WAYS):
        (scored,) = llm.score(prompt_of(llm, case), tokens, repair=way.repair, position_strategy=way.strategy)
        assert readings[way].loss == pytest.approx(scored.loss, abs=1e-4)
        params = SamplingParams(temperature=0, max_tokens=case.answer_tokens, repair=way.repair)
        (output,) = llm.generate([prompt_of(llm, case)], params, position_strategy=way.strategy)
        assert readings[way].answer == output.outputs[0].text.strip()
        assert readings[way].work == pytest.approx(output.reuse.repair.work_fraction if output.reuse.repair else 0.0)


def test_unlabelled_cases_have_distances_and_no_score(llm: LLM, case: Case) -> None:
    labelled, context_free = asked(llm, case), asked(llm, replace(case, answers=()))
    for way in (FULL, *WAYS):
        assert (context_free[way].score, context_free[way].loss) == (None, None)
        # a reading whose prompt is cached rounds otherwise
        assert context_free[way].divergence == pytest.approx(labelled[way].divergence, abs=1e-6)
        assert context_free[way].agreement == pytest.approx(labelled[way].agreement)
    assert context_free[FULL].answer == labelled[FULL].answer and context_free[Variant()].answer == ""


def test_answers_that_are_not_scored_still_have_a_loss(llm: LLM, case: Case) -> None:
    readings = asked(llm, case, is_scored=False)
    assert (
        readings[Variant()].score is None and readings[Variant()].loss is not None and readings[FULL].score is not None
    )


def test_a_policy_measures_once_for_answer_and_scores() -> None:
    recalled = Recalled.of("query(0.3)")
    assert recalled is not None and recalled.signals == {"attention"} and str(recalled) == "query(0.3)"
    chunks = [ChunkSignals(4, attention=[0.1, 0.9, 0.2, 0.3])]
    chosen = recalled.choose(chunks)
    assert recalled.signals == frozenset() and recalled.choose([ChunkSignals(4)]) == chosen
    assert Recalled.of("first(4)") is None and Recalled.of("full") is None


def test_divergence_is_zero_from_itself_and_never_negative() -> None:
    logs = torch.randn(3, 50, dtype=torch.float64).log_softmax(-1)
    other = torch.randn(3, 50, dtype=torch.float64).log_softmax(-1)
    assert divergence(logs, logs) == 0.0
    expected = torch.nn.functional.kl_div(other, logs, reduction="batchmean", log_target=True)
    assert divergence(logs, other) == pytest.approx(float(expected))


def test_questions_without_answers_have_rows_without_accuracy(reader: LoadedModel) -> None:
    cases = [replace(each, answers=(), task="own") for each in TwoHop().cases(0, 2)]
    found = evaluate(reader, cases, [Variant()], capacity="64MiB")
    full, none = found.rows
    assert (full.accuracy, none.accuracy, none.ratio, none.loss_increase) == (None, None, None, None)
    assert none.divergence > 0 and full.divergence == 0


def test_a_log_takes_the_place_of_asking(reader: LoadedModel, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, cases = tmp_path / "log.jsonl", TwoHop().cases(0, 3)

    def stop(rows):
        if rows[0].num_cases == 2:
            raise KeyboardInterrupt

    partly = evaluate(reader, cases, [Variant()], capacity="64MiB", log=log, news=stop)
    assert partly.is_interrupted and [row.num_cases for row in partly.rows] == [2, 2]
    text = log.read_text()
    assert len(text.splitlines()) == 3
    log.write_text(text + '{"case": "half a li')  # it was killed while it wrote
    asked_for: list[str] = []
    real = run.ask

    def watched(engine_of, case, *rest, **more):
        asked_for.append(case.id)
        return real(engine_of, case, *rest, **more)

    monkeypatch.setattr(run, "ask", watched)
    whole = evaluate(reader, cases, [Variant()], capacity="64MiB", log=log)
    assert asked_for == [cases[2].id] and not whole.is_interrupted
    assert list(whole.rows[1].readings[:2]) == list(partly.rows[1].readings)
    assert log.read_text().startswith(text) and len(log.read_text().splitlines()) == 4
    evaluate(reader, [cases[0]], [Variant(), Variant("shared")], capacity="64MiB", log=log)
    assert asked_for == [cases[2].id, cases[0].id]  # another way was wanted
    other = replace(cases[0], documents=(*cases[0].documents, Document("One more.")))
    evaluate(reader, [other], [Variant()], capacity="64MiB", log=log)
    assert asked_for == [cases[2].id, cases[0].id, other.id]  # another prompt under the same id


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("hello\n", "this is no log of a run"),
        ("half", "is no log of a run"),
        ('{"kvmosaic_eval_log": 2, "fingerprint": "x"}\n', "is of format 2"),
        ('{"kvmosaic_eval_log": 1, "fingerprint": "x"}\n', "of another model or dtype"),
        ("[1]\n", "this is no log of a run"),
    ],
)
def test_a_file_that_is_no_log_is_left_alone(reader: LoadedModel, tmp_path, content: str, told: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(content)
    with pytest.raises(InvalidConfig, match=told):
        evaluate(reader, TwoHop().cases(0, 1), [Variant()], capacity="64MiB", log=log)
    assert log.read_text() == content
