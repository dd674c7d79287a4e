"""Logging of the server process: one line per event, on standard error, as text or JSON; and bars of progress."""

from __future__ import annotations

import json
import logging.config
from datetime import UTC, datetime
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvmosaic.tiers.tier import Notices

LogFormat = Literal["text", "json"]
FIELDS = "fields"
"""Attribute of a log record: values by name, which a line of JSON has beside the message."""
PROBES = ("/livez", "/readyz", "/health", "/healthz")
"""Probe paths that an orchestrator polls."""
_LEVELS = {"trace": 5}


def progress_bar(console: Console) -> Progress:
    """A bar with counts, the time that passed and what is left, on terminals only, gone when it ends."""
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    text = TextColumn("{task.description}")
    return Progress(text, *columns, console=console, transient=True, disable=not console.is_terminal)


class JSONFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, its fields, and a traceback if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class OncePerMinute(logging.Filter):
    """Passes each warning and error once a minute, whatever its values are."""

    def __init__(self) -> None:
        super().__init__()
        self._notices = Notices(logging.getLogger("kvmosaic"))

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a record is due."""
        if record.levelno < logging.WARNING:
            return True
        told, error = str(record.msg), record.exc_info[1] if record.exc_info else None
        told = record.getMessage() if told.startswith("%s") else told
        left_out = self._notices.count((record.name, told, f"{error!r:.200}"))
        if left_out:
            record.msg, record.args = "%s%s", (record.getMessage(), left_out)
        return left_out is not None


def set_up_logs(level: str, log_format: LogFormat = "text") -> None:
    """Sends our messages and uvicorn's to standard error; "info" has a line per request, but none for probes."""
    number = _LEVELS.get(level) or logging.getLevelNamesMapping()[level.upper()]
    # uvicorn's start and stop messages would repeat ours
    quiet = max(number, logging.WARNING) if level == "info" else number
    handler: dict[str, Any] = {"class": "logging.StreamHandler", "formatter": log_format, "stream": "ext://sys.stderr"}
    handler["filters"] = ["repeats"]
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {
                "text": {"format": "%(asctime)s %(levelname)s %(message)s"},
                "json": {"()": JSONFormatter},
            },
            "filters": {"repeats": {"()": OncePerMinute}},
            "handlers": {"stderr": handler},
            "loggers": {
                name: {"handlers": ["stderr"], "level": chosen, "propagate": False}
                # the parser of forms warns of every damaged one
                for name, chosen in (("kvmosaic", number), ("uvicorn", quiet), ("python_multipart", logging.ERROR))
            },
        }
    )
