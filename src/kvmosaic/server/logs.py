"""Logs of the server process: one line per event, on standard error."""

from __future__ import annotations

import logging.config
from typing import Any

_LEVELS = {"trace": 5}


def set_up_logs(level: str) -> None:
    """Sends our messages and uvicorn's to standard error; from "info" on, with a line per request."""
    number = _LEVELS.get(level) or logging.getLevelNamesMapping()[level.upper()]
    # of uvicorn's own messages, those about starting and stopping would repeat ours
    quiet = max(number, logging.WARNING) if level == "info" else number
    handler: dict[str, Any] = {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
            "handlers": {"stderr": handler},
            "loggers": {
                name: {"handlers": ["stderr"], "level": chosen, "propagate": False}
                for name, chosen in (("kvmosaic", number), ("uvicorn", quiet), ("uvicorn.access", number))
            },
        }
    )
