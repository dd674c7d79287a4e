"""`curl`, as the documentation shows it."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from clients.conftest import ANSWER, DOCUMENTS, QUESTION, SYSTEM
from support.server import RunningServer

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
BODY = {
    "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}],
    "documents": DOCUMENTS,
    "temperature": 0,
}


def curl(server: RunningServer, path: str, body: dict[str, object], *options: str) -> str:
    command = ["curl", "--silent", "--show-error", "--no-buffer", *options, f"{server.url}{path}"]
    command += ["--header", "Content-Type: application/json", "--data", json.dumps(body)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_curl_gets_an_answer(server: RunningServer) -> None:
    reply = json.loads(curl(server, "/v1/chat/completions", BODY, "--fail"))
    assert reply["choices"][0]["message"]["content"].strip() == ANSWER


def test_curl_gets_a_stream_that_ends_with_done(server: RunningServer) -> None:
    events = curl(server, "/v1/chat/completions", {**BODY, "stream": True}, "--fail").strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text.strip() == ANSWER


def test_curl_without_json_is_told_so(server: RunningServer) -> None:
    command = ["curl", "--silent", f"{server.url}/v1/chat/completions", "--data", "hello"]
    error = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)["error"]
    assert error["type"] == "invalid_request_error"
    assert "JSON" in error["message"]
