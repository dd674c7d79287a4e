"""Evaluation run: every question with every variant, and the measurements of every answer.

Its log has every finished case as a line, on disk before the next one starts:

    {"kvmosaic_eval_log": 1, "fingerprint": …}                  the model
    {"case": id, "digest": …, "readings": [{way, reading}, …]}  a case with its readings, and so on

A killed run loses only its current case. A later run takes identical cases from the log, and runs the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from kvmosaic.assembly import AnyModel
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
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.case_measurement import ask, prompt_of, try_way
from kvmosaic.lab.eval.rows import CaseResult, TaskRow, rows_of
from kvmosaic.lab.eval.variants import FULL, Variant
from kvmosaic.llm import LLM
from kvmosaic.prompt import Prompt
from kvmosaic.repair import FirstTokens, repair_policy

MAX_CASES = 1_000_000
Progress = Callable[[int, int], None]
"""Called with the number of answers so far and the number of all."""
News = Callable[[Sequence[TaskRow]], None]
"""Called with the rows of all results so far."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of a run."""

    rows: tuple[TaskRow, ...]
    """By task in the order of the cases, then by variant; full attention first."""
    notes: tuple[str, ...] = ()
    """Remarks for the reader: what was left out, and why."""
    is_interrupted: bool = False
    """Whether some questions were not run."""


def evaluate(
    model: AnyModel,
    cases: Sequence[Case],
    ways: Sequence[Variant],
    *,
    capacity: int | str = "1GiB",
    progress: Progress | None = None,
    news: News | None = None,
    log: Path | None = None,
    is_scored: bool = True,
) -> Evaluation:
    """Runs every case with every variant, greedily and alone, and measures the answers.

    Documents are prefilled before the question, so the TTFT is that of cached documents; full attention computes
    everything. Full attention runs a case first; the other variants follow in rotating order, so that a busy moment of
    the machine affects all of them alike. Except for the times, the same cases give the same results. An interrupt ends
    the run with the results so far.

    Args:
        model: the model to evaluate.
        cases: questions with documents. Cases that do not fit into the model are left out and counted in a note.
        ways: variants to compare; full attention is always added.
        capacity: memory for chunks, and as much again for questions and answers, for each chunk context.
        progress: called after every answer.
        news: called after every finished case.
        log: a file to which every finished case is written at once; cases that it has already are not asked again.
        is_scored: whether answers are compared with the accepted ones. If not, only full attention answers, which saves
            most of the time; loss, divergence and agreement are measured all the same.

    Raises:
        InvalidConfig: no case, none that fits, two with the same id, or a log that cannot be used.
        RequestTooLarge, ChunkCacheFull: not even the shortest fits into `capacity`.
        ChunkCacheOff: the self-check of the model failed, so that prompts are not composed.
    """
    _check_ids(cases)
    opened = None if log is None else RunLog(log, model.fingerprint)
    try:
        run = _Run(model, dict.fromkeys([FULL, *ways]), capacity, opened, is_scored)
        try:
            return run.answer_all(cases, progress or (lambda done, of: None), news or (lambda rows: None))
        finally:
            run.close()
    finally:
        if opened is not None:
            opened.close()


def _check_ids(cases: Sequence[Case]) -> None:
    if not 1 <= len(cases) <= MAX_CASES:
        raise InvalidConfig(f"{len(cases)} cases; a run needs 1 to {MAX_CASES:,}")
    seen = set[str]()
    for case in cases:
        if case.id in seen:
            raise InvalidConfig(f"two cases have the id {case.id!r}; give each its own")
        seen.add(case.id)


