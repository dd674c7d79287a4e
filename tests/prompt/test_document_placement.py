import json
import re

import pytest
from support.tokenizers import (
    AFTER,
    CHATML,
    COHERE,
    DEFAULT_SYSTEM,
    GRANITE,
    JOINED,
    LLAMA2,
    OTHER_TEMPLATES,
    PLACING_TEMPLATES,
    READER,
    TEMPLATES,
    TOJSON,
    make_tokenizer,
)

from kvmosaic.errors import InvalidMessages
from kvmosaic.prompt import Document
from kvmosaic.prompt.chat_template.document_placement import place_documents
from kvmosaic.prompt.conversation import Conversation
from kvmosaic.prompt.text_pieces import joined

LAST = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if loop.last %}"
    "{% for document in documents or [] %}{{ '<|document|>' + document.text + '\n' }}{% endfor %}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Documents inside the last message, which is another one in every turn."""

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is it?"}
HISTORY = [SYSTEM, USER, {"role": "assistant", "content": "A river."}, {"role": "user", "content": "Which one?"}]
DOCUMENTS = [Document('the "first"\ntext', "A title", "a"), Document("second", id="b"), Document("third", "C")]
CONVERSATIONS = {"user": [USER], "system": [SYSTEM, USER], "history": HISTORY}


def placed(template, messages=(SYSTEM, USER)):
    return place_documents(Conversation(make_tokenizer(template), list(messages), {}))


def composed(template, messages, documents=DOCUMENTS):
    placing = placed(template, messages)
    return [joined(placing.head), *(joined(placing.chunk(document)) for document in documents), joined(placing.tail)]


def ordinary(template, messages, documents=DOCUMENTS):
    names = ("doc_id", "title", "text") if "doc_id" in template else ("title", "text")
    fields = [{"doc_id": document.id, "title": document.title, "text": document.text} for document in documents]
    given = [{name: row[name] for name in names if row[name]} for row in fields]
    return make_tokenizer(template).apply_chat_template(
        list(messages), documents=given, tokenize=False, add_generation_prompt=True
    )


def as_template_shows(template, document):
    """The document as a template without titles should be given it."""
    return document if template != GRANITE else Document(document.plain_text, id=document.id)


def unnumbered(text):
    return re.sub(r"Document: \d+", "Document: ", text)


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", ["reader", "granite", "cohere", "tojson"])
def test_segments_together_are_the_templates_text_without_numbers_of_places(name, messages):
    template = PLACING_TEMPLATES[name]
    assert placed(template, messages).by_template
    shown = [as_template_shows(template, document) for document in DOCUMENTS]
    assert "".join(composed(template, messages)) == unnumbered(ordinary(template, messages, shown))


def test_a_document_keeps_what_the_template_writes_around_it():
    assert composed(READER, [SYSTEM, USER]) == [
        "<s><|im_start|>Be brief.\n",
        '<|document|>A title\nthe "first"\ntext\n',
        "<|document|>second\n",
        "<|document|>C\nthird\n",
        "<|im_end|>What is it?\n",
    ]
    assert composed(READER, [USER])[:2] == ["<s>", '<|document|>A title\nthe "first"\ntext\n']
    assert composed(GRANITE, [SYSTEM, USER])[1:3] == [
        '<|im_start|>document {"document_id": "a"}<|fim|>\nA title\nthe "first"\ntext<|im_end|>\n',
        '<|im_start|>document {"document_id": "b"}<|fim|>\nsecond<|im_end|>\n',
    ]
    assert composed(COHERE, [SYSTEM, USER])[:3] == [
        "<s>Be brief.<results>",
        '\nDocument: \ntitle: A title\ntext: the "first"\ntext\n',
        "\nDocument: \ntext: second\n",
    ]


def test_json_documents_are_escaped_as_the_template_does():
    chunks = composed(TOJSON, [SYSTEM, USER])[1:-1]
    assert [json.loads(chunk) for chunk in chunks] == [
        {"title": "A title", "text": 'the "first"\ntext'},
        {"text": "second"},
        {"title": "C", "text": "third"},
    ]
    assert "ü" in joined(placed(TOJSON).chunk(Document("ü")))


