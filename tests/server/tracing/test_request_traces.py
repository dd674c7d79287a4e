"""Spans of a real server, as an exporter receives them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.server import RunningServer, send, wait_until

from kvmosaic.engine import Engine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ENDPOINT = "http://127.0.0.1:4318/v1/traces"
STAGES = ["plan", "lookup", "prefill", "decode"]
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
SECRET = "Zanzibar"
"""A word of every prompt here, in texts, names and ids; no span may contain it."""


@dataclass
class Traced:
    """A server, and the spans that it has sent."""

    server: RunningServer
    exporter: InMemorySpanExporter
    checked: list[ReadableSpan] = field(default_factory=list)

    def ask(self, path: str = CHAT, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, **body}
        if path == CHAT:
            body.setdefault("messages", [{"role": "user", "content": f"When was {SECRET} built?"}])
        return httpx.post(self.server.url + path, json=body, headers=headers, timeout=60)

    def take(self) -> list[ReadableSpan]:
        """The spans since the last call, once those of all requests have ended; never with a text of a request."""

        def is_sent() -> bool:
            assert self.server.services.tracing is not None
            self.server.services.tracing._processor.force_flush()
            return any(span.kind is SpanKind.SERVER for span in self.exporter.get_finished_spans())

        wait_until(is_sent)
        spans = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        assert not any(SECRET in span.to_json() for span in spans)
        return spans


def documents(*names: str) -> list[dict[str, str]]:
    return [{"id": name, "text": f"{name} of {SECRET} was built in the year of the great storm."} for name in names]


def root_of(spans: list[ReadableSpan]) -> ReadableSpan:
    (root,) = [span for span in spans if span.kind is SpanKind.SERVER]
    return root


def stages_of(spans: list[ReadableSpan]) -> list[ReadableSpan]:
    return sorted((span for span in spans if span.kind is SpanKind.INTERNAL), key=lambda span: span.start_time or 0)


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.fixture(scope="module")
def running() -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    with RunningServer(otlp_traces_endpoint=ENDPOINT, span_exporter=exporter) as server:
        yield Traced(server, exporter)


@pytest.fixture
def traced(running: Traced) -> Traced:
    assert running.server.services.tracing is not None
    running.server.services.tracing._processor.force_flush()
    running.exporter.clear()
    return running


def test_stages_are_children_of_the_request_in_order(traced: Traced) -> None:
    before = time.time_ns()
    assert traced.ask(documents=documents("Harbour", "Tower")).status_code == 200
    spans = traced.take()
    root, stages = root_of(spans), stages_of(spans)
    assert (root.name, root.parent, root.status.status_code) == (f"POST {CHAT}", None, StatusCode.UNSET)
    assert [span.name for span in stages] == STAGES and len(spans) == 5
    for span in stages:
        assert span.context.trace_id == root.context.trace_id and span.parent is not None
        assert span.parent.span_id == root.context.span_id
    times = [before, root.start_time, *(at for span in stages for at in (span.start_time, span.end_time))]
    times += [root.end_time, time.time_ns()]
    assert times == sorted(times)
    assert root.resource.attributes["service.name"] == "kvmosaic"


def test_attributes_are_those_of_the_reply(traced: Traced) -> None:
    assert traced.ask(documents=documents("Mill", "Well")).status_code == 200
    traced.take()
    asked = {"documents": documents("Well", "Mill", "Gate"), "position_strategy": "sequential"}
    reply = traced.ask(headers={"X-Request-Id": "case-7"}, **asked)
    body, spans = reply.json(), traced.take()
    attributes, segments = attributes_of(root_of(spans)), body["kvmosaic"]["segments"]
    reused = sum(segment["reused_tokens"] for segment in segments)
    moved = sum(segment["reused_tokens"] for segment in segments if segment["distance"])
    assert reused > 0 and moved > 0, body["kvmosaic"]
    assert {name: attributes[name] for name in attributes if name.startswith("kvmosaic.")} == {
        "kvmosaic.reused_tokens": reused,
        "kvmosaic.moved_tokens": moved,
        "kvmosaic.computed_tokens": body["usage"]["prompt_tokens"] - reused,
        "kvmosaic.documents": 3,
        "kvmosaic.composition": body["kvmosaic"]["composition"],
    }
    latencies = {name: attributes.pop(name) for name in list(attributes) if name.startswith("gen_ai.latency.")}
    assert {name: attributes[name] for name in attributes if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvmosaic",
        "gen_ai.request.id": "case-7",
        "gen_ai.request.model": body["model"],
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.stream": False,
        "gen_ai.response.model": body["model"],
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": body["usage"]["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": reused,
        "gen_ai.usage.output_tokens": 4,
    }
    first = latencies["gen_ai.latency.time_to_first_token"]
    assert round(first * 1e3, 3) == body["kvmosaic"]["time_to_first_token_ms"]
    assert latencies["gen_ai.latency.time_in_queue"] < first < latencies["gen_ai.latency.e2e"]
    others = {name: value for name, value in attributes.items() if not name.startswith(("gen_ai.", "kvmosaic."))}
    assert others == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": CHAT,
        "url.path": CHAT,
        "url.scheme": "http",
        "network.protocol.version": "1.1",
    }
    stages = {span.name: attributes_of(span) for span in stages_of(spans)}
    assert stages["plan"]["kvmosaic.documents"] == 3
    assert stages["lookup"]["kvmosaic.found_tokens"] == reused
    assert stages["prefill"]["kvmosaic.computed_tokens"] == attributes["kvmosaic.computed_tokens"]
    assert stages["decode"]["gen_ai.usage.output_tokens"] == 4


def test_request_continues_the_trace_of_its_headers(traced: Traced) -> None:
    traced.ask(headers={"traceparent": PARENT, "tracestate": "vendor=value", "baggage": f"user={SECRET}"})
    root = root_of(traced.take())
    assert root.parent is not None and root.parent.is_remote
    assert f"{root.context.trace_id:032x}" == TRACE_ID and f"{root.parent.span_id:016x}" == SPAN_ID
    assert root.context.trace_state.to_header() == "vendor=value"


@pytest.mark.parametrize(
    "parent", ["", "nonsense", PARENT.replace("4bf9", "XXXX"), PARENT + "-" + "0" * 600, "0" * 5000]
)
def test_invalid_traceparent_begins_a_trace(traced: Traced, parent: str) -> None:
    assert traced.ask(headers={"traceparent": parent}).status_code == 200
    root = root_of(traced.take())
    assert root.parent is None and f"{root.context.trace_id:032x}" != TRACE_ID


def test_long_tracestate_and_two_parents_are_ignored(traced: Traced) -> None:
    traced.ask(headers={"traceparent": PARENT, "tracestate": "vendor=" + "v" * 1_000})
    root = root_of(traced.take())
    assert root.parent is not None and not root.context.trace_state
    two = [("traceparent", PARENT), ("traceparent", PARENT.replace("4bf9", "5bf9"))]
    httpx.get(traced.server.url + "/v1/models", headers=two)
    assert root_of(traced.take()).parent is None


def test_request_of_a_trace_that_is_not_sampled_has_no_spans(traced: Traced) -> None:
    assert traced.ask(headers={"traceparent": PARENT[:-1] + "0"}).status_code == 200
    traced.ask(headers={"X-Request-Id": "afterwards"})
    assert attributes_of(root_of(traced.take()))["gen_ai.request.id"] == "afterwards"


def test_stream_has_the_same_spans_and_ends_with_its_last_event(traced: Traced) -> None:
    names, text = ("Barn", "Dam"), ""
    body = {"messages": [{"role": "user", "content": f"When was {SECRET} built?"}], "documents": documents(*names)}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body |= {"max_tokens": 30, "temperature": 0, "ignore_eos": True, **options}
    with httpx.stream("POST", traced.server.url + CHAT, json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            text += line
            ended = time.time_ns()
    spans = traced.take()
    root, stages = root_of(spans), stages_of(spans)
    assert text.endswith("[DONE]") and [span.name for span in stages] == STAGES
    attributes = attributes_of(root)
    assert attributes["gen_ai.request.stream"] and attributes["gen_ai.usage.output_tokens"] == 30
    assert attributes["kvmosaic.documents"] == 2 and root.status.status_code is StatusCode.UNSET
    assert (stages[-1].end_time or 0) <= (root.end_time or 0) and (stages[-1].end_time or 0) <= ended


def test_answers_of_one_prompt_share_its_stages(traced: Traced) -> None:
    body = traced.ask(n=3, temperature=1.0, seed=5).json()
    spans = traced.take()
    attributes = attributes_of(root_of(spans))
    assert [span.name for span in stages_of(spans)] == STAGES
    assert attributes["gen_ai.request.choice.count"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == body["usage"]["completion_tokens"] == 12
    assert attributes["gen_ai.response.finish_reasons"] == ("length",) * 3


def test_each_prompt_of_a_request_has_its_stages(traced: Traced) -> None:
    body = traced.ask(COMPLETIONS, prompt=[f"{SECRET} is", f"The ferry of {SECRET} goes to"], max_tokens=2).json()
    spans = traced.take()
    attributes, stages = attributes_of(root_of(spans)), stages_of(spans)
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.usage.input_tokens"] == body["usage"]["prompt_tokens"]
    assert attributes["kvmosaic.composition"] == body["kvmosaic"]["composition"] == "exact"
    for index in (0, 1):
        own = [span.name for span in stages if attributes_of(span)["kvmosaic.prompt_index"] == index]
        assert own == STAGES


@pytest.mark.parametrize(
    ("body", "status"),
    [({"max_tokens": 0}, 400), ({"documents": [{"id": SECRET}]}, 404), ({"n": 100}, 400)],
)
def test_refused_request_has_its_status_code(traced: Traced, body: dict[str, Any], status: int) -> None:
    assert traced.ask(**body).status_code == status
    root, *others = traced.take()
    attributes = attributes_of(root)
    assert (root.name, attributes["http.response.status_code"], others) == (f"POST {CHAT}", status, [])
    assert attributes["error.type"] == str(status)
    assert root.status.status_code is StatusCode.UNSET  # as the conventions have it for servers


def test_prompt_that_the_engine_refuses_names_the_class_of_the_error(traced: Traced) -> None:
    many = [{"id": f"d{number}", "text": f"{number} and {SECRET}. " * 150} for number in range(60)]
    reply = traced.ask(documents=many)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "chunk_cache_full"
    attributes = attributes_of(root_of(traced.take()))
    assert attributes["error.type"] == "ChunkCacheFull" and attributes["gen_ai.usage.output_tokens"] == 0


def test_failed_step_is_an_error(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError(SECRET)

    with monkeypatch.context() as broken:
        broken.setattr(traced.server.llm.engine.runner, "run", fail)
        assert traced.ask().status_code == 500
    root = root_of(traced.take())
    assert root.status.status_code is StatusCode.ERROR and attributes_of(root)["error.type"] == "EngineError"


def test_step_that_fails_within_a_stream_is_an_error(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = traced.server.llm.engine.runner
    run, num_steps = runner.run, 0

    def fail(*args: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 3:
            raise RuntimeError(SECRET)
        return run(*args)

    with monkeypatch.context() as broken:
        broken.setattr(runner, "run", fail)
        assert traced.ask(stream=True, max_tokens=50).status_code == 200
    root = root_of(traced.take())
    assert root.status.status_code is StatusCode.ERROR
    assert attributes_of(root)["error.type"] == "EngineError"
    assert attributes_of(root)["http.response.status_code"] == 200


def test_answer_that_the_server_aborts_is_an_error(traced: Traced) -> None:
    body = {"prompt": f"Once upon a time in {SECRET}", "max_tokens": 1_500, "ignore_eos": True, "stream": True}
    engine = traced.server.services.engine
    with httpx.stream("POST", traced.server.url + COMPLETIONS, json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        traced.server.call(engine.call, lambda each: each.abort_all(each.unfinished_requests))
        assert "error" in [line for line in lines if line][-1]
    root = root_of(traced.take())
    assert root.status.status_code is StatusCode.ERROR and attributes_of(root)["error.type"] == "aborted"
    assert attributes_of(root)["gen_ai.response.finish_reasons"] == ("abort",)


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_disconnects_ends_its_trace_as_an_error(traced: Traced, stream: bool) -> None:
    body = {"prompt": f"Once upon a time in {SECRET}", "max_tokens": 1_500, "ignore_eos": True, "stream": stream}

    def decodes(engine: Engine) -> bool:
        return any(sequence.last_step for sequence in engine.scheduler.running)

    client = send(traced.server, COMPLETIONS, body)
    wait_until(lambda: traced.server.call(traced.server.services.engine.call, decodes))
    client.close()
    spans = traced.take()
    root = root_of(spans)
    assert root.status.status_code is StatusCode.ERROR
    assert attributes_of(root)["error.type"] == "client_disconnected"
    assert attributes_of(root)["gen_ai.usage.output_tokens"] < 1_500
    assert [span.name for span in stages_of(spans)] == STAGES  # decoding ends when the client has left
    assert attributes_of(root).get("http.response.status_code") == (200 if stream else None)


def test_other_routes_have_a_span_without_names_of_documents(traced: Traced) -> None:
    address = f"{traced.server.url}/v1/documents"
    assert httpx.post(address, json={"id": SECRET, "text": f"All of {SECRET}."}).status_code == 201
    assert root_of(traced.take()).name == "POST /v1/documents"
    assert httpx.get(f"{address}/{SECRET}").status_code == 200
    root = root_of(traced.take())
    assert root.name.startswith("GET /v1/documents/{") and "url.path" not in attributes_of(root)
    assert httpx.get(f"{traced.server.url}/v1/{SECRET}").status_code == 404
    root = root_of(traced.take())
    assert root.name == "GET" and "url.path" not in attributes_of(root)
    httpx.request(SECRET.upper(), address)
    root = root_of(traced.take())
    assert root.name == "HTTP /v1/documents" and attributes_of(root)["http.request.method"] == "_OTHER"


def test_page_that_closes_its_stream_of_events_is_no_error(traced: Traced) -> None:
    with httpx.stream("GET", traced.server.url + "/dashboard/events", timeout=60) as reply:
        next(reply.iter_lines())
    root = root_of(traced.take())
    assert (root.name, root.status.status_code) == ("GET /dashboard/events", StatusCode.UNSET)
    assert "error.type" not in attributes_of(root)


def test_probes_and_scrapes_have_no_spans(traced: Traced) -> None:
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        assert httpx.get(traced.server.url + path).status_code == 200
    httpx.get(traced.server.url + "/v1/models")
    assert root_of(traced.take()).name == "GET /v1/models"


def test_chunks_from_a_tier_are_a_load() -> None:
    exporter = InMemorySpanExporter()
    options = {"chunk_tier": ["host:64MiB"], "chunk_loading": "always"}
    with RunningServer(otlp_traces_endpoint=ENDPOINT, span_exporter=exporter, **options) as server:
        traced = Traced(server, exporter)
        traced.ask(documents=documents("Bridge"))
        missed = {span.name: span for span in stages_of(traced.take())}
        assert attributes_of(missed["load"])["kvmosaic.loaded_tokens"] == 0
        httpx.post(
            server.url + "/v1/documents:sleep", json={"min_accesses": 2**20, "idle_seconds": 0}
        ).raise_for_status()
        offloader = server.llm.engine.offloader
        assert offloader is not None and offloader.tiered_store.flush(60)
        assert root_of(traced.take()).name == "POST /v1/documents:sleep"
        body = traced.ask(documents=documents("Bridge")).json()
        spans = traced.take()
    (document,) = body["kvmosaic"]["documents"]
    assert document["tier"] == "host"
    stages = {span.name: span for span in stages_of(spans)}
    load = attributes_of(stages["load"])
    assert load["kvmosaic.loaded_tokens"] == document["reused_tokens"] and load["kvmosaic.tiers"] == ("host",)
    found = attributes_of(stages["lookup"])["kvmosaic.found_tokens"]
    assert found + load["kvmosaic.loaded_tokens"] == attributes_of(root_of(spans))["kvmosaic.reused_tokens"]
    times = [stages["plan"].end_time, stages["load"].start_time, stages["lookup"].start_time]
    times += [stages["lookup"].end_time, stages["load"].end_time, stages["prefill"].start_time]
    assert times == sorted(times)
