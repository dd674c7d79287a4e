"""Measurement of one case with every variant, compared with full attention, over the same tokens.

full attention   answers greedily; the distributions over its own answer are the reference of this case every other way
gives its first token, then the log probabilities of that same answer, token by token (teacher forced), and those of the
accepted answer; it answers itself only where its answer may differ
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvmosaic.engine import Request
from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.eval.case import METRICS, Case, Metric
from kvmosaic.lab.eval.rows import CaseResult
from kvmosaic.lab.eval.variants import FULL, Variant
from kvmosaic.llm import LLM
from kvmosaic.prompt import Prompt, Segment, SegmentKind
from kvmosaic.repair import ChunkSignals, RepairPolicy, Signal, repair_policy
from kvmosaic.sampling import RequestOutput, SamplingParams

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


def prompt_of(llm: LLM, case: Case) -> Prompt:
    """Returns the tokenized prompt of a case, as a conversation if the model has a chat template.

    Full attention reads its segments one after the other, so both read the same tokens.

    Raises:
        InvalidConfig: a case without documents.
        InvalidPrompt: and its kinds, for example if it is longer than the model.
    """
    if not case.documents:
        raise InvalidConfig(f"case {case.id!r} has no documents, so there is nothing to compose; leave it out")
    prompt = llm.compose(_messages(case), documents=case.documents, companions=case.companions or None)
    if case.piece_tokens is None:
        return prompt
    pieces = [piece for segment in prompt.segments for piece in _cut(segment, case.piece_tokens)]
    return llm.encoder.encode(replace(prompt, segments=tuple(pieces)))


def accepted_tokens(llm: LLM, case: Case) -> tuple[int, ...]:
    """The tokens of the first accepted answer as a continuation of the prompt; none for an unlabelled case.

    A chat template may begin an answer with a space; without a template, a space separates prompt and answer.
    """
    if not case.answers:
        return ()
    answer = case.answers[0].strip()
    return llm.encoder.continuation(_lead(llm.model.tokenizer, case, answer) + answer)


def _lead(tokenizer: Any, case: Case, answer: str) -> str:
    """Returns the white space before an answer."""
    if not getattr(tokenizer, "chat_template", None):
        return " "
    messages, said = _messages(case), {"role": "assistant", "content": answer}
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    answered = tokenizer.apply_chat_template([*messages, said], tokenize=False)
    lead = answered.removeprefix(asked).partition(answer)[0] if answered.startswith(asked) else ""
    return lead if lead.isspace() else ""


def _messages(case: Case) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": case.question}]
    if case.system is not None:
        messages.insert(0, {"role": "system", "content": case.system})
    return messages


def _cut(segment: Segment, length: int) -> Iterator[Segment]:
    """Cuts a chunk into pieces of this many tokens, the last of which may be shorter; other segments stay whole."""
    ids = segment.token_ids or ()
    if segment.kind is not SegmentKind.CHUNK or len(ids) <= length:
        yield segment
        return
    starts = range(0, len(ids), length)
    for number, start in enumerate(starts, start=1):
        name = f"{segment.name} ({number}/{len(starts)})" if segment.name else None
        piece = ids[start : start + length]
        place = (number, len(starts))
        yield replace(segment, token_ids=piece, text=None, name=name, part=place, document_offset=start)


class Recalled:
    """A policy with signals that remembers its choice for one prompt.

    Answer and scores of one case then read the very same tokens, and signals are measured for the first of them only.
    """

    def __init__(self, policy: RepairPolicy) -> None:
        self._policy = policy
        self._chosen: list[Sequence[int]] | None = None

    @classmethod
    def of(cls, repair: str) -> Recalled | None:
        """Wraps a policy that measures signals; returns None for any other."""
        policy = repair_policy(repair)
        return cls(policy) if policy.signals else None

    @property
    def signals(self) -> frozenset[Signal]:
        """See `RepairPolicy.signals`."""
        return self._policy.signals if self._chosen is None else frozenset()

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        if self._chosen is None:
            self._chosen = self._policy.choose(chunks)
        return self._chosen

    def __str__(self) -> str:
        return str(self._policy)


@dataclass(frozen=True, slots=True)
class _Reference:
    """Full attention's result for one case."""

    text: str
    token_ids: tuple[int, ...]
    distributions: Tensor
    """[C, V], log probabilities before each token of its own answer."""
    greedy: tuple[int, ...]
    accepted: tuple[int, ...]
    """Tokens of the accepted answer; empty for an unlabelled case."""


