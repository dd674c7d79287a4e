"""Answer scores: a number from 0 to 1, the best over the accepted answers.

| metric | what it is | computed by | |---|---|---| | exact | the same words as SQuAD compares them: without case,
punctuation and articles | here | | f1 | SQuAD's F1 of the words that both have | torchmetrics | | rouge_l | the
F-measure of ROUGE-L, without stemming | torchmetrics | | contains_all | RULER's string match: the share of the accepted
answers that occur, in any case | here | | contains_any | RULER's string match for questions: 1 if an accepted answer
occurs, in any case | here | | only | 1 if the accepted answers occur as whole words, in their order, and no answer of
another document | here |
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from kvmosaic.errors import InvalidConfig
from kvmosaic.eval.case import METRICS, Case, Metric

MAX_COMPARED_WORDS = 2**24
"""ROUGE-L compares every word of the answer with every word of the accepted one; this many pairs take seconds."""

_FIRST_CJK = 0x2E80
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ROUGE_WORD = re.compile(r"[a-z0-9]+")


def score(metric: Metric, said: str, answers: Iterable[str]) -> float:
    """Returns the score of an answer, 0 to 1.

    Args:
        metric: one of the table above.
        said: the model's answer.
        answers: every accepted answer, at least one.

    Raises:
        InvalidConfig: no such metric, no accepted answer, texts too long for the metric, or its library is missing.
    """
    if metric not in _SCORES:
        raise InvalidConfig(f"there is no metric {metric!r:.80}; there are {', '.join(METRICS)}")
    accepted = tuple(answers)
    if not accepted:
        raise InvalidConfig("nothing can be scored without an accepted answer; give at least one")
    return _SCORES[metric](said, accepted)


def score_case(case: Case, said: str) -> float | None:
    """The score of an answer to a case; None if none is known."""
    if not case.is_labelled:
        return None
    return only(said, case.answers, case.others) if case.metric == "only" else score(case.metric, said, case.answers)


def _whole(value: str) -> str:
    """A pattern for a value that is no part of a longer word or number; scripts without spaces have no such borders."""
    borders = (r"\b" if re.match(r"\w", end) and ord(end) < _FIRST_CJK else "" for end in (value[:1], value[-1:]))
    return re.escape(value).join(borders)


def check_metrics(metrics: Iterable[Metric]) -> None:
    """Checks that the libraries of some metrics are there, so that a long run does not end without scores.

    Raises:
        InvalidConfig: no such metric, or its library is missing.
    """
    for metric in metrics:
        if metric not in _SCORES:
            raise InvalidConfig(f"there is no metric {metric!r:.80}; there are {', '.join(METRICS)}")
        if _SCORES[metric] in (f1, rouge_l) and find_spec("torchmetrics") is None:
            raise _missing(metric)


def exact_match(said: str, answers: Iterable[str]) -> float:
    """1 if the answer is an accepted one, word for word, else 0. Case, punctuation and articles do not count."""
    words = _words(said)
    return float(any(_words(answer) == words for answer in answers))


def f1(said: str, answers: Iterable[str]) -> float:
    """The harmonic mean of precision and recall of the words, of which `exact_match` tells what counts."""
    target = {"id": "", "answers": {"text": list(answers)}}
    scores = _torchmetrics("f1").squad([{"id": "", "prediction_text": said}], [target])
    return float(scores["f1"]) / 100


def rouge_l(said: str, answers: Iterable[str]) -> float:
    """The F-measure of the longest common subsequence of words; a word is a run of the letters a-z and of digits.

    Raises:
        InvalidConfig: the texts are too long to be compared.
    """
    accepted = list(answers)
    num_said, num_accepted = (max(map(_num_rouge_words, texts), default=0) for texts in ([said], accepted))
    if num_said * num_accepted > MAX_COMPARED_WORDS:
        raise InvalidConfig(
            f"ROUGE-L of {num_said} words and {num_accepted} accepted ones takes too long; "
            f"their product may be {MAX_COMPARED_WORDS}: give answers fewer tokens"
        )
    scores = _torchmetrics("rouge_l").rouge_score([said], [accepted], accumulate="best", rouge_keys="rougeL")
    return float(scores["rougeL_fmeasure"])


def contains_all(said: str, answers: Iterable[str]) -> float:
    """The share of the accepted answers that occur in the answer, in any case."""
    found = [answer.lower() in said.lower() for answer in answers]
    return sum(found) / len(found)


def contains_any(said: str, answers: Iterable[str]) -> float:
    """1 if one of the accepted answers occurs in the answer, in any case, else 0."""
    return float(any(answer.lower() in said.lower() for answer in answers))


def only(said: str, answers: Iterable[str], others: Iterable[str] = ()) -> float:
    """1 if all answers occur as whole words, in their order and in any case, and none of the others, else 0."""
    found = [re.search(_whole(answer), said, re.IGNORECASE) for answer in answers]
    places = [match.start() for match in found if match is not None]
    is_mixed_up = any(re.search(_whole(other), said, re.IGNORECASE) for other in others)
    return float(len(places) == len(found) and places == sorted(places) and not is_mixed_up)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _num_rouge_words(text: str) -> int:
    return len(_ROUGE_WORD.findall(text.lower()))


def _torchmetrics(metric: Metric) -> ModuleType:
    try:
        return import_module("torchmetrics.functional.text")
    except ImportError as error:
        raise _missing(metric) from error


def _missing(metric: Metric) -> InvalidConfig:
    return InvalidConfig(f"the metric {metric!r} needs torchmetrics; pip install 'kvmosaic[eval]'")


_SCORES: dict[Metric, Callable[[str, tuple[str, ...]], float]] = {
    "exact": exact_match,
    "f1": f1,
    "rouge_l": rouge_l,
    "contains_all": contains_all,
    "contains_any": contains_any,
    "only": only,
}
