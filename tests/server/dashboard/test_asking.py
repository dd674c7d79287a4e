from __future__ import annotations

import asyncio
import time

import httpx
from support.screen import Screen
from support.server import RunningServer


def test_a_second_question_finds_what_the_first_one_computed(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    first = screen.ask()
    assert screen.text("#answer") == "Talmira Varlow"
    assert [action for _, action in first[1:]] == ["computed"] * 6
    assert [name for name, _ in first] == [
        "system",
        "Talmira Varlow",
        "Amber Pearl",
        "Corlow Lighthouse",
        "Golden Anchor Museum",
        "Fenbury",
        "question",
    ]
    second = screen.ask("Who is the mayor of Fenbury?")
    assert second[0] == ("system", "reused")
    assert {action for _, action in second[1:-1]} == {"reused"}
    assert second[-1] == ("question", "computed")
    assert screen.text("#answer") == "Renna Velley"


def test_documents_in_another_order_are_moved(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    screen.ask()
    screen.click("#strategy option[value='sequential']")
    screen.click("#chosen > li:nth-child(1) [data-action='Move down']")
    strip = screen.ask()
    assert [name for name, _ in strip[1:3]] == ["Amber Pearl", "Talmira Varlow"]
    assert [action for _, action in strip[1:-1]] == ["reused", "moved", "moved", "moved", "moved"]
    tip = screen.run("return document.querySelectorAll('#answer-strip .box')[2].dataset.tip").split("\n")
    assert tip[0] == "Talmira Varlow"
    assert tip[1].endswith(" tokens")
    assert tip[2].startswith("reused, moved by ")
    assert tip[3].endswith(" ms")


def test_recent_prompts_and_charts_follow_as_requests_end(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    before = len(screen.all("#records > li"))
    screen.ask()
    screen.until(lambda: len(screen.all("#records > li")) >= min(before + 1, 6), "a new strip")
    newest = "#records > li:first-child"
    screen.until(lambda: len(screen.segments(newest)) == 7, "the new strip on top")
    assert screen.segments(newest) == screen.segments("#answer-strip")
    assert screen.text("#ttft-words").startswith("Median ")
    assert "prompt" in screen.find("#reuse-chart").get_attribute("aria-label")
    drawn = screen.run("return [...document.querySelectorAll('#charts .chart text')].map((one) => one.textContent)")
    assert any(text.endswith(" ms") for text in drawn)
    assert "100 %" in drawn


def test_a_question_without_documents_is_an_ordinary_prompt(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url)
    assert screen.text("#chosen-empty").startswith("No document is chosen")
    assert [name for name, _ in screen.ask("Who is there?")] == ["prompt"]


def test_lost_reuse_is_shown_with_its_reason_and_what_to_do(server: RunningServer, screen: Screen) -> None:
    text = "Fenbury was founded in 1642. It lies on the river Quinan, and has a market on Fridays."
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        for name in ("Ada", "Bob", "Cecily", "Dora", "Emil"):
            system = f"You answer the question from the documents. You are talking to {name}."
            messages = [{"role": "system", "content": system}, {"role": "user", "content": "When was Fenbury founded?"}]
            body = {"messages": messages, "documents": [{"id": "fenbury", "text": text}], "max_tokens": 1}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    screen.open(server.url)
    screen.until(lambda: screen.all("#advice-list > li"), "the advice")
    lost, why, way_out = [each.text for each in screen.all("#advice-list > li:first-child > *")]
    assert "tokens computed again in 4 requests" in lost
    assert "ystem texts share" in why and "→ set preamble=" in way_out
    record = "#records > li:first-child"
    screen.until(lambda: "documents computed: 1 cached after another system text" in screen.text(record), "the reason")
    tip = screen.run("return document.querySelector('#records [data-action=computed]').dataset.tip")
    assert tip.count("cached after another system text") == 1


def test_a_question_under_way_can_be_cancelled(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    server.call(_keep_busy, server, 1.0)
    screen.click("#ask")
    assert {action for _, action in screen.segments("#answer-strip")} == {"waiting"}
    screen.click("#cancel")
    screen.until(lambda: screen.text("#usage") == "Cancelled.", "the end of the question")
    assert screen.run("return document.activeElement.id") == "ask"
    screen.until(lambda: server.services.admission.num_under_way == 0, "the end of the request")
    screen.ask()
    assert screen.text("#answer") == "Talmira Varlow"


def test_what_the_server_refuses_is_said_in_its_words(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    screen.forgiven = ("404",)
    server.call(server.services.documents.delete, "default", "fenbury")
    screen.ask()
    assert "fenbury" in screen.text("#usage")
    assert screen.find(".notice[data-kind='error']").is_displayed()
    assert not screen.segments("#answer-strip")


def test_a_lost_connection_is_taken_up_again(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url)
    screen.forgiven = ("503",)
    screen.until(lambda: screen.text("#connection") == "Live", "the connection")
    server.services.admission.is_draining = True
    try:
        screen.until(lambda: "next try in" in screen.text("#connection"), "the loss of the connection")
    finally:
        server.services.admission.is_draining = False
    screen.click("#retry")
    screen.until(lambda: screen.text("#connection") == "Live", "the new connection")


def test_tabs_that_were_left_give_their_connections_back(server: RunningServer, screen: Screen) -> None:
    for _ in range(8):  # a browser has six connections to a server
        screen.open(server.url)
        screen.until(lambda: screen.text("#connection") == "Live", "the connection")


async def _keep_busy(server: RunningServer, seconds: float) -> None:
    server.busy = asyncio.create_task(server.services.engine.call(lambda engine: time.sleep(seconds)))
