"""What /v1/documents and /v1/files must do on every server: cases for any HTTP client of one.

    @pytest.mark.parametrize("case", CASES)
    def test_conformance(case: str, client: httpx.Client) -> None:
        run_case(case, client)

The server has `LIMITS` and a key, which the client sends; the client's store is empty before and after a case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx

LIMITS = {"max_documents": 6, "max_documents_bytes": 120_000, "max_body_bytes": 100_000}
DOCUMENTS = "/v1/documents"
JSON = {"Content-Type": "application/json"}
LINES = {"Content-Type": "application/jsonl"}
TEXT = "It goes to Oak Island."
Case = Callable[[httpx.Client], None]


def run_case(name: str, client: httpx.Client) -> None:
    """Runs one case, and deletes what it has stored."""
    try:
        _CASES[name](client)
    finally:
        while data := client.get(DOCUMENTS, params={"limit": 1000}).json()["data"]:
            for each in data:
                client.delete(f"{DOCUMENTS}/{_quoted(each['id'])}").raise_for_status()


def refused(reply: httpx.Response, status: int, code: str | None = None) -> str:
    """The message of a reply with this status and code, in OpenAI's shape."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"], error
    assert code is None or error["code"] == code, error
    message: str = error["message"]
    return message


def stored(client: httpx.Client, name: str, text: str = TEXT, **fields: Any) -> dict[str, Any]:
    """Stores a document under an id; returns what the reply says."""
    reply = client.put(f"{DOCUMENTS}/{_quoted(name)}", json={"text": text, **fields})
    assert reply.status_code in (200, 201), reply.text
    assert reply.headers["ETag"] == f'"{reply.json()["version"]}"'
    described: dict[str, Any] = reply.json()
    return described


def ids(client: httpx.Client, **query: Any) -> list[str]:
    """The ids of a list."""
    reply = client.get(DOCUMENTS, params=query)
    assert reply.status_code == 200, reply.text
    return [each["id"] for each in reply.json()["data"]]


def created_document_is_described_and_read(client: httpx.Client) -> None:
    body = {"id": "urn:ferry.v1", "title": "Ferry", "text": f" {TEXT} ", "metadata": {"lang": "en"}}
    made = client.post(DOCUMENTS, json=body)
    assert made.status_code == 201 and made.headers["ETag"] == '"1"', made.text
    described = made.json()
    assert (described["object"], described["id"], described["metadata"]) == ("document", "urn:ferry.v1", {"lang": "en"})
    assert (described["version"], described["characters"], described["bytes"]) == (1, 22, 27)
    assert (described["ttl_seconds"], described["expires_at"], described["hits"]) == (None, None, 0)
    assert not {"text", "chunks", "versions"} & described.keys()
    read = client.get(f"{DOCUMENTS}/urn:ferry.v1")
    assert read.headers["ETag"] == '"1"'
    assert {**read.json(), "chunks": []} == {**described, "text": TEXT, "chunks": []}
    assert re.fullmatch("doc-[0-9a-f]{24}", client.post(DOCUMENTS, json={"text": "one"}).json()["id"])
    refused(client.post(DOCUMENTS, json=body), 409, "document_exists")


def document_is_replaced_and_deleted(client: httpx.Client) -> None:
    assert stored(client, "mill", metadata={"k": "v"})["version"] == 1
    again = client.put(f"{DOCUMENTS}/mill", json={"id": "mill", "text": "Another."})
    assert (again.status_code, again.json()["version"], again.json()["metadata"]) == (200, 2, {})
    assert "'y'" in refused(client.put(f"{DOCUMENTS}/mill", json={"id": "y", "text": "z"}), 400)
    assert client.delete(f"{DOCUMENTS}/mill").json() == {"id": "mill", "object": "document.deleted", "deleted": True}
    for method, path in (
        ("GET", "mill"),
        ("DELETE", "mill"),
        ("POST", "mill:pin"),
        ("POST", "mill:unpin"),
        ("POST", "mill:warm"),
    ):
        assert "'mill'" in refused(client.request(method, f"{DOCUMENTS}/{path}"), 404, "document_not_found"), path
    refused(client.patch(f"{DOCUMENTS}/mill", json={"priority": 0.1}), 404, "document_not_found")


