"""Text of files, and files that are made to exhaust memory or time."""

from __future__ import annotations

import re
import resource
import sys
import zlib
from contextlib import suppress

import pytest
from support.files import docx_file, pdf_file

from kvmosaic.errors import InvalidDocument, MissingExtra, pip_install
from kvmosaic.extraction import extract_text
from kvmosaic.extraction.worker import read_html


def test_web_page_becomes_markdown_without_scripts() -> None:
    page = (
        "<html><head><title>no</title></head><body><h1>Häfen</h1><ul><li>one</li><li><a href='http://x'>two</a></li>"
        "</ul><table><tr><th>a</th></tr><tr><td>b</td></tr></table><style>no</style><img alt='no'></body></html>"
    )
    text, title = extract_text(page.encode(), "page.HTML")
    assert title == "no"
    assert text.startswith("# Häfen\n\n* one\n* two\n")
    assert "| b |" in text and "no" not in text and "http" not in text


def test_what_stands_beside_the_text_of_a_web_page_is_left_out() -> None:
    page = """<?xml version="1.0"?><!DOCTYPE html><html><body class="menu"><!-- no -->
        <div id="banner">no</div><ul class="docnav top"><li>no</li></ul><nav>no</nav><p role="navigation">no</p>
        <div class="sidebar">A note.</div><div class="content navigable">The ferry leaves at noon.</div>
        <div class="page-footer">no</div><footer>no</footer></body></html>"""
    assert read_html(page.encode())[1].split("\n\n")[-2:] == ["A note.", "The ferry leaves at noon."]
    assert "no" not in read_html(page.encode())[1].replace("noon", "").replace("note", "")
    assert read_html(b"<div class=menu>Soup, bread and plums.</div>")[1].strip() == "Soup, bread and plums."


def test_a_page_laid_out_by_tables_is_its_text_without_the_menu_cell() -> None:
    links = "".join(f"<li><a href='{number}.html'>Chapter {number}</a></li>" for number in range(8))
    page = f"""<table><tr><td><h1>The mill</h1></td></tr></table><table><tr><td><table><tr><td><b>Menu</b></td></tr>
        <tr><td><ul>{links}</ul></td></tr></table></td><td><table><tr><td><p>{20 * "The mill grinds oats. "}</p>
        <table><tr><td>oats</td><td>3 crowns</td></tr></table></td></tr></table></td></tr></table>"""
    text = read_html(page.encode())[1]
    assert text.startswith("# The mill\n") and "Chapter" not in text
    assert "grinds oats. The mill" in text and "| oats | 3 crowns |" in text
    assert text.count("|") < 12, "only the table of data is one"
    column = f"<p>{5 * 'Oats. '}</p><table><tr><td><b>Menu</b></td></tr><tr><td><ul>{links}</ul></td></tr></table>"
    assert "Chapter" not in read_html(f"<p>{60 * 'The mill. '}</p>{column}".encode())[1]
    listed = f"<table><tr><td><h1>Contents</h1><ul>{links}</ul></td></tr></table>"
    assert "Chapter 7" in read_html(listed.encode())[1], "a page of links is kept"


def test_a_short_page_without_a_known_encoding_is_no_guess() -> None:
    pages = [b"<p>caf\xe9</p>", b"<meta charset=no-such><p>caf\xe9</p>", b"<meta charset=iso-8859-1><p>caf\xe9</p>"]
    pages += ["<p>caf\xe9</p>".encode(encoding) for encoding in ("utf-8", "utf-16")]
    assert {read_html(page)[1] for page in pages} == {"caf\xe9"}


def test_the_main_part_of_a_page_is_its_text() -> None:
    page = f"""<html><body><div id="help">Keyboard shortcuts</div><div class="page"><main><h1>The mill</h1>
        <p>{20 * "The mill grinds oats. "}</p></main><div class="next">Next chapter</div></div></body></html>"""
    assert read_html(page.encode())[1].startswith("# The mill\n\nThe mill grinds")
    assert "chapter" not in read_html(page.encode())[1]
    assert "shortcuts" in read_html(page.replace(20 * "The mill grinds oats. ", "").encode())[1], "an empty one is none"


