"""How many of our modules one warm chat passes through: what a reader of this path has to open."""

from __future__ import annotations

import threading
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from support.server import RunningServer

import kvmosaic

MAX_MODULES = 107  # 105, and what the server does meanwhile
"""Reached now; the aim is 65. Raise it only for a module that the path really needs."""
ROOT = str(Path(kvmosaic.__file__).parent)
BODY = {
    "messages": [{"role": "user", "content": "Where does the ferry go?"}],
    "documents": [
        {"id": "ferry", "text": "The ferry of Bellos goes to Oak Island."},
        {"id": "tower", "text": "The tower of Fenbury is forty metres high."},
    ],
    "max_tokens": 8,
    "temperature": 0.0,
}


class ModulesRun:
    """The files of ours in which a function runs, in all threads that are started inside of the block."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.is_recording = False

    def __enter__(self) -> ModulesRun:
        threading.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.is_recording and event == "call" and (name := frame.f_code.co_filename).startswith(ROOT):
            self.found.add(name[len(ROOT) + 1 :])


def test_warm_chat_runs_few_modules() -> None:
    with ModulesRun() as modules, RunningServer() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(2):  # the first computes, the second runs what is imported on the first cache hit
            client.post("/v1/chat/completions", json=BODY).raise_for_status()
        modules.is_recording = True
        reply = client.post("/v1/chat/completions", json=BODY)
        modules.is_recording = False
    report = reply.json()["kvmosaic"]
    assert [document["action"] for document in report["documents"]] != ["computed", "computed"]
    assert "engine/engine.py" in modules.found and "server/openai/chat.py" in modules.found
    assert len(modules.found) <= MAX_MODULES, "\n".join(sorted(modules.found))