def change_for_another_version_is_refused(client: httpx.Client) -> None:
    stored(client, "boat")
    stored(client, "boat", "Another.")
    old, new = {"If-Match": '"1"'}, {"If-Match": '"7", "2"'}
    refused(client.put(f"{DOCUMENTS}/boat", json={"text": "z"}, headers=old), 412, "document_changed")
    refused(client.patch(f"{DOCUMENTS}/boat", json={"metadata": {}}, headers=old), 412, "document_changed")
    refused(client.delete(f"{DOCUMENTS}/boat", headers=old), 412, "document_changed")
    refused(client.put(f"{DOCUMENTS}/y", json={"text": "z"}, headers={"If-Match": "*"}), 412, "document_changed")
    refused(client.put(f"{DOCUMENTS}/boat", json={"text": "z"}, headers={"If-Match": "x" * 5_000}), 400)
    assert client.put(f"{DOCUMENTS}/boat", json={"text": "z"}, headers=new).status_code == 200
    assert client.delete(f"{DOCUMENTS}/boat", headers={"If-Match": '"3"'}).status_code == 200


def metadata_and_priority_change_without_a_version(client: httpx.Client) -> None:
    stored(client, "lake", metadata={"year": "1871"})
    changed = client.patch(f"{DOCUMENTS}/lake", json={"metadata": {"year": "1872"}, "priority": 0.9})
    assert (changed.status_code, changed.headers["ETag"]) == (200, '"1"'), changed.text
    assert (changed.json()["metadata"], changed.json()["priority"]) == ({"year": "1872"}, 0.9)
    assert client.patch(f"{DOCUMENTS}/lake", json={"priority": None}).json()["priority"] == 0.5
    assert "changes nothing" in refused(client.patch(f"{DOCUMENTS}/lake", json={}), 400)
    for body in ({"priority": 1.1}, {"text": "x"}, {"metadata": {"k": 1}}):
        refused(client.patch(f"{DOCUMENTS}/lake", json=body), 400)


def document_is_pinned_and_unpinned(client: httpx.Client) -> None:
    stored(client, "town", ttl_seconds=60)
    pinned = client.post(f"{DOCUMENTS}/town:pin")
    assert pinned.status_code == 200 and pinned.headers["ETag"] == '"1"', pinned.text
    assert (pinned.json()["pinned"], pinned.json()["expires_at"]) == (True, None)
    assert stored(client, "town", "Another.", ttl_seconds=60)["pinned"]
    unpinned = client.post(f"{DOCUMENTS}/town:unpin").json()
    assert not unpinned["pinned"] and unpinned["expires_at"] is not None
    assert stored(client, "y", pinned=True)["pinned"]


def earlier_texts_are_read_by_their_version(client: httpx.Client) -> None:
    for text in ("First.", "Second."):
        stored(client, "road", text)
    assert client.get(f"{DOCUMENTS}/road", params={"version": 1}).json()["text"] == "First."
    read = client.get(f"{DOCUMENTS}/road", params={"include_versions": True}).json()
    assert (read["text"], [each["version"] for each in read["versions"]]) == ("Second.", [2, 1])
    refused(client.get(f"{DOCUMENTS}/road", params={"version": 9}), 404, "document_not_found")
    for version in (0, 2**31 + 1, "one"):
        refused(client.get(f"{DOCUMENTS}/road", params={"version": version}), 400)


