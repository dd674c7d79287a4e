"""Loaders of question files: HotpotQA, 2WikiMultihopQA, MuSiQue, SAMSum, RULER, LongBench, SQuAD."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmosaic.errors import InvalidConfig, KVMosaicError
from kvmosaic.eval.case import MAX_CASE_DOCUMENTS, MAX_PIECE_TOKENS, USUAL_DOCUMENTS, Case
from kvmosaic.eval.loaders.long_context import read_longbench, read_ruler, read_samsum
from kvmosaic.eval.loaders.multi_hop import read_2wikimultihopqa, read_hotpotqa, read_musique
from kvmosaic.eval.loaders.records import JSONField, Record, RecordOrigin, read_records
from kvmosaic.eval.loaders.squad import is_squad, load_squad

MAX_CASES = 100_000


@dataclass(frozen=True, slots=True)
class Format:
    """A file format of questions."""

    fields: tuple[str, ...]
    """What a record must have; a file is taken for the first format whose fields its first record has."""
    read: Callable[[JSONField, RecordOrigin], Case]


FORMATS: Final[dict[str, Format]] = {
    "musique": Format(("paragraphs", "question", "answer"), read_musique),
    "2wikimultihopqa": Format(("context", "question", "answer", "evidences"), read_2wikimultihopqa),
    "hotpotqa": Format(("context", "question", "answer"), read_hotpotqa),
    "longbench": Format(("context", "input", "answers", "dataset"), read_longbench),
    "samsum": Format(("dialogue", "summary"), read_samsum),
    "ruler": Format(("input", "outputs"), read_ruler),
}
SQUAD: Final = ("squad", "xquad")
"""Two names of the one format whose files hold paragraphs with questions, and not records."""


def load(
    path: str | Path,
    format: str | None = None,
    limit: int | None = None,
    piece_tokens: int | None = None,
    *,
    documents: int = USUAL_DOCUMENTS,
    seed: int = 0,
) -> list[Case]:
    """Reads questions from a file of JSON lines, of one JSON list, or of SQuAD.

    Args:
        path: the file.
        format: one of `FORMATS` or `SQUAD`; None: found by the fields of the first record.
        limit: the maximum number of cases, the first ones of the file (of SQuAD, drawn ones); None: all of them, if
            they are at most `MAX_CASES`.
        piece_tokens: the length of the pieces that long texts without passages are cut into; None: as each format does.
        documents: of a prompt, where the format does not say which ones belong to a question (SQuAD).
        seed: what is drawn, where something is.

    Raises:
        InvalidConfig: a file, record or field that is not as its format says, or an argument outside its bounds.
    """
    path = Path(path)
    _check_count("limit", limit, MAX_CASES)
    _check_count("piece_tokens", piece_tokens, MAX_PIECE_TOKENS)
    _check_count("documents", documents, MAX_CASE_DOCUMENTS)
    if format is not None and format not in (*FORMATS, *SQUAD):
        raise InvalidConfig(f"there is no format {format!r:.80}; there are {', '.join((*FORMATS, *SQUAD))}")
    if format in SQUAD or (format is None and is_squad(path)):
        return load_squad(path, MAX_CASES if limit is None else limit, documents, seed)
    cases: list[Case] = []
    places: dict[str, int] = {}
    with closing(read_records(path)) as records:
        for record in records:
            if len(cases) == MAX_CASES:
                raise InvalidConfig(f"{path} has more than {MAX_CASES} records; ask for its first ones with a limit")
            format = format or _found(path, record)
            case = _read(path, record, format, piece_tokens)
            if case.id in places:
                raise _wrong(path, record, f"its id {case.id!r:.80} is that of line {places[case.id]}; remove one")
            places[case.id] = record.line
            cases.append(case)
            if len(cases) == limit:
                break
    if not cases:
        raise InvalidConfig(f"{path} has no records; give a file with at least one")
    return cases


def _found(path: Path, record: Record) -> str:
    """The name of the first format that suits."""
    fields = JSONField("", record.value)
    for name, format in FORMATS.items():
        if fields.has(*format.fields):
            return name
    named = "; ".join(f"{name}: {', '.join(format.fields)}" for name, format in FORMATS.items())
    has = ", ".join(record.value)[:200] or "none"
    raise _wrong(path, record, f"its fields ({has}) are those of no format; convert it to one of them ({named})")


def _read(path: Path, record: Record, name: str, piece_tokens: int | None) -> Case:
    format = FORMATS[name]
    try:
        return format.read(JSONField("", record.value), RecordOrigin(path, record.number, piece_tokens))
    except KVMosaicError as error:
        needed = ", ".join(format.fields)
        what = f"{error} (read as {name}, which has {needed}; another format can be named)"
        raise _wrong(path, record, what) from error


def _wrong(path: Path, record: Record, what: str) -> InvalidConfig:
    return InvalidConfig(f"{path}, line {record.line}, record {record.number}: {what}")


def _check_count(name: str, value: int | None, limit: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise InvalidConfig(f"{name} must be a whole number from 1 to {limit}, or None, got {value!r:.80}")
