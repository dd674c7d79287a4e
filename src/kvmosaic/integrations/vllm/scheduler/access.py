"""Access to the scheduler that a connector belongs to."""

from __future__ import annotations

import sys
from typing import Any


def calling_scheduler() -> Any:
    """Returns the scheduler whose constructor is calling.

    vLLM creates a connector inside its scheduler, but passes it neither that scheduler nor any other way to request
    computation. So it is read from the call stack, and nothing in it is changed: only its public `add_request` and
    its cache manager are used.

    Raises:
        LookupError: no caller is a scheduler.
    """
    frame = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if hasattr(candidate, "add_request") and hasattr(candidate, "schedule"):
            return candidate
        frame = frame.f_back  # type: ignore[assignment]
    raise LookupError("no scheduler is making this connector")