def list_is_read_in_parts(client: httpx.Client) -> None:
    for name, title in (("mill", "Red"), ("ferry", "The RED one"), ("town", "Blue"), ("lake", "Green")):
        stored(client, name, title=title)
    first = client.get(DOCUMENTS, params={"limit": 2}).json()
    assert (first["object"], first["first_id"], first["last_id"]) == ("list", "lake", "town")
    assert first["has_more"] and not {"text", "chunks"} & first["data"][0].keys()
    client.delete(f"{DOCUMENTS}/town")
    for after in (first["next_after"], first["last_id"]):
        assert ids(client, after=after) == ["ferry", "mill"]
    assert ids(client, order="asc", limit=1) == ["mill"]
    assert ids(client, search="red") == ["ferry", "mill"]
    assert client.get(f"{DOCUMENTS}?id=lake&id=mill&id=gone").json()["data"][1]["id"] == "mill"
    for query in ({"limit": 0}, {"limit": 1_001}, {"limit": "x"}, {"order": "up"}, {"search": "x" * 257}, {"id": ""}):
        refused(client.get(DOCUMENTS, params=query), 400)
    refused(client.get(DOCUMENTS, params={"after": "gone"}), 404, "document_not_found")


def chunks_are_listed_or_refused_by_name(client: httpx.Client) -> None:
    stored(client, "x")
    listed = client.get(DOCUMENTS, params={"include_chunks": True})
    read = client.get(f"{DOCUMENTS}/x").json()
    if "chunks" in read:
        assert listed.json()["data"][0]["chunks"] == read["chunks"] == []
    else:
        assert "include_chunks" in refused(listed, 400)


def addresses_say_which_methods_they_take(client: httpx.Client) -> None:
    stored(client, "a")
    one = "GET, PUT, PATCH, DELETE"
    for method, path, allowed in (
        ("PATCH", "", "GET, POST"),
        ("DELETE", "", "GET, POST"),
        ("POST", "/a", one),
        ("POST", "/a:other", one),
        ("PUT", ":batch", "POST"),
        ("GET", ":warm", "POST"),
        *((method, f"/a:{verb}", "POST") for method in ("GET", "PUT") for verb in ("warm", "pin", "unpin")),
        ("DELETE", f"/{'x' * 300}:warm", "POST"),
    ):
        reply = client.request(method, DOCUMENTS + path, content=b"{}", headers=JSON)
        assert allowed in refused(reply, 405, "method_not_allowed"), (method, path)
        assert reply.headers["Allow"] == allowed, (method, path)
    refused(client.post(f"{DOCUMENTS}:other"), 404)


def ids_are_any_line_but_no_path_and_no_verb(client: httpx.Client) -> None:
    for name in ("日本語", "docs/my file.md", "pin", "a:pin:b"):
        stored(client, name)
        assert client.get(f"{DOCUMENTS}/{_quoted(name)}").json()["id"] == name
        assert client.post(f"{DOCUMENTS}/{_quoted(name)}:pin").status_code == 200, name
    for name in ("", ".", "a/../b", "~a", "x" * 257, "a:wake", "a\nb"):
        refused(client.post(DOCUMENTS, json={"id": name, "text": "x"}), 400)
    for name in ("..%2fx", "%20a", "x" * 257, ""):
        for method in ("PUT", "GET"):
            reply = client.request(method, f"{DOCUMENTS}/{name}", json={"text": "x"})
            assert reply.status_code in (400, 404), (method, name, reply.text)
            refused(reply, reply.status_code)


