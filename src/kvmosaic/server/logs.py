"""Logs of the server process: one line per event, on standard error."""

from __future__ import annotations

import logging.config
from typing import Any

_LEVELS = {"trace": 5}
PROBES = ("/livez", "/readyz", "/health")
"""Addresses at which an orchestrator asks how the server is."""


class NoProbes(logging.Filter):
    """Leaves out the lines of probes that an orchestrator sends every few seconds; they would drown all others."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line of uvicorn's access log, made of (client, method, address, version, status), is written."""
        address = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else None
        return not (isinstance(address, str) and address.partition("?")[0].endswith(PROBES))


def set_up_logs(level: str) -> None:
    """Sends our messages and uvicorn's to standard error; "info" has a line per request, but none for probes."""
    number = _LEVELS.get(level) or logging.getLevelNamesMapping()[level.upper()]
    # of uvicorn's own messages, those about starting and stopping would repeat ours
    quiet = max(number, logging.WARNING) if level == "info" else number
    handler: dict[str, Any] = {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
            "filters": {"probes": {"()": NoProbes}},
            "handlers": {"stderr": handler},
            "loggers": {
                name: {"handlers": ["stderr"], "level": chosen, "filters": filters, "propagate": False}
                for name, chosen, filters in (
                    ("kvmosaic", number, []),
                    ("uvicorn", quiet, []),
                    ("uvicorn.access", number, ["probes"] if number >= logging.INFO else []),
                )
            },
        }
    )
