"""RULER: a long text with something hidden in it, made by RULER's own scripts with the template `base`.

question answering                        every other task
------------------                        ----------------
instruction           system              instruction           system (the first line)
Document 1: …         document            text …                one document, cut into pieces
Document 2: …         document            text …
instruction           question            question              question (the last line)
Question: …           question
"""

from __future__ import annotations

from kvmosaic.eval.case import MAX_ID_CHARACTERS, Case
from kvmosaic.eval.loaders.field import JSONField
from kvmosaic.eval.loaders.origin import RecordOrigin
from kvmosaic.eval.loaders.passages import numbered_passages, titled
from kvmosaic.prompt import Document

_PIECE_TOKENS = 512
_ANSWER_TOKENS = 128
_SHORT_ANSWER_TOKENS = 32
_SPLITS = ("validation", "test")


def read_ruler(record: JSONField, origin: RecordOrigin) -> Case:
    """A prompt of RULER as a case. What the answer is to begin with (`answer_prefix`) ends the question."""
    text = record.member("input").filled_text().strip()
    system, passages = numbered_passages(text, "Document")
    is_answering = bool(passages)
    if is_answering:
        passages[-1], question = _last_paragraphs(record, passages[-1])
        documents = tuple(Document(body, title) for title, body in map(titled, passages))
    else:
        body, question = _parted(record, *_at_last(text, "\n"))
        system, _, rest = body.partition("\n")
        system, body = (system, rest) if rest.strip() else ("", body)
        documents = (Document(body),)
    task = _task_of(origin)
    return Case(
        id=f"{task}-{origin.number}",
        task=task,
        system=system or None,
        documents=documents,
        question=question + _prefix_of(record),
        answers=record.member("outputs").texts(),
        metric="contains_any" if is_answering else "contains_all",
        answer_tokens=_SHORT_ANSWER_TOKENS if is_answering else _ANSWER_TOKENS,
        piece_tokens=None if is_answering else origin.piece_tokens or _PIECE_TOKENS,
    )


def _prefix_of(record: JSONField) -> str:
    for name in ("answer_prefix", "gen_prefix"):
        if record.has(name):
            return record.member(name).text().rstrip()
    return ""


def _task_of(origin: RecordOrigin) -> str:
    """RULER writes TASK/validation.jsonl; any other file is called by its own name."""
    path = origin.path.absolute()
    name = path.parent.name if path.stem in _SPLITS else path.stem
    name = name if name.lower().startswith("ruler") else f"ruler-{name}"
    return name[: MAX_ID_CHARACTERS // 2]


def _last_paragraphs(record: JSONField, text: str) -> tuple[str, str]:
    """Returns the last document, and the instruction and question after it."""
    before, question = _at_last(text, "\n\n")
    document, instruction = _at_last(before, "\n\n")
    return _parted(record, document, f"{instruction}\n\n{question}") if document else _parted(record, before, question)


def _at_last(text: str, border: str) -> tuple[str, str]:
    before, _, after = text.strip().rpartition(border)
    return before.strip(), after.strip()


def _parted(record: JSONField, text: str, question: str) -> tuple[str, str]:
    if not text or not question:
        raise record.member("input").wrong(
            "the question cannot be separated from the text: it must be the last line; "
            "make the file without --remove_newline_tab"
        )
    return text, question
