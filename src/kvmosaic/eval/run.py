"""A run: every question answered in every way, one after the other, and every answer scored."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.errors import (
    ChunkCacheFull,
    ChunkCacheOff,
    InvalidConfig,
    InvalidPrompt,
    InvalidRepair,
    NotMovable,
    RequestTooLarge,
)
from kvmosaic.eval.case import Case
from kvmosaic.eval.composing import prompt_of
from kvmosaic.eval.rows import Reading, Row
from kvmosaic.eval.scores import score
from kvmosaic.eval.ways import FULL, Way
from kvmosaic.llm import LLM
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

MAX_CASES = 1_000_000
Progress = Callable[[int, int], None]
"""Called with the number of answers so far and the number of all."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a run found."""

    rows: tuple[Row, ...]
    """By task in the order of the cases, then by way; full attention first."""
    notes: tuple[str, ...] = ()
    """What a reader has to know: what was left out, and why."""


def evaluate(
    model: LoadedModel,
    cases: Sequence[Case],
    ways: Sequence[Way],
    *,
    capacity: int | str = "1GiB",
    progress: Progress | None = None,
) -> Evaluation:
    """Answers every case in every way, greedily and alone, and scores the answers.

    Documents are computed before they are asked about, so the time to the first token is that of a prompt with known
    documents; full attention computes everything. The ways take turns case by case, and another one begins each time,
    so that a busy moment of the machine falls on all of them alike. Except for the times, the same cases give the same
    results.

    Args:
        model: the model to look at.
        cases: questions with documents. Those that do not fit into the model are left out and counted in a note.
        ways: ways to answer; full attention is always added.
        capacity: memory for chunks, and as much again for questions and answers, for each chunk context.
        progress: called after every answer.

    Raises:
        InvalidConfig: no case, none that fits, or two with the same id.
        RequestTooLarge, ChunkCacheFull: not even the shortest fits into `capacity`.
        ChunkCacheOff: the self-check of the model failed, so that prompts are not composed.
    """
    _check_ids(cases)
    run = _Run(model, dict.fromkeys([FULL, *ways]), capacity)
    try:
        return run.answer_all(cases, progress or (lambda done, of: None))
    finally:
        run.close()


def _check_ids(cases: Sequence[Case]) -> None:
    if not 1 <= len(cases) <= MAX_CASES:
        raise InvalidConfig(f"{len(cases)} cases; a run needs 1 to {MAX_CASES:,}")
    seen = set[str]()
    for case in cases:
        if case.id in seen:
            raise InvalidConfig(f"two cases have the id {case.id!r}; give each its own")
        seen.add(case.id)


