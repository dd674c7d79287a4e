"""Tasks: cases drawn from a seed, whose answers stand where they should."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvmosaic.assembly import bundled_reader
from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.case_measurement import score_case
from kvmosaic.lab.eval.tasks import TASKS, Long, Needle, OneHop, Order, Story, TwoHop, task
from kvmosaic.lab.eval.text.documents import Recipe, TextSource
from kvmosaic.prompt.companions import alike_companions, like_one_before

NAMES = tuple(TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_draws_the_same_cases_and_more_of_them_begin_alike(name: str) -> None:
    assert task(name).cases(7, 5) == task(name).cases(7, 9)[:5]
    assert task(name).cases(7, 5) != task(name).cases(8, 5)


def test_names_are_held_out() -> None:
    example = TextSource(7, "held_out").example(Recipe(documents=(3, 3), sentences=(2, 4), questions=1))
    assert [document.text for document in OneHop(3).cases(7, 1)[0].documents] == [
        document.text for document in example.documents
    ]


@pytest.mark.parametrize("name", NAMES)
def test_cases_have_ids_of_their_own_and_the_name_of_their_task(name: str) -> None:
    cases = task(name).cases(0, 20)
    assert len({case.id for case in cases}) == 20
    assert {case.task for case in cases} == {name}
    assert len({case.documents for case in cases}) == 20


@pytest.mark.parametrize("name", NAMES)
def test_answer_stands_in_a_document_that_is_needed(name: str) -> None:
    for case in task(name).cases(1, 60):
        needed = "\n".join(case.documents[number].plain_text for number in case.needs)
        assert case.answers[0].lower() in needed.lower()


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("similar")])
def test_prompts_are_as_short_as_the_readers_know_them(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_reader(), local_files_only=True)
    for case in task(name).cases(2, 60):
        lengths = [len(tokenizer(document.plain_text).input_ids) for document in case.documents]
        assert sum(lengths) <= 440
        if case.piece_tokens is None:
            assert max(lengths) <= 85


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("similar")])
def test_records_are_alike_and_only_one_has_the_answer(name: str) -> None:
    for case in task(f"{name}(12)").cases(0, 100):
        texts, said = [document.plain_text for document in case.documents], ", ".join(case.answers)
        for number, answer in zip(case.needs, case.answers, strict=True):
            assert answer in texts[number]
        values = {value.casefold() for value in (*case.answers, *case.others)}
        assert len(values) == 12, "every record has a value of its own"
        assert not any(one in other for one in values for other in values - {one})
        assert score_case(case, said) == score_case(case, f"{case.question} {said}.") == 1
        assert score_case(case, f"{said}, or {case.others[0]}") == 0, "another record's value is wrong"
        assert score_case(case, ", ".join(case.answers[::-1])) == (len(case.answers) == 1), "and so is the other name"
        assert score_case(case, f"{said}7") == 0 or ord(said[-1]) > 0x2E80, "a part of a longer word is another one"
        assert len(case.companions) == (0 if name == "similar-among" else 3) and not set(case.companions) & set(texts)
        assert len(case.needs) == len(case.answers) and "{" not in "".join((case.question, *texts))


def test_records_are_short_or_long() -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_reader(), local_files_only=True)
    for name, low, high in (("similar", 25, 160), ("similar-long", 100, 360)):
        for case in task(name).cases(0, 30):
            assert all(low <= len(tokenizer(each.plain_text).input_ids) <= high for each in case.documents)


def test_records_are_seen_to_be_alike_and_the_bundled_documents_are_not() -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_reader(), local_files_only=True)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False).input_ids)

    for name in (name for name in NAMES if name.startswith("similar")):
        for case in task(name).cases(0, 5):
            documents = [ids(document.text) for document in case.documents]
            assert like_one_before(documents)
            assert len(list(alike_companions(documents, map(ids, case.companions)))) == len(case.companions)
    texts = [path.read_text() for path in sorted((bundled_reader().parent / "documents").glob("*.txt"))]
    documents = [ids(text) for text in texts]
    assert not like_one_before(documents) and not list(alike_companions(documents[:3], documents[3:]))
    assert not like_one_before([documents[0], documents[0]]), "the same text twice cannot be mixed up"
    assert not like_one_before([]) and not like_one_before([(), (1,), (1, 2)])


def test_second_document_of_two_hops_does_not_name_what_is_asked() -> None:
    """The first one names it, so neither is enough."""
    for case in TwoHop().cases(3, 40):
        first, second = (case.documents[number].plain_text for number in case.needs)
        assert case.answers[0] in second
        assert any(word in second for word in first.replace(".", " ").replace("'", " ").split() if word[0].isupper())
        assert not _names_in_common(case.question, second)


def test_piece_of_a_story_with_the_answer_does_not_name_who_it_is_about() -> None:
    for case in Story().cases(4, 40):
        assert len(case.needs) > 1
        assert _names_in_common(case.question, case.documents[case.needs[0]].plain_text)
        assert not _names_in_common(case.question, case.documents[case.needs[-1]].text)


def _names_in_common(question: str, text: str) -> set[str]:
    """Capitalized words of a question, but its first, that a text has as well."""
    words = question.replace("?", " ").replace(",", " ").replace("'", " ").split()[1:]
    return {word for word in words if word[0].isupper() and word in text.replace(".", " ").replace("'", " ").split()}


def test_first_and_last_document_of_an_order_say_different_things() -> None:
    for case in Order().cases(5, 40):
        assert set(case.needs) == set(range(len(case.documents)))
        holders = [number for number, document in enumerate(case.documents) if case.answers[0] in document.text]
        is_first = case.question.startswith(("In the first", "According to the first", "Before"))
        assert (0 if is_first else len(case.documents) - 1) in holders


@given(st.integers(1, 64), st.integers(2, 64))
def test_size_in_brackets_is_the_number_of_documents(few: int, many: int) -> None:
    assert len(OneHop(few).cases(0, 1)[0].documents) == few
    assert len(Needle(many).cases(0, 1)[0].documents) == many
    for each in (OneHop(few), Needle(many), Long(max(4, few))):
        assert task(str(each)) == each


def test_long_document_is_one_text_of_several_paragraphs() -> None:
    case = Long(20).cases(0, 1)[0]
    assert (len(case.documents), case.piece_tokens) == (1, 20)
    assert 4 <= len(case.documents[0].text.split("\n")) <= 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("three-hop", "choose from similar"),
        ("two-hop(3)", "has one size only"),
        ("one-hop(0)", "from 1 to 64, got 0"),
        ("similar-de(13)", "from 3 to 12, got 13"),
        ("similar(0)", "from 3 to 12, got 0"),
        ("needle(1)", "from 2 to 256, got 1"),
        ("long(99999)", "from 4 to 4096, got 99999"),
        ("one-hop(x)", "there is no task 'one-hop(x)'"),
        ("one-hop" * 1000, "there is no task"),
    ],
)
def test_unknown_task_or_size_is_told_with_the_way_out(text: str, said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        task(text)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("seed", "count"), [(-1, 1), (2**63, 1), (0, 0), (0, 100_001), (True, 1), (0, 1.5)])
def test_seed_and_count_have_bounds(seed: int, count: int) -> None:
    with pytest.raises(InvalidConfig, match="must be a whole number from"):
        TwoHop().cases(seed, count)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("question", " ", "its question must be a text that says something"),
        ("answers", ("a",) * 1001, "at most 1000 answers are allowed, got 1001"),
        ("answers", ["a"], "answers must be a tuple"),
        ("needs", (3,), "it needs document 3, and has 0"),
        ("metric", "bleu", "the metric must be one of exact, f1"),
        ("answer_tokens", 0, "answer_tokens must be a whole number from 1 to 4096, got 0"),
        ("piece_tokens", True, "piece_tokens must be a whole number"),
        ("documents", ("text",), "documents must be a tuple of Document"),
        ("id", "x" * 201, "its id has 201 characters; at most 200"),
    ],
)
def test_case_that_cannot_be_is_told(field: str, value: object, said: str) -> None:
    fields = {"id": "one", "task": "own", "question": "Who?", "answers": ("Ann",)} | {field: value}
    with pytest.raises(InvalidConfig, match=r"^case ") as caught:
        Case(**fields)  # type: ignore[arg-type]
    assert said in str(caught.value)
