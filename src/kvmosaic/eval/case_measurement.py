"""Measurement of one case with every variant, compared with full attention.

full attention   answers greedily; the distributions over its own answer are the reference of this case every other way
gives its first token, then the log probabilities of that same answer, token by token (teacher forced), and those of the
accepted answer; it answers itself only where its answer may differ
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from kvmosaic.engine import Request
from kvmosaic.eval.case import Case
from kvmosaic.eval.case_prompts import accepted_tokens
from kvmosaic.eval.remembered_repair import Recalled
from kvmosaic.eval.rows import CaseResult
from kvmosaic.eval.scores import score
from kvmosaic.eval.variants import FULL, Variant
from kvmosaic.llm import LLM
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import RequestOutput, SamplingParams


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
        text, said.token_ids, own.scoring.distributions, tuple(own.scoring.greedy_token_ids), accepted
    )
    right = score(case.metric, text, case.answers) if case.is_labelled else None
    reading = _reading(output, case, prompt, text, right)
    return reference, replace(reading, loss=None if gold is None else gold.score().loss)


def _ask_way(
    llm: LLM, way: Variant, case: Case, prompt: Prompt, reference: _Reference, *, is_scored: bool
) -> CaseResult:
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
        right = score(case.metric, text, case.answers)
    return replace(
        _reading(output, case, prompt, text, right),
        loss=None if gold is None else gold.score().loss,
        divergence=divergence(reference.distributions, own.scoring.distributions),
        agreement=agreement,
    )


def divergence(full: Tensor, other: Tensor) -> float:
    """Mean KL(full || other) in nats, of log probabilities [C, V]."""
    return max(float((full.exp() * (full - other)).sum(-1).mean()), 0.0)


def _answer(llm: LLM, way: Variant, prompt: Prompt, max_tokens: int, recalled: Recalled | None) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, repair=recalled or way.repair)
    return llm.generate([prompt], params, position_strategy=way.strategy)[0]


def _scores(
    llm: LLM, way: Variant, prompt: Prompt, own: tuple[int, ...], accepted: tuple[int, ...], recalled: Recalled | None
) -> tuple[Request, Request | None]:
    """Scores full attention's answer, with distributions, and the accepted one."""
    engine, repair = llm.engine, recalled or way.repair
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
