from pathlib import Path

import pytest

from training.batches import Reading
from training.evaluate import load_reader
from training.examples import example_with, load_documents, load_questions
from training.layout import STRATEGIES, Strategy
from training.measure import score_example

FOLDER = Path(__file__).parents[2] / "src" / "kvmosaic" / "bundled" / "reader"


def test_every_answer_stands_in_its_document() -> None:
    documents = load_documents()
    assert 8 <= len(documents) <= 12
    assert len(load_questions()) >= 12
    assert all(question.answer in documents[question.document].text for question in load_questions())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("chat", [True, False])
def test_reader_answers_all_example_questions(strategy: Strategy, chat: bool) -> None:
    model, tokenizer = load_reader(FOLDER)
    for first in range(len(load_documents())):
        score = score_example(model.answers, tokenizer, example_with(4, first), Reading(strategy, chat=chat))
        assert not score.wrong
    everything = example_with(len(load_documents()))
    assert not score_example(model.answers, tokenizer, everything, Reading(strategy, chat=chat)).wrong
