"""Repair by HTTP: one field on each answering route, and what the reply says of it."""

from __future__ import annotations

import httpx
import pytest
from support.asking import DOCUMENTS, GREEDY, MESSAGES, post, refused, streamed_chat
from support.server import RunningServer

from kvmosaic.engine import AnswerDelta, RequestDelta
from kvmosaic.sampling import ReuseReport, SegmentReuse
from kvmosaic.sampling.reuse import RepairUse
from kvmosaic.server.generation.usage import UsageTotals

ROUTES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "The ferry goes to"},
    "/v1/responses": {"input": "Where does the ferry go?"},
}


def use(document_tokens: int, repaired: int, computed: int, work: float, milliseconds: float) -> RepairUse:
    return RepairUse("query(0.15)", document_tokens, repaired, computed, work, milliseconds)


def tally_of(*repairs: RepairUse | None) -> UsageTotals:
    tally = UsageTotals([4] * len(repairs), frozenset())
    for index, repair in enumerate(repairs):
        report = ReuseReport((SegmentReuse("chunk", 4, "reused", reused_tokens=4),), 0.1, repair=repair)
        tally.add(index, RequestDelta("r", (AnswerDelta(0, "", (1,), None, None, None),), report, False, None, 4))
    return tally


def test_each_route_repairs_what_the_request_asks_for_and_the_reply_tells(http: httpx.Client) -> None:
    for route, body in ROUTES.items():
        fields = {**body, "temperature": 0, "documents": DOCUMENTS, "cache_salt": route}
        told = post(http, route, **fields, repair="first(2)")["kvmosaic"]
        repair, tokens = told["repair"], [document["tokens"] for document in told["documents"]]
        assert (repair["policy"], repair["document_tokens"]) == ("first(2)", sum(tokens))
        assert repair["repaired_tokens"] == repair["computed_tokens"] == 4, "the first document saw all before it"
        assert repair["fraction"] == pytest.approx(4 / sum(tokens), abs=1e-6)
        assert 0 < repair["work_fraction"] < 1 and repair["ms"] > 0
        assert "but for 4 repaired tokens" in told["composition"]
        assert post(http, route, **fields, repair="none")["kvmosaic"]["repair"] is None
        assert post(http, route, **fields)["kvmosaic"]["repair"] is None


def test_full_repair_is_the_answer_of_the_plain_prompt(http: httpx.Client) -> None:
    composed = {"prompt": "The ferry goes to", "documents": DOCUMENTS}
    tokens = post(http, "/tokenize", **composed)["tokens"]
    asked = {**GREEDY, "max_tokens": 24, "cache_salt": "full"}
    plain = post(http, "/v1/completions", prompt=tokens, **asked)["choices"]
    assert post(http, "/v1/completions", **composed, **asked, repair="full")["choices"] == plain
    assert post(http, "/v1/completions", **composed, **asked, repair="none")["choices"] != plain


def test_a_stream_tells_at_its_end_what_was_repaired(http: httpx.Client) -> None:
    events = streamed_chat(http, documents=DOCUMENTS, cache_salt="stream", repair="full")
    (told,) = (event["kvmosaic"] for event in events if event.get("kvmosaic"))
    assert told["repair"]["policy"] == "full"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("repair", "told"),
    [
        ("most", "choose one of none, first(k)"),
        ("", "choose one of none, first(k)"),
        ("query(1.5)", "above 0, at most 1, got 1.5"),
        ("first(0)", "first(k) computes 1 to"),
        ("query(a lot)", "'a lot' is no number"),
        ("full(1)", "with 1 numbers"),
    ],
)
def test_a_repair_that_cannot_be_is_refused_with_a_code_of_its_own(
    http: httpx.Client, route: str, repair: str, told: str
) -> None:
    error = refused(http, route, **ROUTES[route], repair=repair)
    assert (error["status"], error["code"], error["param"]) == (400, "invalid_repair", "repair")
    assert told in error["message"]


def test_the_schema_names_the_field_and_its_forms(http: httpx.Client) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest", "ResponseRequest"):
        assert "combined(fraction)" in schemas[name]["properties"]["repair"]["description"]
    assert {"policy", "repaired_tokens", "work_fraction"} <= set(schemas["RepairReport"]["properties"])


def test_what_several_prompts_of_a_request_repaired_adds_up() -> None:
    report = tally_of(use(100, 15, 15, 0.20, 3.0), None, use(300, 45, 0, 0.04, 1.0)).report()
    assert report.repair is not None
    assert report.repair.model_dump() == {
        "policy": "query(0.15)",
        "document_tokens": 400,
        "repaired_tokens": 60,
        "computed_tokens": 15,
        "fraction": 0.15,
        "work_fraction": 0.08,
        "ms": 4.0,
    }


def test_without_repair_the_reply_says_that_there_was_none() -> None:
    assert tally_of(None).report().model_dump()["repair"] is None


def test_the_setting_of_the_server_counts_for_requests_that_say_nothing() -> None:
    with (
        RunningServer(repair="first(2)", position_strategy="sequential") as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http,
    ):
        body = {"messages": MESSAGES, "documents": DOCUMENTS, "max_tokens": 2}
        assert post(http, "/v1/chat/completions", **body)["kvmosaic"]["repair"]["policy"] == "first(2)"
        assert post(http, "/v1/chat/completions", **body, repair="none")["kvmosaic"]["repair"] is None
        lines = http.get("/metrics").text.splitlines()
    assert 'kvmosaic:repairs_total{model_name="reader",policy="first"} 1.0' in lines
    assert 'kvmosaic:repaired_tokens_total{action="computed",model_name="reader"} 4.0' in lines
    how = 'chunk_context="system",model_name="reader",position_strategy="sequential",profile="",repair="first(2)"'
    assert f"kvmosaic:composition_info{{{how}}} 1.0" in lines
