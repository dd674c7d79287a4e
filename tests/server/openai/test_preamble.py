"""System texts that change with every request, over HTTP."""

from __future__ import annotations

import pytest
from support.asking import chat, refused

DOCUMENTS = [{"id": "tower", "text": "The tower of Fenbury is forty metres high, and older than the town."}]


def messages(*system):
    return [{"role": "system", "content": list(system)}, {"role": "user", "content": "How high is the tower?"}]


def text(said, **marks):
    return {"type": "text", "text": said, **marks}


def action(http, said, salt, **fields):
    reply = chat(http, messages=said, documents=DOCUMENTS, cache_salt=salt, **fields)
    (document,) = reply["kvmosaic"]["documents"]
    return document["action"]


@pytest.mark.parametrize("day", ["2026-11-24", "2026-11-25"])
def test_a_dated_system_text_keeps_its_documents(http, day):
    said = [messages(text(f"You answer from the documents. Today is {each}.")) for each in ("2026-11-23", day)]
    assert action(http, said[0], day) == "computed"
    assert action(http, said[1], day) == "moved"
    assert action(http, said[1], day, preamble="all") == "computed"


def test_a_mark_says_where_it_ends(http):
    cached = {"cache_control": {"type": "ephemeral"}}
    said = [messages(text("You answer briefly.", **cached), text(f"You talk to {name}.")) for name in ("Ada", "Bob")]
    assert [action(http, each, "marked") for each in said] == ["computed", "moved"]


def test_a_request_says_where_it_ends(http):
    said = [messages(text(f"You answer kindly. You talk to {name}.")) for name in ("Ada", "Bob")]
    assert [action(http, each, "said", preamble="before:You talk") for each in said] == ["computed", "moved"]
    assert [action(http, each, "counted", preamble=4) for each in said] == ["computed", "moved"]


def test_a_report_shows_both_parts_of_a_system_text(http):
    said = messages(text("You answer. Now it is 10:45."))
    reply = chat(http, messages=said, documents=DOCUMENTS)
    assert [segment["kind"] for segment in reply["kvmosaic"]["segments"]][:2] == ["system", "text"]
    assert "tokens before them" in reply["kvmosaic"]["composition"]
    counted = http.post("/tokenize", json={"messages": said, "documents": DOCUMENTS}).json()
    assert [segment["kind"] for segment in counted["segments"]][:3] == ["system", "text", "chunk"]


def test_warmed_documents_serve_under_another_rest(http):
    warmed = http.post(
        "/v1/documents:warm",
        json={"documents": DOCUMENTS, "system": "You answer at once. It is 9:15.", "cache_salt": "warm preamble"},
    )
    assert warmed.status_code == 200, warmed.text
    assert action(http, messages(text("You answer at once. It is 10:45.")), "warm preamble") == "moved"


@pytest.mark.parametrize(
    ("preamble", "told"),
    [
        ("sometimes", "choose 'auto', 'all'"),
        ("pattern:a*b", "set by the operator"),
        (-1, "preamble"),
        (True, "preamble"),
        ("before:" + "x" * 2_000, "preamble"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(http, preamble, told):
    error = refused(http, "/v1/chat/completions", messages=messages(text("x")), documents=DOCUMENTS, preamble=preamble)
    assert error["status"] == 400 and told in error["message"]
