"""How many of our modules one warm chat passes through: what a reader of this path has to open."""

from __future__ import annotations

import httpx
from support.modules_run import ModulesRun, max_modules
from support.server import RunningServer

BODY = {
    "messages": [{"role": "user", "content": "Where does the ferry go?"}],
    "documents": [
        {"id": "ferry", "text": "The ferry of Bellos goes to Oak Island."},
        {"id": "tower", "text": "The tower of Fenbury is forty metres high."},
    ],
    "max_tokens": 8,
    "temperature": 0.0,
}


def test_warm_chat_runs_few_modules() -> None:
    with ModulesRun() as run, RunningServer() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(2):  # the first computes, the second runs what is imported on the first cache hit
            client.post("/v1/chat/completions", json=BODY).raise_for_status()
        run.is_recording = True
        reply = client.post("/v1/chat/completions", json=BODY)
        run.is_recording = False
    report = reply.json()["kvmosaic"]
    assert [document["action"] for document in report["documents"]] != ["computed", "computed"]
    assert "engine/engine.py" in run.modules and "server/openai/chat.py" in run.modules
    assert len(run.modules) <= max_modules("http"), "\n".join(sorted(run.modules))