class _Run:
    """One engine for each chunk context, and what they answered."""

    def __init__(self, model: LoadedModel, ways: Sequence[Way] | dict[Way, None], capacity: int | str) -> None:
        self._notes: list[str] = []
        self._engines: dict[str, LLM] = {}
        for context in dict.fromkeys(way.context for way in ways):
            try:
                self._engines[context] = _open(model, Way(context=context), capacity)
            except NotMovable as error:
                if context == FULL.context:
                    raise
                self._notes.append(f"Documents with chunk_context {context!r} are left out: {error}.")
        self._ways = [way for way in ways if way.context in self._engines]

    def close(self) -> None:
        for llm in self._engines.values():
            llm.close()

    def answer_all(self, cases: Sequence[Case], progress: Progress) -> Evaluation:
        asked = self._fitting(cases)
        self._try_ways(*min(asked, key=lambda each: each[1].num_tokens))
        found: dict[Way, dict[str, Reading]] = {way: {} for way in self._ways}
        total, too_large = len(asked) * len(self._ways), dict[str, str]()
        try:
            for number, (case, prompt) in enumerate(asked):
                turn = number % len(self._ways)
                try:
                    for llm in self._engines.values():
                        llm.chunks.warm([prompt])
                    for count, way in enumerate(self._ways[turn:] + self._ways[:turn], start=1):
                        found[way][case.id] = self._answer(way, case, prompt)
                        progress(number * len(self._ways) + count, total)
                except (RequestTooLarge, ChunkCacheFull) as error:
                    too_large[case.id] = str(error)
        except KeyboardInterrupt:
            if not all(found.values()):
                raise
            self._notes.append("Interrupted: what came later was not asked.")
        if too_large:
            self._notes.append(_left_out(len(too_large), len(cases), *next(iter(too_large.items()))))
        return Evaluation(_rows([case for case, _ in asked], found), tuple(self._notes))

    def _fitting(self, cases: Sequence[Case]) -> list[tuple[Case, Prompt]]:
        """Cases with their prompts, without those that are too long for the model."""
        llm, fitting, too_long = self._engines[FULL.context], [], dict[str, str]()
        for case in cases:
            try:
                prompt = prompt_of(llm, case)
                most = llm.engine.max_positions
                if most is not None and prompt.num_tokens + case.answer_tokens > most:
                    raise InvalidPrompt(
                        f"{prompt.num_tokens} tokens and {case.answer_tokens} of the answer are more than the "
                        f"{most} positions of the model"
                    )
                fitting.append((case, prompt))
            except InvalidPrompt as error:
                too_long[case.id] = str(error)
        if too_long:
            left_out = _left_out(len(too_long), len(cases), *next(iter(too_long.items())))
            if not fitting:
                raise InvalidConfig(left_out)
            self._notes.append(left_out)
        return fitting

    def _try_ways(self, case: Case, prompt: Prompt) -> None:
        """Asks once without counting it: the first forward of everything is slow, and a way may not suit the model."""
        apart = replace(prompt, salt="the first try of each way")
        for way in list(self._ways):
            try:
                self._answer(way, case, apart)
            except (InvalidRepair, NotMovable) as error:
                if way.is_full:
                    raise
                self._ways.remove(way)
                self._notes.append(f"Left out: {way}, since {error}.")

    def _answer(self, way: Way, case: Case, prompt: Prompt) -> Reading:
        params = SamplingParams(temperature=0, max_tokens=case.answer_tokens, repair=way.repair)
        llm = self._engines[way.context]
        output = llm.generate([prompt], params, position_strategy=way.strategy)[0]
        text, used = output.outputs[0].text.strip(), output.reuse.repair
        assert output.metrics.time_to_first_token is not None
        return Reading(
            case=case.id,
            answer=text,
            score=score(case.metric, text, case.answers),
            first_seconds=output.metrics.time_to_first_token,
            computed_tokens=output.reuse.computed_tokens,
            document_tokens=sum(chunk.num_tokens for chunk in prompt.chunks),
            repaired_tokens=used.repaired_tokens if used else 0,
            work=used.work_fraction if used else 0.0,
            repair_seconds=used.milliseconds / 1e3 if used else 0.0,
        )


def _open(model: LoadedModel, way: Way, capacity: int | str) -> LLM:
    config = ChunkCacheConfig(capacity=capacity, chunk_context=way.context, long_chunks="split")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the chunk cache is off")  # said below
        engine_config = EngineConfig(request_cache=capacity)
        llm = LLM(model, chunk_cache_config=config, engine_config=engine_config, profile=False)
    if not llm.has_chunk_cache:
        raise ChunkCacheOff(f"nothing can be compared with full attention: {llm.chunk_cache_off_reason}")
    return llm


def _left_out(count: int, of: int, case_id: str, reason: str) -> str:
    return f"{count} of {of} cases cannot be asked; the first one, {case_id!r}: {reason}"


def _rows(cases: Sequence[Case], found: dict[Way, dict[str, Reading]]) -> tuple[Row, ...]:
    """Rows of the cases that were answered in every way."""
    complete = [case for case in cases if all(case.id in readings for readings in found.values())]
    rows = []
    for task in dict.fromkeys(case.task for case in complete):
        ids = [case.id for case in complete if case.task == task]
        metric = next(case.metric for case in complete if case.task == task)
        full = sum(found[FULL][case_id].score for case_id in ids) / len(ids)
        rows += [
            Row(way, task, metric, tuple(readings[case_id] for case_id in ids), full) for way, readings in found.items()
        ]
    return tuple(rows)
