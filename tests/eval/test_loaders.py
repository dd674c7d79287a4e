from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.eval import loaders
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.loaders import FORMATS, load
from kvmosaic.prompt import Document

HOTPOT = {
    "_id": "5ab",
    "type": "bridge",
    "level": "medium",
    "question": "In which town was the founder of Brask Bells born?",
    "answer": "Ostermoor",
    "supporting_facts": [["Brask Bells", 1], ["Nora Brask", 0]],
    "context": [
        ["Nora Brask", ["Nora Brask was born in Ostermoor.", " She liked bells."]],
        ["Ostermoor", ["Ostermoor is a town."]],
        ["Brask Bells", ["Brask Bells makes bells.", " It was founded by Nora Brask."]],
    ],
}
WIKI = {
    "_id": "9f0",
    "type": "compositional",
    "question": "Who is the mother of the director of Grey Harbour?",
    "answer": "Ilse Tand",
    "supporting_facts": [["Grey Harbour (film)", 0], ["Jon Tand", 1]],
    "evidences": [["Grey Harbour", "director", "Jon Tand"], ["Jon Tand", "mother", "Ilse Tand"]],
    "context": [
        ["Jon Tand", ["Jon Tand is a director.", "His mother is Ilse Tand."]],
        ["Grey Harbour (film)", ["Grey Harbour was directed by Jon Tand."]],
        ["Empty", []],
    ],
}
MUSIQUE = {
    "id": "2hop__1_2",
    "paragraphs": [
        {"idx": 0, "title": "Salt", "paragraph_text": "Salt is white.", "is_supporting": False},
        {"idx": 1, "title": "Ferry", "paragraph_text": "The ferry is called Odo.", "is_supporting": True},
        {"idx": 2, "title": "Odo", "paragraph_text": "Odo was built by Mats Ree.", "is_supporting": True},
    ],
    "question": "Who built the ferry?",
    "question_decomposition": [{"id": 1, "question": "ferry >> name", "answer": "Odo", "paragraph_support_idx": 1}],
    "answer": "Mats Ree",
    "answer_aliases": ["M. Ree"],
    "answerable": True,
}
RECORDS: dict[str, dict[str, Any]] = {
    "hotpotqa": HOTPOT,
    "2wikimultihopqa": WIKI,
    "musique": MUSIQUE,
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(*values: object, name: str = "set.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        return path

    return write


def without(record: dict[str, Any], *names: str, **changed: object) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names} | changed


def test_every_format_has_a_record_here() -> None:
    assert set(RECORDS) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_found_by_the_fields_and_can_be_named(name: str, write: Callable[..., Path]) -> None:
    path = write(RECORDS[name])
    assert load(path) == load(str(path), format=name)
    assert load(path)[0].task == name


def test_hotpotqa_needs_the_paragraphs_with_supporting_facts(write: Callable[..., Path]) -> None:
    (case,) = load(write(HOTPOT))
    assert case.documents == (
        Document("Nora Brask was born in Ostermoor. She liked bells.", "Nora Brask"),
        Document("Ostermoor is a town.", "Ostermoor"),
        Document("Brask Bells makes bells. It was founded by Nora Brask.", "Brask Bells"),
    )
    assert (case.id, case.answers, case.needs, case.metric) == ("5ab", ("Ostermoor",), (0, 2), "f1")
    assert case.question == HOTPOT["question"]


def test_hotpotqa_of_the_hub_is_the_official_one(write: Callable[..., Path]) -> None:
    columns = without(
        HOTPOT,
        "_id",
        id="5ab",
        context={"title": [t for t, _ in HOTPOT["context"]], "sentences": [s for _, s in HOTPOT["context"]]},
        supporting_facts={"title": ["Brask Bells", "Nora Brask"], "sent_id": [1, 0]},
    )
    rows = without(HOTPOT, context=[{"title": title, "sentences": lines} for title, lines in HOTPOT["context"]])
    packed = without(
        HOTPOT, context=json.dumps(HOTPOT["context"]), supporting_facts=json.dumps(HOTPOT["supporting_facts"])
    )
    for record in (columns, rows, packed):
        assert load(write(record)) == load(write(HOTPOT))


def test_supporting_paragraph_that_is_not_there_makes_what_is_needed_unknown(write: Callable[..., Path]) -> None:
    for record in (without(HOTPOT, context=HOTPOT["context"][:2]), without(HOTPOT, "supporting_facts")):
        assert load(write(record))[0].needs == ()


def test_2wikimultihopqa_is_told_from_hotpotqa_by_its_evidences(write: Callable[..., Path]) -> None:
    (case,) = load(write(WIKI))
    assert (case.task, case.needs, case.answers) == ("2wikimultihopqa", (0, 1), ("Ilse Tand",))
    assert case.documents[0] == Document("Jon Tand is a director. His mother is Ilse Tand.", "Jon Tand")
    assert case.documents[2] == Document("Empty")


def test_musique_accepts_the_aliases(write: Callable[..., Path]) -> None:
    (case,) = load(write(MUSIQUE))
    assert (case.id, case.answers, case.needs) == ("2hop__1_2", ("Mats Ree", "M. Ree"), (1, 2))
    assert case.documents[1] == Document("The ferry is called Odo.", "Ferry")


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
    lambda text: text.strip() != "" and not any(ord(letter) < 32 for letter in text)
)


