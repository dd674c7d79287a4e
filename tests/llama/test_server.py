"""The server over llama.cpp: every route answers, or says why not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from support.llama_engine import llama_reader
from support.screen import Screen, start_browser
from support.server import RunningServer, wait_until

DOCUMENTS = [
    {"id": "ferry", "text": "The ferry goes to Oak Island. Its captain is Otto Bramble."},
    {"id": "mill", "text": "The mill was built in 1871 and grinds oats."},
]
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Where does the ferry go?"}],
    "max_tokens": 6,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(loaded=llama_reader("Q8_0", "f16"), chunk_tier=["host:64MiB"], dtype="auto") as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as opened:
        yield opened


def chat(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def actions(reply: dict[str, Any]) -> list[str]:
    return [each["action"] for each in reply["kvmosaic"]["documents"]]


def test_documents_are_reused_in_any_order_and_streamed_answers_are_the_same(client: httpx.Client) -> None:
    orders = DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS  # each is computed as the first document and as a later one
    first, second, again = (chat(client, documents=order, position_strategy="sequential") for order in orders)
    assert actions(first) == actions(second) == ["computed", "computed"]
    assert set(actions(again)) == {"reused", "moved"}
    body = {**CHAT, "documents": DOCUMENTS, "position_strategy": "sequential", "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    deltas = [choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(deltas) == first["choices"][0]["message"]["content"]


def test_documents_that_overlap_end_no_answer_of_others(client: httpx.Client) -> None:
    """With the repair of the command line: llama.cpp refused the forward, and every answer in it ended."""
    body = {**CHAT, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as running:
        lines = running.iter_lines()
        next(line for line in lines if '"content"' in line)
        for offsets in ((60, 70), (70, 60)):
            placed = [{**each, "position_offset": at} for each, at in zip(DOCUMENTS, offsets, strict=True)]
            reply = chat(client, documents=placed, position_strategy="absolute", repair="first(8)")
            assert reply["usage"]["completion_tokens"]
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": "The ferry", "max_tokens": 3, "echo": True}),
        ("/v1/completions", {"prompt": ["The ferry", "The mill"], "max_tokens": 2, "logprobs": 2, "n": 2}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3, "n": 2, "temperature": 0.7, "seed": 1}),
        ("/v1/chat/completions", {**CHAT, "structured_outputs": {"choice": ["Oak Island", "Paris"]}}),
        ("/v1/chat/completions", {**CHAT, "priority": 5, "stop": ["."], "documents": DOCUMENTS, "repair": "first(4)"}),
        ("/v1/responses", {"input": "Where does the ferry go?", "max_output_tokens": 3, "documents": DOCUMENTS}),
        ("/v1/messages", {"model": "reader", "max_tokens": 3, "messages": CHAT["messages"]}),
        ("/tokenize", {"prompt": "The ferry"}),
        ("/detokenize", {"tokens": [5, 6, 7]}),
    ],
)
def test_routes_answer(client: httpx.Client, route: str, body: dict[str, Any]) -> None:
    reply = client.post(route, json=body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("route", "fields", "status", "reason"),
    [
        ("/v1/chat/completions", {"window_tokens": 64}, 400, "llama.cpp keeps one position per token"),
        ("/v1/chat/completions", {"documents": DOCUMENTS, "repair": "query(0.1)"}, 400, "does not give its attention"),
        ("/v1/embeddings", {"input": "text"}, 501, "no embeddings"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    client: httpx.Client, route: str, fields: dict[str, Any], status: int, reason: str
) -> None:
    reply = client.post(route, json={**(CHAT if "chat" in route else {}), **fields})
    assert reply.status_code == status and reason in reply.json()["error"]["message"]
    assert chat(client)["choices"][0]["message"]["content"]


def test_a_stored_document_is_warmed_edited_pinned_slept_over_and_deleted(client: httpx.Client) -> None:
    text = "The captain of the ferry is Otto Bramble. " * 8
    assert client.put("/v1/documents/captain", json={"text": text}).status_code == 201
    assert client.post("/v1/documents/captain:warm").json()["num_computed"] == 1
    named = [{"id": "captain"}]
    said = chat(client, documents=named)
    assert actions(said) == ["reused"]
    edited = client.put("/v1/documents/captain", json={"text": text + "He is old."}).json()
    assert edited["kept_tokens"] > 0
    assert actions(chat(client, documents=named)) == ["partly reused"]
    assert client.post("/v1/documents/captain:pin").json()["pinned"]
    before = chat(client, documents=named)["choices"][0]["message"]
    for level in (1, 2):
        assert client.post(f"/sleep?level={level}").json() == {"is_sleeping": True}
        assert client.post("/wake_up").json() == {"is_sleeping": False}
        assert chat(client, documents=named)["choices"][0]["message"] == before
    assert client.post("/reset_prefix_cache").status_code == 200
    assert client.delete("/v1/documents/captain").json()["deleted"]


def test_metrics_and_the_page_tell_the_engine_its_build_and_the_types_of_numbers(
    client: httpx.Client, server: RunningServer
) -> None:
    (line,) = [each for each in client.get("/metrics").text.splitlines() if each.startswith("kvmosaic:engine_info{")]
    facts = server.llm.engine_facts
    for label in (f'build="{facts.build}"', 'name="llama.cpp"', 'weights="Q8_0"', 'cache="f16"', 'device="cpu"'):
        assert label in line
    with client.stream("GET", "/dashboard/events") as reply:
        data = next(each[6:] for each in reply.iter_lines() if each.startswith("data: "))
    assert json.loads(data)["server"]["engine"] == f"llama.cpp ({facts.build}), weights Q8_0, cache f16"


def test_the_page_names_the_engine_and_asks_about_documents_that_it_moves(server: RunningServer) -> None:
    browser = start_browser()
    try:
        screen = Screen(browser).open(server.url)
        screen.until(lambda: screen.text("#engine").startswith("llama.cpp ("), "the engine")
        screen.load_examples()
        screen.fill("#answer-tokens", "4")
        screen.click("#strategy option[value='sequential']")
        assert {action for _, action in screen.ask()[1:]} == {"computed"}
        screen.click("#chosen > li:nth-child(2) [data-action='Move down']")
        assert "moved" in {action for _, action in screen.ask()}
        screen.check_clean()
    finally:
        browser.quit()


def test_a_server_stops_while_it_answers_and_a_second_one_finds_the_documents(tmp_path: Any) -> None:
    tier = [f"disk:{tmp_path}/tier?quota=64MiB"]
    settings: dict[str, Any] = {"chunk_tier": tier, "chunk_loading": "always", "dtype": "auto"}
    model = llama_reader("Q8_0", "f16")
    body = {**CHAT, "stream": True, "max_tokens": 3_000, "ignore_eos": True}
    with ExitStack() as streams, RunningServer(loaded=model, **settings) as first:
        with httpx.Client(base_url=first.url, timeout=120) as client:
            said = chat(client, documents=DOCUMENTS)
        reply = streams.enter_context(httpx.stream("POST", f"{first.url}/v1/chat/completions", json=body, timeout=120))
        lines = reply.iter_lines()  # closing it would end the request
        next(lines)
        wait_until(lambda: first.services.engine.num_running == 1)
    with RunningServer(loaded=model, **settings) as second, httpx.Client(base_url=second.url, timeout=120) as client:
        again = chat(client, documents=DOCUMENTS)
        assert {each["tier"] for each in again["kvmosaic"]["documents"]} == {"disk"}
        assert again["choices"][0]["message"] == said["choices"][0]["message"]
