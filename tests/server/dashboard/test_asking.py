from __future__ import annotations

import asyncio
import math
import time
from itertools import chain, pairwise

import httpx
import pytest
from support.screen import Screen
from support.server import RunningServer

from kvmosaic.documents import DocumentDraft


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
    screen.run("chosen = []; showDocuments()")
    screen.click("#choose-all")
    assert screen.run("return chosen.length === list.rows.length && find('choose-all').hidden")


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


@pytest.mark.slow
def test_a_conversation_of_an_agent_is_drawn_with_what_its_tools_returned(
    server: RunningServer, screen: Screen
) -> None:
    def call(name: str) -> dict[str, object]:
        return {"id": name, "type": "function", "function": {"name": "read", "arguments": "{}"}}

    def asked(names: list[str]) -> None:
        turns = [
            [
                {"role": "assistant", "content": "", "tool_calls": [call(name)]},
                {"role": "tool", "tool_call_id": name, "content": f"{name} " + " ".join(sorted(dir(__import__(name))))},
            ]
            for name in names
        ]
        messages = [{"role": "user", "content": "Read."}, *chain(*turns), {"role": "user", "content": "Why?"}]
        body = {"model": "reader", "messages": messages, "max_tokens": 1, "find_documents": "agents"}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text

    names = ["os", "math", "httpx"]
    asked(names)
    asked(names[1:])  # the oldest turn is dropped
    screen.open(server.url)
    newest = "#records > li:first-child"
    screen.until(lambda: ("tool result", "moved") in screen.segments(newest), "a moved result")
    results = [action for name, action in screen.segments(newest) if name == "tool result"]
    assert results == ["moved", "moved"]
    assert ("text", "computed") in screen.segments(newest)


