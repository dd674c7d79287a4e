"""Where spans go: to a collector on loopback, to none that answers, and nowhere without the packages."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from support.server import RunningServer, ServeCommand, wait_until

from kvmosaic.errors import InvalidConfig, pip_install
from kvmosaic.server import tracing as export
from kvmosaic.server.read import read_settings

SOURCE = Path(__file__).parents[3] / "src" / "kvmosaic"
NOWHERE = "http://127.0.0.1:9/v1/traces"
FINDER = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
"""


class Collector:
    """An OTLP collector that keeps what it receives."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.is_endless, self.num_sent = False, 0
        self.gate = threading.Event()
        """Requests wait here; set at first."""
        self.gate.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.gate.wait(60)
                collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                with suppress(OSError):  # the client is gone
                    while collector.is_endless:
                        sent = bytes(2**16) if collector.num_sent else b"HTTP/1.1 503 Busy\r\n\r\n"
                        collector.num_sent += self.wfile.write(sent)
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.gate.set()
        self._http.shutdown()
        self._http.server_close()

    def names(self) -> set[str]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        resources = [spans for request in requests for spans in request.resource_spans]
        return {span.name for each in resources for scope in each.scope_spans for span in scope.spans}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def ask(server: RunningServer) -> httpx.Response:
    body = {"prompt": "The ferry goes to", "max_tokens": 3, "ignore_eos": True}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=60)


def test_spans_reach_a_collector_at_shutdown_at_the_latest(collector: Collector) -> None:
    with RunningServer(otlp_traces_endpoint=collector.address + "/v1/traces") as server:
        assert ask(server).status_code == 200
    assert collector.names() == {"POST /v1/completions", "plan", "lookup", "prefill", "decode"}


def test_collector_that_does_not_answer_delays_neither_requests_nor_the_end(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "FLUSH_SECONDS", 0.5)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    collector.gate.clear()
    with RunningServer(otlp_traces_endpoint=collector.address + "/v1/traces") as server:
        statuses = {ask(server).status_code for _ in range(5)}
        tracing = server.services.tracing
        assert tracing is not None
        tracing.close()
        assert statuses == {200} and not collector.bodies  # the collector has not answered yet


def test_a_collector_that_writes_without_end_is_cut_off(collector: Collector) -> None:
    collector.is_endless = True
    exporter = OTLPSpanExporter(endpoint=collector.address, session=export._bounded_session(), timeout=0.3)
    span = TracerProvider().get_tracer("test").start_span("span")
    span.end()
    exporter.export([cast("ReadableSpan", span)])
    exporter.shutdown()
    collector.is_endless = False
    assert 0 < collector.num_sent < 2**26


def test_headers_that_a_client_sent_wrong_cost_no_line(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    tracing = export.Tracing(collector.address + "/v1/traces", "model", time.monotonic)
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    assert tracing.begin("POST", [parent], ["=,no pair", "a=1,a=2"]) is not None
    tracing.close()
    assert "spans of requests are not sent" not in caplog.text


def test_endpoint_that_cannot_be_reached_costs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "FLUSH_SECONDS", 0.5)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with RunningServer(otlp_traces_endpoint=NOWHERE) as server:
        assert {ask(server).status_code for _ in range(5)} == {200}
        wait_until(lambda: NOWHERE in caplog.text)
        assert server.services.tracing is not None
        for _ in range(5):
            ask(server)
            server.services.tracing._processor.force_flush()
    lines = [record.getMessage() for record in caplog.records if "spans of requests are not sent" in record.message]
    assert len(lines) == 1 and NOWHERE in lines[0]
    assert "opentelemetry" not in capfd.readouterr().err


def test_process_whose_endpoint_cannot_be_reached_logs_one_line_and_ends() -> None:
    quick = {"OTEL_BSP_SCHEDULE_DELAY": "10", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.2"}
    with ServeCommand("--otlp-traces-endpoint", NOWHERE, **quick) as command:
        command.until_ready()
        body = {"prompt": "The ferry goes to", "max_tokens": 3}
        for _ in range(3):
            assert httpx.post(command.url + "/v1/completions", json=body, timeout=60).status_code == 200
        command.until("spans of requests are not sent")
        command.stop()
        assert command.wait() == 0
    lines = [line for line in command.log.splitlines() if "trace" in line.lower() or "span" in line.lower()]
    assert [line for line in lines if line.startswith("traces")] == [f"traces     {NOWHERE}"]
    assert len(lines) == 2, lines


def test_variables_of_opentelemetry_name_the_service_and_sample(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "answers-of-acme")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    parent = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    with RunningServer(otlp_traces_endpoint=collector.address + "/v1/traces") as server:
        assert ask(server).status_code == 200
        assert httpx.get(server.url + "/v1/models", headers=parent).status_code == 200
    assert collector.names() == {"GET /v1/models"}
    assert b"answers-of-acme" in collector.bodies[0]


def test_wrong_variable_of_opentelemetry_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-3")
    with pytest.raises(InvalidConfig, match="OTEL_"):
        export.Tracing(NOWHERE, "reader", time.monotonic)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("localhost:4317", "must be the URL"),
        ("grpc://localhost:4317", "gRPC is not supported"),
        ("http://localhost:99999/v1/traces", "must be the URL"),
        ("http:///v1/traces", "must be the URL"),
        ("http://[::1/v1/traces", "must be the URL"),
        ("http://localhost:4318", "/v1/traces"),
        ("http://user:hidden@localhost:4318/v1/traces", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("http://localhost/" + "a" * 3_000, "at most 2048 characters"),
        ("http://localhost/a\nb", "must be the URL"),
    ],
)
def test_endpoint_that_cannot_be_used_is_a_clear_error(url: str, advice: str) -> None:
    with pytest.raises(InvalidConfig, match="--otlp-traces-endpoint") as caught:
        read_settings({"otlp_traces_endpoint": url})
    assert advice in str(caught.value)


def test_without_the_packages_the_error_names_the_extra() -> None:
    command = (sys.executable, "-c", FINDER + "from kvmosaic.cli import main; main()", "serve")
    result = subprocess.run((*command, "--otlp-traces-endpoint", NOWHERE), capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and pip_install("otel") in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_without_tracing_no_request_imports_what_traces() -> None:
    """FastAPI itself imports OpenTelemetry's API; the SDK and the exporter are for tracing only."""
    code = """
import sys
import httpx
from support.server import RunningServer

with RunningServer() as server:
    body = {"prompt": "The ferry goes to", "max_tokens": 3}
    headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    reply = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60)
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"], reply.text
    assert server.services.tracing is None
tracing = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto", "kvmosaic.server.tracing.")
print([name for name in sys.modules if name.startswith(tracing)])
"""
    tests = str(Path(__file__).parents[2])
    command = (sys.executable, "-c", f"{FINDER}sys.path.insert(0, {tests!r})\n{code}")
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_only_the_modules_for_tracing_import_opentelemetry() -> None:
    users = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(
            line.startswith(("import opentelemetry", "from opentelemetry")) for line in path.read_text().splitlines()
        )
    }
    assert users == {"server/tracing.py"}
