"""Documents that a request places in its messages: where they are in a content, and in what a template writes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.prompt import Document
from kvmosaic.prompt.found_documents import DocumentFinder, PlacedDocuments, content_key, placed_content
from kvmosaic.prompt.patterns import OwnPattern

texts = st.text("ab \n", max_size=6)
documents = st.builds(Document, st.text("ab \n", max_size=6).map(lambda text: f"x{text}y"), st.none() | st.just("T"))


@given(st.lists(texts | documents, max_size=6), st.sampled_from(["{}", " {}", "\n{}\n"]), st.booleans())
def test_every_document_is_found_in_what_a_template_writes(parts, around, strips):
    content, found = placed_content(parts)
    placed = PlacedDocuments({content_key(content): found} if found else {})
    written = around.format(content.strip() if strips else content)
    expected = [part.plain_text for part in parts if isinstance(part, Document)]
    assert [written[each.start : each.end].rstrip() for each in placed.find(written)] == expected
    ends = [place for each in placed.find(written) for place in (each.start, each.end)]
    assert ends == sorted(ends)


def test_content_that_a_template_edits_has_no_documents():
    content, found = placed_content([Document("one"), "two"])
    placed = PlacedDocuments({content_key(content): found})
    assert len(placed.find(content)) == 1 and not placed.find(content.upper()) and not placed.find("two")


def test_documents_have_their_text_and_an_empty_line_and_texts_are_lines():
    content, found = placed_content(["a", Document("one", "T"), Document("two"), "b", "c"])
    assert content == "a\n\nT\none\n\ntwo\n\nb\nc"
    assert [content[each.start : each.end] for each in found] == ["T\none\n\n", "two\n\n"]
    assert [each.name for each in found] == ["T", None]


def test_placed_documents_count_before_found_ones():
    content, found = placed_content([Document("<d>" + "x" * 50 + "</d>"), "<d>" + "y" * 50 + "</d>"])
    finder = DocumentFinder((OwnPattern(r"<d>(.*?)</d>"),), PlacedDocuments({content_key(content): found}))
    assert finder.find(content)[0].origin == "placed"
    assert len(finder.find(content)) == 2
    assert len(finder.only_placed().find(content)) == 1
