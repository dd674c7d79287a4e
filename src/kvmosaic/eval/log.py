"""Log of a run: every finished case as a line, on disk before the next one starts.

    {"kvmosaic_eval_log": 1, "fingerprint": …}                  the model
    {"case": id, "digest": …, "readings": [{way, reading}, …]}  a case with its readings, and so on

A killed run loses only its current case. A later run takes identical cases from the log, and runs the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from kvmosaic.errors import InvalidConfig
from kvmosaic.eval.case import Case
from kvmosaic.eval.rows import CaseResult
from kvmosaic.eval.variants import Variant
from kvmosaic.prompt import Prompt

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
