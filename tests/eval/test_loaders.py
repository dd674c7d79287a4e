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
from kvmosaic.eval.case import Case
from kvmosaic.eval.loaders import FORMATS, load, records
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
SAMSUM = {"id": "13", "dialogue": "Ada: Tea?\r\nBo: At five.", "summary": "Ada and Bo will have tea at five."}
RULER_QUESTION = {
    "index": 0,
    "input": "Answer here.\n\nThey are:\n\nDocument 1:\nOdo\nOdo is no Document 2: it floats.\nDocument 7: no.\n\n"
    "Document 2:\nSalt is white.\n\nIn short:\n\nWhite.\n\nAnswer here.\n\nQuestion: What is Odo?",
    "outputs": ["a ferry", "ferry"],
    "length": 90,
    "answer_prefix": " Answer:",
}
RULER_NEEDLE = {
    "index": 4512,
    "input": "Special numbers are hidden here.\nThe sky is blue.\nOne number for fox is: 4512.\nThe sky is blue.\n"
    "What are all the numbers for fox?",
    "outputs": ["4512"],
    "length": 40,
}
LONGBENCH = {
    "input": "What is Odo?",
    "context": "Passage 1:\nOdo\nOdo is a ferry.\n\n\nPassage 2:\nSalt\nSalt is white.\n\nPassage 3:\n",
    "answers": ["a ferry", "a boat"],
    "length": 12,
    "dataset": "2wikimqa",
    "language": "en",
    "all_classes": None,
    "_id": "a1",
}
RECORDS: dict[str, dict[str, Any]] = {
    "hotpotqa": HOTPOT,
    "2wikimultihopqa": WIKI,
    "musique": MUSIQUE,
    "samsum": SAMSUM,
    "ruler": RULER_NEEDLE,
    "longbench": LONGBENCH,
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
    assert load(path)[0].task.startswith(name.replace("ruler", "ruler-set").replace("longbench", "longbench-2wikimqa"))


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


def test_samsum_is_cut_into_pieces_and_scored_by_rouge(write: Callable[..., Path]) -> None:
    (case,) = load(write(SAMSUM))
    assert case.documents == (Document("Ada: Tea?\nBo: At five."),)
    assert (case.answers, case.metric, case.piece_tokens) == ((SAMSUM["summary"],), "rouge_l", 64)
    assert load(write(SAMSUM), piece_tokens=10)[0].piece_tokens == 10


def test_documents_of_ruler_are_told_by_their_numbers(write: Callable[..., Path]) -> None:
    (case,) = load(write(RULER_QUESTION, name="qa_1/validation.jsonl"))
    assert case.documents == (
        Document("Odo is no Document 2: it floats.\nDocument 7: no.", "Odo"),
        Document("Salt is white.\n\nIn short:\n\nWhite."),
    )
    assert case.system == "Answer here.\n\nThey are:"
    assert case.question == "Answer here.\n\nQuestion: What is Odo? Answer:"
    assert (case.task, case.id, case.metric) == ("ruler-qa_1", "ruler-qa_1-1", "contains_any")
    assert case.piece_tokens is None


def test_ruler_without_documents_is_one_text_in_pieces(write: Callable[..., Path]) -> None:
    first, second = load(write(RULER_NEEDLE, RULER_NEEDLE), piece_tokens=33)
    assert first.system == "Special numbers are hidden here."
    assert first.documents == (Document("The sky is blue.\nOne number for fox is: 4512.\nThe sky is blue."),)
    assert first.question == "What are all the numbers for fox?"
    assert (first.metric, first.piece_tokens) == ("contains_all", 33)
    assert (first.id, second.id) == ("ruler-set-1", "ruler-set-2")


def test_ruler_with_one_line_before_the_question_has_no_system_text(write: Callable[..., Path]) -> None:
    (case,) = load(write({"input": "Count the words. ab cd ab\nQuestion: Which is most frequent?", "outputs": ["ab"]}))
    assert (case.system, case.documents) == (None, (Document("Count the words. ab cd ab"),))


def test_passages_of_longbench_are_documents_with_titles(write: Callable[..., Path]) -> None:
    (case,) = load(write(LONGBENCH))
    assert case.documents == (Document("Odo is a ferry.", "Odo"), Document("Salt is white.", "Salt"))
    assert (case.answers, case.metric, case.question) == (("a ferry", "a boat"), "f1", "What is Odo?")
    assert case.piece_tokens is None


def test_other_sets_of_longbench_are_cut_as_they_are_written(write: Callable[..., Path]) -> None:
    news = without(LONGBENCH, dataset="multi_news_e", input="", context="Passage 1:\nA\nfox.\nPassage 2:\nB")
    examples = "Dialogue: A: Hi\nB: Ho\nSummary: Both greet.\nDialogue: C: Bye\nSummary: C leaves."
    report = without(LONGBENCH, dataset="gov_report", input="", context="Passage 1:\nA report.")
    few = without(LONGBENCH, dataset="samsum", input="Dialogue: D: Tea?\nSummary: ", context=examples)
    assert load(write(news))[0].documents == (Document("A\nfox."), Document("B"))
    assert load(write(few))[0].documents == (
        Document("Dialogue: A: Hi\nB: Ho\nSummary: Both greet."),
        Document("Dialogue: C: Bye\nSummary: C leaves."),
    )
    (case,) = load(write(report))
    assert (case.documents, case.piece_tokens) == ((Document("Passage 1:\nA report."),), 512)
    assert "summary" in case.question
    assert case.metric == "rouge_l"


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
    lambda text: text.strip() != "" and not any(ord(letter) < 32 for letter in text)
)
DIALOGUES = st.builds(lambda dialogue, summary: {"dialogue": dialogue, "summary": summary}, TEXTS, TEXTS)