def test_pages_of_a_pdf_are_marked() -> None:
    assert extract_text(pdf_file("One.", "", "Three."), "a.pdf").text == "[page 1]\nOne.\n\n[page 3]\nThree."


def test_headings_of_a_word_document_are_marked() -> None:
    assert extract_text(docx_file("Ferry", "It leaves."), "a.docx").text == "# Ferry\n\nIt leaves."


def test_markdown_and_text_stay_as_they_are() -> None:
    assert extract_text("\ufeff# One\r\n*two*".encode(), "a.md").text == "# One\r\n*two*"
    assert extract_text(b"plain", "README").text == "plain"


@pytest.mark.parametrize(
    ("content", "name", "told"),
    [
        (b"\xff\xfe", "a.txt", "not UTF-8"),
        (b"a\0b", "a.txt", "NUL"),
        (b" \n", "a.txt", "no text"),
        (pdf_file(""), "a.pdf", "OCR"),
        (b"<p></p>", "a.html", "no text"),
        (b"not a pdf", "a.pdf", "not a PDF"),
        (b"PK\x05\x06" + bytes(18), "a.docx", "not a DOCX"),
    ],
)
def test_file_without_text_is_refused_with_the_reason(content: bytes, name: str, told: str) -> None:
    with pytest.raises(InvalidDocument, match=told):
        extract_text(content, name)


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmosaic.extraction.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=rf"pypdfium2 .* {re.escape(pip_install('files'))}"):
        extract_text(b"%PDF", "a.pdf")


def test_word_document_that_unpacks_to_much_is_refused() -> None:
    content = docx_file("One", "two", padding=100_000_000)
    assert len(content) < 2**19
    with pytest.raises(InvalidDocument, match="unpacks to"):
        extract_text(content, "a.docx")


def test_pdf_with_a_stream_that_unpacks_to_much_is_refused_or_read() -> None:
    """Whatever the library makes of it, this process needs no more memory."""
    squeezed = zlib.compress(b"(word) Tj " * 30_000_000, 9)
    head, tail = (
        pdf_file("x").split(b"<< /Length 38 >>\nstream\n", 1)[0],
        b"\nendstream\nendobj\ntrailer << /Root 1 0 R >>",
    )
    content = head + b"<< /Filter /FlateDecode /Length %d >>\nstream\n" % len(squeezed) + squeezed + tail
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(InvalidDocument):
        extract_text(content, "a.pdf")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19, sys.platform


def test_deeply_nested_page_is_refused() -> None:
    with pytest.raises(InvalidDocument, match="nested too deeply"):
        extract_text(b"<div>" * 20_000, "a.html")


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>one<p>two", "one\n\ntwo"),
        ("<p>one<h2>Two</h2>", "one\n\n## Two"),
        ("<ul><li>one<li>two<ul><li>inner<li>last</ul><li>three</ul>", "* one\n* two\n  + inner\n  + last\n* three"),
        ("<dl><dt>a<dd>b<dt>c<dd>d</dl>", "a\n:   b\n\nc\n:   d"),
        ("<table><tr><th>a<th>b<tr><td>1<td>2</table>", "| a | b |\n| --- | --- |\n| 1 | 2 |"),
    ],
)
def test_elements_without_end_tags_read_like_those_with_them(page: str, text: str) -> None:
    assert extract_text(page.encode(), "a.html").text.strip() == text


@pytest.mark.parametrize(
    "page",
    [
        b"<p>word" * 5_000,
        b"<ul>" + b"<li>word" * 5_000,
        b"<table>" + b"<tr><td>word<td>2" * 2_000,
        b"<b>" * 900 + b"word",
    ],
)
def test_long_page_without_end_tags_is_read(page: bytes) -> None:
    assert "word" in extract_text(page, "a.html").text
