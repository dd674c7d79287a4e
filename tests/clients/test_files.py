"""OpenAI's client uploads files, and asks about them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from clients.conftest import ANSWER, QUESTION
from openai import OpenAI
from support.files import docx_file, pdf_file
from support.server import RunningServer


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as asking:
        yield asking
        for file in asking.files.list():
            asking.files.delete(file.id)


def test_uploaded_file_is_read_by_a_chat(client: OpenAI, server: RunningServer) -> None:
    text = b"Jonas Kelberg works as a teacher. He lives in Halport."
    file = client.files.create(file=("jonas.txt", text), purpose="user_data")
    assert (file.id[:5], file.filename, file.bytes, file.purpose) == ("file-", "jonas.txt", len(text), "user_data")
    assert file.status == "processed" and file.created_at > 0 and file.expires_at is None
    reply = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": QUESTION}],
        extra_body={"documents": [{"id": file.id}]},
        max_tokens=16,
        temperature=0,
    )
    assert ANSWER in (reply.choices[0].message.content or "")
    assert client.files.content(file.id).text == text.decode()


def test_files_are_listed_retrieved_and_deleted(client: OpenAI, server: RunningServer) -> None:
    httpx.put(server.url + "/v1/documents/file-of-mine", json={"text": "no file"})
    files = [client.files.create(file=(f"{n}.md", b"# one"), purpose="assistants") for n in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == [file.id for file in reversed(files)]
    assert [file.id for file in client.files.list(order="asc")] == [file.id for file in files]
    assert not list(client.files.list(purpose="user_data"))
    assert client.files.retrieve(files[0].id).filename == "0.md"
    assert client.files.delete(files[0].id).deleted
    for missing in (files[0].id, "file-of-mine"):
        with pytest.raises(openai.NotFoundError, match="there is no"):
            client.files.retrieve(missing)
    httpx.delete(server.url + "/v1/documents/file-of-mine")


def test_pdf_and_docx_are_read_with_pages_and_headings(client: OpenAI) -> None:
    pdf = client.files.create(file=("two.pdf", pdf_file("The first page.", "The second page.")), purpose="assistants")
    assert client.files.content(pdf.id).text == "[page 1]\nThe first page.\n\n[page 2]\nThe second page."
    docx = client.files.create(file=("d.docx", docx_file("Harbour", "The ferry leaves.")), purpose="assistants")
    assert client.files.content(docx.id).text == "# Harbour\n\nThe ferry leaves."


def test_file_may_expire(client: OpenAI) -> None:
    expiry = {"anchor": "created_at", "seconds": 3_600}
    file = client.files.create(file=("a.txt", b"one"), purpose="user_data", expires_after=expiry)  # type: ignore[arg-type]
    assert file.expires_at is not None and file.expires_at - file.created_at == 3_600


@pytest.mark.parametrize(
    ("name", "content", "purpose", "told"),
    [
        ("a.txt", b"one", "batch", "user_data"),
        ("a.txt", b"", "user_data", "no text"),
        ("a.pdf", b"%PDF-1.4 nothing", "user_data", "not a PDF"),
        ("a.docx", b"PK\x03\x04", "user_data", "not a DOCX"),
        ("a.png", b"\x89PNG\xff", "user_data", "UTF-8"),
        ("a.txt", b"word " * 5_000, "user_data", "--chunk-cache-size"),
    ],
)
def test_file_that_cannot_be_read_is_refused_with_the_reason(
    client: OpenAI, name: str, content: bytes, purpose: str, told: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=told):
        client.files.create(file=(name, content), purpose=purpose)  # type: ignore[arg-type]
    assert not list(client.files.list())


def test_what_is_not_served_is_told(client: OpenAI) -> None:
    for ask in (
        lambda: client.embeddings.create(model="any", input="text"),
        lambda: client.vector_stores.create(name="mine"),
        lambda: client.vector_stores.files.list("vs_1"),
    ):
        with pytest.raises(openai.APIStatusError, match="examples/rag") as refusal:
            ask()
        assert refusal.value.status_code == 501
