"""GET /v1/cache/tree: your own conversations and documents, and how much others have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server import RunningServer

ADMIN, ACME, UMBRA = "admin-key-0123456789", "acme-key-0123456789", "umbra-key-0123456789"
DOCUMENTS = [{"id": "ferry", "text": "The ferry goes to Oak Island."}]
MESSAGES = [
    {"role": "system", "content": "Answer from the documents."},
    {"role": "user", "content": "Where does the ferry of the secret harbour go?"},
]


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(f"- {{key: {ACME}, tenant: acme}}\n- {{key: {UMBRA}, tenant: umbra}}\n")
    with RunningServer(api_key=(ADMIN,), keys_file=Path(path)) as server:
        for key in (ADMIN, ACME):
            reply = httpx.post(
                f"{server.url}/v1/chat/completions",
                json={"messages": MESSAGES, "documents": DOCUMENTS, "max_tokens": 4, "temperature": 0},
                headers={"Authorization": f"Bearer {key}"},
                timeout=60,
            )
            assert reply.status_code == 200
        yield server


def tree(server: RunningServer, key: str, **query: Any) -> dict[str, Any]:
    reply = httpx.get(
        f"{server.url}/v1/cache/tree", params=query, headers={"Authorization": f"Bearer {key}"}, timeout=60
    )
    assert reply.status_code == 200, reply.text
    read: dict[str, Any] = reply.json()
    return read


def test_a_tenant_sees_its_own(closed):
    shown = tree(closed, ACME)
    assert {system["tenant"] for system in shown["systems"]} == {"acme"}
    system = next(system for system in shown["systems"] if system["num_tokens"])
    assert "Answer from the documents." in system["text"]
    assert [document["name"] for document in system["documents"]] == ["ferry"]
    (place,) = system["places"]
    assert place["documents"] == ["ferry"] and "secret" in str(tree(closed, ACME, tokens=64))
    assert tree(closed, UMBRA)["systems"] == [], "and nothing of others"


def test_an_admin_sees_how_much_others_have_and_nothing_of_what_they_say(closed):
    shown = tree(closed, ADMIN, tokens=64)
    assert {system["tenant"] for system in shown["systems"]} == {"default", "acme"}
    foreign = [system for system in shown["systems"] if system["tenant"] == "acme"]
    assert any(system["documents"] for system in foreign)
    told = str(foreign)
    assert "ferry" not in told and "secret" not in told and "Answer" not in told
    for system in foreign:
        assert system["token_ids"] == [] and system["text"] is None
        assert all(
            run["token_ids"] == [] and run["text"] is None for place in system["places"] for run in place["runs"]
        )
    assert "secret" in str(shown), "its own it reads"


def test_a_key_is_needed(closed):
    assert httpx.get(f"{closed.url}/v1/cache/tree").status_code == 401


@pytest.mark.parametrize("query", ["depth=0", "depth=33", "children=101", "runs=2001", "tokens=65", "runs=x", "what=1"])
def test_limits_outside_their_range_are_refused(closed, query):
    reply = httpx.get(f"{closed.url}/v1/cache/tree?{query}", headers={"Authorization": f"Bearer {ADMIN}"})
    assert reply.status_code == 400 and query.split("=")[0] in reply.text
