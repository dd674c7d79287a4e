from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import httpx
import pytest
from support.server import RunningServer, ServeCommand, wait_until

from kvmosaic.server.process.logs import FIELDS, JSONFormatter, OncePerMinute
from kvmosaic.tiers.tier import Notices

CHAT = "/v1/chat/completions"


def lines_of(caplog: pytest.LogCaptureFixture, request_id: str) -> list[logging.LogRecord]:
    def found() -> list[logging.LogRecord]:
        return [record for record in caplog.records if getattr(record, FIELDS, {}).get("request_id") == request_id]

    wait_until(found)
    return found()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer() as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        (CHAT, {"messages": [], "max_tokens": 1}, 400, "messages: must have at least 1 item, not 0"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "document": []}, 400, "did you mean 'documents'?"),
        ("/v1/messages", {"messages": []}, 400, "max_tokens is missing"),
        ("/v1/documents:warm", [], 400, "the body: must be a JSON object"),
        ("/v1/nothing", {}, 404, "no such address"),
    ],
)
def test_refused_request_is_logged_with_id_status_duration_and_reason(
    server: RunningServer, caplog: pytest.LogCaptureFixture, path: str, body: object, status: int, reason: str
) -> None:
    caplog.set_level("INFO", logger="kvmosaic.access")
    reply = httpx.post(server.url + path, json=body)
    (record,) = lines_of(caplog, reply.headers["x-request-id"])
    fields = getattr(record, FIELDS)
    assert (reply.status_code, fields["status"], fields["method"], fields["path"]) == (
        status,
        status,
        "POST",
        path,
    )
    assert reason in fields["reason"] and 0 < fields["milliseconds"] < 60_000
    assert re.fullmatch(r'127\.0\.0\.1:\d+ "POST \S+" \d+ in [0-9.]+ ms, request \w+: .+', record.getMessage())


def test_answer_is_logged_without_its_texts(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="kvmosaic.access")
    body = {"messages": [{"role": "user", "content": "A private question"}], "max_tokens": 1}
    reply = httpx.post(server.url + CHAT, json=body, headers={"X-Request-Id": "mine-1"})
    (record,) = lines_of(caplog, "mine-1")
    assert reply.status_code == 200 and "reason" not in getattr(record, FIELDS)
    assert "private" not in caplog.text


def test_line_stays_one_line_and_short_whatever_is_sent(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="kvmosaic.access")
    name = "a\nb\x1b[31m" + "x" * 5_000
    reply = httpx.post(server.url + CHAT, json={"messages": [], "stream_options": {"type": name}, name: 1})
    (record,) = lines_of(caplog, reply.headers["x-request-id"])
    assert record.getMessage().isprintable() and len(record.getMessage()) < 1_000
    reply = httpx.get(server.url + "/a%0Ab/" + "y" * 3_000)
    (record,) = lines_of(caplog, reply.headers["x-request-id"])
    assert record.getMessage().isprintable() and len(record.getMessage()) < 1_200


def test_probes_are_logged_on_the_level_debug_only(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="kvmosaic.access")
    for path in ("/livez", "/readyz", "/health"):
        assert httpx.get(server.url + path).status_code == 200
    assert not caplog.records
    caplog.set_level("DEBUG", logger="kvmosaic.access")
    reply = httpx.get(server.url + "/livez")
    lines_of(caplog, reply.headers["x-request-id"])


def test_record_becomes_one_json_object_with_its_traceback() -> None:
    try:
        raise ValueError("broken\nin two")
    except ValueError as error:
        told = (type(error), error, error.__traceback__)
    record = logging.LogRecord("kvmosaic", logging.ERROR, "", 0, "request %s failed", ("7",), told)
    line = JSONFormatter().format(record)
    read = json.loads(line)
    assert "\n" not in line and re.match(r"20\d\d-\d\d-\d\dT[\d:.]+\+00:00$", read["time"])
    assert (read["level"], read["logger"], read["message"]) == ("error", "kvmosaic", "request 7 failed")
    assert "ValueError: broken" in read["traceback"]


def test_a_warning_is_repeated_once_a_minute_and_says_how_often_it_was_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, said, log = [0.0], [], logging.Logger("kvmosaic.test")
    once = OncePerMinute()
    monkeypatch.setattr(once, "_notices", Notices(log, clock=lambda: now[0]))
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    handler.addFilter(once)
    log.addHandler(handler)
    for second in (0.0, 1.0, 59.0, 61.0):
        now[0] = second
        log.warning("entry %s is damaged", second)
        log.error("a step failed", exc_info=ValueError("first"))
        log.error("a step failed", exc_info=KeyError("second"))
        log.info("fine")
    assert said.count("fine") == 4
    assert [each for each in said if each != "fine"] == [
        "entry 0.0 is damaged", "a step failed", "a step failed",
        *(f"{each} (2 times more in the last 61 s)" for each in ("entry 61.0 is damaged", *["a step failed"] * 2)),
    ]  # fmt: skip


def test_every_line_of_a_server_with_json_logs_is_json() -> None:
    with ServeCommand("--log-format", "json") as command:
        url = command.until(r'"message": "ready (http\S+)"')[1]
        assert httpx.post(url + CHAT, json={"messages": []}, timeout=60).status_code == 400
        command.stop()
        assert command.wait() == 0
    lines = [json.loads(line) for line in command.log.splitlines()]
    (refused,) = [line for line in lines if line["logger"] == "kvmosaic.access"]
    assert (refused["status"], refused["path"], refused["level"]) == (400, CHAT, "info")
    assert "messages" in refused["reason"] and refused["request_id"]
    assert any(line["message"].startswith("loading ") for line in lines)
