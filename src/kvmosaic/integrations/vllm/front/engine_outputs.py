"""Reports of composed requests, read from the engine's outputs in the API server's process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import wraps
from typing import Any

from kvmosaic.integrations.vllm.contract import FIELD
from kvmosaic.integrations.vllm.report import HEADER, SHELF, ReportShelf

_METHOD = "process_outputs"


def shelve_reports(state: Any, shelf: ReportShelf = SHELF) -> None:
    """Stores the reports that arrive at this process from now on; safe to call again.

    vLLM has no extension point for the outputs of its engine, so this wraps one method of one object: the output
    processor of the engine's client. An engine client without one changes nothing.
    """
    processor = getattr(getattr(state, "engine_client", None), "output_processor", None)
    process = getattr(processor, _METHOD, None)
    if process is None or hasattr(process, "__wrapped__"):
        return

    @wraps(process)
    def shelving(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            if (report := _report_in(output)) is not None:
                shelf.put(output.request_id, report)
        return process(outputs, *args, **kwargs)

    setattr(processor, _METHOD, shelving)


def _report_in(output: Any) -> dict[str, Any] | None:
    """The report of an output: the first one has it in its headers, a finished one in its own field."""
    if (text := (output.trace_headers or {}).get(HEADER)) is not None:
        report = json.loads(text)
    else:
        report = (output.kv_transfer_params or {}).get(FIELD)
    return report if isinstance(report, dict) and "segments" in report else None