class _Run:
    """One engine per chunk context, and their answers."""

    def __init__(
        self, model: AnyModel, ways: Mapping[Variant, None], capacity: int | str, log: RunLog | None, is_scored: bool
    ) -> None:
        self._log = log
        self._is_scored = is_scored
        self._notes: list[str] = []
        self._engines: dict[str, LLM] = {}
        for context in dict.fromkeys(way.context for way in ways):
            try:
                self._engines[context] = _open(model, [way for way in ways if way.context == context], capacity)
            except NotMovable as error:
                if context == FULL.context:
                    raise
                self._notes.append(f"Documents with chunk_context {context!r} are left out: {error}.")
        self._ways = [way for way in ways if way.context in self._engines]

    def close(self) -> None:
        for llm in self._engines.values():
            llm.close()

    def answer_all(self, cases: Sequence[Case], progress: Progress, news: News) -> Evaluation:
        asked = self._fitting(cases)
        self._try_ways(min((prompt for _, prompt in asked), key=lambda prompt: prompt.num_tokens))
        found, total, too_large = dict[str, Readings](), len(asked) * len(self._ways), dict[str, str]()
        known = [case for case, _ in asked]
        is_interrupted = False
        try:
            progress(0, total)
            for number, (case, prompt) in enumerate(asked):
                count = partial(_count, progress, number * len(self._ways), total)
                try:
                    found[case.id] = self._readings(case, prompt, number, count)
                except (RequestTooLarge, ChunkCacheFull) as error:
                    too_large[case.id] = str(error)
                else:
                    news(rows_of(known, found))
        except KeyboardInterrupt:
            if not found:
                raise
            is_interrupted = True
            self._notes.append("Interrupted: what came later was not asked.")
        if too_large:
            self._notes.append(_left_out(len(too_large), len(cases), *next(iter(too_large.items()))))
        return Evaluation(rows_of(known, found), tuple(self._notes), is_interrupted)

    def _readings(self, case: Case, prompt: Prompt, number: int, progress: Callable[[int], None]) -> Readings:
        """Returns the readings of one case, from this run or an earlier one."""
        digest = digest_of(case, prompt, is_scored=self._is_scored)
        if self._log is not None and (known := self._log.find(digest, self._ways)) is not None:
            progress(len(self._ways))
            return {way: replace(reading, case=case.id) for way, reading in known.items()}
        for context, llm in self._engines.items():
            adapters = dict.fromkeys(way.adapter for way in self._ways if way.context == context)
            llm.chunks.warm([replace(prompt, adapter=adapter) for adapter in adapters])
        others = [way for way in self._ways if not way.is_full]
        turn = number % max(len(others), 1)
        found = ask(
            lambda way: self._engines[way.context],
            case,
            prompt,
            others[turn:] + others[:turn],
            progress,
            is_scored=self._is_scored,
        )
        readings = {way: found[way] for way in self._ways if way in found}
        if self._log is not None:
            self._log.add(digest, readings)
        return readings

    def _fitting(self, cases: Sequence[Case]) -> list[tuple[Case, Prompt]]:
        """Returns cases with their prompts, without the cases that are too long for the model."""
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

    def _try_ways(self, prompt: Prompt) -> None:
        """Runs each variant once uncounted: the first forward is slow, and a variant may not suit the model."""
        apart = replace(prompt, salt="the first try of each way")
        for way in list(self._ways):
            try:
                try_way(self._engines[way.context], way, apart)
            except (InvalidRepair, NotMovable) as error:
                if way.is_full:
                    raise
                self._ways.remove(way)
                self._notes.append(f"Left out: {way}, since {error}.")


def _open(model: AnyModel, ways: Sequence[Variant], capacity: int | str) -> LLM:
    """An engine for ways of one context; with states, it keeps them for the last first(k) among these."""
    config = ChunkCacheConfig(
        chunk_cache_size=capacity, chunk_context=ways[0].context, long_chunks="split", oversized_prompts="error"
    )
    first = [way.repair for way in ways if isinstance(repair_policy(way.repair), FirstTokens)]
    if first and model.map_bytes:
        config = replace(config, repair=first[-1])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the chunk cache is off")  # reported below
        engine_config = EngineConfig(request_cache_size=capacity)
        llm = LLM(model, chunk_cache_config=config, engine_config=engine_config, profile=False)
    if not llm.has_chunk_cache:
        raise ChunkCacheOff(f"nothing can be compared with full attention: {llm.chunk_cache_off_reason}")
    return llm


