"""Cases of a run: from tasks and files, interleaved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path

from kvmosaic.errors import InvalidConfig
from kvmosaic.eval.case import MAX_ID_CHARACTERS, Case
from kvmosaic.eval.distractors import USUAL_DOCUMENTS
from kvmosaic.eval.tasks import TASKS, task

USUAL_CASES = 16
"""Default number of cases per task."""
MAX_LIST_CHARACTERS = 10_000
MAX_TASKS, MAX_FILES = 64, 64


@dataclass(frozen=True, slots=True)
class OwnQuestions:
    """A folder of documents, and a file of questions about them."""

    folder: Path
    questions: Path


def own_questions(folder: Path | None, questions: Path | None) -> OwnQuestions | None:
    """The two options that belong together.

    Raises:
        InvalidConfig: one of them without the other.
    """
    if folder is None and questions is None:
        return None
    if folder is None or questions is None:
        given, missing = ("--questions", "--documents DIR") if folder is None else ("--documents", "--questions FILE")
        raise InvalidConfig(f"{given} goes with {missing}: questions are asked over the documents of a folder")
    return OwnQuestions(folder, questions)


def gather(
    tasks: Sequence[str] = tuple(TASKS),
    data: Sequence[Path] = (),
    *,
    count: int | None = None,
    seed: int = 0,
    form: str | None = None,
    documents: int = USUAL_DOCUMENTS,
    own: OwnQuestions | None = None,
) -> list[Case]:
    """Returns cases of tasks and files, interleaved, so that a run that ends early covers all of them.

    Args:
        tasks: names such as "one-hop" or "one-hop(3)".
        data: files of questions; see `kvmosaic.eval.loaders`.
        count: cases of each task and file; None: 16 of each task, and all of a file.
        seed: the same seed draws the same cases.
        form: the format of the files; None: found by their fields.
        documents: of a prompt, where nothing says which ones belong to a question.
        own: questions over a folder of documents.

    Raises:
        InvalidConfig: an unknown task, a number outside its range, or a file that cannot be read.
    """
    if len(tasks) > MAX_TASKS or len(data) > MAX_FILES:
        raise InvalidConfig(
            f"{len(tasks)} tasks and {len(data)} files are too many for one table; give at most {MAX_TASKS} tasks and "
            f"{MAX_FILES} files"
        )
    chosen = {str(each): each for each in map(task, tasks)}
    groups = [each.cases(seed, USUAL_CASES if count is None else count) for each in chosen.values()]
    if data:
        from kvmosaic.eval.loaders import load

        groups += [load(path, form, count, documents=documents, seed=seed) for path in data]
    if own is not None:
        from kvmosaic.eval.own import own_cases

        groups.append(own_cases(own.folder, own.questions, count=count, documents=documents, seed=seed))
    turns = (case for turn in zip_longest(*groups) for case in turn if case is not None)
    return list(_with_own_ids(turns))


def parts_of(name: str, text: str) -> tuple[str, ...]:
    """The parts of a list such as "none,first(8),temperature(0.9, 0.8)"; commas in brackets do not part.

    Raises:
        InvalidConfig: an empty part, or a text that is too long.
    """
    if len(text) > MAX_LIST_CHARACTERS:
        raise InvalidConfig(f"{name} has {len(text)} characters; at most {MAX_LIST_CHARACTERS} are allowed")
    cuts, depth = [-1], 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and depth <= 0:
            cuts.append(place)
    parts = tuple(text[first + 1 : last].strip() for first, last in pairwise([*cuts, len(text)]))
    if not all(parts):
        raise InvalidConfig(f"{name} is {text[:80]!r}, and a part of it is empty; write for example one,two")
    return parts


def _with_own_ids(cases: Iterable[Case]) -> Iterable[Case]:
    """Returns the cases; adds a number to ids that an earlier file has used."""
    seen = set[str]()
    for case in cases:
        name, number = case.id, 1
        while name in seen:
            number += 1
            name = f"{case.id[: MAX_ID_CHARACTERS - 12]} ({number})"
        seen.add(name)
        yield case if name == case.id else replace(case, id=name)