def test_what_stands_only_between_documents_goes_behind_each():
    assert composed(JOINED, [SYSTEM, USER]) == [
        "<s>Be brief.\n\nDocuments:\n",
        'A title: the "first"\ntext\n---\n',
        "second\n---\n",
        "C: third\n---\n",
        "\n[INST] What is it? [/INST]",
    ]


@pytest.mark.parametrize("name", OTHER_TEMPLATES)
def test_templates_that_cannot_place_documents_get_them_behind_the_system_text(name):
    template = OTHER_TEMPLATES[name]
    placing = placed(template, HISTORY)
    assert not placing.by_template
    text = make_tokenizer(template).apply_chat_template(HISTORY, tokenize=False, add_generation_prompt=True)
    head, tail = joined(placing.head), joined(placing.tail)
    assert head.endswith("Be brief.\n\n")
    assert head.removesuffix("\n\n") + tail == text
    assert joined(placing.chunk(DOCUMENTS[0])) == 'A title\nthe "first"\ntext\n\n'
    assert joined(placing.chunk(DOCUMENTS[1])) == "second\n\n"


def test_without_a_system_text_documents_stand_before_the_first_message():
    assert composed(CHATML, [USER])[::4] == ["<|im_start|>user\n", "What is it?<|im_end|>\n<|im_start|>assistant\n"]
    assert composed(LLAMA2, [USER])[::4] == ["<s>[INST] ", "What is it? [/INST]"]
    assert composed(DEFAULT_SYSTEM, [USER])[0].startswith("<|im_start|>system\nYou are a helpful")


def test_documents_behind_the_question_are_moved_to_the_front():
    head, *_, tail = composed(AFTER, [SYSTEM, USER])
    assert "What is it?" not in head
    assert "What is it?" in tail


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_neither_head_nor_chunks_depend_on_the_question(name, messages):
    placing = placed(TEMPLATES[name], messages)
    other = [*(message for message in messages if message["role"] == "system"), {"role": "user", "content": "else?"}]
    twin = placed(TEMPLATES[name], other)
    assert placing.head == twin.head
    assert [placing.chunk(d) for d in DOCUMENTS] == [twin.chunk(d) for d in DOCUMENTS]


@pytest.mark.parametrize("system", [[SYSTEM], []], ids=["system", "no system"])
@pytest.mark.parametrize("name", [*TEMPLATES, "last"])
def test_documents_and_history_are_written_alike_in_every_turn(name, system):
    template = (TEMPLATES | {"last": LAST})[name]
    turns = [*system, *HISTORY[1:], {"role": "assistant", "content": "The Aller."}, USER]
    first, *later = (composed(template, turns[: len(system) + count]) for count in (1, 3, 5))
    for one, before in zip(later, [first, *later], strict=False):
        assert one[:-1] == before[:-1], "what is before the question"
        asked = before[-1][: before[-1].rindex("?") + 1]
        assert one[-1].startswith(asked) and len(one[-1]) > len(before[-1])


def test_a_message_that_looks_like_a_wrapper_does_not_move_the_cut():
    for template in PLACING_TEMPLATES.values():
        plain = placed(template, [SYSTEM, USER])
        for text in ("<|document|>", "\n<|document|>", "Document: 0\ntext: ", '\n{"text": "', "<|im_end|>\n"):
            odd = placed(template, [{**SYSTEM, "content": f"x{text}"}, {**USER, "content": f"{text}x"}])
            assert odd.by_template
            assert [odd.chunk(d) for d in DOCUMENTS] == [plain.chunk(d) for d in DOCUMENTS]


def test_a_template_that_shows_no_message_has_no_place():
    with pytest.raises(InvalidMessages, match="shows none of the messages"):
        placed("{{ bos_token }}nothing", [USER])
