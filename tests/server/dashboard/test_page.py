from __future__ import annotations

import base64
import hashlib
import re

import httpx
from support.server import RunningServer

from kvmosaic.prompt.document import check_id
from kvmosaic.server.dashboard.views import Markup, example_documents, example_questions


def test_the_policy_names_the_one_script_and_the_one_style(own_server: RunningServer) -> None:
    reply = httpx.get(own_server.url + "/")
    policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
    for element in ("script", "style"):
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)


def test_the_file_is_one_file_and_makes_no_markup_from_text() -> None:
    text = Markup.read().text
    addresses = set(re.findall(r"https?://[^\s'\"]+", text))
    assert {address.split("/")[2] for address in addresses} == {"www.w3.org"}  # names, nothing that is loaded
    assert not re.search(r"<(script|link|img|iframe)[^>]+src=|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert " style=" not in text
    assert not re.search(r"\son[a-z]+=", text)


def test_the_file_comes_without_a_key_and_everything_else_needs_one() -> None:
    with RunningServer(api_key=("a-long-key",)) as locked:
        assert httpx.get(locked.url + "/").status_code == 200
        for path in ("/dashboard/events", "/dashboard/examples"):
            assert httpx.get(locked.url + path).status_code == 401
        known = {"Authorization": "Bearer a-long-key"}
        assert httpx.get(locked.url + "/dashboard/examples", headers=known).status_code == 200


def test_the_examples_can_be_stored_and_their_questions_asked(own_server: RunningServer) -> None:
    documents, questions = example_documents(), example_questions()
    assert httpx.get(own_server.url + "/dashboard/examples").json() == {"documents": documents, "questions": questions}
    ids = {check_id(document["id"]) for document in documents}
    assert len(ids) == len(documents) == 11
    assert all(document["text"] for document in documents)
    assert all(set(question["documents"]) <= ids for question in questions)