@given(
    st.lists(DIALOGUES, min_size=1, max_size=5),
    st.sampled_from([None, 2]),
    st.booleans(),
    st.sampled_from([1, 7, 4096]),
)
@settings(max_examples=examples(60))
def test_lines_and_a_list_give_the_same_cases(
    tmp_path_factory: pytest.TempPathFactory,
    values: list[dict[str, str]],
    indent: int | None,
    with_mark: bool,
    block: int,
) -> None:
    folder = tmp_path_factory.mktemp("data")
    mark = "\ufeff" if with_mark else ""
    lines = "\n".join(json.dumps(value, ensure_ascii=False) for value in values)
    (folder / "set.jsonl").write_text(mark + lines, "utf-8")
    (folder / "set.json").write_text(mark + json.dumps(values, ensure_ascii=False, indent=indent) + "\n", "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_BLOCK_BYTES", block)
        listed = load(folder / "set.json")
    assert listed == load(folder / "set.jsonl")
    assert [case.answers for case in listed] == [(value["summary"],) for value in values]
    assert load(folder / "set.json", limit=1) == listed[:1] == load(folder / "set.jsonl", limit=1)


@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=12), TEXTS)
@settings(max_examples=examples(60))
def test_ruler_gives_back_the_documents_that_its_prompt_was_made_of(
    tmp_path_factory: pytest.TempPathFactory, head: str, texts: list[str], question: str
) -> None:
    path = tmp_path_factory.mktemp("ruler") / "ruler_qa.jsonl"
    context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(texts, start=1))
    prompt = f"{head}\n\n{context}\n\nNow answer.\n\nQuestion: {question}"
    path.write_text(json.dumps({"input": prompt, "outputs": ["a"]}))
    (case,) = load(path)
    assert case.documents == tuple(map(Document, texts))
    assert (case.system, case.question) == (head.strip(), f"Now answer.\n\nQuestion: {question}".strip())
    assert case.task == "ruler_qa"