def _count(progress: Progress, before: int, total: int, done: int) -> None:
    """Reports the number of answers after `done` more."""
    progress(before + done, total)


def _left_out(count: int, of: int, case_id: str, reason: str) -> str:
    return f"{count} of {of} cases cannot be asked; the first one, {case_id!r}: {reason}"


FORMAT = 1
_FORMAT_FIELD = "kvmosaic_eval_log"
MAX_LOG_BYTES = 2**32
Readings = dict[Variant, CaseResult]


class RunLog:
    """A file of finished cases that grows line by line. Close it in the end."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        """Opens the log of a model; a file that is there is read, and what a killed run left half is cut off.

        Raises:
            InvalidConfig: the file is no log, belongs to another model, or cannot be read and written.
        """
        self.path = path
        self._known: dict[str, Readings] = {}
        try:
            if path.exists() and path.stat().st_size:
                whole = self._read(fingerprint)
                self._file: IO[bytes] = path.open("r+b")
                self._file.truncate(whole)
                self._file.seek(whole)
            else:
                self._file = path.open("wb")
                self._append({_FORMAT_FIELD: FORMAT, "fingerprint": fingerprint})
        except OSError as error:
            raise InvalidConfig(f"the log {path} cannot be written: {error.strerror or error}; name another") from None

    def __len__(self) -> int:
        return len(self._known)

    def close(self) -> None:
        """Closes the file; closing it again is safe."""
        self._file.close()

    def find(self, digest: str, ways: Iterable[Variant]) -> Readings | None:
        """Returns the readings of a case, if it has all of these variants; not every case has another order."""
        known = self._known.get(digest, {})
        has_all = all(way in known for way in ways if not way.is_turned)
        return {way: known[way] for way in ways if way in known} if has_all else None

    def add(self, digest: str, readings: Readings) -> None:
        """Writes a finished case, synced to disk on return."""
        case = next(iter(readings.values())).case
        self._append({"case": case, "digest": digest, "readings": [_written(*each) for each in readings.items()]})
        self._known[digest] = readings

    def _append(self, content: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(content, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, fingerprint: str) -> int:
        """Reads the whole lines; returns where the last of them ends."""
        if self.path.stat().st_size > MAX_LOG_BYTES:
            raise InvalidConfig(f"the log {self.path} has more than {MAX_LOG_BYTES} bytes; begin another")
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # the run that wrote it was killed
                try:
                    self._take(json.loads(line), number, fingerprint)
                except InvalidConfig:
                    raise
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise InvalidConfig(f"{self.path}, line {number}: this is no log of a run; name another") from None
                whole += len(line)
        if not whole:
            raise InvalidConfig(f"{self.path} is no log of a run; name another")
        return whole

    def _take(self, content: dict[str, Any], number: int, fingerprint: str) -> None:
        if number > 1:
            self._known[content["digest"]] = dict(_read_back(each) for each in content["readings"])
            return
        if content[_FORMAT_FIELD] != FORMAT:
            raise InvalidConfig(f"the log {self.path} is of format {content[_FORMAT_FIELD]!r:.20}; begin another")
        if content["fingerprint"] != fingerprint:
            raise InvalidConfig(
                f"the log {self.path} is of another model or dtype ({content['fingerprint']:.12}; this "
                f"one is {fingerprint:.12}); begin another"
            )


def digest_of(case: Case, prompt: Prompt, *, is_scored: bool) -> str:
    """Returns a digest of the case: all prompt tokens, its companions', and the scoring."""
    segments = [(str(segment.kind), segment.token_ids) for segment in prompt.segments]
    answers = (case.answers, case.others) if case.others else case.answers
    content = (segments, prompt.companions, case.task, answers, case.metric, case.answer_tokens, is_scored)
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _written(way: Variant, reading: CaseResult) -> dict[str, Any]:
    return {**asdict(way), "reading": reading.to_dict()}


def _read_back(content: dict[str, Any]) -> tuple[Variant, CaseResult]:
    reading = CaseResult.from_dict(content.pop("reading"))
    return Variant(**content), reading
