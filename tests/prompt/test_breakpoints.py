import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_time import least_cpu_seconds
from support.examples import examples
from support.nasty import nasty_texts
from support.target import slowness

from kvmosaic.errors import InvalidDocument, InvalidMessages
from kvmosaic.prompt import read_messages
from kvmosaic.prompt.chat_request import take_marked

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
EXPLICIT = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def part(text, mark=None):
    return {"type": "text", "text": text, **(mark or {})}


def system(*parts):
    return {"role": "system", "content": list(parts)}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def taken(*messages):
    kept, documents = take_marked(messages)
    read = [(message["role"], message["content"]) for message in read_messages(kept)]
    return read, [document.text for document in documents]


def test_first_marked_part_ends_the_system_text_and_later_ones_are_documents():
    messages = system(part("Be brief."), part("Handbook", EPHEMERAL), part("Manual", EPHEMERAL)), user(part("Why?"))
    assert taken(*messages) == ([("system", "Be brief.\nHandbook"), ("user", "Why?")], ["Manual"])


@pytest.mark.parametrize("mark", [EPHEMERAL, EXPLICIT], ids=["cache_control", "prompt_cache_breakpoint"])
def test_marked_parts_of_the_last_question_are_documents(mark):
    question = user(part("One", mark), part("Two", mark), part("Which?"))
    assert taken(question) == ([("user", "Which?")], ["One", "Two"])


def test_text_without_a_mark_stays_with_whoever_wrote_it():
    messages = (
        system(part("a", EPHEMERAL), part("b"), part("c", EPHEMERAL), part("d")),
        user(part("e"), part("f", EXPLICIT), part("g")),
    )
    assert taken(*messages) == ([("system", "a\nb\nd"), ("user", "e\ng")], ["c", "f"])


def test_last_part_stays_the_question_when_every_part_is_marked():
    assert taken(user(part("Why?", EPHEMERAL))) == ([("user", "Why?")], [])
    assert taken(user(part("One", EPHEMERAL), part("Why?", EPHEMERAL))) == ([("user", "Why?")], ["One"])


def test_a_document_of_the_first_turn_is_one_in_the_second_and_marked_answers_stay_answers():
    first = user(part("One", EPHEMERAL), part("first?", EPHEMERAL))
    answer = {"role": "assistant", "content": [part("Yes.", EPHEMERAL)]}
    assert taken(first) == ([("user", "first?")], ["One"])
    second = user(part("Two", EPHEMERAL), part("second?"))
    turns = [("user", "first?"), ("assistant", "Yes."), ("user", "second?")]
    assert taken(first, answer, second) == (turns, ["One", "Two"])
    assert taken(first, answer, user(part("second?"))) == (turns, ["One"])


def test_second_system_message_may_be_documents_only():
    messages = system(part("a", EPHEMERAL)), system(part("b", EPHEMERAL)), user(part("c"))
    assert taken(*messages) == ([("system", "a"), ("user", "c")], ["b"])


@pytest.mark.parametrize("mark", [{"cache_control": None}, {"prompt_cache_breakpoint": False}, {}])
def test_a_mark_that_says_no_is_no_mark(mark):
    assert taken(user(part("One", mark), part("Why?"))) == ([("user", "One\nWhy?")], [])


def test_marked_parts_need_text():
    with pytest.raises(InvalidMessages, match="marked part of type 'image_url'"):
        take_marked([user({"type": "image_url", **EPHEMERAL}, part("Why?"))])
    with pytest.raises(InvalidDocument, match="empty"):
        take_marked([user(part("  ", EPHEMERAL), part("Why?"))])


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(nasty_texts(visible=True), st.booleans()), min_size=1, max_size=5))
def test_no_text_is_lost_doubled_or_given_to_another(parts):
    written = user(*(part(text, EPHEMERAL if marked else None) for text, marked in parts))
    kept, documents = take_marked([system(part("Be brief.")), written])
    is_taken = [marked for _, marked in parts]
    if all(is_taken):
        is_taken[-1] = False
    assert [document.text for document in documents] == [
        text.strip() for (text, _), taken in zip(parts, is_taken, strict=True) if taken
    ]
    assert [item["text"] for item in kept[1]["content"]] == [
        text for (text, _), taken in zip(parts, is_taken, strict=True) if not taken
    ]
    assert kept[0] == system(part("Be brief."))


def test_a_message_of_ten_thousand_marked_parts_takes_linear_time():
    message = user(*[part("A mill.", EPHEMERAL)] * 10_000)
    assert len(take_marked([message])[1]) == 9_999
    assert least_cpu_seconds(lambda: take_marked([message])) < 0.3 * slowness()