def test_recent_prompts_and_charts_follow_as_requests_end(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    before = len(screen.all("#records > li"))
    screen.ask()
    screen.until(lambda: len(screen.all("#records > li")) >= min(before + 1, 6), "a new strip")
    newest = "#records > li:first-child"
    assert len(screen.segments("#answer-strip")) == 7
    screen.until(lambda: screen.segments(newest) == screen.segments("#answer-strip"), "the new strip on top")
    assert screen.text("#ttft-words").startswith("Median ")
    assert "prompt" in screen.find("#reuse-chart").get_attribute("aria-label")
    drawn = screen.run("return [...document.querySelectorAll('#charts .chart text')].map((one) => one.textContent)")
    assert any(text.endswith(" ms") for text in drawn)
    assert "100 %" in drawn


def test_every_miss_has_its_reason(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    newest, questions = "#records > li:first-child", iter(("What?", "Why?", "How?"))

    def said() -> str:
        number = "return document.querySelector(arguments[0])?.dataset.key"
        before = screen.run(number, newest)
        screen.ask(next(questions))
        screen.until(lambda: screen.run(number, newest) != before, "the prompt in the list")
        return screen.text(newest)

    assert "documents computed: 5 not seen before" in said()
    server.call(server.services.documents.put, "default", "fenbury", DocumentDraft("The town is old.", "Fenbury"))
    assert "documents computed: 1 text changed" in said()
    screen.fill("#system", "Answer in one word.")
    assert "documents computed: 5 " in said() and "system text" in screen.text(newest)


def test_the_answer_is_as_long_as_it_may_be(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    length = screen.find("#answer-tokens")
    assert length.get_attribute("value") == "128"
    length.clear()
    length.send_keys("1")
    screen.ask()
    assert "1 answer token, cut off at the answer length" in screen.text("#usage")
    length.clear()
    length.send_keys("0")
    screen.click("#ask")
    assert not screen.is_asking()
    assert screen.run("return document.getElementById('answer-tokens').validity.rangeUnderflow")
    length.clear()
    length.send_keys("40")
    screen.ask()
    assert screen.text("#answer") == "Talmira Varlow" and "cut off" not in screen.text("#usage")


def test_times_are_on_a_logarithmic_axis(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url)
    screen.until(lambda: screen.run("return known.statistics !== null"), "the state")
    for times, marks in (([3, 800], ["2", "5", "10", "50", "100", "500", "1,000 ms"]), ([0.02, 90000], None)):
        places = screen.run(
            "known.records = arguments[0].map((ms, index) => ({number: index, time: index, ttft: ms / 1000,"
            " num_tokens: 1, uncached_ttft: null, reused_tokens: 0, moved_tokens: 0})); showCharts();"
            "return [...document.querySelectorAll('#ttft-chart text[text-anchor=end]')]"
            ".map((one) => [one.textContent, one.y.baseVal[0].value])",
            times,
        )[:-1]
        values = [float(text.removesuffix(" ms").replace(",", "")) for text, _ in places]
        assert values[0] <= times[0] and times[-1] <= values[-1] and len(values) <= 9
        assert marks is None or {text for text, _ in places} >= {marks[0], marks[-1]}
        per_decade = {
            round((low - high) / math.log10(upper / lower), 3)
            for (lower, low), (upper, high) in pairwise(zip(values, [y for _, y in places], strict=True))
        }
        assert len(per_decade) == 1, "equal factors are equally far apart"


def test_a_question_without_documents_is_an_ordinary_prompt(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url)
    assert screen.text("#chosen-empty").startswith("No document is chosen")
    assert [name for name, _ in screen.ask("Who is there?")] == ["prompt"]
    assert screen.text("#composition") == "No document was read."


def test_nobody_can_ask_before_the_server_has_answered(server: RunningServer, screen: Screen) -> None:
    screen.slow(milliseconds=500)
    screen.open(server.url)
    assert not screen.find("#ask").is_enabled()
    assert [name for name, _ in screen.ask("Who is there?")] == ["prompt"]


def test_lost_reuse_is_shown_with_its_reason_and_what_to_do(screen: Screen) -> None:
    text = "Fenbury was founded in 1642. It lies on the river Quinan, and has a market on Fridays."
    with RunningServer() as server:
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
            for name in ("Ada", "Bob", "Cecily", "Dora", "Emil"):
                system = f"You answer the question from the documents. You are talking to {name}."
                messages = [
                    {"role": "system", "content": system},
                    {"role": "user", "content": "When was Fenbury founded?"},
                ]
                body = {"messages": messages, "documents": [{"id": "fenbury", "text": text}], "max_tokens": 1}
                assert client.post("/v1/chat/completions", json=body).status_code == 200
        screen.open(server.url)
        screen.until(lambda: screen.all("#advice-list > li"), "the advice")
        lost, why, way_out = [each.text for each in screen.all("#advice-list > li:first-child > *")]
        assert "tokens computed again in 4 requests" in lost
        assert "ystem texts share" in why and "→ set preamble=" in way_out
        record = "#records > li:first-child"
        screen.until(
            lambda: "documents computed: 1 cached after another system text" in screen.text(record), "the reason"
        )
        tip = screen.run("return document.querySelector('#records [data-action=computed]').dataset.tip")
        assert tip.count("cached after another system text") == 1
        screen.open("about:blank")


def test_a_question_under_way_can_be_cancelled(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    server.call(_keep_busy, server, 1.0)
    screen.click("#ask")
    assert {action for _, action in screen.segments("#answer-strip")} == {"waiting"}
    screen.click("#cancel")
    screen.until(lambda: screen.text("#usage") == "Stopped.", "the end of the question")
    assert screen.run("return document.activeElement.id") == "ask"
    screen.until(lambda: server.services.admission.num_under_way == 0, "the end of the request")
    screen.ask()
    assert screen.text("#answer") == "Talmira Varlow"


def test_what_the_server_refuses_is_said_in_its_words(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    screen.forgiven = ("404",)
    # while news are late: with them the page itself takes a document that is gone out of the question
    screen.hold("v1/documents?")
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


def test_after_a_restart_the_page_is_live_again_and_reads_no_document_that_is_gone(screen: Screen) -> None:
    with RunningServer() as first:
        screen.open(first.url).load_examples()
        assert len(screen.all("#chosen > li")) == 5
    screen.until(lambda: "next try in" in screen.text("#connection"), "the loss of the connection")
    screen.forgiven = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET", "503")
    with RunningServer(port=first.port) as second:
        second.call(second.services.documents.create, "default", DocumentDraft("Fenbury is a town.", "Town"), "fenbury")
        screen.until(lambda: screen.text("#connection") == "Live", "the new connection")
        screen.until(lambda: len(screen.all("#chosen > li")) == 1, "the documents to leave the question")
        assert screen.text("#chosen .title") == "Town"
        screen.until(lambda: len(screen.all("#documents > li")) == 1, "the new list")
        assert "4 chosen documents are no longer stored" in screen.text("#notices")
        screen.ask("What is Fenbury?")
        assert screen.segments("#answer-strip")[1][0] == "Town"


def test_tabs_that_were_left_give_their_connections_back(server: RunningServer, screen: Screen) -> None:
    for _ in range(8):  # a browser has six connections to a server
        screen.open(server.url)
        screen.until(lambda: screen.text("#connection") == "Live", "the connection")


async def _keep_busy(server: RunningServer, seconds: float) -> None:
    server.busy = asyncio.create_task(server.services.engine.call(lambda engine: time.sleep(seconds)))


@pytest.mark.slow
def test_a_conversation_goes_on_where_it_is_kept(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url).load_examples()
    assert "a toy" in screen.find("#toy").text and not screen.run("return document.getElementById('keep').checked")
    screen.click("#keep")
    screen.ask()
    screen.ask("How high is the Corlow Lighthouse?")
    asked = "return questionBody('And then?').messages.map((one) => one.role)"
    assert screen.run(asked) == ["user", "assistant", "user", "assistant", "user"]
    assert screen.text("#earlier") == "Who is the captain of the Amber Pearl?Talmira Varlow"
    assert {action for _, action in screen.segments("#answer-strip")[:-1]} == {"reused"}
    screen.click("#begin-anew")
    assert screen.run(asked) == ["user"] and not screen.text("#earlier")
    assert screen.run("return document.activeElement.id") == "question"
    assert screen.run("localStorage.clear(); return document.getElementById('result').hidden")


@pytest.mark.slow
def test_an_answer_is_markdown_and_never_markup(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url)
    text = "## Plan\n\n1. **Ask** `x < y`\n2. <img src=x onerror=alert(1)>\n\n- one\n- two\n\n"
    text += "```js\nlet a;\n\n- b\n```\nEnd\nof it"
    drawn = screen.run("const place = document.getElementById('answer'); showMarkdown(place, arguments[0]);"
                       "return place.innerHTML.replace(/ tabindex=\"0\"/, '')", text)  # fmt: skip
    assert drawn == (
        '<p><b>Plan</b></p><ol start="1"><li><b>Ask</b> <code>x &lt; y</code></li>'
        "<li>&lt;img src=x onerror=alert(1)&gt;</li></ol><ul><li>one</li><li>two</li></ul>"
        "<pre><code>let a;\n\n- b\n</code></pre><p>End\nof it</p>"
    )


@pytest.mark.slow
def test_repair_and_overlap_are_shown(server: RunningServer, screen: Screen) -> None:
    screen.open(server.url)
    screen.run(
        "const row = (kind) => ({ kind, id: null, tokens: 9, action: 'reused', reused_tokens: 9, distance: 0, ms: 1 });"
        "showStrip(document.getElementById('answer-strip'), ['system', 'chunk', 'question'].map(row), 'This prompt',"
        " { policy: 'names', repaired_tokens: 4, document_tokens: 9, ms: 2 });"
    )
    assert [name for name, _ in screen.segments("#answer-strip")] == ["system", "document", "repair", "question"]
    assert screen.segments("#answer-strip")[2][1] == "repaired"
    told = {"repaired_tokens": 9, "document_tokens": 9, "milliseconds": 2}
    assert screen.run("return repairWords(arguments[0])", {"policy": "full", **told}) == "documents read in full"
    words = (
        "known.server.is_toy = arguments[0]; return compositionWords('composed (shared): they do not see each other')"
    )
    assert screen.run(words, True) == "Composed (shared): they do not see each other."
    assert screen.run(words, False).startswith("Documents overlap, which an ordinary model mixes up. Composed")
