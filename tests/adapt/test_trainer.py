"""Training on a tiny model: it gets nearer to full attention, survives interrupts, and repeats itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftConfig
from support.families import build
from support.tokenizers import CHATML, make_tokenizer

from kvmosaic import LLM, SamplingParams
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.errors import InvalidAdapter, InvalidConfig
from kvmosaic.lab.adapt import trainer as trainer_module
from kvmosaic.lab.adapt.corpus import Corpus, Question, lessons_of
from kvmosaic.lab.adapt.trainer import AdaptSettings, Trained, Trainer
from kvmosaic.lab.eval.case import Case
from kvmosaic.model import LoadedModel
from kvmosaic.model.lora import read_adapter
from kvmosaic.prompt import Document

WORDS = "river mill ferry stone bread tower garden winter letter market bridge candle harbour meadow".split()
SETTINGS = AdaptSettings(
    rank=4,
    learning_rate=3e-3,
    steps=45,
    num_documents=(2, 3),
    questions=4,
    answer_tokens=6,
    held_out_lessons=8,
    evaluate_every=15,
    question_weight=0.5,
)


def corpus() -> Corpus:
    documents = tuple(Document(f"The {one} is near the {other}.") for one in WORDS[:5] for other in WORDS[5:7])
    questions = tuple(
        Question(f"Where is the {word}?", (number % len(documents),)) for number, word in enumerate(WORDS * 3)
    )
    return Corpus(documents, questions, "Answer.")


def model_of() -> LoadedModel:
    tokenizer = make_tokenizer(CHATML)
    module = build("llama", torch.float32, vocab_size=len(tokenizer), max_position_embeddings=2048)
    return LoadedModel.from_module(module, tokenizer)


def train(folder: Path, settings: AdaptSettings = SETTINGS, **given: Any) -> Trained:
    return Trainer(model_of(), corpus(), settings, folder).train(**given)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    folder = tmp_path_factory.mktemp("adapter")
    return folder, train(folder)


def test_reading_apart_gets_nearer_to_reading_together(trained: tuple[Path, Trained]) -> None:
    _, result = trained
    assert [each.step for each in result.history] == [0, 15, 30, 45] and not result.is_interrupted
    assert result.best.divergence < 0.85 * result.history[0].divergence


def test_what_is_written_is_read_by_peft_and_by_us_and_says_what_it_is(trained: tuple[Path, Trained]) -> None:
    folder, result = trained
    assert read_adapter(folder).digest == result.adapter.digest
    assert PeftConfig.from_pretrained(folder).r == SETTINGS.rank
    report = json.loads((folder / "kvmosaic_adapter.json").read_text())
    assert report["digest"] == result.adapter.digest and report["base_fingerprint"] == model_of().fingerprint
    assert len(report["history"]) == 4


def test_the_engine_serves_it_as_it_was_trained(trained: tuple[Path, Trained]) -> None:
    """Composed prompts by the engine are nearer to full attention with the adapter, ordinary ones are unchanged."""
    folder, _ = trained
    plain = model_of()
    adapted = LoadedModel.from_module(model_of().module, plain.tokenizer, adapters={"tuned": read_adapter(folder)})
    config = {
        "chunk_cache_config": ChunkCacheConfig(chunk_cache_size="4MiB", repair="none", position_strategy="sequential"),
        "engine_config": EngineConfig(request_cache_size="8MiB"),
    }
    documents = [each.text for each in corpus().documents[:3]]
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Where is the mill?"}]
    with LLM(plain, profile=False, **config) as base, LLM(adapted, profile=False, **config) as tuned:  # type: ignore[arg-type]
        prompt = base.compose(messages, documents=documents)
        full = base.generate([prompt.joined()], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        answer = [list(full[0].outputs[0].token_ids)]
        ordinary = base.score([prompt.joined()], answer)[0].logprobs
        assert tuned.score([prompt.joined()], answer)[0].logprobs == pytest.approx(ordinary, abs=1e-5)
        composed = tuned.score([replace(prompt, adapter="")], answer)[0].logprobs
        assert composed == pytest.approx(base.score([prompt], answer)[0].logprobs, abs=1e-5)
        assert tuned.score([prompt], answer)[0].logprobs != pytest.approx(composed, abs=1e-4)


def test_an_interrupt_keeps_the_best_and_the_same_command_goes_on(
    tmp_path: Path, trained: tuple[Path, Trained]
) -> None:
    def interrupt(step: int, *_: object) -> None:
        if step == 20:
            raise KeyboardInterrupt

    first = train(tmp_path, progress=interrupt)
    assert first.is_interrupted and [each.step for each in first.history] == [0, 15]
    assert read_adapter(tmp_path).digest == first.adapter.digest
    taken: list[int] = []
    second = train(tmp_path, progress=lambda step, *_: taken.append(step))
    assert taken == list(range(16, 46)), "it goes on from its last evaluation"
    whole = trained[1]
    assert second.adapter.digest == whole.adapter.digest, "as if it had not been interrupted"
    again = train(tmp_path, progress=lambda step, *_: pytest.fail("nothing is left to do"))
    assert again.adapter.digest == whole.adapter.digest


def test_a_state_of_another_training_is_not_taken_for_ones_own(tmp_path: Path, trained: tuple[Path, Trained]) -> None:
    folder, _ = trained
    with pytest.raises(InvalidConfig, match="another model, other documents or other settings"):
        Trainer(model_of(), corpus(), replace(SETTINGS, rank=5), folder)
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "state.safetensors").write_bytes(b"\x80" * 99)
    with pytest.raises(InvalidAdapter, match="remove it to start again"):
        Trainer(model_of(), corpus(), SETTINGS, tmp_path)


def test_training_ends_where_nothing_improves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "_schedule", lambda *_: 0.0)
    result = train(tmp_path, replace(SETTINGS, steps=40, evaluate_every=1, patience=3))
    assert result.is_converged and result.history[-1].step == 3


@pytest.mark.slow
def test_sampled_answers_stand_beside_the_greedy_one_and_repeat() -> None:
    learned, _ = corpus().split(0.4, 0)
    cases = learned.draw(Random("cases"), 3, 4)
    with LLM(model_of(), profile=False, chunk_cache_config=ChunkCacheConfig(chunk_cache_size="4MiB")) as llm:
        (greedy,) = lessons_of(llm, [cases], 6)
        (lesson,) = lessons_of(llm, [cases], 6, seeds=(1, 2))
        (again,) = lessons_of(llm, [cases], 6, seeds=(1, 2))
    assert lesson.questions == tuple(question for question in greedy.questions for _ in range(3))
    assert lesson.answers[::3] == greedy.answers and again.answers == lesson.answers
    assert len({*lesson.answers[1::3], *lesson.answers[2::3]} - {*greedy.answers}) > len(greedy.answers)


def test_training_on_sampled_answers_repeats_itself(tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=4, evaluate_every=2, sampled_answers=1)
    result = train(tmp_path / "one", settings)
    assert train(tmp_path / "two", settings).adapter.digest == result.adapter.digest
    greedy = train(tmp_path / "greedy", replace(settings, sampled_answers=0))
    assert greedy.history[0] == result.history[0], "held-out answers are greedy"
    assert greedy.history[-1].num_tokens < result.history[-1].num_tokens


def test_a_corpus_has_no_document_or_question_in_both_parts() -> None:
    learned, held = corpus().split(0.4, 0)
    assert {each.text for each in learned.documents}.isdisjoint(each.text for each in held.documents)
    assert len(learned.documents) + len(held.documents) == 10
    for part in (learned, held):
        assert part.questions and all(need < len(part.documents) for each in part.questions for need in each.needs)


def test_a_corpus_of_cases_has_each_document_once() -> None:
    texts = [Document(f"Text {number}.") for number in range(6)]

    def cases() -> Iterator[Case]:
        for number in range(6):
            chosen = (texts[number], texts[(number + 1) % 6])
            yield Case(f"q{number}", "t", f"What is {number}?", documents=chosen, needs=(0,), system="Say.")

    found = Corpus.of_cases(cases())
    assert found.documents == (texts[0], texts[1], *texts[2:]) and found.system == "Say."
    assert [each.needs for each in found.questions] == [(number,) for number in range(6)]


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 0},
        {"sampled_answers": -1},
        {"learning_rate": 0.0},
        {"num_documents": ()},
        {"num_documents": (65,)},
        {"held_out": 1.0},
        {"strategies": ("absolute",)},
        {"strategies": ("nowhere",)},
        {"targets": ()},
    ],
)
def test_settings_outside_their_bounds_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        replace(SETTINGS, **change)


def test_too_little_to_learn_from_is_refused(tmp_path: Path) -> None:
    few = tuple(Document(f"Text {number}.") for number in range(5))
    with pytest.raises(InvalidConfig, match="too few to learn from"):
        Corpus(few[:3], (Question("What?"),))
    with pytest.raises(InvalidConfig, match="no question"):
        Corpus(few, ())
    with pytest.raises(InvalidConfig, match="at least 4 are needed"):
        Corpus(few, (Question("What?"),)).split(0.2, 0)
    with pytest.raises(InvalidConfig, match="no linear layer called nothing"):
        Trainer(model_of(), corpus(), replace(SETTINGS, targets=("nothing",)), tmp_path)


def test_documents_of_a_case_that_belong_together_are_read_in_their_order(tmp_path: Path) -> None:
    cases = [
        Case(
            f"case-{number}", "story", f"Where is it {number}?", (), documents, f"System {number}.", piece_tokens=pieces
        )
        for number in range(12)
        for documents in [tuple(Document(f"Part {part} of {number}, which is long enough.") for part in range(3))]
        for pieces in [7 if number % 3 == 0 else None]
    ]
    found = Corpus.of_cases(cases, lambda _: True)
    learned, held = found.split(0.25, 0)
    assert {each.text for each in learned.documents}.isdisjoint(each.text for each in held.documents)
    assert len(learned.questions) + len(held.questions) == 12, "no question has documents on both sides"
    assert held.keeps_documents and len(held.documents) == 3 * len(held.questions)
    assert [learned.draw(Random(number), 5, 4) for number in range(40)] == [
        [learned.questions[Random(number).randrange(len(learned.questions))].case] for number in range(40)
    ]
    result = Trainer(model_of(), found, replace(SETTINGS, steps=2, evaluate_every=2), tmp_path).train()
    assert result.history[-1].num_tokens > 0


@given(
    count=st.integers(17, 60),
    share=st.floats(0.05, 0.9),
    needs=st.lists(st.lists(st.integers(0, 8), max_size=3, unique=True), min_size=1, max_size=20),
    seed=st.integers(0, 5),
)
def test_a_split_parts_documents_and_loses_a_question_only_where_it_must(
    count: int, share: float, needs: list[list[int]], seed: int
) -> None:
    questions = tuple(Question(f"What is {number}?", tuple(each)) for number, each in enumerate(needs))
    whole = Corpus(tuple(Document(str(number)) for number in range(count)), questions)
    try:
        learned, held = whole.split(share, seed)
    except InvalidConfig as error:
        assert "no question to learn from" in str(error), "one side has none"
        return
    texts = [[each.text for each in part.documents] for part in (learned, held)]
    assert sorted(texts[0] + texts[1]) == sorted(map(str, range(count))) and min(map(len, texts)) >= 4
    asked = [each.text for part in (learned, held) for each in part.questions]
    assert len(asked) == len(set(asked)) == len(needs)
    for part in (learned, held):
        for question in part.questions:
            told = {part.documents[need].text for need in question.needs}
            assert told == {str(need) for need in needs[int(question.text[8:-1])]}
