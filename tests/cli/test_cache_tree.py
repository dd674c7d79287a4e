"""`kvmosaic cache tree`: the tree of a running server, on the screen and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from support.server import RunningServer
from typer.testing import CliRunner, Result

from kvmosaic.cli import app
from kvmosaic.console.cache import tree

MESSAGES = [
    {"role": "system", "content": "Answer from the documents."},
    {"role": "user", "content": "Where does it go?"},
]
DOCUMENTS = [{"id": "ferry", "text": "The ferry goes to Oak Island."}]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVMOSAIC_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer() as running:
        yield running


def kvmosaic(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cache", "tree", *arguments])


def test_conversations_are_shown_under_their_system_text(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "documents": DOCUMENTS, "max_tokens": 4, "temperature": 0, "cache_salt": "tree"}
    for _ in range(2):
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    result = kvmosaic("--url", server.url, "--children", "100", "--tokens", "20")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    system = next(
        number for number, line in enumerate(lines) if "Answer from the documents." in line and "salted" in line
    )
    assert lines[system].startswith("system ") and "tokens" in lines[system]
    assert any("document ferry" in line and "found once" in line for line in lines[system:])
    place = next(number for number in range(system, len(lines)) if "conversations over ferry" in lines[number])
    assert "Where does it go?" in lines[place + 1] and "found" in lines[place + 1]
    fields = json.loads(kvmosaic("--url", server.url, "--json", "--runs", "3").stdout)
    assert fields["block_size"] == 16 and fields["systems"]


@pytest.mark.parametrize("arguments", [("--depth", "0"), ("--children", "101"), ("--runs", "x")])
def test_limits_outside_their_range_are_refused(arguments: tuple[str, str]) -> None:
    result = kvmosaic(*arguments)
    assert result.exit_code == 2 and arguments[0] in result.stderr


def test_a_server_that_is_not_there_is_named() -> None:
    result = kvmosaic("--url", "http://127.0.0.1:9")
    assert result.exit_code == 2 and "nothing listens at http://127.0.0.1:9" in result.stderr


def one_system(num_tokens: object) -> dict[str, object]:
    system = {"tenant": "", "is_salted": False, "num_tokens": num_tokens, "text": "x", "documents": [], "places": []}
    return {"systems": [system | {"num_hidden_documents": 0, "num_hidden_places": 0}], "num_hidden": 0}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"systems": 3},
        {"systems": [1], "num_hidden": 0},
        {"systems": [{}], "num_hidden": 0},
        one_system("many"),
    ],
)
def test_a_reply_of_something_else_is_said_to_be_that(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    monkeypatch.setattr(tree, "fields_of_server", lambda *_, **__: fields)
    result = kvmosaic("--url", "http://localhost:1")
    assert result.exit_code == 2 and "not as a kvmosaic server does" in result.stderr


def test_texts_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    run = {
        "num_tokens": 5,
        "num_blocks": 1,
        "hits": 3,
        "users": 2,
        "idle_seconds": 1.0,
        "token_ids": [1],
        "children": [],
    }
    place = {"documents": ["a\x1b[31m"], "start": 0, "num_hidden": 4}
    system = {"tenant": "x\x1b]0;y", "is_salted": False, "num_tokens": 3, "token_ids": [7, 8], "text": None}
    system |= {"documents": [], "num_hidden_documents": 0, "num_hidden_places": 1}
    system["places"] = [{**place, "runs": [{**run, "text": "\x1b[2J[bold]hello[/bold]", "num_hidden": 0}]}]
    monkeypatch.setattr(tree, "fields_of_server", lambda *_, **__: {"systems": [system], "num_hidden": 2})
    shown = kvmosaic("--url", "http://localhost:1").stdout
    assert "\x1b" not in shown and "[bold]hello[/bold]" in shown and "7 8" in shown and "read by 2" in shown
    assert "4 more runs" in shown and "1 more set of documents" in shown and "2 more system texts" in shown
