from __future__ import annotations

import re
import string
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.eval import case_measurement as scores
from kvmosaic.lab.eval.case import METRICS, Metric

WORDS = st.sampled_from("the a red Red, green kettle. kettle's 17 17th of élan – AN".split())
TEXTS = st.lists(WORDS, max_size=9).map(" ".join)
ANSWERS = st.lists(TEXTS, min_size=1, max_size=3)


def plain_words(text: str) -> list[str]:
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def plain_f1(said: list[str], answer: list[str]) -> float:
    if not said or not answer:
        return float(said == answer)
    same = (Counter(said) & Counter(answer)).total()
    return 2 * same / (len(said) + len(answer))


@given(TEXTS, ANSWERS)
@settings(max_examples=examples(60))
def test_exact_match_and_f1_are_those_of_a_plain_twin(said: str, answers: list[str]) -> None:
    words = [plain_words(answer) for answer in answers]
    assert scores.exact_match(said, answers) == float(plain_words(said) in words)
    assert scores.f1(said, answers) == pytest.approx(max(plain_f1(plain_words(said), each) for each in words))


@given(st.sampled_from(METRICS), TEXTS, ANSWERS, TEXTS)
@settings(max_examples=examples(100))
def test_scores_are_from_0_to_1_and_more_accepted_answers_only_help(
    metric: Metric, said: str, answers: list[str], more: str
) -> None:
    value = scores.score(metric, said, answers)
    assert 0 <= value <= 1
    if metric != "only":
        assert scores.score(metric, said, [*answers, more]) >= value


@given(TEXTS, TEXTS)
@settings(max_examples=examples(60))
def test_exact_match_and_f1_are_the_same_both_ways(one: str, other: str) -> None:
    for metric in ("exact", "f1"):
        assert scores.score(metric, one, [other]) == pytest.approx(scores.score(metric, other, [one]))


@given(TEXTS.filter(lambda text: bool(re.search("[a-z0-9]", text))))
@settings(max_examples=examples(30))
def test_the_accepted_answer_itself_is_worth_1(text: str) -> None:
    for metric in METRICS:
        assert scores.score(metric, text, [text]) == pytest.approx(1)


def test_exact_match_looks_through_case_articles_and_punctuation_only() -> None:
    assert scores.exact_match("The  Iron Bridge.", ["stone bridge", "an iron-bridge", "iron bridge"]) == 1
    assert scores.exact_match("the iron bridges", ["iron bridge"]) == 0
    assert scores.exact_match("theatre", ["atre"]) == 0


def test_string_match_finds_what_occurs() -> None:
    said = "The numbers are 4512 and 77, as I said."
    assert scores.contains_any(said, ["99", "4512"]) == 1
    assert scores.contains_any(said, ["99"]) == 0


def test_unknown_metric_and_missing_answers_are_errors() -> None:
    with pytest.raises(InvalidConfig, match="no metric 'bleu'; there are exact, f1, contains_any"):
        scores.score("bleu", "yes", ["yes"])  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="at least one"):
        scores.score("exact", "yes", [])
