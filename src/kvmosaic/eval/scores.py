"""Answer scores: a number from 0 to 1, the best over the accepted answers.

exact           the same words as SQuAD compares them: without case, punctuation and articles
f1              SQuAD's F1 of the words that both have
contains_any    1 if an accepted answer occurs, in any case
only            1 if the accepted answers occur as whole words, in their order, and no answer of another document
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable

from kvmosaic.errors import InvalidConfig
from kvmosaic.eval.case import METRICS, Case, Metric

_FIRST_CJK = 0x2E80
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def score(metric: Metric, said: str, answers: Iterable[str]) -> float:
    """Returns the score of an answer, 0 to 1.

    Args:
        metric: one of the table above.
        said: the model's answer.
        answers: every accepted answer, at least one.

    Raises:
        InvalidConfig: no such metric, or no accepted answer.
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


def exact_match(said: str, answers: Iterable[str]) -> float:
    """1 if the answer is an accepted one, word for word, else 0. Case, punctuation and articles do not count."""
    words = _words(said)
    return float(any(_words(answer) == words for answer in answers))


def f1(said: str, answers: Iterable[str]) -> float:
    """The harmonic mean of precision and recall of the words, of which `exact_match` tells what counts."""
    words = _words(said)
    return max(_f1(words, _words(answer)) for answer in answers)


def _f1(said: list[str], answer: list[str]) -> float:
    same = (Counter(said) & Counter(answer)).total()
    return 2 * same / (len(said) + len(answer)) if said and answer else float(said == answer)


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


_SCORES: dict[Metric, Callable[[str, tuple[str, ...]], float]] = {
    "exact": exact_match,
    "f1": f1,
    "contains_any": contains_any,
    "only": only,
}
