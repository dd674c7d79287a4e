"""Own modules in which functions run, and the deepest stack of own calls: what a reader of a path must follow."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import kvmosaic

_ROOT = f"{Path(kvmosaic.__file__).parent}/"
_WEIGHT = Path(__file__).parents[2] / "scripts/weight.json"


def max_modules(face: str) -> int:
    """How many modules one cached chat may pass through; the numbers only fall."""
    allowed: int = json.loads(_WEIGHT.read_text())["modules_of_a_chat"][face]
    return allowed


class ModulesRun:
    """Records this thread, and all threads that are started inside of the block, while `is_recording`."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.deepest: list[str] = []
        self.is_recording = False

    def __enter__(self) -> ModulesRun:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.is_recording or event != "call" or not frame.f_code.co_filename.startswith(_ROOT):
            return
        self.modules.add(frame.f_code.co_filename.removeprefix(_ROOT))
        stack = list[str]()
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code.co_filename.startswith(_ROOT):
                stack.append(f"{caller.f_code.co_filename.removeprefix(_ROOT)}:{caller.f_code.co_name}")
            caller = caller.f_back
        if len(stack) > len(self.deepest):
            self.deepest = stack[::-1]
