import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.errors import InvalidDocument, KVMosaicError, TooManyChunks
from kvmosaic.prompt import Document, Prompt, read_documents
from kvmosaic.prompt.document import distinct_documents


def test_texts_mappings_and_documents_are_read_alike():
    documents = read_documents(["  a \n", {"text": "b", "title": " T ", "id": 7, "url": "x"}, Document("c")], 3)
    assert documents == (Document("a"), Document("b", "T", "7"), Document("c"))
    assert [document.name for document in documents] == [None, "7", None]
    assert documents[1].plain_text == "T\nb"
    assert documents[0].plain_text == "a"


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("text", "documents must be a list, got str"),
        ({"text": "a"}, "documents must be a list, got dict"),
        (7, "documents must be a list, got int"),
        ([7], r"document number 1: a document is \{.*got 7"),
        (["a", {"title": "T"}], "document number 2: a document needs a \"text\"; this one has 'title'"),
        ([{"text": 7}], "document number 1: a document's text must be a text, got int"),
        ([{"text": None}], "text must be a text, got NoneType"),
        ([{"text": " \n"}], "document number 1: a document's text is empty"),
        ([""], "document number 1: a document's text is empty"),
        ([{"text": "a", "title": 7}], "a document's title must be a text, got int"),
        ([{"text": "a", "id": ["x"]}], "a document's id must be a text, got list"),
        ([{"text": "a", "id": "x"}, "b", {"text": "c", "id": "x"}], "documents number 1 and 3 have the same id 'x'"),
        (["a" * (2**25 + 1)], "text has 33554433 characters; at most 33554432"),
        ([{"text": "a", "title": "t" * 5000}], "title has 5000 characters; at most 4096"),
    ],
)
def test_what_is_no_document_is_refused_with_its_place(documents, message):
    with pytest.raises(InvalidDocument, match=message):
        read_documents(documents, 10)


def test_too_many_documents_are_refused_before_they_are_all_read():
    def endless():
        while True:
            yield "a"

    with pytest.raises(TooManyChunks, match="more than 5 documents in one prompt; raise max_prompt_chunks"):
        read_documents(endless(), 5)


def test_documents_are_never_searched_for_separators():
    prompt = Prompt.from_documents(["# a\n## b ## c", {"text": "## d", "id": "x"}], "Why ## so?", system="Be ## brief.")
    assert [segment.text for segment in prompt.segments] == ["Be ## brief.", "# a\n## b ## c", "## d", "Why ## so?"]
    assert prompt.chunks[1].name == "x"


@pytest.mark.parametrize("arguments", [(["a"], " "), (["a"], ""), (["a"], 7)])
def test_a_prompt_of_documents_needs_a_question(arguments):
    with pytest.raises(KVMosaicError):
        Prompt.from_documents(*arguments)
    with pytest.raises(KVMosaicError):
        Prompt.from_documents(["a"], "Why?", system=" ")


@given(
    st.lists(
        st.none()
        | st.builds(
            Document,
            text=st.sampled_from("ab"),
            id=st.none() | st.sampled_from(["m", "m#2", "m#3", "m#2#2"]),
            sees=st.just(()) | st.tuples(st.integers(0, 9)),
        ),
        max_size=8,
    )
)
def test_distinct_documents_have_the_texts_that_were_sent_and_see_the_same(sent):
    """None is a blank document."""
    by_place = {place: document for place, document in enumerate(sent) if document is not None}
    blank = dict.fromkeys(place for place, document in enumerate(sent) if document is None)
    made = distinct_documents(by_place, blank)
    ids = [document.id for document in made.documents if document.id is not None]
    assert len(set(ids)) == len(ids)
    for place, document in zip(made.places, made.documents, strict=True):
        original = by_place[place]
        assert document.text == original.text and (document.id or "").startswith(original.id or "")
        seen = [sent[each].text if each < len(sent) else each for each in original.sees if each not in blank]
        assert seen == [made.documents[each].text if each < len(made.documents) else each for each in document.sees]
    kept = {(by_place[place].id, by_place[place].text) for place in made.places}
    assert {(document.id, document.text) for document in by_place.values()} == kept
    assert bool(made.warnings) == (list(made.documents) != sent)
