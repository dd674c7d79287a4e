from __future__ import annotations

import re
import string
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.errors import InvalidConfig
from kvmosaic.eval import scores
from kvmosaic.eval.case import METRICS, Metric

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


def longest_common(one: list[str], other: list[str]) -> int:
    if not one or not other:
        return 0
    if one[0] == other[0]:
        return 1 + longest_common(one[1:], other[1:])
    return max(longest_common(one[1:], other), longest_common(one, other[1:]))


def plain_rouge_l(said: str, answer: str) -> float:
    one, other = (re.findall("[a-z0-9]+", text.lower()) for text in (said, answer))
    return 2 * longest_common(one, other) / (len(one) + len(other)) if one and other else 0.0


@given(TEXTS, ANSWERS)
@settings(max_examples=examples(60))
def test_exact_match_and_f1_are_those_of_a_plain_twin(said: str, answers: list[str]) -> None:
    words = [plain_words(answer) for answer in answers]
    assert scores.exact_match(said, answers) == float(plain_words(said) in words)
    assert scores.f1(said, answers) == pytest.approx(max(plain_f1(plain_words(said), each) for each in words))


@given(TEXTS, ANSWERS)
@settings(max_examples=examples(60))
def test_exact_match_is_that_of_the_library(said: str, answers: list[str]) -> None:
    from torchmetrics.functional.text import squad

    theirs = squad([{"id": "1", "prediction_text": said}], [{"id": "1", "answers": {"text": answers}}])
    assert scores.exact_match(said, answers) == float(theirs["exact_match"]) / 100


@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=2))
@settings(max_examples=examples(40))
def test_rouge_l_is_that_of_a_plain_twin(said: str, answers: list[str]) -> None:
    assert scores.rouge_l(said, answers) == pytest.approx(max(plain_rouge_l(said, answer) for answer in answers))


@given(st.sampled_from(METRICS), TEXTS, ANSWERS, TEXTS)
@settings(max_examples=examples(100))
def test_scores_are_from_0_to_1_and_more_accepted_answers_only_help(
    metric: Metric, said: str, answers: list[str], more: str
) -> None:
    value = scores.score(metric, said, answers)
    assert 0 <= value <= 1
    if metric not in ("contains_all", "only"):
        assert scores.score(metric, said, [*answers, more]) >= value


@given(TEXTS, TEXTS)
@settings(max_examples=examples(60))
def test_exact_match_f1_and_rouge_l_are_the_same_both_ways(one: str, other: str) -> None:
    for metric in ("exact", "f1", "rouge_l"):
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


def test_string_match_of_ruler_counts_what_occurs() -> None:
    said = "The numbers are 4512 and 77, as I said."
    assert scores.contains_all(said, ["4512", "99", "77", "AS I"]) == 0.75
    assert scores.contains_any(said, ["99", "4512"]) == 1
    assert scores.contains_any(said, ["99"]) == 0


def test_unknown_metric_and_missing_answers_are_errors() -> None:
    with pytest.raises(InvalidConfig, match="no metric 'bleu'; there are exact, f1, rouge_l"):
        scores.score("bleu", "yes", ["yes"])  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="no metric 'bleu'"):
        scores.check_metrics(["bleu"])  # type: ignore[list-item]
    with pytest.raises(InvalidConfig, match="at least one"):
        scores.score("exact", "yes", [])


def test_texts_that_are_too_long_for_rouge_are_an_error() -> None:
    with pytest.raises(InvalidConfig, match="5000 words and 4000 accepted ones"):
        scores.rouge_l("a " * 5_000, ["b", "b " * 4_000])


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    scores.check_metrics(METRICS)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchmetrics"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    for metric in ("f1", "rouge_l"):
        with pytest.raises(InvalidConfig, match=r"pip install 'kvmosaic\[eval\]'"):
            scores.score(metric, "yes", ["yes"])
    monkeypatch.setattr(scores, "find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match=r"pip install 'kvmosaic\[eval\]'"):
        scores.check_metrics(["exact", "rouge_l"])
    scores.check_metrics(["exact", "contains_all", "contains_any"])
    assert scores.score("exact", "yes", ["Yes"]) == 1
