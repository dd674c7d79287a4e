"""How requests end that do not end by themselves."""

from __future__ import annotations

import json
from itertools import pairwise

import httpx
import pytest
from support.asking import DOCUMENTS, MESSAGES, QUESTION, chat
from support.server import RunningServer, send, wait_until

LONG = {"max_tokens": 3_000, "ignore_eos": True, "temperature": 0}
ROUTES = {
    "/v1/chat/completions": {"messages": MESSAGES, "documents": DOCUMENTS, **LONG, "n": 2},
    "/v1/completions": {"prompt": [QUESTION, "The mill"], **LONG},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 3_000, "ignore_eos": True},
}


@pytest.fixture
def mine():
    """A server of its own, for tests that break things."""
    with RunningServer() as server:
        yield server


def last_statuses(server, number):
    return [record.status for record in server.records[-number:]]


@pytest.mark.parametrize("path", ROUTES)
def test_a_reader_that_leaves_ends_its_request(http, server, path):
    with http.stream("POST", path, json={**ROUTES[path], "stream": True}) as reply:
        for _, line in zip(range(2), reply.iter_lines(), strict=False):
            assert '"error":{' not in line
    wait_until(lambda: server.services.engine.num_running == 0)
    wait_until(lambda: server.services.admission.num_under_way == 0)
    assert last_statuses(server, 1) == ["cancelled"]


@pytest.mark.parametrize("path", ROUTES)
def test_a_client_that_does_not_wait_ends_its_request(server, path):
    client = send(server, path, ROUTES[path])
    wait_until(lambda: server.services.engine.num_running)
    client.close()
    wait_until(lambda: server.services.admission.num_under_way == 0)
    wait_until(lambda: server.services.engine.num_running == 0)
    assert last_statuses(server, 1) == ["cancelled"]


def break_after(server, steps):
    """The engine's forward raises from some step on; returns a function that repairs it."""
    runner = server.llm.engine.runner
    whole, left = runner.run, [steps]

    def run(*args, **options):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("a secret of the device")
        return whole(*args, **options)

    runner.run = run
    return lambda: setattr(runner, "run", whole)


def lines_of(server, path):
    with httpx.stream("POST", server.url + path, json={**ROUTES[path], "stream": True}, trust_env=False) as reply:
        assert reply.status_code == 200
        return [line for line in reply.iter_lines() if line]


def test_a_failed_step_is_the_last_event_of_a_stream_and_the_server_goes_on(mine):
    repair = break_after(mine, 5)
    try:
        lines = lines_of(mine, "/v1/chat/completions")
    finally:
        repair()
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "secret" not in json.dumps(lines)
    with httpx.Client(base_url=mine.url, timeout=60, trust_env=False) as http:
        assert chat(http)["choices"][0]["message"]["content"]


def test_a_failed_step_ends_a_response_as_failed(mine):
    repair = break_after(mine, 5)
    try:
        lines = lines_of(mine, "/v1/responses")
    finally:
        repair()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error" and "secret" not in json.dumps(events)
    assert all(after["sequence_number"] == before["sequence_number"] + 1 for before, after in pairwise(events))


def test_a_failed_step_is_a_500_without_its_reason(mine):
    repair = break_after(mine, 2)
    try:
        reply = httpx.post(f"{mine.url}/v1/chat/completions", json=ROUTES["/v1/chat/completions"], trust_env=False)
    finally:
        repair()
    assert reply.status_code == 500 and "secret" not in reply.text
    assert reply.headers["x-request-id"] in reply.json()["error"]["message"]


def test_answers_that_the_server_ends_are_not_passed_off_as_complete(mine):
    url = f"{mine.url}/v1/chat/completions"
    body = {**ROUTES["/v1/chat/completions"], "stream": True}
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        mine.call(mine.services.engine.close)
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "service_unavailable"
    assert "[DONE]" not in rest[-1]
    after = httpx.post(url, json=ROUTES["/v1/chat/completions"], trust_env=False)
    assert after.status_code == 503 and "Retry-After" in after.headers