def ask(
    engine_of: Callable[[Variant], LLM],
    case: Case,
    prompt: Prompt,
    ways: Iterable[Variant],
    progress: Callable[[int], None],
    *,
    is_scored: bool = True,
) -> dict[Variant, CaseResult]:
    """Returns the readings of one case, full attention's first.

    Args:
        engine_of: returns the engine of a variant.
        case: the question.
        prompt: the case, tokenized.
        ways: all variants except full attention.
        progress: called after every reading with their number.
        is_scored: whether answers of labelled cases are scored; otherwise other variants are measured and generate no
            answer.
    """
    readings: dict[Variant, CaseResult] = {}
    reference, readings[FULL] = _ask_full(engine_of(FULL), case, prompt)
    progress(1)
    for number, way in enumerate(ways, start=2):
        if way.is_turned and (case.is_ordered or len(case.documents) < 2):
            continue
        readings[way] = _ask_way(engine_of(way), way, case, prompt, reference, is_scored=is_scored)
        progress(number)
    return readings


def try_way(llm: LLM, way: Variant, prompt: Prompt) -> None:
    """Generates one token.

    Raises:
        InvalidRepair, NotMovable: the variant does not suit the model.
    """
    _answer(llm, way, prompt, 1, None)


def _ask_full(llm: LLM, case: Case, prompt: Prompt) -> tuple[_Reference, CaseResult]:
    output = _answer(llm, FULL, prompt, case.answer_tokens, None)
    said = output.outputs[0]
    accepted = accepted_tokens(llm, case)
    own, gold = _scores(llm, FULL, prompt, said.token_ids, accepted, None)
    assert own.scoring is not None and own.scoring.distributions is not None
    text = said.text.strip()
    reference = _Reference(
        text, said.token_ids, torch.as_tensor(own.scoring.distributions), tuple(own.scoring.greedy_token_ids), accepted
    )
    right = score_case(case, text)
    reading = _reading(output, case, prompt, text, right)
    return reference, replace(reading, loss=None if gold is None else gold.score().loss)


def _ask_way(
    llm: LLM, way: Variant, case: Case, prompt: Prompt, reference: _Reference, *, is_scored: bool
) -> CaseResult:
    if way.is_turned:
        prompt = prompt_of(llm, case.turned())
    recalled = Recalled.of(way.repair)
    output = _answer(llm, way, prompt, 1, recalled)
    own, gold = _scores(llm, way, prompt, reference.token_ids, reference.accepted, recalled)
    assert own.scoring is not None and own.scoring.distributions is not None
    pairs = list(zip(own.scoring.greedy_token_ids, reference.greedy, strict=True))
    agreement = sum(one == other for one, other in pairs) / len(pairs)
    text, right = "", None
    if is_scored and case.is_labelled:
        text = reference.text
        if tuple(own.scoring.greedy_token_ids) != reference.token_ids:  # otherwise it continues as full attention does
            text = _answer(llm, way, prompt, case.answer_tokens, recalled).outputs[0].text.strip()
        right = score_case(case, text)
    return replace(
        _reading(output, case, prompt, text, right),
        loss=None if gold is None else gold.score().loss,
        divergence=divergence(reference.distributions, torch.as_tensor(own.scoring.distributions)),
        agreement=agreement,
    )


def divergence(full: Tensor, other: Tensor) -> float:
    """Mean KL(full || other) in nats, of log probabilities [C, V]."""
    return max(float((full.exp() * (full - other)).sum(-1).mean()), 0.0)


def _answer(llm: LLM, way: Variant, prompt: Prompt, max_tokens: int, recalled: Recalled | None) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, repair=recalled or way.repair)
    prompt = replace(prompt, adapter=way.adapter)
    return llm.generate([prompt], params, position_strategy=way.strategy)[0]


def _scores(
    llm: LLM, way: Variant, prompt: Prompt, own: tuple[int, ...], accepted: tuple[int, ...], recalled: Recalled | None
) -> tuple[Request, Request | None]:
    """Scores full attention's answer, with distributions, and the accepted one."""
    engine, repair, prompt = llm.engine, recalled or way.repair, replace(prompt, adapter=way.adapter)
    requests = [engine.add_score(prompt, own, repair=repair, position_strategy=way.strategy, keeps_distributions=True)]
    if accepted:
        requests.append(engine.add_score(prompt, accepted, repair=repair, position_strategy=way.strategy))
    first, *others = engine.run(requests)
    return first, others[0] if others else None


def _reading(output: RequestOutput, case: Case, prompt: Prompt, text: str, right: float | None) -> CaseResult:
    used, first = output.reuse.repair, output.metrics.time_to_first_token
    assert first is not None
    return CaseResult(
        case=case.id,
        answer=text,
        score=right,
        first_seconds=first,
        computed_tokens=output.reuse.computed_tokens,
        document_tokens=sum(chunk.num_tokens for chunk in prompt.chunks),
        repaired_tokens=used.repaired_tokens if used else 0,
        work=used.work_fraction if used else 0.0,
        repair_seconds=used.milliseconds / 1e3 if used else 0.0,
    )
