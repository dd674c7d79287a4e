"""Edited documents: the reply to PUT and the next answer agree on what is kept of the earlier text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from server.documents.world import Client, DocumentServer

from kvmosaic.server.documents import cached

SECTIONS = [f"## Part {number}\n\n" + f"The ferry number {number} leaves early. " * 6 + "\n\n" for number in range(20)]


def client_of(server: DocumentServer) -> Client:
    return Client(base_url=server.url, timeout=60, trust_env=False)


def lines_of(reply: dict[str, Any]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = reply["kvmosaic"]["documents"]
    return lines


@pytest.fixture(scope="module")
def whole() -> Iterator[DocumentServer]:
    with DocumentServer() as running:
        yield running


@pytest.fixture(scope="module")
def divided() -> Iterator[DocumentServer]:
    with DocumentServer(long_chunks="sections", max_section_tokens=250) as running:
        yield running


def test_an_edit_near_the_end_keeps_what_is_before_it(whole: DocumentServer) -> None:
    text = "The mayor of Fenbury is Renna Velley. " * 20
    with client_of(whole) as client:
        assert "kept_tokens" not in client.store("x", text)
        client.ask({"id": "x"})
        reply = client.store("x", text + "The baker is Tom Orrin.")
        assert 0 < reply["kept_tokens"] < reply["tokens"]
        (line,) = lines_of(client.ask({"id": "x"}))
        assert (line["tokens"], line["reused_tokens"]) == (reply["tokens"], reply["kept_tokens"])
        assert line["action"] == "partly reused"
        kept = f"first {reply['kept_tokens']} of {reply['tokens']} tokens kept from an earlier text"
        assert line["note"].startswith(kept)
        (line,) = lines_of(client.ask({"id": "x"}))
        assert line["reused_tokens"] == line["tokens"]
        (line,) = lines_of(client.ask({"id": "x", "version": 1}))
        assert line["reused_tokens"] == line["tokens"], "the earlier text is still cached"


def test_an_answer_from_an_edited_text_is_that_of_a_server_that_never_saw_the_old_one(whole: DocumentServer) -> None:
    question = "Who is the mayor of Fenbury?"
    text = "In Fenbury the boats leave early. " * 10
    old, new = (text + f"The mayor of Fenbury is {name}." for name in ("Tom Orrin", "Renna Velley"))
    with client_of(whole) as client, DocumentServer() as fresh, client_of(fresh) as other:
        client.store("y", old)
        client.ask({"id": "y"}, question=question, max_tokens=8)
        assert client.store("y", new)["kept_tokens"] > 0
        edited = client.ask({"id": "y"}, question=question, max_tokens=8)
        other.store("y", new)
        expected = other.ask({"id": "y"}, question=question, max_tokens=8)
        assert edited["choices"][0]["message"] == expected["choices"][0]["message"]


@pytest.mark.parametrize("change", [{"title": "A title"}, {"text": "Something else entirely."}])
def test_an_edit_at_the_start_keeps_little_or_nothing(whole: DocumentServer, change: dict[str, str]) -> None:
    body = {"text": "The mayor of Fenbury is Renna Velley. " * 20, **change}
    with client_of(whole) as client:
        client.store("z", "The mayor of Fenbury is Renna Velley. " * 20)
        client.ask({"id": "z"})
        reply = client.put("/v1/documents/z", json=body).json()
        assert reply["kept_tokens"] <= 16 < reply["tokens"] or reply["kept_tokens"] == 0
        client.delete("/v1/documents/z")


def test_nothing_is_said_where_nothing_was_cached_or_edited(
    whole: DocumentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(whole) as client:
        client.store("w", "The mayor of Fenbury is Renna Velley. " * 5)
        assert "kept_tokens" not in client.store("w", "The baker of Fenbury is Renna Velley. " * 5), "never read"
        client.ask({"id": "w"})
        assert "kept_tokens" not in client.store("w", "The baker of Fenbury is Renna Velley. " * 5), "the same text"
        with monkeypatch.context() as patched:
            patched.setattr(cached, "MAX_COUNTED_CHARACTERS", 10)
            assert "kept_tokens" not in client.store("w", "The mason of Fenbury is Renna Velley. " * 5), "too long"


def test_without_earlier_versions_nothing_is_kept() -> None:
    text = "The mayor of Fenbury is Renna Velley. " * 20
    with DocumentServer(document_version_seconds=0) as server, client_of(server) as client:
        client.store("x", text)
        client.ask({"id": "x"})
        assert "kept_tokens" not in client.store("x", text + "More.")
        (line,) = lines_of(client.ask({"id": "x"}))
        assert line["reused_tokens"] == 0


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
@pytest.mark.parametrize("section", [0, 9, 19])
def test_an_edit_in_one_of_twenty_sections_computes_this_section_only(section: int, strategy: str) -> None:
    options: dict[str, Any] = {"long_chunks": "sections", "max_section_tokens": 250, "position_strategy": strategy}
    with DocumentServer(**options) as server, client_of(server) as client:
        client.store("guide", "".join(SECTIONS))
        first = lines_of(client.ask({"id": "guide"}))
        assert len(first) == 20
        edited = SECTIONS.copy()
        edited[section] = edited[section].rstrip() + " The last one is late.\n\n"
        reply = client.store("guide", "".join(edited))
        lines = lines_of(client.ask({"id": "guide"}))
        missed = [number for number, line in enumerate(lines) if line["reused_tokens"] < line["tokens"]]
        assert missed == [section]
        assert f"section {section + 1} of 20 of a document" in lines[section]["note"]
        assert sum(line["reused_tokens"] for line in lines) == reply["kept_tokens"]
        assert sum(line["tokens"] for line in lines) == reply["tokens"]


def test_sections_of_a_document_are_listed_and_dropped_together(divided: DocumentServer) -> None:
    with client_of(divided) as client:
        client.store("manual", "".join(SECTIONS[::-1]))
        client.ask({"id": "manual"})
        parts = [chunk["part"] for chunk in client.get("/v1/documents/manual").json()["chunks"]]
        assert sorted(parts) == sorted(f"{number}/20" for number in range(1, 21))


def test_lines_and_files_of_an_upload_say_what_is_kept(whole: DocumentServer) -> None:
    text = "The baker of Fenbury is Tom Orrin. " * 20
    with client_of(whole) as client:
        for name in ("read.md", "unread.md"):
            files = [("file", (name, text.encode()))]
            assert "tokens" not in client.post("/v1/documents:batch", files=files).json()["data"][0]
        client.ask({"id": "read.md"})
        files = [("file", (name, f"{text}The mason is Una.".encode())) for name in ("read.md", "unread.md")]
        read, unread = client.post("/v1/documents:batch", files=files).json()["data"]
        assert 0 < read["kept_tokens"] < read["tokens"] and "kept_tokens" not in unread
        (line,) = lines_of(client.ask({"id": "read.md"}))
        assert (line["tokens"], line["reused_tokens"]) == (read["tokens"], read["kept_tokens"])
        names = ("read.md", "unread.md", "new", "read.md")
        lines = [json.dumps({"id": name, "text": f"{text}The {name} mason.", "title": "read.md"}) for name in names]
        body, header = "\n".join(lines), {"Content-Type": "application/jsonl"}
        reply = client.post("/v1/documents:batch", content=body, headers=header).json()
        assert reply["num_replaced"] == 3 and reply["object"] == "documents.uploaded"
        assert [each.get("kept_tokens", 0) > 0 for each in reply["data"]] == [True, False, False, True]


def test_kept_tokens_do_not_tell_what_others_have_asked_with_a_salt(whole: DocumentServer) -> None:
    common, secret = "In Fenbury the boats leave early. " * 4, "The code of the vault is 4711, as Una knows. " * 4
    with client_of(whole) as client:
        kept = []
        for name, guess in (("right", secret), ("wrong", secret.replace("4711", "1234"))):
            client.store(name, common)
            client.ask({"id": name}, cache_salt="hidden")
            client.ask({"text": common + secret}, cache_salt="hidden")
            kept.append(client.store(name, common + guess)["kept_tokens"])
        assert kept[0] == kept[1]