@given(st.lists(TEXTS, min_size=1, max_size=5), st.sampled_from([None, 2]), st.booleans())
@settings(max_examples=examples(60))
def test_lines_and_a_list_give_the_same_cases(
    tmp_path_factory: pytest.TempPathFactory, answers: list[str], indent: int | None, with_mark: bool
) -> None:
    folder = tmp_path_factory.mktemp("data")
    mark = "\ufeff" if with_mark else ""
    values = [without(HOTPOT, "_id", answer=answer) for answer in answers]
    lines = "\n".join(json.dumps(value, ensure_ascii=False) for value in values)
    (folder / "set.jsonl").write_text(mark + lines, "utf-8")
    (folder / "set.json").write_text(mark + json.dumps(values, ensure_ascii=False, indent=indent) + "\n", "utf-8")
    listed = load(folder / "set.json")
    assert listed == load(folder / "set.jsonl")
    assert [case.answers for case in listed] == [(answer,) for answer in answers]
    assert load(folder / "set.json", limit=1) == listed[:1] == load(folder / "set.jsonl", limit=1)


WRONG: list[tuple[dict[str, Any], str]] = [
    (without(HOTPOT, answer=7), r"line 1: answer: Input should be a valid string, got 7 \(read as hotpotqa"),
    (without(HOTPOT, answer=" "), "answer: it is empty; leave the record out"),
    (without(HOTPOT, question="\ud800"), "question: .*surrogate"),
    (without(HOTPOT, context=[["A", ["b"], 1]]), r"context\[0\]: Input should be a valid dictionary .*, got \[.A., "),
    (without(HOTPOT, context=[["A", "b"]]), r"context\[0\]\.sentences: Input should be a valid list, got 'b'"),
    (without(HOTPOT, context="[[[" + "[" * 99_999), "context: it is not JSON"),
    (without(HOTPOT, context={"title": ["A"], "sentences": []}), "context: it has 1 of 'title' and 0 of 'sentences'"),
    (without(HOTPOT, context={"title": ["A"]}), "context: it has 1 of 'title' and 0 of 'sentences'"),
    (without(HOTPOT, context=[[" ", []]]), "text is empty"),
    (without(MUSIQUE, answerable=False), "'answerable' is false, so no answer is right; take the files of MuSiQue-Ans"),
    (without(MUSIQUE, paragraphs=[{"title": "A"}]), r"paragraphs\[0\]: there is no 'paragraph_text'"),
    (without(MUSIQUE, paragraphs=["A"]), r"paragraphs\[0\]: Input should be a valid dictionary .*, got 'A'"),
    (without(MUSIQUE, answerable="no"), "answerable: Input should be a valid boolean, got 'no'"),
    (without(MUSIQUE, id=["a"]), r"id: Input should be a valid string, got \['a'\]"),
    (without(MUSIQUE, answer_aliases="4512"), "answer_aliases: Input should be a valid list, got '4512'"),
    (
        {"text": "a", "label": 1},
        r"line 1: its fields \(text, label\) are those of no format; convert .*musique",
    ),
    ({}, r"its fields \(none\) are those of no format"),
]


