"""Questions of one's own over a folder of documents, and paragraphs of SQuAD: what is read, drawn and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvmosaic.cli import app
from kvmosaic.errors import InvalidConfig, InvalidDocument
from kvmosaic.lab.eval.case import draw_documents
from kvmosaic.lab.eval.cases import Library, gather, own_cases, own_questions
from kvmosaic.lab.eval.loaders import load
from kvmosaic.prompt import Document
from kvmosaic.tuned_settings import read_profile

TEXTS = {
    "ferry": "The ferry goes to Oak Island every hour.",
    "mill": "The mill grinds oats every day.",
    "tower": "The tower has a clock.",
    "inn": "The inn has nine rooms.",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "texts"
    place.mkdir()
    for name, text in TEXTS.items():
        (place / f"{name}.txt").write_text(text)
    return place


def written(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


# Drawing


@given(
    st.integers(1, 30).flatmap(
        lambda total: st.tuples(
            st.lists(st.integers(0, total - 1), max_size=4), st.just(total), st.integers(1, 12), st.integers(0, 99)
        )
    )
)
def test_drawn_documents_are_different_ones_with_those_that_are_needed(drawn) -> None:
    needed, total, count, seed = drawn
    numbers = draw_documents(needed, total, count, seed, "a")
    assert len(numbers) == len(set(numbers)) == min(count, total)
    assert set(dict.fromkeys(needed[:count])) <= set(numbers) or len(set(needed)) > count
    assert all(0 <= number < total for number in numbers)
    assert numbers == draw_documents(needed, total, count, seed, "a")


def test_the_needed_document_stands_everywhere_as_often() -> None:
    places = [draw_documents([5], 50, 3, 0, str(number)).index(5) for number in range(600)]
    assert all(150 < places.count(place) < 250 for place in range(3))


# One's own documents


def test_lines_are_questions_and_each_has_the_document_that_it_is_about(folder: Path, tmp_path: Path) -> None:
    questions = written(tmp_path / "asked.txt", "Where does the ferry go?", "", "  What has nine rooms?  ")
    cases = own_cases(folder, questions, documents=2)
    assert [(case.id, case.question, case.task, case.answers) for case in cases] == [
        ("asked:1", "Where does the ferry go?", "asked", ()),
        ("asked:3", "What has nine rooms?", "asked", ()),
    ]
    for case, text in zip(cases, (TEXTS["ferry"], TEXTS["inn"]), strict=True):
        assert len(case.documents) == 2 and not case.is_labelled
        (place,) = case.needs
        assert case.documents[place].text == text
    assert own_cases(folder, questions, documents=2) == cases
    assert any(own_cases(folder, questions, documents=2, seed=seed) != cases for seed in range(1, 9))
    assert own_cases(folder, questions, documents=2, count=1) == cases[:1]


def test_a_question_that_shares_no_rare_word_has_drawn_documents(folder: Path, tmp_path: Path) -> None:
    (case,) = own_cases(folder, written(tmp_path / "asked.txt", "The what?"), documents=9)
    assert case.needs == () and len(case.documents) == 4


def test_answers_documents_and_ids_are_taken_where_they_are_known(folder: Path, tmp_path: Path) -> None:
    line = {"id": 7, "question": "Which clock?", "answer": ["The tower's", "tower"], "documents": ["mill", "tower"]}
    (case,) = own_cases(folder, written(tmp_path / "asked.jsonl", line))
    assert (case.id, case.answers, case.metric) == ("7", ("The tower's", "tower"), "contains_any")
    assert [document.id for document in case.documents] == ["mill.txt", "tower.txt"] and case.needs == (0, 1)


def test_a_document_is_named_with_or_without_its_ending_where_only_one_is_meant() -> None:
    library = Library([Document("text", id=name) for name in ("sub/a.md", "a.md", "x.md", "x.txt")])
    numbers = [library.number_of(name) for name in ("sub/a", "sub/a.md", "a", "x.txt", "x")]
    assert numbers == [0, 0, 1, 3, None]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"question": 5}', "question: Input should be a valid string, got 5"),
        ('{"answer": "x"}', "there is no 'question'"),
        ('{"question": "x"', "it is not JSON"),
        ('{"question": "x", "documents": ["sea"]}', "there is no document 'sea'"),
        ('{"question": "x", "documents": []}', "documents: List should have at least 1 item"),
        ('{"question": "x", "answer": []}', "answer: List should have at least 1 item"),
    ],
)
def test_a_line_that_is_no_question_is_told_with_its_number(folder: Path, tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(InvalidConfig, match="line 2: ") as raised:
        own_cases(folder, written(tmp_path / "asked.jsonl", "A question?", line))
    assert told in str(raised.value)


def test_files_and_options_that_do_not_go_together_are_told(folder: Path, tmp_path: Path) -> None:
    asked = written(tmp_path / "asked.txt", "What?")
    for missing, what in (("--questions FILE", {"folder": folder}), ("--documents DIR", {"questions": asked})):
        with pytest.raises(InvalidConfig, match=missing):
            own_questions(what.get("folder"), what.get("questions"))
    assert own_questions(None, None) is None
    with pytest.raises(InvalidConfig, match="is not a file"):
        own_cases(folder, tmp_path / "none.txt")
    with pytest.raises(InvalidConfig, match="has no questions"):
        own_cases(folder, written(tmp_path / "empty.txt", " ", ""))
    with pytest.raises(InvalidDocument, match="does not exist"):
        own_cases(tmp_path / "nowhere", asked)
    twice = written(tmp_path / "twice.jsonl", {"id": 1, "question": "a"}, {"id": "1", "question": "b"})
    with pytest.raises(InvalidConfig, match="line 2: its id '1' is that of line 1"):
        own_cases(folder, twice)


def test_a_model_is_tuned_on_unlabelled_questions(folder: Path, tmp_path: Path) -> None:
    asked = written(tmp_path / "asked.txt", "Where does the ferry go?", "What has nine rooms?")
    profile, log = tmp_path / "profile.json", tmp_path / "log.jsonl"
    arguments = ["tune", "reader", "--documents", str(folder), "--questions", str(asked), "--repair", "none,first(8)"]
    arguments += ["--strategies", "sequential", "--max-divergence", "50", "--min-agreement", "0", "--max-work", "0.9"]
    arguments += ["--profile", str(profile), "--resume", str(log), "--num-threads", "1", "--capacity", "64MiB"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    found = read_profile(profile)
    assert (found.repair, found.goal.loss, found.goal.max_divergence) == ("none", None, 50.0)
    (task,) = found.tasks
    assert (task.task, task.cases, task.accuracy) == ("asked", 2, None) and task.divergence is not None
    assert len(log.read_text().splitlines()) == 3
    assert "cheapest way that reaches a divergence of at most 50 nats" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--loss", "0.1"], "--loss needs the right answers, and no question has one"),
        (["--max-divergence", "-1"], "--max-divergence must be a number from 0 to 100"),
    ],
)
def test_goals_that_cannot_be_measured_are_told_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, options: list[str], told: str
) -> None:
    asked = written(tmp_path / "asked.txt", "Where does the ferry go?")
    arguments = ["tune", "no/such/model", "--documents", str(folder), "--questions", str(asked), *options]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert result.exit_code == 2 and told in result.output, result.output


# SQuAD

PARAGRAPHS = ["The ferry goes to Oak Island.", "The mill grinds oats.", "The tower has a clock.", "Nine rooms."]


def squad(path: Path, indent: int | None = None, **changes: object) -> Path:
    qas = [
        [{"id": f"q{number}{letter}", "question": f"What {number}{letter}?", "answers": [{"text": "x"}, {"text": "x"}]}]
        for number, letter in ((0, "a"), (1, "a"), (2, "a"), (3, "a"))
    ]
    qas[1].append({"id": "q1b", "question": "Oats?", "answers": [{"text": "oats", "answer_start": 16}]} | changes)
    paragraphs = [{"context": text, "qas": own} for text, own in zip(PARAGRAPHS, qas, strict=True)]
    articles = [{"title": "One", "paragraphs": paragraphs[:3]}, {"title": "Two", "paragraphs": paragraphs[3:]}]
    path.write_text(json.dumps({"data": articles, "version": "1.1"}, indent=indent))
    return path


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("form", [None, "squad", "xquad"])
def test_each_paragraph_of_squad_stands_among_others(tmp_path: Path, indent: int | None, form: str | None) -> None:
    path = squad(tmp_path / "xquad.en.json", indent)
    cases = load(path, form, documents=3, seed=4)
    assert sorted(case.id for case in cases) == ["q0a", "q1a", "q1b", "q2a", "q3a"]
    for case in cases:
        (place,) = case.needs
        assert len({document.text for document in case.documents}) == 3
        assert case.documents[place].text == PARAGRAPHS[int(case.id[1])]
        assert (case.task, case.metric) == ("xquad.en", "f1")
    (oats,) = (case for case in cases if case.id == "q1b")
    assert oats.answers == ("oats",) and oats.question == "Oats?"


def test_fewer_questions_of_squad_are_the_first_of_more(tmp_path: Path) -> None:
    path = squad(tmp_path / "dev.json")
    cases = load(path, documents=2, seed=1)
    assert load(path, limit=2, documents=2, seed=1) == cases[:2]
    assert {tuple(case.id for case in load(path, seed=seed)) for seed in range(6)} != {tuple(c.id for c in cases)}
    assert gather((), [path], count=2, seed=1, documents=2) == cases[:2]
    assert [len(case.documents) for case in load(path, documents=9)] == [4] * 5


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"answers": []}, "has no answer, as in SQuAD 2.0"),
        ({"question": " "}, "question: it is empty"),
        ({"id": None}, "id: Input should be a valid string, got None"),
        ({"id": "q1a"}, "its id 'q1a' is that of another question"),
    ],
)
def test_a_question_of_squad_that_cannot_be_asked_is_told(tmp_path: Path, changes: dict, told: str) -> None:
    with pytest.raises(InvalidConfig, match="read as squad") as raised:
        load(squad(tmp_path / "dev.json", **changes))
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [('{"data": [', "it is not JSON"), ('{"data": []}', "there are no questions"), ('{"data": [{}]}', "'paragraphs'")],
)
def test_a_file_that_only_begins_as_squad_is_told(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "dev.json"
    path.write_text(content)
    with pytest.raises(InvalidConfig) as raised:
        load(path)
    assert told in str(raised.value)
