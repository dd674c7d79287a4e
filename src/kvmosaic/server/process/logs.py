"""Logging of the server process: one line per event, on standard error."""

from __future__ import annotations

import logging.config
from typing import Any

_LEVELS = {"trace": 5}
PROBES = ("/livez", "/readyz", "/health")
"""Probe paths that an orchestrator polls."""


class NoProbes(logging.Filter):
    """Log filter that drops the probes an orchestrator sends every few seconds."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a line of uvicorn's access log, made of (client, method, address, version, status)."""
        address = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else None
        return not (isinstance(address, str) and address.partition("?")[0].endswith(PROBES))


def set_up_logs(level: str) -> None:
    """Sends our messages and uvicorn's to standard error; "info" has a line per request, but none for probes."""
    number = _LEVELS.get(level) or logging.getLevelNamesMapping()[level.upper()]
    # uvicorn's start and stop messages would repeat ours
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