@pytest.mark.parametrize(("record", "message"), WRONG, ids=[f"{index}" for index in range(len(WRONG))])
def test_damaged_record_is_an_error_that_names_file_line_and_field(
    record: dict[str, Any], message: str, write: Callable[..., Path]
) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        load(write(record))
    assert "set.jsonl" in str(caught.value)
    assert len(str(caught.value)) < 700


def test_record_of_another_format_than_the_first_is_an_error(write: Callable[..., Path]) -> None:
    path = write(MUSIQUE, HOTPOT)
    with pytest.raises(InvalidConfig, match=r"line 2: there is no 'paragraphs' .read as musique, which has paragr"):
        load(path)
    assert len(load(path, limit=1)) == 1
    with pytest.raises(InvalidConfig, match=r"there is no 'context' .read as hotpotqa"):
        load(path, format="hotpotqa")


def test_id_given_twice_is_an_error(write: Callable[..., Path]) -> None:
    with pytest.raises(InvalidConfig, match="line 2: its id '5ab' is that of line 1; remove one"):
        load(write(HOTPOT, HOTPOT))


GOOD = json.dumps(without(HOTPOT, "_id"))
DAMAGED: list[tuple[bytes, str]] = [
    (f"{GOOD}\n{GOOD[:-2]}\n".encode(), r"line 2: it is not JSON \(.*repair it, or load it again if it was cut off"),
    (f"{GOOD}\n\n17\n".encode(), "line 3: it must be an object, got 17"),
    (f"[{GOOD},\n{GOOD[:-2]}".encode(), r"it is not JSON \(.* line 2 .*load it again if it was cut off"),
    (f"[{GOOD}],".encode(), "it is not JSON .Extra data"),
    (f"[{GOOD},\n\n[1]]".encode(), r"record 2: it must be an object, got \[1\]"),
    (f"{GOOD}\n".encode() + b"\x1f\x8b\xff", "is not text in UTF-8 .*unpack it if it is compr"),
    (b'{"a":' + b"[" * 100_000, "line 1: it is not JSON"),
    (b'[{"a":' + b"[" * 100_000, "it is not JSON"),
    (b'{"a": ' + b"1" * 5_000 + b"}", "line 1: it is not JSON"),
    (b" \n\n", "has no records; give a file with at least one"),
    (b"[]", "has no records"),
]


@pytest.mark.parametrize(("data", "message"), DAMAGED, ids=[f"{index}" for index in range(len(DAMAGED))])
def test_damaged_file_is_an_error_that_names_the_line(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "set.json"
    path.write_bytes(data)
    with pytest.raises(InvalidConfig, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InvalidConfig, match="is not a file; give the path of a file of lines or of JSON"):
            load(path)


def test_bounds_of_files_and_records(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(*(without(HOTPOT, "_id", id=number) for number in range(3)))
    monkeypatch.setattr(loaders, "MAX_CASES", 2)
    assert len(load(path, limit=2)) == 2
    with pytest.raises(InvalidConfig, match="more than 2 records; ask for its first ones with a limit"):
        load(path)
    monkeypatch.setattr(loaders, "MAX_FILE_BYTES", 60)
    with pytest.raises(InvalidConfig, match="bytes; at most 60 are read: split it"):
        load(path)


@pytest.mark.parametrize("name", ["limit", "documents"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, 10**9])
def test_numbers_have_bounds(name: str, value: Any, write: Callable[..., Path]) -> None:
    with pytest.raises(InvalidConfig, match=f"{name} must be a whole number from 1 to"):
        load(write(HOTPOT), **{name: value})


def test_unknown_format_is_an_error_that_names_all(write: Callable[..., Path]) -> None:
    with pytest.raises(InvalidConfig, match="no format 'triviaqa'; there are musique, 2wikimultihopqa, hotpotqa"):
        load(write(HOTPOT), format="triviaqa")


def test_every_case_of_a_file_is_a_case(write: Callable[..., Path]) -> None:
    for record in RECORDS.values():
        assert all(isinstance(case, Case) and case.documents for case in load(write(record)))