def bodies_that_cannot_be_stored_say_why(client: httpx.Client) -> None:
    for body in (
        {},
        {"text": ""},
        {"text": " \n"},
        {"text": 5},
        {"text": None},
        {"text": "x", "ttl_seconds": 1.5},
        {"text": "x", "ttl_seconds": 0},
        {"text": "x", "ttl_seconds": "5"},
        {"text": "x", "ttl_seconds": 31_536_001},
        {"text": "x", "metadata": {"k": 1}},
        {"text": "x", "metadata": {str(number): "" for number in range(17)}},
        {"text": "x", "title": "t" * 4_097},
        {"text": "x", "priority": 1.1},
        {"text": "x", "pinned": "yes"},
        {"txt": "x"},
        [],
    ):
        refused(client.put(f"{DOCUMENTS}/x", json=body), 400)
    refused(client.post(DOCUMENTS, json={"txt": "x"}), 400)
    for content in (
        b"{",
        b'{"text": "x", "id": "\\ud800"}',
        b'{"text": "x", "ttl_seconds": NaN}',
        b"[" * 65,
        b"\xff",
        b'"\0"',
        b"",
    ):
        refused(client.put(f"{DOCUMENTS}/x", content=content, headers=JSON), 400)
    reply = client.put(f"{DOCUMENTS}/x", content=b'{"text": "x"}', headers={"Content-Type": "text/plain"})
    assert "application/json" in refused(reply, 400, "invalid_content_type")
    assert ids(client) == []
    reply = client.put(f"{DOCUMENTS}/x", content=b'{"text": "a\\ud800"}', headers=JSON)
    assert reply.status_code == 201 and "first at character 1" in reply.headers["x-kvmosaic-warning"]
    assert client.get(f"{DOCUMENTS}/x").json()["text"] == "a\ufffd"


def limits_are_said(client: httpx.Client) -> None:
    too_long = refused(
        client.put(f"{DOCUMENTS}/x", json={"text": "x" * LIMITS["max_body_bytes"]}), 413, "body_too_large"
    )
    assert "100000 bytes (" in too_long and "max" in too_long.lower()
    lines = _lines({"id": "a", "text": "x" * LIMITS["max_body_bytes"]}, {"id": "b", "text": "x"})
    results = client.post(f"{DOCUMENTS}:batch", content=lines, headers=LINES).json()["data"]
    assert [each["status"] for each in results] == ["refused", "stored"]
    reply = client.post(f"{DOCUMENTS}:batch", content=b"x" * LIMITS["max_documents_bytes"] + b"\n", headers=LINES)
    assert "120000 bytes (" in refused(reply, 413, "body_too_large")
    for number in range(LIMITS["max_documents"] - 1):
        stored(client, f"d{number}", "x")
    refused(client.put(f"{DOCUMENTS}/more", json={"text": "x"}), 429, "document_store_full")
    stored(client, "d0", "replacing needs no place")


def long_bodies_are_checked_as_short_ones(client: httpx.Client) -> None:
    text = "The ferry goes. " * 5_000
    told = refused(client.put(f"{DOCUMENTS}/x", json={"text": text}), 400)
    assert "tokens" in told, "no prompt can hold it"
    for wrong in ({"pinned": "yes"}, {"unknown": 1}, {"metadata": {"k": 1}}, {"id": "y"}):
        refused(client.put(f"{DOCUMENTS}/x", json={"text": text, **wrong}), 400)
    reply = client.put(f"{DOCUMENTS}/x", content=json.dumps({"text": text})[:-1], headers=JSON)
    refused(reply, 400, "invalid_json")
    stored(client, "x", " " * 80_000 + TEXT)


def lines_and_files_are_uploaded(client: httpx.Client) -> None:
    lines = _lines({"id": "a", "text": TEXT}, 3, {"id": "b", "text": "Again."}, {"text": "x", "id": "a:warm"}) + b"\n{"
    stored(client, "b")
    reply = client.post(f"{DOCUMENTS}:batch", content=lines, headers=LINES)
    assert reply.status_code == 200, reply.text
    summary = reply.json()
    assert summary["object"] == "documents.uploaded"
    assert (summary["num_stored"], summary["num_replaced"], summary["num_refused"]) == (1, 1, 3)
    assert [(each["line"], each["status"]) for each in summary["data"]][:3] == [
        (1, "stored"), (2, "refused"), (3, "replaced"),
    ]  # fmt: skip
    files = [("file", ("n.md", b"# Mill\nIt is red.")), ("file", ("raw.bin", b"\xff\xfe"))]
    results = client.post(f"{DOCUMENTS}:batch", files=files).json()["data"]
    assert [(each["file"], each["status"]) for each in results] == [("n.md", "stored"), ("raw.bin", "refused")]
    assert client.get(f"{DOCUMENTS}/n.md").json()["metadata"] == {"filename": "n.md"}
    form = "multipart/form-data"
    for content, kind in ((b"{}", "application/json"), (b"x", ""), (b"", f"{form}; boundary=x"), (b"x", form)):
        for path in (f"{DOCUMENTS}:batch", "/v1/files"):
            refused(client.post(path, content=content, headers={"Content-Type": kind}), 400)


