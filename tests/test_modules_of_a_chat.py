"""How many own modules, and how deep a stack, one cached `llm.chat` goes through: what a reader must follow."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import kvmosaic
from kvmosaic import LLM, SamplingParams

MAX_MODULES = 81
MAX_DEPTH = 20
ROOT = f"{Path(kvmosaic.__file__).parent}/"
DOCUMENTS = [
    {"id": "fenbury", "text": "Fenbury was founded in 1642. It lies on the river Quinan."},
    {"id": "bellos", "text": "Bellos is a donkey. It lives in the boathouse."},
]
MESSAGES = [
    {"role": "system", "content": "Answer the question from the documents."},
    {"role": "user", "content": "When was Fenbury founded?"},
]


class Trail:
    """Own modules in which a function was called, and the deepest stack of own calls."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.deepest: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        self.modules.add(frame.f_code.co_filename.removeprefix(ROOT))
        stack, caller = list[str](), frame
        while caller is not None:
            if caller.f_code.co_filename.startswith(ROOT):
                stack.append(f"{caller.f_code.co_filename.removeprefix(ROOT)}:{caller.f_code.co_name}")
            caller = caller.f_back  # type: ignore[assignment]
        if len(stack) > len(self.deepest):
            self.deepest = stack[::-1]


def test_a_cached_chat_can_be_followed() -> None:
    llm, params, trail = LLM("reader"), SamplingParams(temperature=0, max_tokens=8), Trail()
    for _ in range(2):
        llm.chat(MESSAGES, params, documents=DOCUMENTS)
    sys.setprofile(trail)
    try:
        (output,) = llm.chat(MESSAGES, params, documents=DOCUMENTS[::-1])
    finally:
        sys.setprofile(None)
    assert sum(segment.reused_tokens > 0 for segment in output.reuse.segments) >= 3
    assert len(trail.modules) <= MAX_MODULES, sorted(trail.modules)
    assert len(trail.deepest) <= MAX_DEPTH, "\n".join(trail.deepest)