WRONG: list[tuple[dict[str, Any], str]] = [
    (without(HOTPOT, answer=7), r"line 1, record 1: answer: it must be a text, got 7 \(read as hotpotqa"),
    (without(HOTPOT, answer=" "), "answer: it is empty; leave the record out"),
    (without(HOTPOT, question="\ud800"), "question: .*surrogate"),
    (without(HOTPOT, context=[["A", ["b"], 1]]), r"context\[0\]: it must have 2 items, got 3"),
    (without(HOTPOT, context=[["A", "b"]]), r"context\[0\]\[1\]: it must be a list, got 'b'"),
    (without(HOTPOT, context="[[[" + "[" * 99_999), "context: it is a text that is not JSON"),
    (without(HOTPOT, context={"title": ["A"], "sentences": []}), "context: it has 1 of 'title' and 0 of 'sentences'"),
    (without(HOTPOT, context={"title": ["A"]}), "context: there is no 'sentences'"),
    (without(HOTPOT, context=[[" ", []]]), r"context\[0\]\[0\]: it is empty"),
    (without(MUSIQUE, answerable=False), "'answerable' is false, so no answer is right; take the files of MuSiQue-Ans"),
    (without(MUSIQUE, paragraphs=[{"title": "A"}]), r"paragraphs\[0\]: there is no 'paragraph_text'"),
    (without(MUSIQUE, paragraphs=["A"]), r"paragraphs\[0\]: it must be an object, got 'A'"),
    (without(MUSIQUE, answerable="no"), "answerable: it must be true or false, got 'no'"),
    (without(SAMSUM, dialogue=" \r\n"), "dialogue: it is empty"),
    (without(SAMSUM, id=["a"]), r"id: it must be a text, got \['a'\]"),
    (without(RULER_NEEDLE, outputs=[]), "outputs: it is empty"),
    (without(RULER_NEEDLE, outputs="4512"), "outputs: it must be a list, got '4512'"),
    (
        without(RULER_NEEDLE, input="A text? All on one line."),
        "input: the question cannot be separated .*remove_newline_tab",
    ),
    (without(RULER_QUESTION, input="Document 1:\nOdo is a ferry."), "input: the question cannot be separated from"),
    (without(LONGBENCH, dataset="trec"), "dataset: 'trec' is scored in a way that is not offered here; there are hotp"),
    (without(LONGBENCH, input=" "), "'input' is empty"),
    (
        {"text": "a", "label": 1},
        r"line 1, record 1: its fields \(text, label\) are those of no format; convert .*musique",
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
    path = write(SAMSUM, RULER_NEEDLE)
    with pytest.raises(
        InvalidConfig, match=r"line 2, record 2: there is no 'dialogue' .read as samsum, which has dialog"
    ):
        load(path)
    assert len(load(path, limit=1)) == 1
    with pytest.raises(InvalidConfig, match=r"there is no 'paragraphs' .read as musique"):
        load(path, format="musique")


def test_id_given_twice_is_an_error(write: Callable[..., Path]) -> None:
    with pytest.raises(InvalidConfig, match="line 2, record 2: its id '13' is that of line 1; remove one"):
        load(write(SAMSUM, SAMSUM))


GOOD = json.dumps({"dialogue": "a", "summary": "b"})
DAMAGED: list[tuple[bytes, str]] = [
    (f"{GOOD}\n{GOOD[:-2]}\n".encode(), r"line 2: it is not JSON \(.*, column \d+\); repair the line, or remove it"),
    (f"{GOOD}\n\n17\n".encode(), "line 3: a record must be an object, got 17"),
    (f"[{GOOD},\n{GOOD[:-2]}".encode(), "line 2: the record is not JSON .*load the file again if it was cut off"),
    (f"[\n{GOOD}\n".encode(), "line 3: the list should go on with ']'; the file ends: it was cut off"),
    (f"[{GOOD} {GOOD}]".encode(), "the list should go on with ']'; got '{'"),
    (f"[{GOOD}],".encode(), "there is something after the end of the list"),
    (f"[{GOOD},]".encode(), "line 1: the record is not JSON"),
    (f"[{GOOD},\n\n[1]]".encode(), r"line 3: a record must be an object, got \[1\]"),
    (f"{GOOD}\n".encode() + b"\x1f\x8b\xff", "line 2: from here on it is not text in UTF-8 .*unpack it if it is compr"),
    (f"[{GOOD},\n".encode() + b"\xff\xfe]", "it is not text in UTF-8"),
    (b'{"a":' + b"[" * 100_000, "line 1: it is not JSON .lists and objects are nested too deep"),
    (b'[{"a":' + b"[" * 100_000, "line 1: the record is not JSON .lists and objects are nested too deep"),
    (b'{"a": ' + b"1" * 5_000 + b"}", "line 1: it is not JSON .a number is too long"),
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
        with pytest.raises(InvalidConfig, match=r"is not a file; give the path of a .*jsonl"):
            load(path)


def test_bounds_of_files_lines_and_records(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmosaic.eval import loaders

    path = write(*(without(SAMSUM, id=number) for number in range(3)))
    listed = path.with_suffix(".json")
    listed.write_text(json.dumps([SAMSUM, SAMSUM])[:-30])
    monkeypatch.setattr(loaders, "MAX_CASES", 2)
    assert len(load(path, limit=2)) == 2
    with pytest.raises(InvalidConfig, match="more than 2 records; ask for its first ones with a limit"):
        load(path)
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 50)
    monkeypatch.setattr(records, "_BLOCK_BYTES", 64)
    with pytest.raises(InvalidConfig, match="line 1: the line is longer than 50 bytes"):
        load(path)
    with pytest.raises(InvalidConfig, match="or longer than 50 characters"):
        load(listed)
    monkeypatch.setattr(records, "MAX_FILE_BYTES", 60)
    with pytest.raises(InvalidConfig, match="bytes; at most 60 are read: split it"):
        load(path)


@pytest.mark.parametrize("name", ["limit", "piece_tokens"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, 10**9])
def test_numbers_have_bounds(name: str, value: Any, write: Callable[..., Path]) -> None:
    with pytest.raises(InvalidConfig, match=f"{name} must be a whole number from 1 to"):
        load(write(SAMSUM), **{name: value})


def test_unknown_format_is_an_error_that_names_all(write: Callable[..., Path]) -> None:
    with pytest.raises(InvalidConfig, match="no format 'triviaqa'; there are musique, 2wikimultihopqa, hotpotqa"):
        load(write(SAMSUM), format="triviaqa")


def test_every_case_of_a_file_is_a_case(write: Callable[..., Path]) -> None:
    for record in RECORDS.values():
        assert all(isinstance(case, Case) and case.documents for case in load(write(record)))