def files_are_documents_for_clients_of_openai(client: httpx.Client) -> None:
    data = {"purpose": "user_data", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    made = client.post("/v1/files", files={"file": ("ferry.md", TEXT.encode())}, data=data).json()
    assert (made["object"], made["filename"], made["bytes"], made["status"]) == ("file", "ferry.md", 22, "processed")
    path = f"/v1/files/{made['id']}"
    assert client.get(path).json() == made and client.get(f"{path}/content").text == TEXT
    asked = {"messages": [{"role": "user", "content": "Where?"}], "documents": [{"id": made["id"]}], "max_tokens": 1}
    assert client.post("/v1/chat/completions", json=asked).status_code == 200
    stored(client, "other")
    assert [each["id"] for each in client.get("/v1/files").json()["data"]] == [made["id"]]
    assert client.get("/v1/files", params={"purpose": "assistants"}).json()["data"] == []
    refused(client.get("/v1/files", params={"limit": 0}), 400)
    for method, there, allowed in (
        ("PUT", path, "GET, DELETE"), ("DELETE", "/v1/files", "GET, POST"), ("POST", f"{path}/content", "GET"),
    ):  # fmt: skip
        assert client.request(method, there).headers["Allow"] == allowed
    refused(client.post("/v1/files", files={"file": ("a.md", b"x")}, data={"purpose": "fine-tune"}), 400)
    assert client.delete(path).json() == {"id": made["id"], "object": "file", "deleted": True}
    for reply in (client.get(path), client.delete("/v1/files/other"), client.get("/v1/files/other/content")):
        refused(reply, 404, "document_not_found")
    for place in ("/v1/vector_stores", "/v1/vector_stores/vs_1/search"):
        refused(client.post(place, json={}), 501, "not_served")


def prompt_names_a_stored_document(client: httpx.Client) -> None:
    stored(client, "ferry", title="The ferry")
    messages = [{"role": "user", "content": "Where does it go?"}]
    body = {"messages": messages, "documents": [{"id": "ferry"}], "max_tokens": 1}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["kvmosaic"]["documents"][0]["id"] == "ferry"
    assert client.get(f"{DOCUMENTS}/ferry").json()["hits"] == 1
    gone = client.post("/v1/chat/completions", json={**body, "documents": [{"id": "gone"}]})
    assert "'gone'" in refused(gone, 404, "document_not_found")


def documents_are_warmed(client: httpx.Client) -> None:
    for name in "ab":
        stored(client, name, f"The text of {name}. " * 8)
    body = {"ids": ["b"], "documents": [{"id": "inline", "text": "One that is not stored."}, "A text.", {"id": "a"}]}
    summary = client.post(f"{DOCUMENTS}:warm", json=body).json()
    assert summary["object"] == "documents.warmed" and summary["num_documents"] == 4, summary
    assert summary["num_computed"] + summary["num_cached"] == 4 and summary["num_failed"] == 0
    assert [(each["index"], each["id"]) for each in summary["data"]] == [(0, "b"), (1, "inline"), (2, None), (3, "a")]
    assert all(each["object"] == "document.warmed" and each["tokens"] > 0 for each in summary["data"])
    assert client.post(f"{DOCUMENTS}/a:warm").json()["num_cached"] == 1
    assert client.post(f"{DOCUMENTS}:warm", json={}).json()["num_documents"] == 2, "all that are stored"
    assert client.post(f"{DOCUMENTS}:warm", json={"ids": []}).json()["num_documents"] == 0
    assert client.get(f"{DOCUMENTS}/a").json()["hits"] == 0
    assert sorted(ids(client)) == ["a", "b"]


def documents_are_warmed_with_an_event_each(client: httpx.Client) -> None:
    for name in "abc":
        stored(client, name, f"The text of {name}. " * 8)
    with client.stream("POST", f"{DOCUMENTS}:warm", json={"stream": True}) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        events = [part.split("\n") for part in "\n".join(reply.iter_lines()).strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in events]
    assert names == ["document.warmed"] * 3 + ["documents.warmed"]
    read = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert sorted((each["index"], each["id"]) for each in read[:3]) == [(0, "a"), (1, "b"), (2, "c")]
    assert (read[-1]["num_documents"], read[-1]["tokens"]) == (3, sum(each["tokens"] for each in read[:3]))


def what_cannot_be_warmed_is_said_first(client: httpx.Client) -> None:
    stored(client, "a")
    for body in ({"ids": ["a", "gone"]}, {"ids": ["gone"], "stream": True}, {"documents": [{"id": "gone"}]}):
        assert "'gone'" in refused(client.post(f"{DOCUMENTS}:warm", json=body), 404, "document_not_found")
    for wrong in (
        {"ids": 3}, {"ids": ["a\nb"]}, {"stream": 1}, {"systm": "x"}, {"system": 3}, {"endpoint": "/v1/other"},
        {"documents": [3]}, {"documents": [{"title": "no text"}]}, {"find_documents": "x"},
    ):  # fmt: skip
        refused(client.post(f"{DOCUMENTS}:warm", json=wrong), 400)
    refused(client.post(f"{DOCUMENTS}/a:warm", json={"ids": ["a"]}), 400)


def warming_is_for_models_that_are_served(client: httpx.Client) -> None:
    stored(client, "a")
    refused(client.post(f"{DOCUMENTS}/a:warm", json={"model": "unknown"}), 404)
    served = client.get("/v1/models").json()["data"][0]["id"]
    assert client.post(f"{DOCUMENTS}/a:warm", json={"model": served}).json()["num_failed"] == 0


def every_route_needs_the_key(client: httpx.Client) -> None:
    wrong = {"Authorization": "Bearer guessed"}
    for method, path in (
        ("GET", DOCUMENTS), ("POST", DOCUMENTS), ("POST", f"{DOCUMENTS}:batch"), ("POST", f"{DOCUMENTS}:warm"),
        *((method, f"{DOCUMENTS}/a") for method in ("GET", "PUT", "PATCH", "DELETE")),
        *(("POST", f"{DOCUMENTS}/a:{verb}") for verb in ("warm", "pin", "unpin", "sleep")),
        ("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/files/file-1/content"),
        ("DELETE", "/v1/files/file-1"), ("POST", "/v1/vector_stores"),
    ):  # fmt: skip
        reply = client.request(method, path, content=b"{" if method != "GET" else None, headers=wrong)
        assert reply.status_code == 401, (method, path, reply.text)


_CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        created_document_is_described_and_read,
        document_is_replaced_and_deleted,
        change_for_another_version_is_refused,
        metadata_and_priority_change_without_a_version,
        document_is_pinned_and_unpinned,
        earlier_texts_are_read_by_their_version,
        list_is_read_in_parts,
        chunks_are_listed_or_refused_by_name,
        addresses_say_which_methods_they_take,
        ids_are_any_line_but_no_path_and_no_verb,
        bodies_that_cannot_be_stored_say_why,
        limits_are_said,
        long_bodies_are_checked_as_short_ones,
        lines_and_files_are_uploaded,
        files_are_documents_for_clients_of_openai,
        prompt_names_a_stored_document,
        documents_are_warmed,
        documents_are_warmed_with_an_event_each,
        what_cannot_be_warmed_is_said_first,
        warming_is_for_models_that_are_served,
        every_route_needs_the_key,
    )
}
CASES = tuple(_CASES)


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _lines(*documents: Any) -> bytes:
    return b"\n".join(json.dumps(document).encode() for document in documents)
